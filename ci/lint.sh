#!/usr/bin/env bash
# Style, types, and the rooms of the package: bash ci/lint.sh PYTHON
set -euo pipefail
"$1" -m ruff check .
"$1" -m ruff format --check .
"$1" ci/house.py
"$1" -m mypy
