#!/usr/bin/env bash
# The main job: makes a virtual environment, installs, and trains a small model by GRPO on two CPU processes.
#
#   bash examples/quickstart.sh                                     # under two minutes after installation
#   bash examples/quickstart.sh --loss-aggregation token_mean       # any flag of train_grpo.py; a later one wins
#   bash examples/quickstart.sh --resume                            # go on where a stopped run was
#   bash examples/quickstart.sh --config runs/quickstart/settings.yaml  # a run's flags again
#   PROCESSES=1 bash examples/quickstart.sh                         # on one core
#   PYTHON=python3.13 bash examples/quickstart.sh                   # another interpreter
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh
make_environment examples

export OMP_NUM_THREADS=1              # two processes on a small machine: more threads get in each other's way
export CUDA_DEVICE_MAX_CONNECTIONS=1  # Megatron wants it set wherever it splits a model
# Megatron warns at length that Transformer Engine and Apex are absent, and uses names that torch is renaming.
export PYTHONWARNINGS=ignore::UserWarning,ignore::FutureWarning,ignore::SyntaxWarning

own=(--context-parallel-size "${PROCESSES:-2}" --loss-aggregation prompt_mean --run-dir runs/quickstart)
[[ " $*" == *" --config"* ]] && own=()  # the file has all flags: these would win over it
exec "$VENV_PYTHON" examples/launch/torchrun.py --standalone --nproc-per-node "${PROCESSES:-2}" examples/train_grpo.py \
    "${own[@]}" "$@"
