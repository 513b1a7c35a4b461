#!/usr/bin/env bash
# The mathematics, without a launcher, on two cores: bash ci/fast.sh PYTHON [pytest flags]
set -euo pipefail
python="$1"
shift
"$python" -m pytest -n 2 --dist loadfile tests/fast "$@"
