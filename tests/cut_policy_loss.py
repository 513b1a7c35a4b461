"""`policy_loss_function` on every rank and micro-batch of a cut step, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg import (
    PackedBatch,
    PolicyLossConfig,
    Sample,
    StepTotals,
    accepted_samples,
    pack,
    policy_loss_function,
)
from megatron_pg.loss.metrics import MicroBatchMetrics, reduce_metrics
from megatron_pg.loss.micro_batch import MicroBatchLoss
from megatron_pg.loss.resolved import resolve
from megatron_pg.megatron.fused_head import FusedHead
from megatron_pg.megatron.scale_contract import scale_contract

from .cut_steps import DIVISOR, Cut, gradients
from .oracle import Objective, Step
from .random_steps import VOCAB_SIZE, lengths, package_samples, uneven_totals
from .token_layout import token_layout

T = TypeVar("T")
EVERYTHING = Objective(
    eps_clip_high=0.3, eps_clip_c=2.0, rollout_temperature=0.7, kl_loss_coef=0.2, entropy_coef=0.01
)


def aggregated(objective: Objective, aggregation: str) -> Objective:
    divisor = DIVISOR if aggregation == "constant" else None
    return replace(objective, loss_aggregation=aggregation, loss_aggregation_divisor=divisor)


def package_config(objective: Objective, **others: object) -> PolicyLossConfig:
    shared = {field.name: getattr(objective, field.name) for field in fields(objective)}
    return PolicyLossConfig(**{**shared, **others})  # type: ignore[arg-type]


def local_logits(
    micro_batch: Step, logits: Sequence[Tensor], cp_rank, cp_size, pad_to_multiple=1
) -> Tensor:
    """[local_tokens, vocab]: what the model of this rank gives; NaN at padding. `logits` are of
    each sample.
    """
    columns = logits[0].shape[1] if logits else VOCAB_SIZE
    padding = torch.full((1, columns), torch.nan, dtype=torch.float64)
    rows = torch.cat([*logits, padding])
    layout = token_layout(*lengths(micro_batch), cp_size, pad_to_multiple)
    return rows[[-1 if row.token is None else row.token for row in layout[cp_rank]]]


@dataclass
class RankLoss:
    """What one rank computed of one micro-batch, and of how many micro-batches of its own."""

    batch: PackedBatch
    loss: Tensor
    metrics: MicroBatchMetrics
    num_microbatches: int


class OneProcessGroup:
    """Context-parallel ranks that run one after another, until all have met in every all-reduce.

    In each round the all-reduces that all ranks reached before return the sum of what they brought.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.sums: list[Tensor] = []
        self.brought: list[Tensor] = []
        self.calls = 0

    def all_reduce(self, tensor: Tensor, op: Any = None, group: Any = None) -> None:
        assert group is self, "an all-reduce over another group"
        if self.calls < len(self.sums):
            tensor.copy_(self.sums[self.calls])
        elif self.calls == len(self.sums):
            self.brought.append(tensor.clone())
        self.calls += 1

    def run(self, of_rank: Callable[[int], T]) -> list[T]:
        """What the function gives on every rank; the ranks must agree on the all-reduces."""
        with mock.patch.multiple(
            dist, all_reduce=self.all_reduce, get_world_size=lambda group=None: self.size
        ):
            while True:
                found, counts, self.brought = [], set(), []
                for rank in range(self.size):
                    self.calls = 0
                    found.append(of_rank(rank))
                    counts.add(self.calls)
                assert len(counts) == 1, "some ranks wait for others"
                if not self.brought:
                    return found
                self.sums.append(torch.stack(self.brought).sum(0))


