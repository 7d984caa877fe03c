#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Says whether the base image is pinned, and refuses one that is not where asked to.
#
#     docker/check_pinned.sh IMAGE DIGEST REQUIRED
#
# DIGEST is the base's, or empty; REQUIRED is 1 for a release, else 0.
set -euo pipefail

fail() {
  echo "check_pinned.sh: error: $1" >&2
  exit 1
}

[ $# -eq 3 ] || fail "three arguments are needed: image, digest and 0 or 1"
image=$1 digest=$2 required=$3

[[ $required =~ ^[01]$ ]] ||
  fail "REQUIRE_DIGEST=$required is neither 0 nor 1: leave it out, or give 1"
if [ -n "$digest" ]; then
  [[ $digest =~ ^sha256:[0-9a-f]{64}$ ]] ||
    fail "BASE_DIGEST=$digest is no digest: sha256: and 64 hexadecimal digits"
  echo "base image $image, pinned to $digest"
  exit
fi

remedy="--build-arg BASE_DIGEST=sha256:..., as \
\`docker buildx imagetools inspect $image\` prints it"
[ "$required" = 0 ] || fail "$image has no digest and REQUIRE_DIGEST=1: give $remedy"
echo "warning: the base image is not pinned: $image may be another one tomorrow; give $remedy" >&2
