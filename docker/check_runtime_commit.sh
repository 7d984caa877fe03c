#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Refuses a base whose ROCm runtime (ROCr and CLR of ROCm/rocm-systems) is not built
# from the commit that is expected.
#
#     docker/check_runtime_commit.sh VERSIONS COMMIT
#
# VERSIONS is the file in which the base records what it is built from, with a line
# `ROCM_RUNTIME_COMMIT: <commit>`; in vLLM's images it is /app/versions.txt.
set -euo pipefail

fail() {
  echo "check_runtime_commit.sh: error: $1" >&2
  exit 1
}

[ $# -eq 2 ] || fail "two arguments are needed: the file of versions and the commit"
versions=$1 expected=$2

[[ $expected =~ ^[0-9a-f]{40}$ ]] ||
  fail "ROCM_RUNTIME_COMMIT=$expected is not a whole commit: give its 40 hexadecimal digits"
[ -f "$versions" ] ||
  fail "the base has no $versions, so its runtime is not known: \
build on rocm/vllm-dev or on an image of vLLM's docker/Dockerfile.rocm_base"

found=$(sed -n 's/^ROCM_RUNTIME_COMMIT:[[:space:]]*//p' "$versions")
[ -n "$found" ] ||
  fail "$versions has no line ROCM_RUNTIME_COMMIT: the base is older than that record"
[ "$found" = "$expected" ] ||
  fail "the base has the ROCm runtime of commit $found, and $expected is expected: \
take another base, or say so with --build-arg ROCM_RUNTIME_COMMIT=$found"

echo "ROCm runtime commit $found"
