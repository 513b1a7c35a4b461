#!/usr/bin/env bash
# Wheel and sdist, and the wheel installed by itself: bash ci/package.sh PYTHON [pytest flags]
set -euo pipefail
python="$1"
shift
"$python" -m pytest tests/package "$@"
