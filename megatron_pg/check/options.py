"""The flags of `megatron-pg check`, under Megatron's names, and the objective of its steps."""

import importlib.util
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from megatron_pg.config.command_line import ProgramParser
from megatron_pg.config.custom import custom_function_violations
from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.config.settings import Settings, add_args, setting
from megatron_pg.config.values import ABOVE_0, COUNT, refuse
from megatron_pg.config.versions import derives_multi_token_labels, has_hybrid_model
from megatron_pg.loss.aggregation import AGGREGATIONS

LEAN_PERIOD = 16
"""The period of token ids: its first half leans one way, its second the other
(`set_parameters`)."""
ADAM_EPSILON = 0.1
_TILED_COLUMNS = 256
DIVISOR = 24.0
KL_COEFFICIENT, ENTROPY_COEFFICIENT = 0.1, 0.05
CUSTOM = "custom"
"""The aggregation name for the user's own reducer, per-token loss or both."""

CUSTOM_PATHS = ("custom_pg_loss_reducer_function_path", "custom_policy_loss_path")


@dataclass(frozen=True)
class CheckOptions(Settings):
    """The sharding and the run of the small model. The rest of the world is data parallel."""

    # fmt: off
    all: bool = setting(False, """
        Check every sharding that the number of processes allows instead of the given sizes. Print
        one line per sharding.""")
    model_provider: str | None = setting(None, """
        Check your model: module:function with Megatron's signature, provider(pre_process,
        post_process, vp_stage=None, config=None, pg_collection=None). The provider reads the flags
        after --.""")
    provider_flags: tuple[str, ...] = setting((), flag=False)
    lr: float = setting(1e-2, ABOVE_0, "Learning rate of the Adam step with --model-provider.")
    clip_grad: float = setting(1.0, ABOVE_0, "Largest gradient norm of that step.")
    sample_groups: int | None = setting(None, COUNT, """
        Check on only this many copies of the model, evenly spaced over the job. The remaining
        processes end at once. A copy is TP x CP x PP processes. Copies that share experts count as
        one. Unset: the whole job.""")
    tensor_model_parallel_size: int = setting(1, COUNT)
    pipeline_model_parallel_size: int = setting(1, COUNT)
    virtual_pipeline_model_parallel_size: int | None = setting(None, COUNT)
    context_parallel_size: int = setting(1, COUNT)
    expert_model_parallel_size: int = setting(1, COUNT)
    expert_tensor_parallel_size: int = setting(1, COUNT, """
        Megatron's own default is the tensor-parallel size.""")
    num_layers: int | None = setting(None, COUNT, """
        Unset: 2, or the pipeline's number of chunks if that is more.""")
    num_experts: int | None = setting(None, COUNT, "Check a mixture of experts.")
    mtp_num_layers: int | None = setting(None, COUNT, """
        Add a model with multi-token prediction. Needs megatron-core 0.19.""")
    hybrid_model: bool = setting(False, """
        Add a HybridModel, which Megatron names as GPTModel's successor. Needs megatron-core 0.18
        and no pipeline.""")
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = False
    average_in_collective: bool = setting(False, """
        DDP averages gradients in its collective. Per-token rows are left out, because Megatron
        excludes the combination.""")
    overlap_grad_reduce: bool = setting(False, """
        DDP reduces each bucket as soon as backward fills it.""")
    gradient_accumulation_fusion: bool = setting(False, """
        Add up weight gradients inside the GEMM. Needs Apex's extension.""")
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] | None = setting(None, """
        Exchange of keys and values in Transformer Engine's attention. Unset: Megatron's
        default.""")
    fused_lm_head: bool = setting(False, "Run the end-to-end rows through the fused output layer.")
    fp32_lm_head: bool = setting(False, """
        Compute float32 logits from bf16 operands. With fused_lm_head on cuda, the vocabulary has a
        size that QuACK's products accept.""")
    custom_pg_loss_reducer_function_path: str | None = setting(None, """
        Add rows with your reducer.""")
    custom_policy_loss_path: str | None = setting(None, """
        Add rows with your per-token loss, and your reducer if given.""")
    device: Literal["cpu", "cuda"] = setting("cpu", """
        Device of the check. The default is cuda if torch finds a GPU.""")
    dtype: Literal["fp32", "bf16"] = setting("fp32", "On cuda the default is bf16.")
    transformer_impl: Literal["local", "transformer_engine"] = setting("local", """
        On cuda in bf16, the default is transformer_engine if it is installed.""")
    # fmt: on

    def parallel_sizes(self, sharded: bool = True) -> dict[str, int | None]:
        """Return the sizes by Megatron's names, or the sizes of a whole model on every rank."""
        values = vars(self if sharded else CheckOptions())
        return {name: size for name, size in values.items() if name.endswith("_parallel_size")}

    @property
    def has_custom(self) -> bool:
        return any(getattr(self, path) for path in CUSTOM_PATHS)

    @property
    def model_parallel_size(self) -> int:
        """The number of processes of one copy of the model."""
        model_size = self.tensor_model_parallel_size * self.pipeline_model_parallel_size
        return model_size * self.context_parallel_size

    @property
    def num_chunks(self) -> int:
        return self.pipeline_model_parallel_size * (self.virtual_pipeline_model_parallel_size or 1)

    @property
    def has_whole_tiles(self) -> bool:
        """Whether the fused head may use QuACK's products, which need multiples of 128 columns."""
        return self.fused_lm_head and self.fp32_lm_head and self.device == "cuda"

    @property
    def vocab_size(self) -> int:
        """The tokenizer's size: about 16 ids per rank, and not a multiple of the tensor-parallel
        size.

        QuACK's products get 256 ids per rank. With several ranks, the last rank has three fewer,
        and so runs different kernels.
        """
        if self.has_whole_tiles:
            return self.padded_vocab_size - (3 if self.tensor_model_parallel_size > 1 else 0)
        return LEAN_PERIOD * max(4, self.tensor_model_parallel_size) - 3

    @property
    def padded_vocab_size(self) -> int:
        """The output layer's columns: at least one more than the tokenizer's, and equally many on
        every tensor-parallel rank.

        On a single rank with QuACK's products, which take no padding, there is no extra column.
        """
        if self.has_whole_tiles:
            return _TILED_COLUMNS * self.tensor_model_parallel_size
        return self.vocab_size + 1 + -(self.vocab_size + 1) % self.tensor_model_parallel_size

    @property
    def tokens_per_chunk(self) -> int:
        """The tokens of a long sequence in each of a context-parallel rank's two chunks. Two chunks
        together exceed an attention tile.
        """
        # Tiles have 128 tokens, 32 on a CPU. A GEMM loses digits with each token, and an expert's
        # GEMM has the tokens of all its ranks.
        is_divided = min(self.context_parallel_size, self.expert_model_parallel_size) > 1
        return 130 if self.device == "cuda" else 17 if is_divided else 33

    @property
    def longest(self) -> int:
        """The padded length of the longest sequence, in tokens."""
        return 2 * self.context_parallel_size * self.tokens_per_chunk

    def num_microbatches(self, data_rank: int) -> int:
        """Return a data-parallel rank's M: five or six, more if the pipeline needs more."""
        # Expert-parallel ranks exchange tokens in every micro-batch, so their M is equal.
        turn = data_rank % 2 if self.expert_model_parallel_size == 1 else 0
        count = max(5, self.pipeline_model_parallel_size + 2) + turn
        # Interleaved pipelines need multiples.
        if self.virtual_pipeline_model_parallel_size is not None:
            count += -count % self.pipeline_model_parallel_size
        return count


