#!/usr/bin/env bash
# One node of 8 80-GB GPUs: a model like Qwen3-8B, DAPO's objective as in its paper, TP 2 x CP 2 x DP 2.
#
#   ROLLOUTS=path/to/rollouts bash examples/launch/one_node.sh
#   bash examples/launch/one_node.sh --dry-run
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=(
    --num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288   # depth, width, MLP width
    --num-attention-heads 32 --kv-channels 128                   # heads of 128 channels
    --group-query-attention --num-query-groups 8                 # 4 heads share keys and values
    --qk-layernorm --rotary-base 1000000      # normalized queries and keys, base of the positions' angles
    --vocab-size 151936 --untie-embeddings-and-output-weights   # input and output embedding are two matrices
    --seq-length 40960 --max-position-embeddings 40960          # longest sample, prompt and response
)
PARALLEL=(
    --tensor-model-parallel-size 2 --sequence-parallel   # matrices and activations over 2 GPUs
    --context-parallel-size 2                            # sequences over 2 GPUs; the remaining factor 2 is DP
)
LOSS=(
    --max-tokens-per-microbatch 65536   # per context-parallel group, 32768 per GPU
    --loss-aggregation prompt_mean                              # every prompt has weight 1/P, its tokens have equal weights
    --policy-loss ppo --eps-clip 0.2 --eps-clip-high 0.28       # clip-higher
    --docs-per-step 512   # responses per optimizer step
)

start 8 --standalone --nproc-per-node 8 -- \
    "${COMMON[@]}" "${MODEL[@]}" "${PARALLEL[@]}" "${LOSS[@]}" "$@"
