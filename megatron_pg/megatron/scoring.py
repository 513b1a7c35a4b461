"""Numbers of samples' response tokens under a model, forward only, at any sharding: what scoring passes share."""

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
from megatron_pg.megatron.groups import ParallelGroups, unwrapped
from megatron_pg.megatron.policy_step import MicroBatchHead
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
    head: Callable[[ParallelGroups, PackedBatch], MicroBatchHead],
    *,
    of_no_token: Tensor,
    max_tokens_per_microbatch: int,
    oversized: OversizedSamples,
    groups: ParallelGroups | None,
    vocab_size: int | None,
    cp_partition_mode: CpPartitionMode,
    takes_sets: bool = False,
) -> list[Tensor]:
    """Numbers of every response token of samples under a model, forward only; see `compute_log_probs` for the arguments.

    Args:
        head: of a micro-batch the head that reports `scores` [numbers, window] (`report_scores`) and has no loss.
        of_no_token: [numbers, 0]: how many numbers a token has, and the dtype in which they are returned.
        takes_sets: whether the head reads the kept sets, which every sample has then.

    Returns:
        Of each sample [numbers, response_length] on the host.
    """
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    groups = ParallelGroups.from_model(model) if groups is None else groups
    (device, bare), _ = compute_and_gather(
        lambda: (_device_of(chunks, groups), _bare(samples, chunks[0], vocab_size, takes_sets)),
        lambda _: None,
        groups.data,
    )
    if groups.context_size > 1:
        require_partition_mode(chunks, cp_partition_mode)
    layout: dict[str, Any] = {
        "cp_size": groups.context_size,
        "pad_to_multiple": _pad_to_multiple(chunks, groups),
        "cp_partition_mode": cp_partition_mode,
    }
    plan = plan_step(
        bare,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        data_parallel_group=groups.data,
        **layout,
        microbatch_group_size=_microbatch_group_size(chunks),
        oversized=oversized,
    )
    packed = [
        pack([bare[i] for i in each], cp_rank=groups.context_rank, **layout)
        for each in plan.microbatches
    ]
    batches = [batch.to(device) for batch in packed]
    with _evaluating(chunks):
        outputs = run_micro_batches(
            lambda batch: head(groups, batch), batches, chunks, forward_only=True
        )
    scores = [output["scores"] for output in outputs]
    values = _exchange(scores, batches, groups, of_no_token.to(device))
    return _in_order(plan, bare, values)


def _device_of(chunks: Sequence[Any], groups: ParallelGroups) -> torch.device:
    """The device of all parameters, which has to be the one that this rank's process groups work on."""
    found = {parameter.device for chunk in chunks for parameter in chunk.parameters()}
    possible = []
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        possible.append(torch.device("cuda", torch.cuda.current_device()))
    if dist.get_backend(groups.pipeline) != "nccl":
        possible.append(torch.device("cpu"))
    for device in possible:
        if found == {device}:
            return device
    raise ValueError(
        f"the model's parameters are on {' and '.join(sorted(map(str, found))) or 'no device'} and this rank works on "
        f"{' or '.join(map(str, possible)) or 'a GPU'}: move the whole model there before it is scored (a reference model "
        "that was offloaded has to come back first)"
    )


def _bare(
    samples: Sequence[Sample], chunk: Any, vocab_size: int | None, takes_sets: bool
) -> list[Sample]:
    """The samples without what scoring does not ask for: some may lack what others have."""
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


def _pad_to_multiple(chunks: Sequence[Any], groups: ParallelGroups) -> int:
    """Of a packed micro-batch, which sequence parallelism splits once more."""
    return groups.context_size * groups.tensor_size if chunks[0].config.sequence_parallel else 1


def _microbatch_group_size(chunks: Sequence[Any]) -> int:
    """The number of micro-batches that an interleaved pipeline runs in a row."""
    return chunks[0].config.microbatch_group_size_per_vp_stage if len(chunks) > 1 else 1


@contextlib.contextmanager
def _evaluating(chunks: Sequence[Any]) -> Iterator[None]:
    """Eval mode within; afterwards every module is in its own mode again."""
    modes = [(module, module.training) for chunk in chunks for module in chunk.modules()]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for module, mode in modes:  # a module comes before those that it holds
            if module.training != mode:
                module.train(mode)


def report_scores(scores: Tensor) -> ScheduleOutput:
    """What the schedule takes in either loss mode where there is no backward: it scales the first in place."""
    return scores.new_zeros(()), {"scores": scores}


def _exchange(
    scores: Sequence[Tensor],
    batches: Sequence[PackedBatch],
    groups: ParallelGroups,
    of_no_token: Tensor,
) -> Tensor:
    """The numbers [numbers, response tokens of all micro-batches] on the host of every rank of the model.

    Each number comes from one context-parallel rank of the last stage: beside the zeros of the others, a sum is exact.
    """
    windows = [batch.window for batch in batches]
    if groups.is_last_pipeline_stage:
        found = zip(windows, scores, strict=True)
        parts = [window.in_responses(each.to(of_no_token.dtype)) for window, each in found]
    else:
        numbers = len(of_no_token)
        parts = [of_no_token.new_zeros(numbers, sum(w.response_lengths)) for w in windows]
    values = torch.cat(parts, dim=1)
    for group in (groups.context, groups.pipeline):
        if dist.get_world_size(group) > 1:
            dist.all_reduce(values, group=group)
    return values.cpu()


def _in_order(plan: StepPlan, samples: Sequence[Sample], values: Tensor) -> list[Tensor]:
    """The samples' own parts of what `_exchange` returned, which has them in the order of the plan."""
    planned = [index for indices in plan.microbatches for index in indices]
    lengths = [samples[index].response_length for index in planned]
    of_sample = dict(zip(planned, torch.split(values, lengths, dim=1), strict=True))
    # Clones: a part would keep all others alive, and be saved with them.
    return [of_sample[index].clone() for index in range(len(samples))]
