"""A step over the kept sets: GPTModel, DDP and schedule, from logits and through the fused head, against the unsharded model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from megatron_pg import PolicyLossConfig, Ragged
from megatron_pg.head.kept import sparse_layer
from megatron_pg.megatron import ParallelGroups, compute_log_probs
from tests.lanes import in_one_lane
from tests.oracle import PlainSample
from tests.random_steps import package_samples

from .compare import compare, gradient_tolerance
from .launch import run_ranks
from .models import ModelOptions, Sharding
from .one_step import Outcome, build, fused_head, train_step
from .reference import reference_log_probs, references_of
from .steps import AGGREGATIONS, Run

pytestmark = in_one_lane  # of the matrix, a case with kept sets is in both

RUNS = [
    Run(
        aggregation,
        shape=shape,
        cut="empty" if place else "uniform",
        regularized=place < 2,
        kept=True,
    )
    for place, (aggregation, shape) in enumerate(
        zip(AGGREGATIONS, ("ragged", "short", "short", "ragged"), strict=True)
    )
]
DENSE = ModelOptions(dtype=torch.float64)
TIED = replace(DENSE, tied_embeddings=True)
CASES = {
    "CP2, per token": (Sharding(context=2), replace(DENSE, calculate_per_token_loss=True)),
    "CP4": (Sharding(context=4), DENSE),
    "TP2": (Sharding(tensor=2), DENSE),
    "TP2+SP CP2": (Sharding(tensor=2, sequence_parallel=True, context=2), DENSE),
    "PP2 tied": (Sharding(pipeline=2), TIED),
    "DP2, distributed optimizer, overlapped reduction": (
        Sharding(data=2),
        replace(DENSE, distributed_optimizer=True, overlap_grad_reduce=True),
    ),
}
HEADS = ("logits", "sparse", "dense")


def choose(head: str) -> None:
    """Of the fused head the sparse layer for all rows with a set, or the dense one."""
    sparse_layer._LEAST_DENSE_ROWS = 1 if head == "dense" else 10**9


def steps(sharding: Sharding, options: ModelOptions, head: str) -> list[Outcome | None]:
    choose(head)
    chunks = build(sharding, options)
    runs = [replace(run, fused_lm_head=head != "logits") for run in RUNS]
    return [train_step(chunks, sharding, run) for run in runs]


@pytest.fixture(scope="module")
def references() -> dict[ModelOptions, list[Outcome]]:
    return references_of((options for _, options in CASES.values()), RUNS)


@pytest.mark.parametrize(
    ("case", "head"),
    [
        (case, head)
        for case, heads in zip(
            CASES, (HEADS, ("logits",), HEADS, ("sparse",), ("sparse",), ("sparse",)), strict=True
        )
        for head in heads
    ],
)
def test_gradients_and_metrics_equal_the_unsharded_reference(
    case: str, head: str, references: dict[ModelOptions, list[Outcome]]
) -> None:
    sharding, options = CASES[case]
    found = run_ranks(steps, sharding.world_size, sharding, options, head)[0]
    for run, outcome, expected in zip(RUNS, found, references[options.unsharded], strict=True):
        comparison = compare(outcome, expected, gradient_tolerance(options))
        assert comparison.passed, f"{run}: {comparison}"
        assert "kept_set_size" in outcome.metrics
        assert ("kept_set_mass" in outcome.metrics) == (head == "logits")


def shifted_steps(sharding: Sharding) -> list[Outcome | None]:
    """Mutant: the window of the kept sets begins one token late, and nobody looks at sets of one."""
    from megatron_pg.loss import inputs
    from megatron_pg.step import batch

    inputs._refuse_other_distributions = lambda *_: None

    whole = batch._field_in_window

    def late(field: str, *others: Any) -> Any:
        found = whole(field, *others)
        if field != "kept_tokens" or len(found) < 2:
            return found
        return found.select(torch.arange(len(found)).roll(1))

    batch._field_in_window = late
    return steps(sharding, DENSE, "logits")


def test_a_late_window_would_be_seen(references: dict[ModelOptions, list[Outcome]]) -> None:
    found = run_ranks(shifted_steps, 2, Sharding(context=2))[0]
    for outcome, expected in zip(found, references[DENSE.unsharded], strict=True):
        assert not compare(outcome, expected, 1e-3).passed


@dataclass(frozen=True)
class FirstTokenRun(Run):
    """Sets of the first response tokens alone, which few ranks have, under an objective with sums over sequences."""

    @property
    def samples(self) -> list[PlainSample]:
        return [
            replace(sample, kept_tokens=[ids if not at else [] for at, ids in enumerate(kept)])
            for sample in super().samples
            if (kept := sample.kept_tokens) is not None
        ]

    @property
    def config(self) -> PolicyLossConfig:
        return replace(super().config, policy_loss="gspo")


def sequence_steps(sharding: Sharding, options: ModelOptions) -> list[Outcome | None]:
    """From logits, and through the fused head in small pieces."""
    choose("sparse")
    chunks = build(sharding, options)
    runs = [FirstTokenRun(kept=True, fused_lm_head=is_fused) for is_fused in (False, True)]
    heads = (None, fused_head(chunk_tokens=4))
    return [
        train_step(chunks, sharding, run, head=head) for run, head in zip(runs, heads, strict=True)
    ]


def test_ranks_without_a_set_wait_for_no_one() -> None:
    """Who has no set joins as many sums over sequences as who has some."""
    of_logits, fused = run_ranks(sequence_steps, 2, Sharding(context=2), DENSE)[0]
    assert of_logits is not None and fused is not None
    comparison = compare(fused, of_logits, 1e-12)
    assert comparison.passed, comparison


def scores(sharding: Sharding, head: str) -> list[torch.Tensor]:
    choose(head)
    run = replace(RUNS[0], fused_lm_head=head != "logits")
    chunks = build(sharding, DENSE)
    groups = ParallelGroups.from_model(chunks)
    samples = package_samples(run.samples)[groups.data_rank :: groups.data_size]
    return compute_log_probs(
        chunks, samples, replace(run.config, kept_set_mass=False), max_tokens_per_microbatch=40
    ).log_probs


@pytest.mark.parametrize("head", ["logits", "sparse"])
def test_log_probs_of_samples(head: str) -> None:
    """Old and reference log-probs over the same sets."""
    found = run_ranks(scores, 2, Sharding(tensor=2), head)[0]
    wanted = run_ranks(reference_log_probs, 1, RUNS[0])[0]
    for sample, each, expected in zip(RUNS[0].samples, found, wanted, strict=True):
        active = torch.tensor(sample.loss_mask).bool()
        torch.testing.assert_close(
            each[active], torch.tensor(expected)[active], rtol=1e-5, atol=1e-5
        )
        assert isinstance(package_samples([sample])[0].kept_tokens, Ragged)
