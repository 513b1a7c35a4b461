#!/usr/bin/env bash
# One node of 8 GPUs of 80 GB: a model of the size of Qwen3-8B, DAPO's objective as in its paper, TP 2 x CP 2 x DP 2.
#
#   ROLLOUTS=path/to/rollouts bash examples/launch/one_node.sh
#   bash examples/launch/one_node.sh --dry-run
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=(
    --num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288   # depth, width, width of the MLP
    --num-attention-heads 32 --kv-channels 128                   # heads of 128 channels
    --group-query-attention --num-query-groups 8                 # 4 heads share keys and values
    --qk-layernorm --rotary-base 1000000      # queries and keys are normalised; the base of the positions' angles
    --vocab-size 151936 --untie-embeddings-and-output-weights   # input and output embedding are two matrices
    --seq-length 40960 --max-position-embeddings 40960          # the longest sample, prompt and response
)
PARALLEL=(
    --tensor-model-parallel-size 2 --sequence-parallel   # every matrix over 2 GPUs, the activations between them too
    --context-parallel-size 2                            # every sequence over 2 GPUs; the other factor 2 is DP
)
LOSS=(
    --max-tokens-per-microbatch 65536   # over the context-parallel group: 32768 on a GPU
    --loss-aggregation prompt_mean                              # every prompt has weight 1/P, its tokens are equal
    --policy-loss ppo --eps-clip 0.2 --eps-clip-high 0.28       # clip-higher
    --docs-per-step 512   # responses of an optimizer step
)

start 8 --standalone --nproc-per-node 8 -- \
    "${COMMON[@]}" "${MODEL[@]}" "${PARALLEL[@]}" "${LOSS[@]}" "$@"
