#!/usr/bin/env bash
# 2 nodes of 8 GPUs of 80 GB: a mixture of experts of the size of Qwen3-30B-A3B, GSPO, EP 8. Started once on every node:
#
#   NODE_RANK=0 MASTER_ADDR=first-node ROLLOUTS=path/to/rollouts bash examples/launch/moe.sh
#   bash examples/launch/moe.sh --dry-run
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
NODES="${NODES:-2}"

MODEL=(
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144
    --num-attention-heads 32 --kv-channels 128 --group-query-attention --num-query-groups 4
    --qk-layernorm --rotary-base 1000000 --vocab-size 151936 --untie-embeddings-and-output-weights
    --seq-length 40960 --max-position-embeddings 40960
    --num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8   # every layer; 8 of 128 experts for a token
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
    --moe-grouped-gemm                                                # one product for a rank's experts
)
PARALLEL=(
    --expert-model-parallel-size 8        # 16 experts on a GPU; the rest of the model is data-parallel
    --context-parallel-size 2
    --moe-token-dispatcher-type alltoall  # packs differ in length from rank to rank
    --overlap-grad-reduce
)
MEMORY=(
    --max-tokens-per-microbatch 40960
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
LOSS=(
    --loss-aggregation sample_mean
    --policy-loss gspo --eps-clip 3e-4 --eps-clip-high 4e-4   # the ratio of whole sequences, which moves far less
    --docs-per-step 512
)

start $((8 * NODES)) "$PYTHON" -m torch.distributed.run --nnodes "$NODES" --nproc-per-node 8 \
    --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}" -- \
    "${COMMON[@]}" "${MODEL[@]}" "${PARALLEL[@]}" "${MEMORY[@]}" "${LOSS[@]}" "$@"
