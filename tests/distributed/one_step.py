"""One training step of real Megatron-Core: model, DDP, schedule, finalized gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_pg.check.model import MAX_SEQUENCE_LENGTH
from megatron_pg.loss.metrics import reduce_metrics
from megatron_pg.megatron.groups import ParallelGroups
from megatron_pg.megatron.loss import megatron_loss
from megatron_pg.megatron.output_head import OutputHead
from megatron_pg.megatron.packing import packed_seq_params
from megatron_pg.step.batch import PackedBatch, pack
from megatron_pg.step.sample import Sample
from megatron_pg.step.totals import StepTotals, step_totals
from tests.oracle import PlainSample
from tests.random_steps import package_samples

from .models import (
    ModelOptions,
    Sharding,
    build_model,
    gather_gradients,
    initialize_groups,
)
from .steps import Run

LossFactory = Callable[..., Callable[[Tensor], Any]]
Head = Callable[..., OutputHead]


@dataclass(frozen=True)
class Outcome:
    """What a step left behind: whole gradients by whole names, and the reduced metrics."""

    gradients: dict[str, Tensor]
    metrics: dict[str, float]


def build(sharding: Sharding, options: ModelOptions) -> list[DistributedDataParallel]:
    """Process groups and model chunks of this rank, ready for any number of steps."""
    initialize_groups(sharding)
    chunks = build_model(sharding, options)
    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    if options.overlap_grad_reduce:
        functions = [chunk.no_sync for chunk in chunks]
        chunks[0].config.no_sync_func = functions if len(chunks) > 1 else functions[0]
    return chunks


def train_step(
    chunks: list[DistributedDataParallel],
    sharding: Sharding,
    run: Run,
    loss: LossFactory = megatron_loss,
    pack_batch: Callable[..., PackedBatch] = pack,
    samples: list[PlainSample] | None = None,
    head: Head | None = None,
) -> Outcome | None:
    """Forward, backward and reduction of one step; the outcome is on rank 0, None elsewhere.

    Every rank of the world calls it. `loss` and `pack_batch` are the package's; mutants replace
    them. `samples` are the run's where None. `head` takes the place of `loss` where the model has
    a part in it, called as `loss` is.
    """
    for chunk in chunks:
        chunk.zero_grad_buffer()
    if head is None:

        def head(*arguments: Any, **keywords: Any) -> OutputHead:
            return OutputHead(loss(*arguments, **keywords))

    metrics = run_schedule(chunks, sharding, run, head, pack_batch, samples)
    groups = ParallelGroups.from_model(chunks)
    reduced = reduce_metrics(
        run.config,
        metrics,
        contributes=groups.is_last_pipeline_stage and groups.tensor_rank == 0,
        device="cpu",
    )
    gradients = gather_gradients(chunks)
    return None if gradients is None else Outcome(gradients, reduced)


def run_schedule(
    chunks: list[DistributedDataParallel],
    sharding: Sharding,
    run: Run,
    head: Head,
    pack_batch: Callable[..., PackedBatch] = pack,
    samples: list[PlainSample] | None = None,
    *,
    forward_only: bool = False,
) -> list[Any]:
    """Megatron's schedule over the micro-batches of a step; returns their metrics."""
    groups = ParallelGroups.from_model(chunks)
    micro_batches, totals = _cut_step(sharding, run, groups, samples or run.samples)

    def batches() -> Iterator[PackedBatch]:
        for samples in micro_batches:
            yield pack_batch(
                samples,
                cp_rank=groups.context_rank,
                cp_size=groups.context_size,
                pad_to_multiple=_pad_to_multiple(sharding),
            )

    def forward_step(iterator: Iterator[PackedBatch], model: Any) -> tuple[Tensor, Any]:
        batch = next(iterator)
        end = head(run.config, batch, totals, num_microbatches=len(micro_batches), model=model)
        output = model(
            batch.tokens[None],
            batch.position_ids[None],
            None,
            packed_seq_params=packed_seq_params(batch),
            **end.model_arguments,
        )
        return output, end.loss_func

    several = len(chunks) > 1
    metrics: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[batches() for _ in chunks] if several else batches(),
        model=chunks if several else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=MAX_SEQUENCE_LENGTH,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return metrics


def _pad_to_multiple(sharding: Sharding) -> int:
    return sharding.context * sharding.tensor if sharding.sequence_parallel else 1


def _cut_step(
    sharding: Sharding, run: Run, groups: ParallelGroups, plain: list[PlainSample]
) -> tuple[list[list[Sample]], StepTotals]:
    """This data-parallel rank's micro-batches and the totals of the step."""
    samples = package_samples(plain)
    multiple = sharding.pipeline if sharding.virtual_pipeline is not None else 1
    indices = run.micro_batches(groups.data_size, groups.data_rank, multiple)
    micro_batches = [[samples[index] for index in each] for each in indices]
    totals = step_totals(
        [sample for each in micro_batches for sample in each], data_parallel_group=groups.data
    )
    # All tokens of the step, padding included: per-token mode with an auxiliary loss counts them.
    count = torch.tensor(
        sum(
            pack(
                each,
                cp_rank=groups.context_rank,
                cp_size=groups.context_size,
                pad_to_multiple=_pad_to_multiple(sharding),
            ).window.local_tokens
            for each in micro_batches
        )
    )
    dist.all_reduce(count, group=groups.data_with_context)
    return micro_batches, replace(totals, num_tokens=int(count))
