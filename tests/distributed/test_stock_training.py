"""The two lines, added to an unchanged megatron.training train step, give the reference's gradients."""

import pytest

from .compare import gradient_tolerance
from .launch import run_ranks
from .models import ModelOptions, relative_error
from .reference import reference_steps
from .steps import AGGREGATIONS, DIVISOR, Run


def flags_of(aggregation: str) -> list[str]:
    flags = ["--loss-aggregation", aggregation]
    return flags + (["--pg-loss-divisor", str(DIVISOR)] if aggregation == "constant" else [])


def run_stock(aggregation: str, cut: object, *flags: str) -> tuple[object, dict[str, float]]:
    from .stock_training import stock_step

    return run_ranks(stock_step, 2, Run(aggregation), [*flags_of(aggregation), *flags], cut)[0]


@pytest.mark.parametrize("flags", [[], ["--fused-lm-head"]], ids=["logits", "fused"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_stock_train_step_has_the_reference_gradients(aggregation: str, flags: list[str]) -> None:
    """Its check of losses for NaN and its rerun state machine are on: they see no loss that backward fills in."""
    outcome, logged = run_stock(aggregation, (5, 5), *flags)
    (reference,) = run_ranks(reference_steps, 1, ModelOptions(), [Run(aggregation)])[0]
    tolerance = gradient_tolerance(ModelOptions())
    for name, gradient in outcome.gradients.items():
        assert relative_error(gradient, reference.gradients[name]) < tolerance, name
    for name in ("loss", "pg_loss", "aggregation_checksum", "new_logprobs", "ratio_new_old"):
        expected = reference.metrics[name]
        assert logged[name] == pytest.approx(expected, rel=2e-6, abs=2e-6), name


@pytest.mark.parametrize("cut, too_large", [((6, 5), True), ((5, 6), False)])
def test_the_logged_checksum_names_a_sample_trained_on_twice_or_never(cut, too_large):
    _, logged = run_stock("sample_mean", cut)
    assert abs(logged["aggregation_checksum"] - 1) > 0.01
    assert (logged["aggregation_checksum"] > 1) == too_large
