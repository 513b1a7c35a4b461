#!/usr/bin/env bash
# Real Megatron-Core over gloo, several processes a test: bash ci/distributed.sh PYTHON
set -euo pipefail
"$1" -m pytest tests/distributed
