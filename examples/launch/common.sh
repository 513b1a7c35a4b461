# Sourced by the scripts that start examples/train.py: the environment and the shared flags.
#
#   start GPUS LAUNCHER... -- FLAGS...     starts it on GPUS processes in total, by torchrun with LAUNCHER...
#
# With --dry-run, one process without a GPU checks the flags for GPUS processes and prints the plan.

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON="${PYTHON:-python}"            # of your container or environment
ROLLOUTS="${ROLLOUTS:-rollouts}"      # folder of Parquet or JSON Lines files: docs/rollout_files.md
RUN_DIR="${RUN_DIR:-runs/$(basename "$0" | cut -d. -f1)}"

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# After SIGTERM, ranks have ten minutes instead of 30 seconds to finish their step and write a checkpoint.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"
# Megatron warns about missing optional packages.
export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore::UserWarning,ignore::FutureWarning,ignore::SyntaxWarning}"
# torch warns about an unusable CUDA toolkit on a CPU.
export TORCH_LOGS="${TORCH_LOGS:--torch.utils.cpp_extension}"
# Packs differ in length between micro-batches. Without this, the allocator keeps a block per size.
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

# The flags of every launch from rollout files.
COMMON=(
    --device cuda --bf16                          # NCCL; weights in bfloat16, gradients and optimizer in float32
    --use-distributed-optimizer --overlap-grad-reduce   # optimizer sharded over DP x CP, gradients reduced during backward
    --attention-dropout 0 --hidden-dropout 0      # the ratio of new to old log-probs must depend only on the weights
    --position-embedding-type rope --swiglu       # rotary positions, gated MLP: Llama's and Qwen's architecture
    --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear   # Llama's and Qwen's norm, no biases
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1   # keep only the layers' inputs
    --adam-beta2 0.98 --weight-decay 0.1          # Adam averages squares over 50 steps instead of 1000
    --lr 1e-6 --lr-decay-style constant --lr-warmup-iters 10   # ten warm-up steps, then a constant rate
    --train-iters 1000                            # or until the files end
    --rollout-files "$ROLLOUTS" --on-bad-row skip # bad rows are counted in metrics.jsonl
    --docs-per-step-mode exact --keep-prompt-groups   # complete prompt groups, exact numbers of rollouts
    --fused-lm-head --fp32-lm-head                # float32 logits of only one chunk in memory
    --check-aggregation                           # stop if a sample is counted twice, dropped or mis-sliced
    --save "$RUN_DIR" --load "$RUN_DIR" --save-interval 50   # resumes from the last complete checkpoint
    --exit-signal-handler                         # writes a checkpoint at SIGTERM
    --tensorboard-dir "$RUN_DIR/tensorboard"      # metrics.jsonl is next to the checkpoints
)
