"""Forward-only scores of response tokens at any sharding: log-probs, hidden states and a critic's
values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.config import PolicyLossConfig
from megatron_pg.config.planning import OversizedSamples
from megatron_pg.config.policy_loss import require_config
from megatron_pg.head import LogitTransform
from megatron_pg.loss.from_logits import log_probs_of_logits, refuse_tokens_outside, require_float32
from megatron_pg.loss.resolved import resolve
from megatron_pg.megatron.context_layout import require_zigzag
from megatron_pg.megatron.fused_head import PRODUCT, OutputRows
from megatron_pg.megatron.groups import ParallelGroups, chunks_of, unwrapped
from megatron_pg.megatron.output_layer import (
    OutputProcessor,
    require_sharded_logits,
    set_fp32_lm_head,
    take_output_processor,
)
from megatron_pg.megatron.policy_step import MicroBatchHead, model_inputs
from megatron_pg.megatron.routing_replay import RoutingReplay
from megatron_pg.megatron.scale_contract import ScheduleOutput
from megatron_pg.megatron.schedule import run_micro_batches
from megatron_pg.megatron.varying_log_probs import require_steady_log_probs
from megatron_pg.step.agreement import compute_and_gather
from megatron_pg.step.batch import PackedBatch, pack
from megatron_pg.step.plan import StepPlan, plan_step
from megatron_pg.step.sample import Sample, number_samples

NEEDED = {
    "kept_tokens": "which --replay-sampling-set requires: give Sample(kept_tokens=...), with an "
    "empty set per token that was sampled from all ids",
    "routed_experts": "which --replay-routing requires: give Sample(routed_experts=...), or score "
    "with dataclasses.replace(config, replay_routing=False), as for a reference model that chooses "
    "experts",
}
"""The reason and remedy for a missing sample field that scoring reads."""


@dataclass(frozen=True, eq=False)
class ScoredSamples:
    """Log-probs and entropy of samples under a model, in the samples' order."""

    log_probs: list[Tensor]
    """Each sample's response log-probs in nats, [response_length] float32 on the host, 0 at masked
    tokens."""
    entropy: list[Tensor]
    """Each sample's response entropies in nats, [response_length] float32 on the host, 0 at masked
    tokens."""


def compute_log_probs(
    model: Any,
    samples: Sequence[Sample],
    config: PolicyLossConfig,
    *,
    max_tokens_per_microbatch: int,
    oversized: OversizedSamples = "error",
    groups: ParallelGroups | None = None,
    vocab_size: int | None = None,
) -> ScoredSamples:
    """Compute log-probs and entropy of samples under a model, such as the old policy or the
    reference.

        old = compute_log_probs(model, samples, config, max_tokens_per_microbatch=16384).log_probs
        samples = [
            replace(sample, old_log_probs=values)
            for sample, values in zip(samples, old, strict=True)
        ]

    Every rank of the model calls it with all samples of its data-parallel rank, after an optimizer
    step and before the next forward and backward. Samples are packed and scored as in `plan_step`
    and `PolicyStep` with the same config, so with the same budget and parameters the next step's
    ratio is 1.

    The model runs under `torch.no_grad()` in eval mode, and every module gets its mode back. No
    gradient, DDP buffer or random generator state changes.

    Args:
        model: on this rank's device, wrapped (DDP, Float16Module) or not, or a virtual pipeline's
            list of chunks.
        samples: this data-parallel rank's samples in any order, possibly none. Tokens, response
            lengths, loss masks, kept sets and routed experts are read. Log-probs are not read, and
            may be missing.
        config: the policy loss, for temperature, head, logit precision, kept sets and routing
            replay.
        max_tokens_per_microbatch: see `plan_step`. Without a backward pass, it may be several times
            training's.
        oversized: see `plan_step`.
        groups: the process groups. None: the model's. vocab_size: the vocabulary without padding.
            None: every column of the logits.

    Returns:
        The same on every tensor-, context- and pipeline-parallel rank of a data-parallel rank. This
        costs two all-reduces (context and pipeline parallel) of two numbers per response token, and
        one copy to the host.

    Raises:
        ValueError: the model's log-probs vary at the same weights, unless
            `--allow-varying-log-probs`. On all data-parallel ranks if it happens on one: the model
            is not on the rank's device, or a sample, which is named, is longer than the budget, has
            a response token outside the vocabulary, or lacks the kept sets of
            `--replay-sampling-set` or the experts of `--replay-routing`.
        NotImplementedError, TypeError: as for `PolicyStep`.
    """
    require_config(config)
    require_steady_log_probs(model, config)
    groups = ParallelGroups.from_model(model) if groups is None else groups
    resolved = resolve(config)
    options = replace(
        resolved.head, tensor_parallel_group=groups.tensor, vocab_size=vocab_size, with_entropy=True
    )

    def read_logits(batch: PackedBatch, logits: Tensor) -> Tensor:
        if resolved.has_float32_logits:
            require_float32(logits)
        kept = batch.kept_tokens_of_rows if resolved.is_over_kept_sets else None
        log_probs, entropy, _ = log_probs_of_logits(batch, logits, options, kept)
        return torch.stack([log_probs, entropy])  # type: ignore[list-item]

    def fused_scores(batch: PackedBatch) -> OutputProcessor:
        rows = OutputRows(batch, options, with_sets=config.replay_sampling_set)
        return lambda *factors: torch.stack(rows.log_probs_and_entropy(*factors))

    if config.fused_lm_head:
        take_output_processor(model)
    else:
        require_sharded_logits(model)
    reads = {"kept_tokens": config.replay_sampling_set, "routed_experts": config.replay_routing}
    was_fp32 = set_fp32_lm_head(model, config.changes_output_layer)
    try:
        scores = score_samples(
            model,
            samples,
            (lambda _, output: output.reshape(2, -1)) if config.fused_lm_head else read_logits,
            output_processor=fused_scores if config.fused_lm_head else None,
            empty_scores=torch.empty(2, 0, dtype=torch.float32, device="cpu"),
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            oversized=oversized,
            groups=groups,
            vocab_size=vocab_size,
            reads=[name for name, is_read in reads.items() if is_read],
        )
    finally:
        set_fp32_lm_head(model, was_fp32)
    log_probs, entropy = ([score[row].clone() for score in scores] for row in range(2))
    return ScoredSamples(log_probs, entropy)


