# SPDX-License-Identifier: Apache-2.0
"""An in-tree series for vLLM's ROCm memory paths, and a HIP simulator to run it on."""
