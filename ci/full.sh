#!/usr/bin/env bash
# Run every test on this machine's CPU: ci/test.sh and its omitted tests, the package, the site, trainers, a
# real model, and the oldest supported megatron-core.
#
#   bash ci/full.sh
#   TRAINERS=/folder bash ci/full.sh       # with trainer tests, which skip otherwise (ci/trainers.sh)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh
# tests/fast/test_rollout_page_in_browser.py and tests/site open pages in Chromium, and skip without it.
if ! command -v chromium >/dev/null && command -v apt-get >/dev/null; then
    (apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium) >/dev/null 2>&1 || true
fi
make_environment test
export OMP_NUM_THREADS=1
status=0 # a failed stage does not hide what the next ones find
bash ci/lint.sh "$VENV_PYTHON" || status=1
"$VENV_PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 50 \
    tests/fast tests/distributed tests/package tests/site tests/trainers tests/real_model || status=1
# The whole matrix. The tests only run its covering array.
"$VENV_PYTHON" -m tests.distributed.matrix --all || status=1
export MEGATRON="$OLDEST_MEGATRON"
make_environment test
"$VENV_PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/fast tests/distributed || status=1
exit $status
