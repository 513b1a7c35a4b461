"""`compute_log_probs`: the log-probs of samples under any model, forward only, at any sharding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.config import PolicyLossConfig
from megatron_pg.config.planning import OversizedSamples
from megatron_pg.head import linear_log_probs_and_entropy
from megatron_pg.loss.policy_loss import log_probs_of_logits, refuse_tokens_outside
from megatron_pg.megatron.fused_head import OutputRows, require_output_processor
from megatron_pg.megatron.groups import ParallelGroups, unwrapped
from megatron_pg.megatron.output_layer import fp32_lm_head
from megatron_pg.megatron.policy_step import MicroBatchHead, model_inputs
from megatron_pg.megatron.scale_contract import ScheduleOutput
from megatron_pg.megatron.schedule import run_micro_batches
from megatron_pg.step.agreement import compute_and_gather
from megatron_pg.step.batch import PackedBatch, pack
from megatron_pg.step.plan import StepPlan, plan_step
from megatron_pg.step.sample import Sample


@dataclass(frozen=True, eq=False)
class ScoredSamples:
    """What a model says of samples, in their order."""

    log_probs: list[Tensor]
    """Of each sample the log-probs of its response tokens, [response_length] float32 on the host, in nats; 0 at masked
    tokens."""
    entropy: list[Tensor]
    """Of each sample the entropy of the distributions that its response tokens were drawn from, likewise."""


@torch.no_grad()
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
    """Log-probs and entropy of samples under a model: those of the old policy, or of the reference.

        old = compute_log_probs(model, samples, config, max_tokens_per_microbatch=16384).log_probs
        samples = [replace(sample, old_log_probs=values) for sample, values in zip(samples, old, strict=True)]

    Every rank of the model calls it, with all samples of its data-parallel rank, and outside of a step: after the
    optimizer's and before the next forward and backward. They are cut as `plan_step` cuts a step, with equally many
    micro-batches on every data-parallel rank, and scored as `PolicyStep` scores them under the same config: with the
    same budget and the same parameters the ratio of the next step is 1.

    The model runs under `torch.no_grad()` in eval mode, without dropout; every module gets its own mode back. No
    gradient, buffer of DDP or state of a random generator changes, and no activation is kept. It draws no random
    numbers, unless the model does in eval mode (`--moe-input-jitter-eps`).

    Args:
        model: on this rank's device, wrapped (DDP, Float16Module) or not, or the list of chunks of a virtual pipeline.
        samples: this data-parallel rank's, in any order; none at all is legal. Of each its tokens, response length and
            loss mask are read; log-probs that it carries are not, and may be missing from some.
        config: the policy loss: temperature, fused head, precision of the logits.
        max_tokens_per_microbatch, oversized: see `plan_step`. There is no backward: the budget may be several times
            that of training.
        groups: the process groups; None takes the model's.
        vocab_size: the vocabulary without padding; None counts every column of the logits.

    Returns:
        The same on every tensor-, context- and pipeline-parallel rank of a data-parallel rank: two all-reduces of two
        numbers a response token, over context parallelism and over the pipeline, and one copy to the host.

    Raises:
        ValueError: on all data-parallel ranks, where one has it: the model is not on the rank's device; a sample, which
            is named, is longer than the budget or has a response token outside the vocabulary.
        NotImplementedError: `--fused-lm-head` with a megatron-core before 0.18 or a model that has no place for it, or
            `--fp32-lm-head` with another output layer than `set_fp32_lm_head` takes.
    """
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    if config.fused_lm_head:
        require_output_processor(model)
    groups = ParallelGroups.from_model(model) if groups is None else groups
    (device, bare), _ = compute_and_gather(
        lambda: (_device_of(chunks, groups), _bare(samples, chunks[0], vocab_size)),
        lambda _: None,
        groups.data,
    )
    cp_rank, cp_size = groups.context_rank, groups.context_size
    multiple = _pad_to_multiple(chunks, groups)
    plan = plan_step(
        bare,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        data_parallel_group=groups.data,
        cp_size=cp_size,
        pad_to_multiple=multiple,
        microbatch_group_size=_microbatch_group_size(chunks),
        oversized=oversized,
    )
    packed = [
        pack([bare[i] for i in each], cp_rank=cp_rank, cp_size=cp_size, pad_to_multiple=multiple)
        for each in plan.microbatches
    ]
    batches = [batch.to(device) for batch in packed]
    with fp32_lm_head(chunks, config.changes_output_layer), _evaluating(chunks):
        outputs = run_micro_batches(
            lambda batch: _head(config, groups, vocab_size, batch),
            batches,
            chunks,
            forward_only=True,
        )
    scores = [output["scores"] for output in outputs]
    return _in_order(plan, bare, _exchange(scores, batches, groups, device))


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


def _bare(samples: Sequence[Sample], chunk: Any, vocab_size: int | None) -> list[Sample]:
    """The samples without what scoring does not ask for: some may lack what others have."""
    bare = [
        Sample(sample.tokens, sample.response_length, sample.loss_mask, name=sample.name)
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


def _head(
    config: PolicyLossConfig, groups: ParallelGroups, vocab_size: int | None, batch: PackedBatch
) -> MicroBatchHead:
    """The head that reports `scores` [2, window] float32, log-probs and entropy, and has no loss."""
    inputs = model_inputs(batch)
    if not config.fused_lm_head:

        def report_of_logits(logits: Tensor) -> ScheduleOutput:
            found = log_probs_of_logits(
                config,
                batch,
                logits,
                tensor_parallel_group=groups.tensor,
                vocab_size=vocab_size,
                with_entropy=True,
            )
            return _report(torch.stack([each for each in found if each is not None]))

        return MicroBatchHead(report_of_logits, inputs, {})
    rows = OutputRows(config, batch, groups, vocab_size=vocab_size)

    def output_processor(
        *,
        hidden_states: Tensor,
        output_layer: torch.nn.Module,
        output_weight: Tensor | None = None,
        config: Any = None,
        **_: Any,
    ) -> Tensor:
        factors = rows.factors(hidden_states, output_layer, output_weight, config)
        found = linear_log_probs_and_entropy(*factors, rows.options)
        return torch.stack([rows.in_window(each) for each in found])

    added = {"output_processor": output_processor}
    return MicroBatchHead(_report, inputs | added, added)


def _report(scores: Tensor) -> ScheduleOutput:
    """What the schedule takes in either loss mode where there is no backward: it scales the first in place."""
    return scores.new_zeros(()), {"scores": scores}


def _exchange(
    scores: Sequence[Tensor],
    batches: Sequence[PackedBatch],
    groups: ParallelGroups,
    device: torch.device,
) -> Tensor:
    """Log-probs and entropy [2, response tokens of all micro-batches] float32 on the host of every rank of the model.

    Each number comes from one context-parallel rank of the last stage: beside the zeros of the others, a sum is exact.
    """
    windows = [batch.window for batch in batches]
    if groups.is_last_pipeline_stage:
        parts = [
            window.in_responses(each.float()) for window, each in zip(windows, scores, strict=True)
        ]
    else:
        parts = [torch.zeros(2, sum(w.response_lengths), device=device) for w in windows]
    values = torch.cat(parts, dim=1)
    for group in (groups.context, groups.pipeline):
        if dist.get_world_size(group) > 1:
            dist.all_reduce(values, group=group)
    return values.cpu()


def _in_order(plan: StepPlan, samples: Sequence[Sample], values: Tensor) -> ScoredSamples:
    """The samples' own parts of what `_exchange` returned, which has them in the order of the plan."""
    planned = [index for indices in plan.microbatches for index in indices]
    lengths = [samples[index].response_length for index in planned]
    parts = torch.split(values, lengths, dim=1)
    of_sample = dict(zip(planned, parts, strict=True))
    # Clones: a part would keep all others alive, and be saved with them.
    log_probs, entropy = (
        [of_sample[index][row].clone() for index in range(len(samples))] for row in (0, 1)
    )
    return ScoredSamples(log_probs, entropy)
