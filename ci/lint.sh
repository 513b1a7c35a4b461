#!/usr/bin/env bash
# Style, types, and the rooms of the package: bash ci/lint.sh PYTHON
set -euo pipefail
"$1" -m ruff check .
"$1" -m ruff format --check .
"$1" ci/house.py
# For Python 3.11 (pyproject.toml) whichever runs it, and it takes long: in one lane, as tests/lanes.py has it for tests.
if "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
    "$1" -m mypy
fi
