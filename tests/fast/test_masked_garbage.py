"""What stands at masked positions reaches neither loss nor gradients nor metrics.

The cases are those of `test_cut_invariance`. Samples and model output hold NaN, infinities or huge
numbers wherever the mask is 0, and give what zeros there give, bit by bit.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import oracle
from tests.critic_oracle import with_values
from tests.cut_policy_loss import CutLoss, aggregated, package_config
from tests.cut_steps import CutCritic, CutPadded, Package, gradients
from tests.fast.test_cut_invariance import Case, cases, step_and_logits
from tests.oracle import PlainSample
from tests.random_steps import FLOATS, random_losses
from tests.settings import config_of

Outcome = tuple[Tensor, dict[str, float]]
"""The value of a step, and its metrics."""
Way = Callable[[Case, list[PlainSample], list[Tensor]], Outcome]


def reducer(case: Case, step: list[PlainSample], losses: list[Tensor]) -> Outcome:
    return Package().objective(step, losses, case.cut(), case.aggregation()), {}


def padded(case: Case, step: list[PlainSample], losses: list[Tensor]) -> Outcome:
    return CutPadded().objective(step, losses, case.cut(), case.aggregation()), {}


def value_loss(case: Case, step: list[PlainSample], values: list[Tensor]) -> Outcome:
    config = package_config(aggregated(oracle.Objective(), case.aggregation()))
    return CutCritic().run(step, values, case.cut(), config)


def policy_loss(case: Case, step: list[PlainSample], logits: list[Tensor]) -> Outcome:
    config, package = config_of(case.row()), CutLoss()
    results = package.losses(config, step, logits, case.cut())
    return package.total(results, case.cut()), package.report(config, results)


def times_mask(way: Way) -> Way:
    """A product with the mask where a choice is meant: 0 * NaN is NaN."""

    def wrong(case: Case, step: list[PlainSample], leaves: list[Tensor]) -> Outcome:
        value, metrics = way(case, step, leaves)
        return value + 0.0 * sum(leaf.sum() for leaf in leaves), metrics

    return wrong


def masked_after_exp(way: Way) -> Way:
    """A choice after the exponential: the value is right, and its gradient NaN."""

    def wrong(case: Case, step: list[PlainSample], leaves: list[Tensor]) -> Outcome:
        value, metrics = way(case, step, leaves)
        for leaf in leaves:
            value = value + torch.where(torch.zeros_like(leaf).bool(), leaf.exp(), 0.0).sum()
        return value, metrics

    return wrong


def in_a_metric(way: Way) -> Way:
    def wrong(case: Case, step: list[PlainSample], leaves: list[Tensor]) -> Outcome:
        value, metrics = way(case, step, leaves)
        return value, metrics | {"sum": float(sum(leaf.detach().sum() for leaf in leaves))}

    return wrong


def spoiled_step(step: Sequence[PlainSample], garbage: float) -> list[PlainSample]:
    """Every per-token field holds garbage where the mask is 0: tool tokens have no log-probs."""
    spoiled = []
    for sample in step:
        fields: dict[str, Any] = {}
        for name in FLOATS:
            if (values := getattr(sample, name)) is not None:
                pairs = zip(values, sample.loss_mask, strict=True)
                fields[name] = [value if keep else garbage for value, keep in pairs]
        spoiled.append(replace(sample, **fields))
    return spoiled


def spoiled_leaves(
    step: Sequence[PlainSample], leaves: Sequence[Tensor], garbage: float
) -> list[Tensor]:
    """Garbage where no active token is scored: [response_length], or logits [total_length, v]."""
    spoiled = []
    for sample, leaf in zip(step, leaves, strict=True):
        is_scored = torch.tensor(sample.loss_mask, dtype=torch.bool)
        if leaf.dim() == 2:
            before = torch.zeros(sample.prompt_length - 1, dtype=torch.bool)
            is_scored = torch.cat([before, is_scored, torch.zeros(1, dtype=torch.bool)])[:, None]
        spoiled.append(torch.where(is_scored, leaf.detach(), garbage).requires_grad_())
    return spoiled


WAYS: dict[str, Way] = {
    "reducer": reducer,
    "padded": padded,
    "value loss": value_loss,
    "policy loss": policy_loss,
}
MUTANTS: dict[str, Way] = {
    f"{name}, {mutate.__name__}": mutate(way)
    for name, way in WAYS.items()
    for mutate in (times_mask, masked_after_exp, in_a_metric)
}


def run(name: str, way: Way, examples: int) -> None:
    @settings(max_examples=examples, phases=[Phase.generate])
    @given(case=cases, garbage=st.sampled_from((math.nan, math.inf, -math.inf, 1e30)))
    def property_of(case: Case, garbage: float) -> None:
        if name.startswith("policy loss"):
            step, leaves = step_and_logits(case, config_of(case.row()))
        else:
            step = with_values(case.step(), case.seed)
            leaves = random_losses(step, case.seed)
        found = []
        for value in (0.0, garbage):
            of_value = spoiled_leaves(step, leaves, value)
            total, metrics = way(case, spoiled_step(step, value), of_value)
            found.append((total.detach(), gradients(total, of_value), metrics))
        (clean, of_clean, metrics), (dirty, of_dirty, found_metrics) = found
        assert torch.equal(clean, dirty)
        assert all(map(torch.equal, of_clean, of_dirty))
        assert metrics == pytest.approx(found_metrics, rel=0, abs=0, nan_ok=True)

    property_of()


@pytest.mark.parametrize("name", WAYS)
def test_garbage_at_masked_positions_is_harmless(name: str) -> None:
    run(name, WAYS[name], 40)


@pytest.mark.full
@pytest.mark.parametrize("name", WAYS)
def test_garbage_is_harmless_in_many_cases(name: str) -> None:
    run(name, WAYS[name], 1000)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_rejected(name: str) -> None:
    with pytest.raises(AssertionError):
        run(name, MUTANTS[name], 50)
