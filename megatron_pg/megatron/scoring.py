"""Scores of samples' response tokens under a model, forward only, at any sharding.

`compute_log_probs`, `compute_hidden_states` and the critic's `compute_values` are made of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.config.planning import OversizedSamples
from megatron_pg.config.policy_loss import CpPartitionMode
from megatron_pg.loss.inputs import refuse_tokens_outside
from megatron_pg.megatron.context_layout import require_partition_mode
from megatron_pg.megatron.groups import ParallelGroups, chunks_of, unwrapped
from megatron_pg.megatron.output_layer import OutputProcessor
from megatron_pg.megatron.policy_step import MicroBatchHead, model_inputs
from megatron_pg.megatron.scale_contract import ScheduleOutput
from megatron_pg.megatron.schedule import run_micro_batches
from megatron_pg.step.agreement import compute_and_gather
from megatron_pg.step.batch import PackedBatch, pack
from megatron_pg.step.plan import StepPlan, plan_step
from megatron_pg.step.sample import Sample


@torch.no_grad()
def score_samples(
    model: Any,
    samples: Sequence[Sample],
    read_scores: Callable[[PackedBatch, Tensor], Tensor],
    *,
    empty_scores: Tensor,
    max_tokens_per_microbatch: int,
    oversized: OversizedSamples,
    groups: ParallelGroups | None,
    cp_partition_mode: CpPartitionMode,
    vocab_size: int | None = None,
    takes_sets: bool = False,
    output_processor: Callable[[PackedBatch], OutputProcessor] | None = None,
) -> list[Tensor]:
    """Score every response token of samples, forward only; see `compute_log_probs` for the other arguments.

    Args:
        read_scores: (micro-batch, the model's output) -> scores [numbers, window].
        empty_scores: [numbers, 0] in the dtype of the scores that are returned.
        takes_sets: whether the kept sets are read; every sample needs one then.
        output_processor: makes a micro-batch's `output_processor=` of the model's forward.

    Returns:
        Per sample [numbers, response_length] on the host.
    """
    chunks = chunks_of(model)
    groups = ParallelGroups.from_model(model) if groups is None else groups
    (device, bare), _ = compute_and_gather(
        lambda: (_device_of(chunks, groups), _bare(samples, chunks[0], vocab_size, takes_sets)),
        lambda _: None,
        groups.data,
    )
    if groups.context_size > 1:
        require_partition_mode(chunks, cp_partition_mode)
    # Sequence parallelism splits a packed micro-batch once more.
    is_split = chunks[0].config.sequence_parallel
    layout: dict[str, Any] = {
        "cp_size": groups.context_size,
        "pad_to_multiple": groups.context_size * groups.tensor_size if is_split else 1,
        "cp_partition_mode": cp_partition_mode,
    }
    interleaved = chunks[0].config.microbatch_group_size_per_vp_stage if len(chunks) > 1 else 1
    plan = plan_step(
        bare,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        data_parallel_group=groups.data,
        **layout,
        microbatch_group_size=interleaved,
        oversized=oversized,
    )
    batches = [
        pack([bare[i] for i in indices], cp_rank=groups.context_rank, **layout).to(device)
        for indices in plan.microbatches
    ]

    def head(batch: PackedBatch) -> MicroBatchHead:
        def report(output: Tensor) -> ScheduleOutput:
            scores = read_scores(batch, output)
            # Right in either loss mode, as nothing goes backward; the schedule scales the zero in place.
            return scores.new_zeros(()), {"scores": scores}

        processor = (
            {} if output_processor is None else {"output_processor": output_processor(batch)}
        )
        return MicroBatchHead(report, model_inputs(batch) | processor, processor)

    with _evaluating(chunks):
        outputs = run_micro_batches(head, batches, chunks, forward_only=True)
    scores = [output["scores"] for output in outputs]
    return _in_order(plan, bare, _exchange(scores, batches, groups, empty_scores.to(device)))


def _device_of(chunks: Sequence[Any], groups: ParallelGroups) -> torch.device:
    """Return the device of all parameters; refuse another one than this rank's process groups work on."""
    devices = {parameter.device for chunk in chunks for parameter in chunk.parameters()}
    possible = []
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        possible.append(torch.device("cuda", torch.cuda.current_device()))
    if dist.get_backend(groups.pipeline) != "nccl":
        possible.append(torch.device("cpu"))
    for device in possible:
        if devices == {device}:
            return device
    raise ValueError(
        f"the model's parameters are on {' and '.join(sorted(map(str, devices))) or 'no device'} and this rank works on "
        f"{' or '.join(map(str, possible)) or 'a GPU'}: move the whole model there before it is scored (a reference model "
        "that was offloaded has to come back first)"
    )


def _bare(
    samples: Sequence[Sample], chunk: Any, vocab_size: int | None, takes_sets: bool
) -> list[Sample]:
    """Leave out what scoring does not read, as some samples may have it and others not."""
    for sample in samples if takes_sets else ():
        if sample.kept_tokens is None:
            raise ValueError(
                f"{sample.name} has no kept_tokens, which --replay-sampling-set needs: give Sample(kept_tokens=...), with an "
                "empty set for each token where all were kept"
            )
    bare = [
        Sample(
            sample.tokens,
            sample.response_length,
            sample.loss_mask,
            name=sample.name,
            kept_tokens=sample.kept_tokens if takes_sets else None,
        )
        for sample in samples
    ]
    if vocab_size is None:
        vocab_size = getattr(unwrapped(chunk), "vocab_size", None)
    if vocab_size is not None:
        refuse_tokens_outside(bare, vocab_size)
    return bare


@contextlib.contextmanager
def _evaluating(chunks: Sequence[Any]) -> Iterator[None]:
    """Put a model into eval mode; afterwards give every module its own mode back."""
    modes = [(module, module.training) for chunk in chunks for module in chunk.modules()]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for module, mode in modes:  # a module comes before the modules inside it
            if module.training != mode:
                module.train(mode)


def _exchange(
    scores: Sequence[Tensor],
    batches: Sequence[PackedBatch],
    groups: ParallelGroups,
    empty_scores: Tensor,
) -> Tensor:
    """Bring the scores [numbers, response tokens of all micro-batches] to the host of every rank of the model.

    One context-parallel rank of the last stage has each score and the other ranks have 0, so the sums are exact.
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
    for group in (groups.context, groups.pipeline):
        if dist.get_world_size(group) > 1:
            dist.all_reduce(values, group=group)
    return values.cpu()


def _in_order(plan: StepPlan, samples: Sequence[Sample], values: Tensor) -> list[Tensor]:
    """Cut the values, which are in the order of the plan, into the samples' own, in the order of the samples."""
    planned = [index for indices in plan.microbatches for index in indices]
    lengths = [samples[index].response_length for index in planned]
    parts = dict(zip(planned, torch.split(values, lengths, dim=1), strict=True))
    # Clones: a part would keep all others alive, and be saved with them.
    return [parts[index].clone() for index in range(len(samples))]
