#!/usr/bin/env bash
# Style and types: bash ci/lint.sh PYTHON
set -euo pipefail
"$1" -m ruff check .
"$1" -m ruff format --check .
"$1" -m mypy
