"""Curves of the step's numbers: the metrics' reduction, and the checksum's rounding and misses."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.scale.played import measured, table
from megatron_pg import PolicyLossConfig, reduce_metrics
from megatron_pg.loss.checksum import CHECKSUMS, IDENTITY_TOLERANCE
from megatron_pg.loss.metric_table import SIGNS, metrics_on
from megatron_pg.loss.metrics import MicroBatchMetrics, metric_names
from megatron_pg.step.identity import coefficient_of, coefficients_of_positions, mixed

Row = Sequence[Any]
TOKENS = 64
PAIRS = 10**6


def reductions() -> Iterator[Row]:
    """`reduce_metrics` of one rank over its micro-batches, and the bytes of its two all-reduces."""
    for kind in ("basic", "with_entropy"):
        config = PolicyLossConfig(pg_metrics=kind)
        names = metric_names(config)
        num_extremes = sum(row.kind in SIGNS for row in metrics_on(config))
        for count in (1, 16, 256):
            pairs = torch.full((len(names), 2), 1.0 / count, dtype=torch.float64)
            pairs[names.index(CHECKSUMS[0])] = 1.0 / count
            batches = []
            for _ in range(count):
                batches.append(MicroBatchMetrics.of(names, pairs.clone()))
                batches[-1].maxima = torch.ones(num_extremes, dtype=torch.float64)
            times = [
                measured(lambda: reduce_metrics(config, batches, contributes=True, device="cpu"))[1]  # noqa: B023
                for _ in range(5)
            ]
            yield kind, count, 1e3 * min(times), 16 * len(names) + 8 * num_extremes


def checksums() -> Iterator[Row]:
    """Rounding of the second sum over samples of 64 tokens, 16 a micro-batch, and exchanges of two samples that it misses."""
    rng, positions = np.random.default_rng(0), coefficients_of_positions(TOKENS).numpy()
    for count in (10**3, 10**4, 10**5, 10**6):
        coefficients = coefficient_of(mixed(np.arange(1, count + 1, dtype=np.uint64)))
        active = rng.integers(1, TOKENS + 1, count)
        expected = coefficients * np.concatenate([[0], positions]).cumsum()[active] / active
        total = expected.sum()
        trained = []
        for start in range(0, count, 16):
            part = slice(start, start + 16)
            mask = np.arange(TOKENS) < active[part, None]
            tokens = (coefficients[part, None] * (1.0 / active[part, None])) * positions * mask
            trained.append(tokens[mask].sum() * (1.0 / total))
        rounding = abs(math.fsum(trained) - 1.0), abs(np.cumsum(trained)[-1] - 1.0)
        one, other = expected[rng.integers(count, size=(2, PAIRS))]
        distance = np.abs(one - other)[one != other] / total
        yield (
            count,
            max(rounding),
            *((distance < limit).mean() for limit in (1e-9, IDENTITY_TOLERANCE)),
        )


def main() -> None:
    table(
        "The metrics' reduction on one rank",
        "metrics, micro-batches, ms, bytes of both all-reduces",
        reductions(),
    )
    table(
        "The checksum of samples",
        f"samples, rounding, exchanges missed at a tolerance of 1e-9, missed at {IDENTITY_TOLERANCE:g}",
        checksums(),
    )