def config_of(aggregation: str, options: CheckOptions, objective: str = "ppo") -> PolicyLossConfig:
    """Make a loss with KL and entropy terms, which are averaged differently than the policy
    gradient.
    """
    values: dict[str, Any] = {"loss_aggregation": aggregation}
    if aggregation == CUSTOM:
        values = {field: getattr(options, field) for field in CUSTOM_PATHS} | {"pg_metrics": "none"}
    elif AGGREGATIONS[aggregation].needs:
        values["loss_aggregation_divisor"] = DIVISOR
    return PolicyLossConfig(
        policy_loss=objective,
        kl_loss_coef=KL_COEFFICIENT,
        entropy_coef=ENTROPY_COEFFICIENT,
        **values,
    )


def parse_options(arguments: Sequence[str], *, world_size: int = 0) -> tuple[CheckOptions, bool]:
    """Return the options and the flag `--json`, or raise one ValueError with all faults. A world
    size of 0 passes every size check.
    """
    parser = ProgramParser(
        prog="megatron-pg check",
        allow_abbrev=False,
        description="Run one training step of a small model on the real process groups for every "
        "aggregation and both of Megatron's loss modes. Compare every gradient with an unsharded "
        "reference computed in the same job. Start it as you start training, for example: torchrun "
        "--nproc-per-node 8 -m megatron_pg check "
        "--tensor-model-parallel-size 2 --context-parallel-size 2 --pipeline-model-parallel-size 2",
    )
    add_args(parser, CheckOptions, "check")
    # Their defaults depend on the machine.
    parser.set_defaults(device=None, dtype=None, transformer_impl=None)
    parser.add_argument("--json", action="store_true", help="Print the report as JSON.")
    parser.add_config_args()
    own, provider_flags = _split(arguments)
    args = parser.parse_args(own)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.dtype = args.dtype or ("bf16" if args.device == "cuda" else "fp32")
    if args.transformer_impl is None:
        use_te = args.device == "cuda" and args.dtype == "bf16" and has_transformer_engine()
        args.transformer_impl = "transformer_engine" if use_te else "local"
    options = replace(CheckOptions.from_args(args), provider_flags=tuple(provider_flags))
    refuse([*violations_of_sizes(options, world_size), *_violations_of_machine(options)])
    return options, args.json


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the command line at `--`."""
    words = list(arguments)
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]


def has_transformer_engine() -> bool:
    """Tell whether Transformer Engine's layers can be imported."""
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        return False
    return True


