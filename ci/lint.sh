#!/usr/bin/env bash
# Style, types, imports and sizes: bash ci/lint.sh PYTHON
set -euo pipefail
"$1" -m ruff check .
"$1" -m ruff format --check .
"$1" ci/imports.py
"$1" ci/sizes.py
"$1" -m mypy
