"""A step cut over data-parallel ranks, micro-batches and context-parallel ranks, in one process.

`Package` evaluates the objective the way a training job does: totals of the step, one reducer per
micro-batch and rank, and a sum. `tests.mutants` derives wrong implementations from it. Each rank's
slice of the losses comes from the oracle's token layout, not from the package's.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pg import (
    AGGREGATIONS,
    CriticConfig,
    PolicyLossConfig,
    StepTotals,
    get_pg_loss_reducer,
    pack,
    padded_totals,
)
from megatron_pg.critic.value_loss import MicroBatchValueLoss, value_report
from megatron_pg.loss.padded import reduce_padded

from . import oracle
from .oracle import Step
from .random_steps import lengths, loss_masks, package_samples, uneven_totals
from .token_layout import Row, token_layout

DIVISOR = 4.0


@dataclass(frozen=True)
class Cut:
    """Which samples go where: `ranks[data-parallel rank][micro-batch]` lists sample indices."""

    ranks: list[list[list[int]]]
    cp_size: int = 1

    @property
    def dp_size(self) -> int:
        return len(self.ranks)

    def micro_batches(self) -> list[list[int]]:
        return [micro_batch for rank in self.ranks for micro_batch in rank]


def whole(num_samples: int, cp_size: int = 1) -> Cut:
    return Cut([[list(range(num_samples))]], cp_size)


def random_cut(rng, num_samples: int, *, dp_size: int, num_microbatches: int, cp_size: int) -> Cut:
    """Every sample on a random rank in a random micro-batch; some micro-batches may stay empty."""
    ranks: list[list[list[int]]] = [[[] for _ in range(num_microbatches)] for _ in range(dp_size)]
    order = list(range(num_samples))
    rng.shuffle(order)
    for index in order:
        ranks[rng.randrange(dp_size)][rng.randrange(num_microbatches)].append(index)
    return Cut(ranks, cp_size)


def halves(num_samples: int) -> list[list[list[int]]]:
    """Samples dealt to two data-parallel ranks in turn."""
    return [[list(range(0, num_samples, 2))], [list(range(1, num_samples, 2))]]


def seeded(seed: int, **sizes: int) -> Callable[[int], Cut]:
    return lambda num_samples: random_cut(random.Random(seed), num_samples, **sizes)


CUTS: dict[str, Callable[[int], Cut]] = {
    "whole": whole,
    "cp_2": lambda n: whole(n, cp_size=2),
    "cp_4": lambda n: whole(n, cp_size=4),
    "cp_8": lambda n: whole(n, cp_size=8),
    "cp_8_dp_2": lambda n: Cut(halves(n), 8),
    "one_sample_a_micro_batch": lambda n: Cut([[[index] for index in range(n)]]),
    "dp_2_interleaved": lambda n: Cut(halves(n)),
    "ragged_dp_3_with_empty_micro_batches": lambda n: Cut(
        [[[0], [], [*range(1, n // 2)]], [[*range(n // 2, n)]], [[], []]]
    ),
    "dp_2_two_micro_batches_cp_2": seeded(0, dp_size=2, num_microbatches=2, cp_size=2),
    "dp_3_three_micro_batches_cp_4": seeded(1, dp_size=3, num_microbatches=3, cp_size=4),
}
"""Named cuts of a step of n samples, for the parametrized tests."""


class Package:
    """The objective of a cut step from the package's parts. Mutants override one method each."""

    def __init__(self, divisor: float = DIVISOR) -> None:
        self.divisor = divisor
        self._totals: tuple[Any, Any] = (None, None)

    def totals(self, step: Step) -> StepTotals:
        if self._totals[0] is not step:  # every rank asks
            self._totals = step, uneven_totals(package_samples(step))
        return self._totals[1]

    def outer_count(self, step: Step, aggregation: str) -> float:
        return AGGREGATIONS[aggregation].outer_count(self.totals(step))

    def denominators(self, step: Step, micro_batch: Step, aggregation: str, cp_rank, cp_size):
        mode = AGGREGATIONS[aggregation]
        return mode.denominators(self.totals(step), package_samples(micro_batch))

    def scored_tokens(self, micro_batch: Step, cp_rank: int, cp_size: int) -> list[int]:
        """Indices into the micro-batch's flat responses that this rank computes losses for."""
        rows = self.layout(micro_batch, cp_size)[cp_rank]
        return [row.response for row in rows if row.response is not None]

    def layout(self, micro_batch: Step, cp_size: int) -> list[list[Row]]:
        return token_layout(*lengths(micro_batch), cp_size)

    def rank_sum(self, step: Step, micro_batch: Step, flat_losses, aggregation, cp_rank, cp_size):
        """The inner sum of one context-parallel rank for one micro-batch."""
        reducer = get_pg_loss_reducer(
            *lengths(micro_batch),
            loss_masks(micro_batch),
            aggregation=aggregation,
            divisor=self.divisor if aggregation == "constant" else None,
            denominators=self.denominators(step, micro_batch, aggregation, cp_rank, cp_size),
            cp_rank=cp_rank,
            cp_size=cp_size,
        )
        return reducer(flat_losses[self.scored_tokens(micro_batch, cp_rank, cp_size)])

    def over_context_parallel(self, parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).sum()

    def over_micro_batches(self, parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).sum()

    def objective(self, step: Step, losses: Sequence[Tensor], cut: Cut, aggregation: str) -> Tensor:
        """The value of the whole step, 0-d, with its graph down to `losses`."""
        sums = []
        for indices in cut.micro_batches():
            micro_batch = [step[index] for index in indices]
            nothing = torch.zeros(0, dtype=torch.float64)
            flat = torch.cat([nothing, *(losses[index] for index in indices)])
            arguments = (step, micro_batch, flat, aggregation)
            parts = [self.rank_sum(*arguments, r, cut.cp_size) for r in range(cut.cp_size)]
            sums.append(self.over_context_parallel(parts))
        return self.over_micro_batches(sums) / self.outer_count(step, aggregation)


