# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# Sourced first by the steps of pipeline.yaml that run tests: sets .venv up and goes to
# tests/, where `pytest` is .venv's and writes a JUnit report for each command. All of a
# step's commands run; the step fails at its end if one of them did.

# EXPECTED_GPUS is how many GPUs the step needs, 0 for none.
case ${EXPECTED_GPUS-} in
  "" | *[!0-9]*)
    echo "prepare.sh: EXPECTED_GPUS=${EXPECTED_GPUS-} is no number of GPUs: give the step" \
      "as many as its tests need, or 0 if they need none" >&2
    exit 1
    ;;
esac

# The container's user is the agent's, whom the image does not know.
[ -w "${HOME:-/}" ] || HOME=$(mktemp -d)
export HOME USER="${USER:-ci}"

if [ "$EXPECTED_GPUS" -gt 0 ]; then
  make setup-test-gpu || exit
else
  make setup || exit
fi
rm -rf build/reports
mkdir -p build/reports
pytest_python=$PWD/.venv/bin/python
pytest_reports=$PWD/build/reports/${BUILDKITE_STEP_KEY:-step}
pytest_runs=0
pytest_failed=0

# What pytest would skip for want of GPUs fails here, by the same word of Machine. AITER's
# first import copies its kernels to the home folder where their own is not this user's to
# write to, without a lock: it must not be that of several ranks.
if [ "$EXPECTED_GPUS" -gt 0 ]; then
  "$pytest_python" -c "if True:
    import importlib.util, sys
    sys.path.append('tools')
    from partitions import Machine
    machine = Machine.seen_by_torch()
    lacks = machine.lacks('rocm-only')
    if not lacks and machine.gpus < $EXPECTED_GPUS:
        lacks = f'needs $EXPECTED_GPUS GPUs: PyTorch {machine.torch} sees {machine.gpus}'
    if lacks:
        sys.exit(f'this step {lacks}. docs/ci.md says what the agent has to give')
    if importlib.util.find_spec('aiter'):
        import aiter"
fi
cd tests || exit

pytest() {
  pytest_runs=$((pytest_runs + 1))
  "$pytest_python" -m pytest --junitxml="$pytest_reports-$pytest_runs.xml" "$@" ||
    pytest_failed=$?
}

finish() {
  local status=$?
  [ "$status" -ne 0 ] || status=$pytest_failed
  exit "$status"
}
trap finish EXIT
