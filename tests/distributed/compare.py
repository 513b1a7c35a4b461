"""How far a sharded step is from the reference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .launch import run_ranks
from .models import ModelOptions, Sharding, relative_error
from .one_step import Outcome

METRIC_TOLERANCE = 2e-6


def gradient_tolerance(options: ModelOptions) -> float:
    """On max|g - reference| / max|reference| of every parameter, through Megatron.

    In float64 it holds in per-token mode because the steps' token counts are powers of two:
    Megatron divides all gradients by the count in float32 (distributed/finalize_model_grads.py). It
    computes the losses of routers in float32.
    """
    is_rounded = options.dtype == torch.float32 or options.moe_aux_loss_coeff
    return 1e-6 if is_rounded else 1e-12


@dataclass(frozen=True)
class Comparison:
    gradient_error: float
    worst_parameter: str
    gradient_ratio: float
    """<g, reference> / <reference, reference> of the worst parameter: a wrong scale shows here."""
    metric_error: float
    worst_metric: str
    tolerance: float
    """On the gradient error."""

    @property
    def passed(self) -> bool:
        # A metric is a sum of either sign: its error is measured against 1 or its size.
        return self.gradient_error < self.tolerance and self.metric_error < METRIC_TOLERANCE

    def __str__(self) -> str:
        return (
            f"gradient error {self.gradient_error:.2g} ({self.worst_parameter}, "
            f"{self.gradient_ratio:.4g} times the reference), metric error "
            f"{self.metric_error:.2g} ({self.worst_metric})"
        )


def assert_equal(
    found: Sequence[Outcome],
    expected: Sequence[Outcome],
    names: Sequence[object] = (),
    tolerance: float = 1e-6,
) -> None:
    """Each step has the gradients and metrics that are expected of it; `names` are for the
    message.
    """
    for number, (outcome, reference) in enumerate(zip(found, expected, strict=True)):
        comparison = compare(outcome, reference, tolerance)
        assert comparison.passed, f"{names[number] if names else number}: {comparison}"


def assert_case(
    name: str,
    options: ModelOptions,
    worker: Callable[..., list[Outcome | None]],
    runs: Sequence[object],
    references: dict[ModelOptions, list[Outcome]],
    *args: Any,
) -> list[Outcome]:
    """Check and return the steps of `worker(sharding, options, *args)`: the runs, once or several
    times in turn.
    """
    sharding = Sharding.named(name)
    found: list[Outcome] = run_ranks(worker, sharding.world_size, sharding, options, *args)[0]
    repeats = len(found) // len(runs)
    expected = references[options.unsharded] * repeats
    assert_equal(found, expected, [*runs] * repeats, gradient_tolerance(options))
    return found


def compare(found: Outcome, expected: Outcome, tolerance: float = 1e-6) -> Comparison:
    """Every parameter's gradient, each expert's by itself, and every metric that both report.

    Raises:
        AssertionError: the two do not have the same parameters.
    """
    assert found.gradients.keys() == expected.gradients.keys()
    gradients, references = found.gradients, expected.gradients
    errors = {name: relative_error(gradients[name], references[name]) for name in gradients}
    worst = max(errors, key=lambda name: errors[name])
    reference = references[worst]
    ratio = (gradients[worst].double() * reference).sum() / reference.pow(2).sum()
    metric_errors = {
        name: abs(value - expected.metrics[name]) / max(1.0, abs(expected.metrics[name]))
        for name, value in found.metrics.items()
        if name in expected.metrics
    }
    assert ("loss" in metric_errors) != ("value_loss" in metric_errors)
    prefix = "value_" if "value_loss" in metric_errors else ""
    assert {f"{prefix}loss", f"{prefix}aggregation_checksum"} <= metric_errors.keys()
    assert prefix or "pg_loss" in metric_errors
    worst_metric = max(metric_errors, key=lambda name: metric_errors[name])
    return Comparison(
        gradient_error=errors[worst],
        worst_parameter=worst,
        gradient_ratio=float(ratio),
        metric_error=metric_errors[worst_metric],
        worst_metric=worst_metric,
        tolerance=tolerance,
    )
