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
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8   # as Llama 3.1 reaches 131072 positions
    --vocab-size 128256 --untie-embeddings-and-output-weights
    --seq-length 131072 --max-position-embeddings 131072
)
PARALLEL=(
    --tensor-model-parallel-size 2 --sequence-parallel
    --context-parallel-size 8             # 16384 of 131072 tokens on a GPU
    --overlap-grad-reduce
)
MEMORY=(
    --max-tokens-per-microbatch 131072
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
LOSS=(
    --loss-aggregation constant --loss-aggregation-divisor 131072   # a token weighs 1/(N L), whatever its response
    --policy-loss ppo --eps-clip 0.2
    --docs-per-step 128
)

start $((8 * NODES)) "$PYTHON" -m torch.distributed.run --nnodes "$NODES" --nproc-per-node 8 \
    --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}" -- \
    "${COMMON[@]}" "${MODEL[@]}" "${PARALLEL[@]}" "${MEMORY[@]}" "${LOSS[@]}" "$@"
