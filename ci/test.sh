#!/usr/bin/env bash
# Run the tests required for a merge on this machine's CPU: make a virtual environment, then run the stages in order.
#
#   bash ci/test.sh
#   TORCH=2.15.0 bash ci/test.sh           # a different torch than in ci/environment.sh
#
# ci/full.sh runs everything.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh
make_environment test
# More threads slow down small tensors in many processes.
export OMP_NUM_THREADS=1
bash ci/lint.sh "$VENV_PYTHON"
# Ranks wait for other ranks half of the time, so two tests run at once, longest first (tests/distributed/conftest.py).
"$VENV_PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 25 -m "not full" tests/fast tests/distributed
PYTHONPATH="$(oldest_megatron)" "$VENV_PYTHON" -m pytest -n 2 -m oldest \
    tests/distributed/test_{auxiliary_loss,data_parallel,fused_output,value_step}.py
