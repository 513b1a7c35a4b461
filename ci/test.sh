#!/usr/bin/env bash
# The tests that decide a landing, on this machine's CPU: makes its own virtual environment, then runs the stages in order.
#
#   bash ci/test.sh
#   TORCH=2.15.0 bash ci/test.sh           # another torch than the one of ci/environment.sh
#
# ci/full.sh runs everything.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh
make_environment test
# Small tensors in many processes: more threads only get in each other's way.
export OMP_NUM_THREADS=1
bash ci/lint.sh "$VENV_PYTHON"
# A rank waits for others half of its life, so two tests run at a time. The longest begin first (tests/distributed/conftest.py).
"$VENV_PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 25 -m "not full" tests/fast tests/distributed
PYTHONPATH="$(oldest_megatron)" "$VENV_PYTHON" -m pytest -n 2 -m oldest \
    tests/distributed/test_{auxiliary_loss,data_parallel,fused_output,value_step}.py
