"""The steps that are trained on, how they are cut, and the settings of the loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_pg.arguments.config import PolicyLossConfig
from tests import oracle
from tests.oracle import Objective, PlainSample
from tests.random_steps import random_step

DIVISOR = 8.0
NUM_SAMPLES = 10

SHAPES: dict[str, list[PlainSample]] = {
    # Ragged lengths; one sample fully masked, one without response, one of a single response token,
    # rollouts of two samples, prompt groups that no cut below keeps together.
    "ragged": random_step(29, num_samples=NUM_SAMPLES, longest_prompt=6, longest_response=14),
    # So short that under context parallelism some ranks hold no response token at all.
    "short": random_step(5, num_samples=NUM_SAMPLES, longest_prompt=2, longest_response=2),
}


def one_active_token() -> list[PlainSample]:
    """The ragged step with all but one response token masked, in the middle of its longest."""
    samples = [
        replace(sample, loss_mask=[0] * sample.response_length) for sample in SHAPES["ragged"]
    ]
    longest = max(range(NUM_SAMPLES), key=lambda index: samples[index].response_length)
    length = samples[longest].response_length
    mask = [int(token == length // 2) for token in range(length)]
    samples[longest] = replace(samples[longest], loss_mask=mask)
    return samples


MATRIX_SHAPES = ("ragged", "short")
SHAPES["one active token"] = one_active_token()
SHAPES["no active token"] = [
    replace(sample, loss_mask=[0] * sample.response_length) for sample in SHAPES["ragged"]
]

CUTS = ("uniform", "ragged", "empty")


@dataclass(frozen=True)
class Run:
    """One optimizer step through Megatron: which samples, cut how, under which loss."""

    aggregation: str = "sample_mean"
    shape: str = "ragged"
    cut: str = "uniform"
    regularized: bool = False
    """Also a KL and an entropy term, whose outer count is not that of the policy-gradient term."""
    temperature: float = 1.0

    def __str__(self) -> str:
        terms = " + KL + entropy" if self.regularized else ""
        return f"{self.aggregation}{terms}, {self.shape} samples, {self.cut} micro-batches"

    @property
    def samples(self) -> list[PlainSample]:
        return SHAPES[self.shape]

    @property
    def config(self) -> PolicyLossConfig:
        """The package's settings."""
        return PolicyLossConfig(
            loss_aggregation=self.aggregation,  # type: ignore[arg-type]
            loss_aggregation_divisor=DIVISOR if self.aggregation == "constant" else None,
            kl_loss_coef=0.1 if self.regularized else 0.0,
            entropy_coef=0.05 if self.regularized else 0.0,
            rollout_temperature=self.temperature,
        )

    @property
    def objective(self) -> Objective:
        """The oracle's."""
        return Objective(
            loss_aggregation=self.aggregation,
            loss_aggregation_divisor=DIVISOR if self.aggregation == "constant" else None,
            kl_loss_coef=0.1 if self.regularized else 0.0,
            entropy_coef=0.05 if self.regularized else 0.0,
            rollout_temperature=self.temperature,
        )

    def micro_batches(self, data_size: int, data_rank: int, multiple: int) -> list[list[int]]:
        """Sample indices of each micro-batch of one data-parallel rank.

        `uniform`: two on every rank. `ragged`: one more on each next rank. `empty`: as uniform, and
        the last rank's last micro-batch is empty. All counts are rounded up to `multiple`, which
        interleaved pipelines ask for, with empty micro-batches.
        """
        counts = [2 + (rank if self.cut == "ragged" else 0) for rank in range(data_size)]
        mine = list(range(data_rank, NUM_SAMPLES, data_size))
        count = counts[data_rank]
        filled = count - 1 if self.cut == "empty" and data_rank == data_size - 1 else count
        # Bins of different sizes: the first holds the first half and every bin gets something.
        bins = [mine[: len(mine) // 2], *([] for _ in range(filled - 1))]
        for place, index in enumerate(mine[len(mine) // 2 :]):
            bins[1 + place % (filled - 1) if filled > 1 else 0].append(index)
        padded = -(-count // multiple) * multiple
        return bins + [[] for _ in range(padded - filled)]


AGGREGATIONS = oracle.AGGREGATIONS
