#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Lets group 0 write to the folders in which AITER keeps its kernels, if AITER is there.
# PYTHON is the interpreter that serves vLLM (default: python3).
set -euo pipefail

# Without importing it, which would look for a GPU.
find_package='import importlib.util as util
spec = util.find_spec("aiter")
print(*(spec.submodule_search_locations or ()) if spec else (), sep="\n")'
packages=$("${PYTHON:-python3}" -P -c "$find_package")
while read -r package; do
  [ -n "$package" ] || continue
  if ! [ -d "$package/jit" ]; then
    echo "warning: $package has no folder jit: see where this AITER keeps its kernels" >&2
    continue
  fi
  find "$package/jit" -type d -exec chgrp 0 {} + -exec chmod g+rwx {} +
  echo "AITER: group 0 may write to $package/jit"
done <<< "$packages"
