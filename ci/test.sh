#!/usr/bin/env bash
# The project's tests on this machine's CPU: makes its own virtual environment, then runs the stages in order.
#
#   bash ci/test.sh                        # Python 3.12 where there is one
#   PYTHON=python3.11 bash ci/test.sh      # the other lane
#   TORCH=2.15.0 bash ci/test.sh           # another torch than the one of ci/environment.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh
make_environment test
# Small tensors in many processes: more threads only get in each other's way.
export OMP_NUM_THREADS=1
if "$VENV_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
    bash ci/lint.sh "$VENV_PYTHON" # for Python 3.11 (pyproject.toml), whichever runs it
    # Beside the fast tests: ci/package.sh, and ci/trainers.sh, which says what it needs and skips without TRAINERS=.
    bash ci/fast.sh "$VENV_PYTHON" tests/package tests/trainers
else
    # tests/lanes.py; collecting the other files takes longer than these tests.
    mapfile -t files < <(grep -rl --include='test_*.py' in_both_lanes tests/fast)
    "$VENV_PYTHON" -m pytest -n 2 --dist loadfile -m in_both_lanes "${files[@]}"
fi
bash ci/distributed.sh "$VENV_PYTHON"
