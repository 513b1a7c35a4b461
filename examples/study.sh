#!/usr/bin/env bash
# The four aggregations on the quickstart's task, five seeds each: docs/records/studies.md has the outcome. Or a student of a larger
# teacher beside one that learns from rewards alone: docs/distillation.md.
#
#   bash examples/study.sh                                  # 20 runs, one at a time, a minute or two each
#   bash examples/study.sh --parallel 4                     # four seeds at a time (two processes each)
#   bash examples/study.sh --study distillation             # 20 runs
#   bash examples/study.sh --seeds 1 2 3 --out runs/other   # started again, it does only what is not done yet
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh
make_environment examples
exec "$VENV_PYTHON" examples/study.py "$@"