def has_gradient_accumulation_fusion(options: CheckOptions) -> bool:
    """Tell whether a kernel can add up weight gradients inside the product.

    Megatron's output layer takes only Apex's, even next to Transformer Engine's layers
    (tensor_parallel/layers.py, 0.19.2).
    """
    has_apex = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    return options.device == "cuda" and has_apex


def violations_of_sizes(options: CheckOptions, world_size: int) -> Iterator[str]:
    """Yield the faults of the sizes."""
    tensor_size = options.tensor_model_parallel_size
    pipeline_size = options.pipeline_model_parallel_size
    experts, expert_size = options.num_experts, options.expert_model_parallel_size
    expert_tensor_size = options.expert_tensor_parallel_size
    stages, chunks = options.virtual_pipeline_model_parallel_size, options.num_chunks
    dense, sparse = options.model_parallel_size, expert_size * pipeline_size * expert_tensor_size
    for size, first, last in (
        (dense, "tensor-model", "context"),
        (sparse, "expert-model", "expert-tensor"),
    ):
        if world_size % size:
            yield (
                f"--{first}-parallel-size * --pipeline-model-parallel-size * "
                f"--{last}-parallel-size = {size} does not divide the {world_size} processes: "
                f"torchrun --nproc-per-node {math.lcm(dense, sparse)} -m megatron_pg check ..."
            )
    if options.provider_flags and options.model_provider is None:
        yield f"{' '.join(options.provider_flags)} after -- requires --model-provider"
    if options.all and options.sample_groups is not None:
        yield "--all and --sample-groups are mutually exclusive"
    if options.num_layers is not None and options.num_layers % chunks:
        yield (
            f"--num-layers {options.num_layers} is not a multiple of the {chunks} pipeline chunks"
        )
    if options.sequence_parallel and tensor_size == 1:
        yield "--sequence-parallel requires --tensor-model-parallel-size above 1"
    if options.fp32_lm_head and not options.fused_lm_head:
        yield "--fp32-lm-head requires --fused-lm-head"
    if options.hybrid_model and pipeline_size > 1:
        yield (
            f"--hybrid-model and --pipeline-model-parallel-size {pipeline_size} are mutually "
            "exclusive"
        )
    if stages is not None and 1 in (stages, pipeline_size):
        yield (
            f"--virtual-pipeline-model-parallel-size {stages} with --pipeline-model-parallel-size "
            f"{pipeline_size}: both must be above 1. Without interleaving, omit the first"
        )
    if options.model_provider is not None:
        if options.all:
            yield "--model-provider and --all are mutually exclusive"
        return
    if experts is None:
        for flag, size in (("model", expert_size), ("tensor", expert_tensor_size)):
            if size > 1:
                yield f"--expert-{flag}-parallel-size {size} requires --num-experts"
        return
    if experts < 2 or experts % expert_size:
        yield (
            f"--num-experts {experts} with --expert-model-parallel-size {expert_size}: give at "
            "least 2 experts, a multiple of that size"
        )
    if tensor_size > 1 and not options.sequence_parallel:
        yield (
            f"--num-experts {experts} with --tensor-model-parallel-size {tensor_size} requires "
            "--sequence-parallel: Megatron trains experts under tensor parallelism only with it"
        )