class CutLoss:
    """The loss of a cut step from the package's public functions.

    `tests.mutants` derives wrong implementations from it, which override one method each.
    """

    most_all_reduces = 1
    """Per micro-batch."""

    def __init__(self) -> None:
        self.weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
        """What the logits of every rank depend on, those of an empty micro-batch too."""

    def samples(self, config: PolicyLossConfig, step: Step) -> list[Sample]:
        return accepted_samples(config, package_samples(step))

    def totals(self, config: PolicyLossConfig, step: Step, micro_batch: Step) -> StepTotals:
        return uneven_totals(self.samples(config, step))

    def rows(self, micro_batch: Step, logits: Sequence[Tensor], *place: int) -> Tensor:
        return local_logits(micro_batch, logits, *place) + self.weight

    def group(self, size: int) -> OneProcessGroup:
        return OneProcessGroup(size)

    def rank_loss(self, config: PolicyLossConfig, batch: PackedBatch, logits: Tensor, **keywords):
        return policy_loss_function(config, batch, logits, **keywords)

    def losses(
        self,
        config: PolicyLossConfig,
        step: Step,
        logits: Sequence[Tensor],
        cut: Cut,
        *,
        totals: StepTotals | None = None,
        vocab_size: int | None = None,
        pad_to_multiple: int = 1,
    ) -> list[RankLoss]:
        """One entry for every (data-parallel rank, micro-batch, context-parallel rank)."""
        size, results = cut.cp_size, []
        for micro_batches in cut.ranks:
            share = 1 / (cut.dp_size * size * len(micro_batches))
            for indices in micro_batches:
                micro_batch, rows = [step[i] for i in indices], [logits[i] for i in indices]
                samples = self.samples(config, micro_batch)
                of_step = totals or self.totals(config, step, micro_batch)
                group = self.group(size)

                def of_rank(rank: int) -> RankLoss:
                    place = {"cp_size": size, "pad_to_multiple": pad_to_multiple}
                    batch = pack(samples, cp_rank=rank, **place)  # noqa: B023
                    loss, metrics = self.rank_loss(
                        config,
                        batch,
                        self.rows(micro_batch, rows, rank, size, pad_to_multiple),  # noqa: B023
                        totals=of_step,  # noqa: B023
                        context_parallel_group=group,  # noqa: B023
                        step_share=share,  # noqa: B023
                        vocab_size=vocab_size,
                    )
                    return RankLoss(batch, loss, metrics, len(micro_batches))  # noqa: B023

                results += group.run(of_rank)
                assert len(group.sums) <= self.most_all_reduces
        return results

    def total(self, results: Sequence[RankLoss], cut: Cut) -> Tensor:
        return summed_loss(results)

    def report(self, config: PolicyLossConfig, results: Sequence[RankLoss]) -> dict[str, float]:
        reports = [result.metrics for result in results]
        return reduce_metrics(config, reports, contributes=True, device="cpu")

    def returned(self, job: Job, totals: StepTotals, result: RankLoss) -> tuple[Any, ...]:
        """What loss_func returns to Megatron's schedule, on a rank of this job."""
        contract = scale_contract(
            None,
            totals,
            calculate_per_token_loss=job.per_token,
            data_parallel_size=job.dp_size,
            context_parallel_size=job.cp_size,
            num_microbatches=result.num_microbatches,
        )
        batch = result.batch
        active, local = batch.num_active_tokens, batch.window.local_tokens
        return contract.apply(result.loss, result.metrics, active, local)


class CutFused(CutLoss):
    """Through the fused head. Logits stand for hidden states, of an output layer without effect."""

    choices = {"sets": "off"}  # whose mass the fused head does not report
    most_all_reduces = 99  # one for each piece

    def rank_loss(
        self, config, batch, logits, *, vocab_size, totals, context_parallel_group, step_share
    ):
        step = (totals, context_parallel_group, step_share)
        resolved = resolve(config)
        loss = MicroBatchLoss(resolved, batch, *step)
        head = FusedHead(loss, replace(resolved.head, vocab_size=vocab_size, chunk_tokens=2))
        hidden = logits.detach().nan_to_num().requires_grad_()
        weight = torch.eye(logits.shape[1], dtype=logits.dtype)
        output, metrics = head.loss(head.output_processor(hidden[:, None], weight))
        output.backward()
        # The same value and gradient, which can be differentiated again and again.
        moved = logits.nan_to_num() - hidden.detach()
        return output.detach() + (hidden.grad * moved).sum(), metrics


@dataclass(frozen=True)
class Job:
    """Sizes that Megatron's schedule and data parallelism work with."""

    per_token: bool
    dp_size: int
    cp_size: int


def rank_losses(*given: Any, **keywords: Any) -> list[RankLoss]:
    """The losses of every rank and micro-batch of a cut step; see `CutLoss.losses`."""
    return CutLoss().losses(*given, **keywords)


def megatron_gradients(
    job: Job, outputs: Sequence[tuple[tuple[Any, ...], int]], leaves: Sequence[Tensor]
) -> list[Tensor]:
    """The gradients that the optimizer sees, of what loss_func returned on every rank, with its
    number of micro-batches.

    This is schedules.py's forward_step_calc_loss, DistributedDataParallel's gradient scaling and
    finalize_model_grads' division by tokens, as read in megatron-core 0.16.1 and 0.19.2.
    tests/distributed runs the real ones.
    """
    total = [torch.zeros_like(leaf) for leaf in leaves]
    total_num_tokens = torch.zeros((), dtype=torch.int32)
    for output, num_microbatches in outputs:
        loss = output[0]
        if len(output) == 3:
            num_tokens = output[1]
            total_num_tokens += num_tokens
            if not job.per_token:
                loss = loss / torch.clamp(num_tokens, min=1) / num_microbatches
        else:
            loss = loss * job.cp_size / num_microbatches
        for gradient, part in zip(total, gradients(loss, leaves), strict=True):
            gradient += part
    count = max(int(total_num_tokens), 1) if job.per_token else job.dp_size * job.cp_size
    return [gradient * (1.0 / count) for gradient in total]


def summed_loss(results: Sequence[RankLoss]) -> Tensor:
    return torch.stack([result.loss for result in results]).sum()
