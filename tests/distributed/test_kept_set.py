"""A step over the kept sets: GPTModel, DDP and schedule, from logits and through the fused head,
against the unsharded model.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from megatron_pg import PolicyLossConfig, Ragged
from megatron_pg.head.kept import sparse_layer
from megatron_pg.loss import resolved
from megatron_pg.megatron import ParallelGroups, compute_log_probs
from megatron_pg.step import batch
from tests.oracle import PlainSample
from tests.random_steps import package_samples

from .compare import assert_case, assert_equal, compare
from .launch import run_ranks
from .models import ModelOptions, Sharding
from .one_step import Outcome, build, fused_heads, run_steps, train_step
from .reference import reference_log_probs, references_of
from .steps import AGGREGATIONS, Run

RUNS = [
    Run(aggregation, shape, "empty" if place else "uniform", regularized=place < 2, kept=True)
    for place, (aggregation, shape) in enumerate(
        zip(AGGREGATIONS, itertools.cycle(("ragged", "short", "short", "ragged")), strict=False)
    )
]
DENSE = ModelOptions(dtype=torch.float64)
PER_TOKEN = replace(DENSE, calculate_per_token_loss=True)
OVERLAPPED = replace(DENSE, distributed_optimizer=True, overlap_grad_reduce=True)
HEADS = ("logits", "sparse", "dense")
CASES = {
    "CP2, per token": (PER_TOKEN, HEADS),
    "CP4": (DENSE, ("logits",)),
    "TP2": (DENSE, HEADS),
    "TP2+SP CP2": (DENSE, ("sparse",)),
    "PP2 tied": (replace(DENSE, tied_embeddings=True), ("sparse",)),
    "DP2, distributed optimizer, overlapped reduction": (OVERLAPPED, ("sparse",)),
}


def choose(head: str) -> None:
    """Of the fused head the sparse layer for all rows with a set, or the dense one."""
    sparse_layer._LEAST_DENSE_ROWS = 1 if head == "dense" else 10**9


def steps(sharding: Sharding, options: ModelOptions, head: str) -> list[Outcome | None]:
    choose(head)
    runs = [replace(run, fused_lm_head=head != "logits") for run in RUNS]
    return run_steps(sharding, options, runs)


@pytest.fixture(scope="module")
def references() -> dict[ModelOptions, list[Outcome]]:
    return references_of((options for options, _ in CASES.values()), RUNS)


@pytest.mark.parametrize(
    ("case", "head"), [(case, head) for case, (_, heads) in CASES.items() for head in heads]
)
def test_gradients_and_metrics_equal_the_unsharded_reference(case, head, references) -> None:
    options = CASES[case][0]
    for outcome in assert_case(case, options, steps, RUNS, references, head):
        assert "kept_set_size" in outcome.metrics
        assert ("kept_set_mass" in outcome.metrics) == (head == "logits")


def shifted_steps(sharding: Sharding) -> list[Outcome | None]:
    """Mutant: the window of the kept sets begins one token late, and nobody looks at sets of
    one.
    """
    resolved.require_kept_set_log_probs = lambda *_: None

    whole = batch._field_in_window

    def late(field: str, *others: Any) -> Any:
        found = whole(field, *others)
        if field != "kept_tokens" or len(found) < 2:
            return found
        return found.select(torch.arange(len(found)).roll(1))

    batch._field_in_window = late
    return steps(sharding, DENSE, "logits")


def test_mutant_a_late_window_would_be_seen(references) -> None:
    found = run_ranks(shifted_steps, 2, Sharding(context=2))[0]
    for outcome, expected in zip(found, references[DENSE.unsharded], strict=True):
        assert not compare(outcome, expected, 1e-3).passed


@dataclass(frozen=True)
class FirstTokenRun(Run):
    """Sets of the first response tokens alone, which few ranks have, under an objective with sums
    over sequences.
    """

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
    choose("sparse")
    chunks, fused = build(sharding, options), FirstTokenRun(kept=True, fused_lm_head=True)
    of_logits = train_step(chunks, sharding, replace(fused, fused_lm_head=False))
    return [of_logits, *(train_step(chunks, sharding, fused, head=h) for h in fused_heads(4))]


def test_ranks_without_a_set_wait_for_no_one() -> None:
    """Who has no set joins as many sums over sequences as who has some."""
    of_logits, fused = run_ranks(sequence_steps, 2, Sharding(context=2), DENSE)[0]
    assert_equal([fused], [of_logits], tolerance=1e-12)


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