def compute_hidden_states(
    model: Any,
    samples: Sequence[Sample],
    *,
    max_tokens_per_microbatch: int,
    oversized: OversizedSamples = "error",
    groups: ParallelGroups | None = None,
) -> list[Tensor]:
    """Compute the hidden states that predict response tokens: `teacher_hidden` of
    `--distill-teacher hidden`.

        states = compute_hidden_states(teacher, samples, max_tokens_per_microbatch=16384)
        samples = [
            replace(sample, side_channels={**sample.side_channels, "teacher_hidden": hidden})
            for sample, hidden in zip(samples, states, strict=True)
        ]

    The same ranks call it as `compute_log_probs`, with the same arguments and the same guarantees
    for the model. It computes no logits, which are the product of these states and the model's
    output weight.

    Args:
        model: the teacher, of any size, in the student's groups or in groups with the same
            data-parallel ranks.

    Returns:
        One `[response_length, hidden]` tensor per sample on the host, in the dtype of the model's
        parameters, the same on every tensor-, context- and pipeline-parallel rank. Until the last
        sample is done, the device holds all states.

    Raises:
        ValueError: as for `compute_log_probs`.
        NotImplementedError: the output layer is not Megatron's `ColumnParallelLinear`, has a bias,
            gathers its logits over tensor parallelism, or computes more than the product of hidden
            states and weight.
    """
    config = chunks_of(model)[0].config
    remedy = "give the teacher by --distill-teacher logits or top_k"

    def states_of(batch: PackedBatch) -> OutputProcessor:
        def processor(hidden: Tensor, weight: Tensor, transform: LogitTransform) -> Tensor:
            if transform != PRODUCT:
                raise NotImplementedError(
                    "compute_hidden_states requires a teacher with logits that are hidden states "
                    f"times output weight, found {transform}: {remedy}"
                )
            return hidden[batch.logit_rows, 0].T

        return processor

    take_output_processor(model, "compute_hidden_states", remedy)
    states = score_samples(
        model,
        samples,
        lambda _, output: output.reshape(config.hidden_size, -1),
        output_processor=states_of,
        empty_scores=torch.empty(config.hidden_size, 0, dtype=config.params_dtype, device="cpu"),
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        oversized=oversized,
        groups=groups,
    )
    return [state.T.contiguous() for state in states]