CLIP = 0.5
"""Of the value loss."""


class CutCritic:
    """The value loss of a cut step from the package's parts. Mutants override one member each."""

    clip = CLIP

    def totals(self, step: Step, micro_batch: Step) -> StepTotals:
        return uneven_totals(package_samples(step))

    def scored(self, rows: list[int], last: int) -> list[int]:
        """Which response tokens of a micro-batch a rank's window is of, given the right ones."""
        return rows

    def of_rank(self, loss: Tensor, cp_size: int) -> Tensor:
        return loss

    def reduced(self, report: Any, parts: list[Tensor]) -> dict[str, float]:
        """The metrics of the step from the sums of every rank and micro-batch."""
        return report.metrics(torch.stack(parts).sum(0))

    def run(self, step: Step, values: Sequence[Tensor], cut: Cut, config: PolicyLossConfig):
        """The loss and the metrics of the step."""
        losses, parts = [], []
        critic = CriticConfig(value_clip=self.clip)
        for micro_batches in cut.ranks:
            share = 1 / (cut.dp_size * cut.cp_size * len(micro_batches))
            for indices in micro_batches:
                plain = [step[index] for index in indices]
                flat = torch.cat([torch.zeros(0).double(), *(values[index] for index in indices)])
                totals = self.totals(step, plain)
                for cp_rank in range(cut.cp_size):
                    batch = pack(package_samples(plain), cp_rank=cp_rank, cp_size=cut.cp_size)
                    layout = token_layout(*lengths(plain), cut.cp_size)[cp_rank]
                    rows = [row.response for row in layout if row.response is not None]
                    of_batch = MicroBatchValueLoss(config, critic, batch, totals, share)
                    loss, metrics = of_batch(flat[self.scored(rows, flat.numel() - 1)])
                    losses.append(self.of_rank(loss, cut.cp_size))
                    report = value_report(config, [metrics], "cpu")
                    parts.append(report.sums)
        return torch.stack(losses).sum(), self.reduced(report, parts)


def padded_rows(samples: Step, losses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Losses and mask as [batch, length]; the padding holds NaN, which nothing may read."""
    length = max((sample.response_length for sample in samples), default=0) + 2
    loss = torch.full((len(samples), length), torch.nan, dtype=torch.float64)
    mask = torch.zeros(len(samples), length, dtype=torch.int64)
    for row, (sample, values) in enumerate(zip(samples, losses, strict=True)):
        loss[row, : len(values)] = values
        mask[row, : len(values)] = torch.tensor(sample.loss_mask)
    return loss, mask


def row_ids(samples: Step) -> dict[str, list[int]]:
    """Group and rollout ids of each row; lone samples get a rollout id that nobody else has."""
    rollouts = [10**6 + i if s.rollout_id is None else s.rollout_id for i, s in enumerate(samples)]
    return {"group_index": [sample.group_index for sample in samples], "rollout_id": rollouts}


class CutPadded:
    """`reduce_padded` in a trainer that averages gradients over data-parallel ranks and sums them
    over micro-batches. It knows no context parallelism.
    """

    def data_parallel_size(self, cut: Cut) -> int:
        return cut.dp_size

    def counted(self, step: Step, rank: list[list[int]]) -> list[int]:
        """The rows that the totals are of."""
        return list(range(len(step)))

    def objective(self, step: Step, losses: Sequence[Tensor], cut: Cut, aggregation: str) -> Tensor:
        total, divisor = torch.zeros((), dtype=torch.float64), None
        if aggregation == "constant":
            divisor = DIVISOR

        def of(rows: list[int]) -> tuple[tuple[Tensor, Tensor], dict[str, list[int]]]:
            padding = padded_rows([step[row] for row in rows], [losses[row] for row in rows])
            ids = {name: [values[row] for row in rows] for name, values in row_ids(step).items()}
            return padding, ids

        for rank in cut.ranks:
            (_, mask), ids = of(self.counted(step, rank))
            totals = padded_totals(mask, allow_different_group_sizes=True, **ids)
            for rows in rank:
                padding, ids = of(rows)
                total = total + (
                    reduce_padded(
                        *padding,
                        totals=totals,
                        aggregation=aggregation,
                        divisor=divisor,
                        data_parallel_size=self.data_parallel_size(cut),
                        **ids,
                    )
                    / cut.dp_size
                )
        return total


def gradients(objective: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of the objective for every leaf, zeros where it does not reach one."""
    if not objective.requires_grad:  # the oracle of a step without an active token
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(objective, leaves, retain_graph=True, materialize_grads=True)
    return list(found)


def assert_same(found: Tensor, expected: Tensor, leaves: Sequence[Tensor], tolerance=1e-12) -> None:
    """Value and every element of every gradient agree, absolutely and, where large, relatively."""
    assert found.requires_grad or not leaves, "the objective is cut off from its graph"
    both = ([value, *gradients(value, leaves)] for value in (found, expected))
    torch.testing.assert_close(*both, rtol=tolerance, atol=tolerance)


def check_cut(implementation: Package, step: Step, losses, cut: Cut, aggregation: str) -> None:
    expected = oracle.aggregate(step, losses, aggregation, implementation.divisor)
    assert_same(implementation.objective(step, losses, cut, aggregation), expected, losses)
