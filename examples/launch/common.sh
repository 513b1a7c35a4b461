# Sourced by the scripts that start examples/train.py: the environment, and flags that launches share.
#
#   start GPUS LAUNCHER... -- FLAGS...     starts it on GPUS processes in all, by torchrun with LAUNCHER...
#
# With --dry-run among the flags one process, without a GPU, checks the flags for that many and prints the plan.

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON="${PYTHON:-python}"            # the one of your container or environment
ROLLOUTS="${ROLLOUTS:-rollouts}"      # folder of Parquet or JSON Lines files: docs/rollout_files.md
RUN_DIR="${RUN_DIR:-runs/$(basename "$0" | cut -d. -f1)}"

export CUDA_DEVICE_MAX_CONNECTIONS=1  # Megatron wants it where it splits a model: communication before computation
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# After SIGTERM the ranks have ten minutes, and not 30 seconds, to end their step and write a checkpoint.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"
# Megatron warns at length of optional packages that are not there.
export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore::UserWarning,ignore::FutureWarning,ignore::SyntaxWarning}"
# Packs differ in length from one micro-batch to the next; without this the allocator keeps a block for each size.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"

start() {
    local gpus="$1" launcher=()
    while shift && [ "$1" != -- ]; do launcher+=("$1"); done
    shift
    case " $* " in
        *" --dry-run "*) WORLD_SIZE="$gpus" exec "$PYTHON" examples/train.py "$@" ;;
        *) exec "$PYTHON" -m torch.distributed.run "${launcher[@]}" examples/train.py "$@" ;;
    esac
}

# What every launch from rollout files has.
COMMON=(
    --device cuda --bf16                          # NCCL; weights in bfloat16, gradients and optimizer in float32
    --use-distributed-optimizer --overlap-grad-reduce   # states sharded over DP x CP; reduced while backward computes
    --attention-dropout 0 --hidden-dropout 0      # the ratio of new to old log-probs must be of the weights alone
    --position-embedding-type rope --swiglu       # rotary positions, gated MLP: Llama's and Qwen's architecture
    --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear   # as there
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1   # keep the inputs of layers only
    --adam-beta2 0.98 --weight-decay 0.1          # Adam averages squares over 50 steps, by default over 1000
    --lr 1e-6 --lr-decay-style constant --lr-warmup-iters 10   # ten steps of warm-up, then the same rate
    --train-iters 1000                            # or until the files end
    --rollout-files "$ROLLOUTS" --on-bad-row skip # bad rows are counted in metrics.jsonl
    --docs-per-step-mode exact --keep-prompt-groups   # steps end between prompt groups, and hold what they should
    --fused-lm-head --fp32-lm-head                # no logits of all tokens in memory; float32 logits of a chunk
    --check-aggregation                           # stop where a sample is counted twice, dropped or mis-sliced
    --save "$RUN_DIR" --load "$RUN_DIR" --save-interval 50   # started again, it goes on from the last whole checkpoint
    --exit-signal-handler                         # at SIGTERM a checkpoint is written first
    --tensorboard-dir "$RUN_DIR/tensorboard"      # metrics.jsonl is beside the checkpoints
)
