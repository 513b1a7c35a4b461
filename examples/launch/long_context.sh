#!/usr/bin/env bash
# Samples of up to 131072 tokens on 2 nodes of 8 GPUs of 80 GB: a model of the size of Llama-3.1-8B, Dr.GRPO,
# TP 2 x CP 8. Started once on every node:
#
#   NODE_RANK=0 MASTER_ADDR=first-node ROLLOUTS=path/to/rollouts bash examples/launch/long_context.sh
#   bash examples/launch/long_context.sh --dry-run
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
NODES="${NODES:-2}"

MODEL=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336   # depth, width, width of the MLP
    --num-attention-heads 32 --group-query-attention --num-query-groups 8   # 4 heads share keys and values
    --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8   # as Llama 3.1 reaches 131072 positions
    --vocab-size 128256 --untie-embeddings-and-output-weights         # input and output embedding are two matrices
    --seq-length 131072 --max-position-embeddings 131072              # the longest sample, prompt and response
)
PARALLEL=(
    --tensor-model-parallel-size 2 --sequence-parallel   # every matrix over 2 GPUs, the activations between them too
    --context-parallel-size 8             # 16384 of 131072 tokens on a GPU
    --overlap-grad-reduce   # gradients travel while backward still computes
)
MEMORY=(
    --max-tokens-per-microbatch 131072   # packed tokens over the context-parallel group; the longest sample must fit
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1   # keep the inputs of layers only
)
LOSS=(
    --loss-aggregation constant --loss-aggregation-divisor 131072   # a token weighs 1/(N L), whatever its response
    --advantage dr_grpo                 # reward - mean of its prompt, undivided by the standard deviation
    --policy-loss ppo --eps-clip 0.2    # clipped ratio
    --docs-per-step 128   # responses of an optimizer step
)

start $((8 * NODES)) --nnodes "$NODES" --nproc-per-node 8 \
    --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}" -- \
    "${COMMON[@]}" "${MODEL[@]}" "${PARALLEL[@]}" "${MEMORY[@]}" "${LOSS[@]}" "$@"