@torch.no_grad()
def score_samples(
    model: Any,
    samples: Sequence[Sample],
    read_scores: Callable[[PackedBatch, Tensor], Tensor],
    *,
    output_processor: Callable[[PackedBatch], OutputProcessor] | None = None,
    empty_scores: Tensor,
    max_tokens_per_microbatch: int,
    oversized: OversizedSamples,
    groups: ParallelGroups | None,
    vocab_size: int | None = None,
    reads: Sequence[str] = (),
) -> list[Tensor]:
    """Score every response token forward-only: [numbers, response_length] per sample on the host.
    See `compute_log_probs`.

    Args:
        read_scores: (micro-batch, the model's output) -> scores [numbers, window].
        output_processor: makes a micro-batch's `output_processor=` for the model's forward. None:
            the model returns logits.
        empty_scores: [numbers, 0] in the dtype of the returned scores.
        reads: the fields of `NEEDED` that every sample must have. Routers replay `routed_experts`
            if included.
    """
    chunks = chunks_of(model)
    groups = ParallelGroups.from_model(model) if groups is None else groups
    (device, bare), _ = compute_and_gather(
        lambda: (_device_of(chunks, groups), _bare(samples, chunks[0], vocab_size, reads)),
        lambda _: None,
        groups.data,
    )
    if groups.context_size > 1:
        require_zigzag(chunks)
    model_config, cp_size = chunks[0].config, groups.context_size
    # Sequence parallelism also splits a packed micro-batch.
    multiple = cp_size * groups.tensor_size if model_config.sequence_parallel else 1
    layout: dict[str, Any] = {"cp_size": cp_size, "pad_to_multiple": multiple}
    interleaved = model_config.microbatch_group_size_per_vp_stage if len(chunks) > 1 else 1
    plan = plan_step(
        bare,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        data_parallel_group=groups.data,
        **layout,
        microbatch_group_size=interleaved,
        oversized=oversized,
    )
    batches = [
        pack([bare[i] for i in indices], cp_rank=groups.context_rank, **layout)
        for indices in plan.microbatches
    ]

    replay = RoutingReplay(chunks, groups) if "routed_experts" in reads else None

    def head(packed: PackedBatch) -> MicroBatchHead:
        batch = packed.to(device)
        added: dict[str, Any] = {} if replay is None else replay.model_inputs(batch)
        if output_processor is not None:
            added["output_processor"] = output_processor(batch)

        def report(output: Tensor) -> ScheduleOutput:
            scores = read_scores(batch, output)
            return scores.new_zeros(()), {
                "scores": scores
            }  # either loss mode, because there is no backward

        return MicroBatchHead(report, model_inputs(batch) | added, added)

    modes = [(module, module.training) for chunk in chunks for module in chunk.modules()]
    try:
        for chunk in chunks:
            chunk.eval()
        outputs = run_micro_batches(head, batches, chunks, forward_only=True)
    finally:
        for module, mode in modes:  # a module comes before the modules inside it
            if module.training != mode:
                module.train(mode)
        if replay is not None:
            replay.clear()
    scores = [output["scores"] for output in outputs]
    return _in_order(plan, bare, _exchange(scores, batches, groups, empty_scores.to(device)))


def _device_of(chunks: Sequence[Any], groups: ParallelGroups) -> torch.device:
    """Return the device of all parameters. Raise ValueError if this rank's process groups do not
    work on it.
    """
    devices = {parameter.device for chunk in chunks for parameter in chunk.parameters()}
    possible = []
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        possible.append(torch.device("cuda", torch.cuda.current_device()))
    if dist.get_backend(groups.pipeline) != "nccl":
        possible.append(torch.device("cpu"))
    if len(devices) == 1 and devices <= set(possible):
        return torch.device(devices.pop())
    raise ValueError(
        f"the model's parameters are on {' and '.join(sorted(map(str, devices))) or 'no device'} "
        f"but this rank works on {' or '.join(map(str, possible)) or 'a GPU'}: move the whole "
        "model there before scoring (load an offloaded reference model first)"
    )


def _bare(
    samples: Sequence[Sample], chunk: Any, vocab_size: int | None, reads: Sequence[str]
) -> list[Sample]:
    """Copy only the fields that scoring reads, because samples may differ in the rest."""
    number_samples(samples)
    for field in reads:
        for sample in samples:
            if getattr(sample, field) is None:
                raise ValueError(f"{sample.name} has no {field}, {NEEDED[field]}")
    fields = ["tokens", "response_length", "loss_mask", "name", *reads]
    bare = [Sample(**{name: getattr(sample, name) for name in fields}) for sample in samples]
    if vocab_size is None:
        vocab_size = getattr(unwrapped(chunk), "vocab_size", None)
    if vocab_size is not None:
        refuse_tokens_outside(bare, vocab_size)
    return bare


def _exchange(
    scores: Sequence[Tensor],
    batches: Sequence[PackedBatch],
    groups: ParallelGroups,
    empty_scores: Tensor,
) -> Tensor:
    """Copy the scores [numbers, response tokens of all micro-batches] to the host of every rank of
    the model.
    """
    if groups.is_last_pipeline_stage:
        parts = [
            batch.window.in_responses(score.to(empty_scores.dtype))
            for batch, score in zip(batches, scores, strict=True)
        ]
    else:
        lengths = [sum(batch.window.response_lengths) for batch in batches]
        parts = [empty_scores.new_zeros(len(empty_scores), length) for length in lengths]
    values = torch.cat(parts, dim=1)
    # One context-parallel rank of the last stage has each score and the rest have 0, so the sums
    # are exact.
    for group in (groups.context, groups.pipeline):
        if dist.get_world_size(group) > 1:
            dist.all_reduce(values, group=group)
    return values.cpu()


def _in_order(plan: StepPlan, samples: Sequence[Sample], values: Tensor) -> list[Tensor]:
    """Split the values, which are in the plan's order, by sample, and return them in the samples'
    order.
    """
    planned = [index for indices in plan.microbatches for index in indices]
    lengths = [samples[index].response_length for index in planned]
    parts = dict(zip(planned, torch.split(values, lengths, dim=1), strict=True))
    # Clone, because a view would keep the whole tensor alive and be saved with it.
    return [parts[index].clone() for index in range(len(samples))]