def shardings(options: CheckOptions, world_size: int) -> Iterator[CheckOptions]:
    """Yield the options with every sharding of `world_size` processes: TP with and without SP, PP,
    VPP 1 and 2, CP, EP.
    """
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    axes = (sizes, sizes, sizes, sizes, (False, True), (None, 2))
    for tensor, pipeline, context, expert, sequence_parallel, chunks in itertools.product(*axes):
        sharding = replace(
            options,
            all=False,
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            virtual_pipeline_model_parallel_size=chunks,
            context_parallel_size=context,
            expert_model_parallel_size=expert,
            sequence_parallel=sequence_parallel,
            hybrid_model=options.hybrid_model and pipeline == 1,
        )
        if not any(violations_of_sizes(sharding, world_size)):
            yield sharding


def _violations_of_machine(options: CheckOptions) -> Iterator[str]:
    """Yield the options that this machine does not support."""
    if options.device == "cuda" and not torch.cuda.is_available():
        yield "--device cuda: torch finds no GPU. Use --device cpu"
    if options.transformer_impl == "transformer_engine":
        if options.device == "cpu":
            yield "--transformer-impl transformer_engine requires --device cuda. Use local"
        elif options.dtype == "fp32":
            yield (
                "--transformer-impl transformer_engine has no packed float32 attention. Use "
                "--dtype bf16 or local"
            )
        elif not has_transformer_engine():
            yield "--transformer-impl transformer_engine: it cannot be imported. Use local"
    elif options.cp_comm_type is not None:
        yield (
            f"--cp-comm-type {options.cp_comm_type} requires --transformer-impl transformer_engine"
        )
    if options.gradient_accumulation_fusion and not has_gradient_accumulation_fusion(options):
        yield (
            "--gradient-accumulation-fusion requires a GPU and Apex's "
            "fused_weight_gradient_mlp_cuda, for Megatron's output layer. Drop it"
        )
    if options.mtp_num_layers is not None and not derives_multi_token_labels():
        yield (
            "--mtp-num-layers requires megatron-core 0.19 or later, which trains it without "
            "labels. Drop it"
        )
    if options.hybrid_model and not has_hybrid_model():
        yield "--hybrid-model requires megatron-core 0.18 or later. Drop it"
    yield from custom_function_violations(options)
