#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs vllm-rocm-memory from a wheel and lays the series over the vLLM of the same
# environment. It needs no GPU and no compiler, and may be run again. Runtime and vLLM are
# looked at first: where they are refused, vLLM and an older vllm-rocm-memory stay.
#
#     PYTHON=/path/to/python docker/install.sh WHEEL-OR-FOLDER
#
# PYTHON                  the interpreter that serves vLLM (default: python3)
# ALLOW_UNKNOWN_BASE      1: a vLLM that the series does not know, where every edit and
#                         every import still fits
# ALLOW_UNKNOWN_RUNTIME   1: a HIP runtime that known_runtimes.toml does not list
# EXPECTED_HIP_RUNTIME, EXPECTED_PATCHES, EXPECTED_VERSION
#                         what an image is labelled with; refused where it is not so
#
# pip takes what is missing besides (libcst, rich) from where it is configured to:
# PIP_INDEX_URL, PIP_FIND_LINKS, PIP_NO_INDEX, pip.conf.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}

fail() {
  echo "install.sh: error: $1" >&2
  exit 1
}

# An allowance that is spelled otherwise must not pass for a refusal, or the reverse.
for name in ALLOW_UNKNOWN_BASE ALLOW_UNKNOWN_RUNTIME; do
  case ${!name:-0} in
    0 | 1) ;;
    *) fail "$name=${!name} is neither 0 nor 1: leave it out, or give 1" ;;
  esac
done

[ $# -eq 1 ] || fail "one argument is needed, a wheel or a folder of wheels"
wheels=$1
[ -e "$wheels" ] || fail "$wheels does not exist: \`make wheel\` builds wheels into dist/"

# -P: a folder `vllm` of the working directory is not to be imported.
run=("$python" -P)
pip=("${run[@]}" -m pip install --quiet --disable-pip-version-check --no-input
  --root-user-action=ignore)
series=("${run[@]}" -m vllm_rocm_memory.cli)

command -v "$python" > /dev/null ||
  fail "PYTHON=$python is not there: name the interpreter that serves vLLM"

# One wheel by its path: an index or another folder cannot bring a package of that name,
# and of several versions the newest is not chosen unasked.
wheel=$wheels
if [ -d "$wheels" ]; then
  tag=$("${run[@]}" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
  shopt -s nullglob
  fitting=("$wheels"/vllm_rocm_memory-*-"$tag"-"$tag"-*.whl)
  [ ${#fitting[@]} -eq 1 ] ||
    fail "$wheels has ${#fitting[@]} wheels of vllm-rocm-memory for $tag, and one is needed: \
name the wheel, or build one with \`make wheel\`"
  wheel=${fitting[0]}
fi
"${run[@]}" -m pip --version > /dev/null ||
  fail "PYTHON=$python has no pip: install it (python -m ensurepip), or name another"
unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
"${pip[@]}" --no-deps --target "$unpacked" "$wheel" ||
  fail "pip did not unpack $wheel: its message is above"
before=(env "PYTHONPATH=$unpacked${PYTHONPATH:+:$PYTHONPATH}")
needs=$("${before[@]}" "${run[@]}" -c \
  'from importlib.metadata import requires; print(*requires("vllm-rocm-memory"), sep="\n")')
mapfile -t needs <<< "$needs"
"${pip[@]}" "${needs[@]}" ||
  fail "pip did not find what vllm-rocm-memory needs (its message is above): \
docker/README.md has how to build without an index"

"${before[@]}" "${run[@]}" "$here/checks.py" runtime

options=()
[ "${ALLOW_UNKNOWN_BASE:-0}" = 0 ] || options+=(--allow-unknown-base)
"${before[@]}" "${series[@]}" apply --dry-run ${options[@]+"${options[@]}"} > /dev/null ||
  fail "the series cannot be applied, for the reason above, and this vLLM is as it was; \
ALLOW_UNKNOWN_BASE=1 stands for --allow-unknown-base"

# By force, because pip keeps an older build of the same version.
"${pip[@]}" --no-deps --force-reinstall "$wheel" ||
  fail "pip did not install $wheel: its message is above"
outcome=$("${series[@]}" apply --json ${options[@]+"${options[@]}"}) ||
  fail "the series is not applied, for the reason above: vllm-rocm-memory is installed, \
and this vLLM is as it was"
"${run[@]}" "$here/checks.py" outcome <<< "$outcome"

"${series[@]}" status || fail "the series is not applied whole: see the table above"
