#!/usr/bin/env bash
# Makes a virtual environment, installs, and trains a small model by GRPO on two CPU processes.
#
#   bash examples/quickstart.sh                                     # two to four minutes after installation
#   RUN_DIR=runs/mine bash examples/quickstart.sh --loss-aggregation token_mean   # any flag of train.py, the last value wins
#   PROCESSES=1 SEED=2 DEVICE=cuda bash examples/quickstart.sh      # on one GPU (PYTHON=python3.13 selects an interpreter)
#
# If started again, it resumes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh
make_environment examples
PYTHON="$VENV_PYTHON"
RUN_DIR="${RUN_DIR:-runs/quickstart}"
source examples/launch/common.sh

WORDS='{"min_word_len":3,"max_word_len":7}'
BOTH=(
    --device "${DEVICE:-cpu}" --seed "${SEED:-1}"
    --context-parallel-size "${PROCESSES:-2}"   # splits every sequence over all processes
    --num-layers 2 --hidden-size 128 --num-attention-heads 4   # 0.4 million parameters
    --vocab-size 100 --make-vocab-size-divisible-by 4 --untie-embeddings-and-output-weights
    --seq-length 64 --max-position-embeddings 64   # longest sequence
    --position-embedding-type learned_absolute --attention-dropout 0 --hidden-dropout 0
    --weight-decay 0 --max-tokens-per-microbatch 4096
    --exit-signal-handler --log-interval 10
)
# The initial model imitates responses, half of them wrong.
WARM_START="${WARM_START:-$RUN_DIR/warm_start}"
STEPS="${WARM_START_STEPS:-400}"
IMITATION=(
    --rollout-files "$WARM_START/rollouts.jsonl" --docs-per-step 128 --docs-per-step-mode exact
    --policy-loss sft --loss-aggregation token_mean
    --lr 2e-3 --lr-warmup-iters 50 --lr-decay-style constant --train-iters "$STEPS"
    --save "$WARM_START" --load "$WARM_START" --save-interval "$STEPS"
)
LAUNCHER=("${PROCESSES:-2}" --standalone --nproc-per-node "${PROCESSES:-2}" --)
if [[ " $* " != *" --dry-run "* && ! -f "$WARM_START/$(printf iter_%07d "$STEPS")/metadata.json" ]]; then
    "$PYTHON" examples/imitate.py --task spell_backward --task-settings "$WORDS" --held-out-tasks 256 \
        --seed "${SEED:-1}" "$WARM_START/rollouts.jsonl"
    echo "Run 1 of 2, supervised: the model imitates responses, half of them wrong, for $STEPS steps."
    (start "${LAUNCHER[@]}" "${BOTH[@]}" "${IMITATION[@]}")
fi
LEARNING=(
    --pretrained-checkpoint "$WARM_START"
    --task spell_backward --task-settings "$WORDS" --held-out-tasks 256 --held-out-temperature 1
    --prompts-per-step 32 --samples-per-prompt 8 --steps-per-round 2   # 256 responses per step
    --max-response-tokens 8 --loss-aggregation prompt_mean
    --lr 5e-4 --lr-warmup-iters 8 --train-iters 80
    --save "$RUN_DIR" --load "$RUN_DIR" --save-interval 20 --tensorboard-dir "$RUN_DIR/tensorboard"
)
[[ " $* " == *" --dry-run "* ]] || echo "Run 2 of 2, GRPO: the model learns from the rewards of its responses."
start "${LAUNCHER[@]}" "${BOTH[@]}" "${LEARNING[@]}" "$@"
