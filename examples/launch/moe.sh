#!/usr/bin/env bash
# 2 nodes of 8 GPUs of 80 GB: a mixture of experts of the size of Qwen3-30B-A3B, GSPO, EP 8. Started once on every node:
#
#   NODE_RANK=0 MASTER_ADDR=first-node ROLLOUTS=path/to/rollouts bash examples/launch/moe.sh
#   bash examples/launch/moe.sh --dry-run
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
NODES="${NODES:-2}"

MODEL=(
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144   # depth, width, width of the MLP
    --num-attention-heads 32 --kv-channels 128                   # heads of 128 channels
    --group-query-attention --num-query-groups 4                 # 8 heads share keys and values
    --qk-layernorm --rotary-base 1000000      # queries and keys are normalised; the base of the positions' angles
    --vocab-size 151936 --untie-embeddings-and-output-weights   # input and output embedding are two matrices
    --seq-length 40960 --max-position-embeddings 40960          # the longest sample, prompt and response
    --num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8   # every layer; 8 of 128 experts for a token
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3    # keeps experts evenly busy
    --moe-grouped-gemm                                                # one product for a rank's experts
)
PARALLEL=(
    --expert-model-parallel-size 8        # 16 experts on a GPU; the rest of the model is data-parallel
    --context-parallel-size 2             # every sequence over 2 GPUs
    --moe-token-dispatcher-type alltoall  # packs differ in length from rank to rank
    --overlap-grad-reduce   # gradients travel while backward still computes
)
MEMORY=(
    --max-tokens-per-microbatch 40960   # packed tokens over the context-parallel group; the longest sample must fit
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1   # keep the inputs of layers only
)
LOSS=(
    --loss-aggregation sample_mean                           # every response has weight 1/N
    --policy-loss gspo --eps-clip 3e-4 --eps-clip-high 4e-4   # the ratio of whole sequences, which moves far less
    --docs-per-step 512   # responses of an optimizer step
)

start $((8 * NODES)) --nnodes "$NODES" --nproc-per-node 8 \
    --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}" -- \
    "${COMMON[@]}" "${MODEL[@]}" "${PARALLEL[@]}" "${MEMORY[@]}" "${LOSS[@]}" "$@"
