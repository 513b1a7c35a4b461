#!/usr/bin/env bash
# The mathematics, without a launcher: bash ci/fast.sh PYTHON
set -euo pipefail
"$1" -m pytest tests/fast
