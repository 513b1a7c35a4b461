#!/usr/bin/env bash
# The mathematics, without a launcher: bash ci/fast.sh PYTHON [pytest flags]
set -euo pipefail
python="$1"
shift
"$python" -m pytest tests/fast "$@"
