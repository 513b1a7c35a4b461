#!/usr/bin/env bash
# Real Megatron-Core over gloo, several processes a test, two tests at a time: a rank waits for others half of its life.
#
#   bash ci/distributed.sh PYTHON [pytest flags]
set -euo pipefail
python="$1"
shift
"$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 25 tests/distributed "$@"
