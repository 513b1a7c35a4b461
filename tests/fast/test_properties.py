"""Properties of the objective over random steps and cuts, and the mutants that must break them."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import mutants, oracle
from tests.cut_steps import (
    CUTS,
    DIVISOR,
    Cut,
    Package,
    assert_same,
    check_cut,
    gradients,
    random_cut,
    whole,
)
from tests.oracle import PlainSample
from tests.random_steps import lengths, plain_sample, random_losses, random_step
from tests.token_layout import token_layout

GROUP_IDS = (-(2**63), 0, 2**63 - 1)


@st.composite
def plain_samples(draw: st.DrawFn) -> PlainSample:
    """Any lengths, mask, group and rollout; the fields that no aggregation reads are constant."""
    mask = draw(st.lists(st.integers(0, 1), max_size=9))
    rollout_id = draw(st.sampled_from((None, None, 0, 1, 2)))
    return plain_sample(
        mask,
        prompt_length=draw(st.integers(1, 5)),
        group=draw(st.sampled_from(GROUP_IDS)) if rollout_id is None else GROUP_IDS[rollout_id],
        rollout=rollout_id,
    )


steps = st.lists(plain_samples(), min_size=1, max_size=8)
seeds = st.integers(0, 2**32 - 1)
aggregations = st.sampled_from(oracle.AGGREGATIONS)


@st.composite
def cut_steps(draw: st.DrawFn) -> tuple[list[PlainSample], list[Tensor], Cut, str]:
    """A step with random losses, a way to cut it, and an aggregation."""
    step, seed = draw(steps), draw(seeds)
    sizes = {"dp_size": draw(st.integers(1, 3)), "num_microbatches": draw(st.integers(1, 3))}
    sizes["cp_size"] = draw(st.sampled_from((1, 2, 4, 8)))
    cut = random_cut(random.Random(seed), len(step), **sizes)
    return step, random_losses(step, seed), cut, draw(aggregations)


@settings(max_examples=150)
@given(case=cut_steps())
def test_no_cut_changes_value_or_gradient(case: tuple) -> None:
    """Nor any order of the samples, in which a cut deals them, or context parallelism: the oracle
    knows neither.
    """
    check_cut(Package(), *case)


def value(step: list[PlainSample], losses: list[Tensor], aggregation: str) -> Tensor:
    return Package().objective(step, losses, whole(len(step)), aggregation)


@settings(max_examples=30)
@given(step=steps, seed=seeds, factor=st.floats(0.25, 64))
def test_constant_is_linear_in_the_inverse_divisor(step, seed, factor) -> None:
    losses = random_losses(step, seed)
    found = Package(DIVISOR * factor).objective(step, losses, whole(len(step)), "constant")
    assert_same(found * factor, value(step, losses, "constant"), losses)


def equally_long(step: list[PlainSample]) -> list[PlainSample]:
    mask = max((sample.loss_mask for sample in step), key=sum)
    return [plain_sample(mask) for _ in step] if any(mask) else []


def in_groups_of_one(step: list[PlainSample]) -> list[PlainSample]:
    return [replace(s, group_index=index, rollout_id=None) for index, s in enumerate(step)]


LAWS = {
    # where two aggregations are one: the steps, and the two
    "equally long samples": (equally_long, "token_mean", "sample_mean"),
    "one group": (
        lambda step: [replace(s, group_index=5) for s in step],
        *("prompt_mean", "token_mean"),
    ),
    "one rollout a group": (in_groups_of_one, "prompt_mean", "sample_mean"),
    "one rollout": (
        lambda step: [replace(s, rollout_id=5, group_index=5) for s in step],
        *("sample_mean", "token_mean"),
    ),
}


@pytest.mark.parametrize("law", LAWS)
@settings(max_examples=30)
@given(step=steps, seed=seeds)
def test_two_aggregations_are_one(law: str, step: list[PlainSample], seed: int) -> None:
    change, one, other = LAWS[law]
    if step := change(step):
        losses = random_losses(step, seed)
        assert_same(value(step, losses, one), value(step, losses, other), losses)


@settings(max_examples=30)
@given(step=steps, aggregation=aggregations, seed=seeds)
def test_objective_is_linear_in_the_losses(step, aggregation, seed) -> None:
    """Hence the gradient is the weight of each token: it does not depend on the losses."""
    first, second = random_losses(step, seed), random_losses(step, seed + 1)
    weights = gradients(value(step, first, aggregation), first)
    other = gradients(value(step, second, aggregation), second)
    assert all(map(torch.equal, weights, other))
    total = sum((w * x).sum() for w, x in zip(weights, first, strict=True))
    found = value(step, first, aggregation)
    torch.testing.assert_close(found, torch.as_tensor(total), rtol=0, atol=1e-12)


@settings(max_examples=30)
@given(
    response_lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    aggregation=st.sampled_from(("sample_mean", "prompt_mean", "token_mean")),
)
def test_a_mean_of_equal_losses_is_that_loss(response_lengths, aggregation) -> None:
    step = [plain_sample([1] * n, group=index % 2) for index, n in enumerate(response_lengths)]
    losses = [torch.full((length,), 3.5, dtype=torch.float64) for length in response_lengths]
    assert value(step, losses, aggregation).item() == pytest.approx(3.5, abs=1e-12)


def fails(mutant: Package, examples: int = 150) -> bool:
    """Whether the property, run as above but on the mutant, finds a counterexample."""

    @settings(max_examples=examples, phases=[Phase.generate])
    @given(case=cut_steps())
    def run(case: tuple) -> None:
        check_cut(mutant, *case)

    try:
        run()
    except AssertionError:
        return True
    return False


class FirstSampleCountsMore(Package):
    """A weight that depends on a sample's place in the step."""

    def objective(self, step, losses, cut, aggregation):  # type: ignore[no-untyped-def]
        return super().objective(step, losses, cut, aggregation) + losses[0].sum()


