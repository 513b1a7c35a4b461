#!/usr/bin/env bash
# Every test on this machine's CPU: ci/test.sh, what it leaves out, the package, the site, trainers, and the oldest
# supported megatron-core.
#
#   bash ci/full.sh
#   TRAINERS=/folder bash ci/full.sh       # ci/trainers.sh says what the folder holds; without it those tests skip
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh
# tests/fast/test_rollout_page_in_browser.py and tests/site open pages in it; without one they skip.
if ! command -v chromium >/dev/null && command -v apt-get >/dev/null; then
    (apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium) >/dev/null 2>&1 || true
fi
make_environment test
export OMP_NUM_THREADS=1
bash ci/lint.sh "$VENV_PYTHON"
"$VENV_PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 50 \
    tests/fast tests/distributed tests/package tests/site tests/trainers
# The whole matrix; the tests have its covering array.
"$VENV_PYTHON" -m tests.distributed.matrix --all
export MEGATRON="$OLDEST_MEGATRON"
make_environment test
"$VENV_PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/fast tests/distributed
