#!/usr/bin/env bash
# One GPU of 80 GB: a model of the size of Qwen3-1.7B, GRPO.
#
#   ROLLOUTS=path/to/rollouts bash examples/launch/single_gpu.sh
#   bash examples/launch/single_gpu.sh --dry-run          # the flags are checked and the plan is printed, without a GPU
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=(
    --num-layers 28 --hidden-size 2048 --ffn-hidden-size 6144   # depth, width, width of the MLP
    --num-attention-heads 16 --kv-channels 128                  # heads of 128 channels
    --group-query-attention --num-query-groups 8                # two heads share keys and values
    --qk-layernorm --rotary-base 1000000      # queries and keys are normalised; the base of the positions' angles
    --vocab-size 151936                       # input and output embedding are one matrix
    --seq-length 40960 --max-position-embeddings 40960          # the longest sample, prompt and response
)
MEMORY=(
    --max-tokens-per-microbatch 40960   # packed tokens of a micro-batch; the longest sample must fit
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1   # keep the inputs of layers only
)
LOSS=(
    --loss-aggregation sample_mean      # GRPO: every response has weight 1/N
    --policy-loss ppo --eps-clip 0.2    # clipped ratio
    --docs-per-step 256                 # responses of an optimizer step
)

start 1 --standalone --nproc-per-node 1 -- \
    "${COMMON[@]}" "${MODEL[@]}" "${MEMORY[@]}" "${LOSS[@]}" "$@"
