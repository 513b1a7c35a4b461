"""One training step of real Megatron-Core: model, DDP, schedule, finalized gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from torch import Tensor

from megatron_pg import CriticConfig, PackedBatch, accepted_samples, pack
from megatron_pg.critic.value_step import ValueStep
from megatron_pg.megatron import ParallelGroups, PolicyStep
from megatron_pg.megatron.groups import unwrapped
from megatron_pg.megatron.output_layer import take_output_processor
from megatron_pg.megatron.policy_step import MicroBatchHead
from megatron_pg.megatron.schedule import run_micro_batches
from tests.oracle import PlainSample
from tests.random_steps import package_samples, uneven_totals

from .models import ModelOptions, Sharding, build_model, gather_gradients, initialize_groups
from .steps import VALUE_CLIP, Run, ValueRun

LossFactory = Callable[..., Callable[[Tensor], Any]]
Head = Callable[..., MicroBatchHead]
"""(step, batch) -> the head of one micro-batch, where the model has a part in it."""


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
    return chunks


def build_changed(
    sharding: Sharding, options: ModelOptions, change: Callable[[Any], None]
) -> list[DistributedDataParallel]:
    """As `build`, of models that are changed before DDP holds their parameters."""
    chunks = build(sharding, options)
    for chunk in chunks:
        change(unwrapped(chunk))
    return [DistributedDataParallel(c.config, c.ddp_config, c.module) for c in chunks]


def fused_heads(*sizes: int) -> list[Head]:
    """Heads of `train_step`, in chunks of so many rows."""
    return [partial(fused_head, chunk_tokens=size) for size in sizes]


def fused_head(step: PolicyStep, batch: PackedBatch, chunk_tokens: int = 5) -> MicroBatchHead:
    """The head of `train_step` through the fused output layer, in chunks of that many rows."""
    take_output_processor(step.model)
    step.config = replace(step.config, fused_lm_head=True)
    return step.head(batch, chunk_tokens=chunk_tokens)


def train_step(
    chunks: list[DistributedDataParallel],
    sharding: Sharding,
    run: Run,
    loss: LossFactory | None = None,
    **keywords: Any,
) -> Outcome | None:
    """Forward, backward and reduction of one step; the outcome is on rank 0, None elsewhere.

    Every rank of the world calls it. `loss` is the package's where None. `keywords` are those of
    `run_schedule`.
    """
    for chunk in chunks:
        chunk.zero_grad_buffer()
    if loss is not None:

        def head(step: PolicyStep, batch: PackedBatch) -> MicroBatchHead:
            count = step.num_microbatches
            wrong = loss(step.config, batch, step.totals, num_microbatches=count, model=chunks)
            return replace(step.head(batch), loss_func=wrong)

        keywords["head"] = head
    step, metrics = run_schedule(chunks, sharding, run, **keywords)
    reduced = step.metrics(metrics)
    gradients = gather_gradients(chunks)
    return None if gradients is None else Outcome(gradients, reduced)


def run_steps(
    sharding: Sharding,
    options: ModelOptions,
    runs: Sequence[Run],
    heads: Sequence[Head | None] = (None,),
) -> list[Outcome | None]:
    """The steps of some runs on one new model, through one head after the other."""
    chunks = build(sharding, options)
    return [train_step(chunks, sharding, run, head=head) for head in heads for run in runs]


def run_schedule(
    chunks: list[DistributedDataParallel],
    sharding: Sharding,
    run: Run,
    head: Head | None = None,
    pack_batch: Callable[..., PackedBatch] = pack,
    samples: list[PlainSample] | None = None,
    *,
    forward_only: bool = False,
    **of_step: Any,
) -> tuple[Any, list[Any]]:
    """Megatron's schedule over the micro-batches of a step; returns the step, a `PolicyStep` or
    `ValueStep`, and their metrics. `samples` are the run's where None. `head` takes the place of
    the step's own, which is given `of_step`.
    """
    groups = ParallelGroups.from_model(chunks)
    layout = {
        "cp_rank": groups.context_rank,
        "cp_size": groups.context_size,
        "pad_to_multiple": sharding.context * sharding.tensor if sharding.sequence_parallel else 1,
    }
    everything = accepted_samples(run.config, package_samples(samples or run.samples))
    multiple = sharding.pipeline if sharding.virtual_pipeline is not None else 1
    indices = run.micro_batches(groups.data_size, groups.data_rank, multiple)
    micro_batches = [[everything[index] for index in part] for part in indices]
    mine = [sample for part in micro_batches for sample in part]
    totals = uneven_totals(mine, data_parallel_group=groups.data)
    # Per-token mode with a loss of routers counts them.
    num_tokens = sum(sample.total_length for sample in everything)
    keywords = {"totals": replace(totals, num_tokens=num_tokens), "model": chunks, **of_step}
    keywords["num_microbatches"] = len(micro_batches)
    if isinstance(run, ValueRun):
        step: Any = ValueStep(run.config, CriticConfig(VALUE_CLIP), **keywords)
    else:
        step = PolicyStep(run.config, **keywords)
    batches = [pack_batch(part, **layout) for part in micro_batches]
    heads = partial(head or type(step).head, step)
    return step, run_micro_batches(heads, batches, chunks, forward_only=forward_only)