@pytest.mark.parametrize("mutant", (FirstSampleCountsMore, *mutants.MUTANTS.values()))
def test_the_cut_property_rejects(mutant: type[Package]) -> None:
    assert fails(mutant())


def test_the_cut_property_accepts_the_package() -> None:
    assert not fails(Package(), examples=20)


CAUGHT_BY_CUT = {
    # mutant -> (aggregation, the named cut of the parametrized tests that tells it from the truth)
    "ExtraContextParallelFactor": ("sample_mean", "cp_2"),
    "MeanOverContextParallel": ("sample_mean", "cp_2"),
    "MeanOverMicroBatches": ("token_mean", "dp_2_interleaved"),
    "MicroBatchDenominator": ("prompt_mean", "dp_2_interleaved"),
    "WindowDenominator": ("sample_mean", "cp_2"),
    "PhantomToken": ("token_mean", "whole"),
    "DropsMaskedRollouts": ("sample_mean", "whole"),
    "SamplesForRollouts": ("sample_mean", "whole"),
    "WindowByOwner": ("token_mean", "cp_2"),
    "OneTokenLate": ("token_mean", "whole"),
}


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_the_named_cuts_reject(name: str) -> None:
    """The same steps and cuts as test_aggregation's, so that those tests can fail too."""
    aggregation, cut = CAUGHT_BY_CUT[name]
    step = random_step(seed=0)
    case = (step, random_losses(step, seed=0), CUTS[cut](len(step)), aggregation)
    check_cut(Package(), *case)
    with pytest.raises(AssertionError):
        check_cut(mutants.MUTANTS[name](), *case)


def test_random_steps_leave_some_rank_without_a_response() -> None:
    """The property would be easier if every window held something."""
    step = random_step(seed=0)
    layout = token_layout(*lengths(step[:2]), 8)
    assert any(all(row.response is None for row in rows) for rows in layout)
