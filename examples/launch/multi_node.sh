#!/usr/bin/env bash
# 8 nodes of 8 80-GB GPUs: a model like Llama-3.1-70B, ScaleRL's objective, TP 8 x PP 4 x DP 2.
# Start it once on every node:
#
#   NODE_RANK=0 MASTER_ADDR=first-node ROLLOUTS=path/to/rollouts bash examples/launch/multi_node.sh
#   bash examples/launch/multi_node.sh --dry-run
#
# ROLLOUTS and RUN_DIR are on a shared file system.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
NODES="${NODES:-8}"

MODEL=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672   # depth, width, MLP width
    --num-attention-heads 64 --group-query-attention --num-query-groups 8   # 8 heads share keys and values
    --rotary-base 500000                                          # base of the positions' angles
    --vocab-size 128256 --untie-embeddings-and-output-weights     # input and output embedding are two matrices
    --seq-length 32768 --max-position-embeddings 32768            # longest sample, prompt and response
)
PARALLEL=(
    --tensor-model-parallel-size 8 --sequence-parallel      # inside a node
    --pipeline-model-parallel-size 4                        # 20 layers per stage, across nodes
    --num-layers-per-virtual-pipeline-stage 5               # in 4 chunks, to wait less at the ends of a step
)
LOSS=(
    --max-tokens-per-microbatch 32768   # packed tokens per context-parallel group, at least the longest sample
    --loss-aggregation prompt_mean                  # ScaleRL's prompt average
    --policy-loss cispo --eps-clip-high 4           # gradient of every token, detached ratio at most 5
    --docs-per-step 1024   # responses per optimizer step
)

start $((8 * NODES)) --nnodes "$NODES" --nproc-per-node 8 \
    --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}" -- \
    "${COMMON[@]}" "${MODEL[@]}" "${PARALLEL[@]}" "${LOSS[@]}" "$@"
