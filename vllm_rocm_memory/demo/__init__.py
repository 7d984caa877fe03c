# SPDX-License-Identifier: Apache-2.0
"""One story on a served engine: sleep, wake, offload, reload, doctor."""
