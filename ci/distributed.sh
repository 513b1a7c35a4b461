#!/usr/bin/env bash
# Real Megatron-Core over gloo, several processes a test: bash ci/distributed.sh PYTHON [pytest flags]
set -euo pipefail
python="$1"
shift
"$python" -m pytest tests/distributed "$@"
