"""No cut of a step changes its loss, metrics or gradients.

A case is a step, a cut of it over data-parallel ranks, micro-batches and context-parallel ranks, in
any order of the samples and with any padding, and settings of the loss. Each way through the
package is compared with the dense float64 oracle, which knows no cut. The mutants of
`tests.mutants` go through the same property, which must reject every one of them.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_pg import PolicyLossConfig
from megatron_pg.config.tables import TABLES
from megatron_pg.loss import METRICS
from megatron_pg.loss.metrics import DERIVED
from tests import critic_oracle, oracle
from tests.critic_oracle import with_values
from tests.cut_policy_loss import (
    CutFused,
    CutLoss,
    Job,
    aggregated,
    megatron_gradients,
    package_config,
)
from tests.cut_steps import (
    CLIP,
    DIVISOR,
    Cut,
    CutCritic,
    CutPadded,
    Package,
    assert_same,
    check_cut,
    gradients,
    random_cut,
    whole,
)
from tests.dense_loss import dense_loss
from tests.metric_loops import DERIVED_LOOPS, METRIC_LOOPS, Token
from tests.mutants import MUTANTS
from tests.oracle import PlainSample
from tests.random_steps import random_logits, random_losses, random_step, with_policies_near
from tests.settings import (
    CHOICES,
    DEFAULTS,
    Row,
    choice_of_row,
    config_of,
    is_legal,
    random_row,
    rows,
)


@dataclass(frozen=True)
class Case:
    """One draw. Everything random in it follows from the seed."""

    seed: int
    num_samples: int
    dp_size: int = 1
    num_microbatches: int = 1
    cp_size: int = 1
    pad_to_multiple: int = 1
    longest: int = 9
    """The longest response; where it is short, some context-parallel ranks hold none."""
    choices: tuple[tuple[str, str], ...] = ()
    """Settings of the loss by factor; the others are drawn."""

    def rng(self) -> random.Random:
        return random.Random(self.seed)

    def row(self) -> Row:
        return random_row(self.rng(), **dict(self.choices))

    def aggregation(self) -> str:
        return self.row()["aggregation"]

    def cut(self) -> Cut:
        sizes = {"dp_size": self.dp_size, "num_microbatches": self.num_microbatches}
        return random_cut(self.rng(), self.num_samples, cp_size=self.cp_size, **sizes)

    def step(self) -> list[PlainSample]:
        return random_step(self.seed, num_samples=self.num_samples, longest_response=self.longest)


cases = st.builds(
    Case,
    seed=st.integers(0, 2**32 - 1),
    num_samples=st.integers(1, 8),
    dp_size=st.integers(1, 3),
    num_microbatches=st.integers(1, 3),
    cp_size=st.sampled_from((1, 2, 4)),
    pad_to_multiple=st.sampled_from((1, 3, 16)),
    longest=st.sampled_from((2, 9)),
)


def check_reducer(package: Package, case: Case) -> None:
    step = case.step()
    check_cut(package, step, random_losses(step, case.seed), case.cut(), case.aggregation())


def step_and_logits(case: Case, config: PolicyLossConfig) -> tuple[list[PlainSample], list[Tensor]]:
    step = case.step()
    logits = random_logits(step, case.seed)
    near = with_policies_near(
        step,
        logits,
        case.seed,
        temperature=config.rollout_temperature,
        has_sets=config.replay_sampling_set,
        has_weights=config.loss_weight_denominator == "weights",
    )
    return near, logits


def check_policy_loss(package: CutLoss, case: Case) -> None:
    """From logits, with every setting: the sum of the ranks' losses and its gradient, the reports,
    and the gradients that Megatron makes of what loss_func returns, in both modes.
    """
    config, cut = config_of(case.row()), case.cut()
    step, logits = step_and_logits(case, config)
    options = {"pad_to_multiple": case.pad_to_multiple * case.cp_size}
    # Columns beyond the vocabulary are padding.
    wide = [torch.nn.functional.pad(part, (0, 3), value=30.0) for part in logits]
    options["vocab_size"] = logits[0].shape[1]
    results = package.losses(config, step, wide, cut, **options)
    expected = dense_loss(step, logits, config)

    # The attention backward of other ranks waits for those without an active token.
    for result in results:
        assert gradients(result.loss, [package.weight])[0].isfinite() and result.loss.requires_grad
    assert_same(package.total(results, cut), expected.loss, logits, 1e-9)
    wanted = gradients(expected.loss, logits)
    totals = package.totals(config, step, step)
    for per_token in (False, True):
        job = Job(per_token, cut.dp_size, cut.cp_size)
        outputs = [(package.returned(job, totals, r), r.num_microbatches) for r in results]
        found = megatron_gradients(job, outputs, logits)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)

    report = package.report(config, results)
    terms = {name: value.item() for name, value in expected.terms.items()}
    terms |= {"aggregation_checksum": 1.0} | metrics_of(config, expected.tokens, report)
    assert {name: report[name] for name in terms} == pytest.approx(terms, rel=2e-6, abs=2e-6)
    uncut = CutLoss().losses(config, step, logits, whole(len(step)))
    of_whole = CutLoss().report(config, uncut)
    assert report == pytest.approx(of_whole, rel=1e-9, abs=1e-9, nan_ok=True)


OF_RATIO = {row.name for row in METRICS if row.of_ratio} | {"effective_sample_size"}
LOOPS = {name: METRIC_LOOPS[name] for name in METRIC_LOOPS if name != "teacher_divergence"}
LOOPS |= {row.name: DERIVED_LOOPS[row.name] for row in DERIVED if "staleness" not in row.name}


def metrics_of(config: PolicyLossConfig, tokens: list[Token], report: dict) -> dict[str, float]:
    """The reported metrics by loops over tokens; those of a ratio where it is PPO's of tokens.

    The loops of other ratios are in test_metrics.
    """
    is_plain = config.policy_loss == "ppo" and config.ratio_anchor == "old"
    names = [name for name in LOOPS if name in report and (is_plain or name not in OF_RATIO)]
    return {name: float(LOOPS[name](tokens)) for name in names} if tokens else {}


def check_value_loss(critic: CutCritic, case: Case) -> None:
    step = with_values(case.step(), case.seed)
    values, aggregation = random_losses(step, case.seed), case.aggregation()
    config = package_config(aggregated(oracle.Objective(), aggregation))
    found, metrics = critic.run(step, values, case.cut(), config)
    divisor = DIVISOR if aggregation == "constant" else None
    expected, table = critic_oracle.value_loss(step, values, aggregation, divisor, CLIP)
    assert_same(found, expected, values)
    of_step = {name: metrics[name] for name in table}
    assert of_step == pytest.approx(table, rel=1e-9, abs=1e-9, nan_ok=True)


def check_padded(padded: CutPadded, case: Case) -> None:
    step, aggregation = case.step(), case.aggregation()
    losses = random_losses(step, case.seed)
    found = padded.objective(step, losses, case.cut(), aggregation)
    assert_same(found, oracle.aggregate(step, losses, aggregation, DIVISOR), losses)


WAYS: dict[type, Callable] = {
    Package: check_reducer,
    CutFused: check_policy_loss,
    CutLoss: check_policy_loss,
    CutCritic: check_value_loss,
    CutPadded: check_padded,
}
"""The ways through the package, each with the comparison of a case."""


def check(implementation: object, case: Case) -> None:
    way = next(way for way in WAYS if isinstance(implementation, way))
    WAYS[way](implementation, case)


def run(implementation: object, examples: int) -> None:
    """The property over so many cases."""

    choices = tuple(getattr(implementation, "choices", {}).items())

    @settings(max_examples=examples, phases=[Phase.generate])
    @given(case=cases)
    def property_of(case: Case) -> None:
        check(implementation, replace(case, choices=choices))

    property_of()


@pytest.mark.parametrize("way", WAYS)
def test_no_cut_changes_loss_metrics_or_gradients(way: type) -> None:
    run(way(), 40)


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_no_cut_changes_them_in_many_cases(way: type) -> None:
    run(way(), 1000)


@pytest.mark.parametrize("number", range(len(rows())))
def test_every_two_settings_together(number: int) -> None:
    """Each legal pair of choices stands in one of the rows."""
    sizes = {"dp_size": 1 + number % 2, "num_microbatches": 2, "cp_size": 1 + number // 2 % 2}
    choices = tuple(rows()[number].items())
    check(CutLoss(), Case(number, 8, **sizes, choices=choices))


def test_a_row_without_choice_or_loops_is_refused() -> None:
    """A copy of each table's last row under another name: right, and nobody could say so."""
    for table in ("policy_loss", "loss_aggregation", "kl_loss_type"):
        copy = replace(list(TABLES[table].values())[-1], name="unheard_of")
        with mock.patch.dict(TABLES[table], unheard_of=copy), pytest.raises(AssertionError):
            choice_of_row(table, "unheard_of")


@pytest.mark.parametrize(("factor", "choice"), CHOICES)
def test_every_choice_tells(factor: str, choice: str) -> None:
    """In some row the gradient is another one without it; else the rows would say nothing of it."""
    if choice == DEFAULTS[factor] or factor == "metrics":
        return
    for number, row in enumerate(rows()):
        others = row | {factor: DEFAULTS[factor]}
        if row[factor] == choice and is_legal(others):
            config = config_of(row)
            step, logits = step_and_logits(Case(number, 8), config)
            both = (dense_loss(step, logits, each).loss for each in (config, config_of(others)))
            one, other = (torch.cat(gradients(loss, logits)) for loss in both)
            if not torch.allclose(one, other, rtol=1e-4, atol=1e-6):
                return
    pytest.fail("no row tells")


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_rejected(name: str) -> None:
    with pytest.raises(AssertionError):
        run(MUTANTS[name](), 150)
