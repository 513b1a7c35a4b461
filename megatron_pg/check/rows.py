"""What a check has found: one row a step."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_pg.loss.metrics import CHECKSUM_TOLERANCE

TOLERANCES = {"fp32": 1e-6, "bf16": 2e-2}


@dataclass(frozen=True)
class Step:
    """What was run, and the loss that it reported."""

    model: str
    aggregation: str
    calculate_per_token_loss: bool
    dtype: str
    loss: float
    checksum: float
    """The metric ``aggregation_checksum``: 1 where every sample was counted once."""

    @property
    def tolerance(self) -> float:
        """Of the gradient error; the loss has twice that."""
        return TOLERANCES[self.dtype]


@dataclass(frozen=True)
class Row:
    """A step compared with the reference. Equal on every rank."""

    step: Step
    reference_loss: float
    gradient_error: float
    """The largest over all parameters and ranks, of max|g - reference| / max|reference| (bf16: of the norms)."""
    worst_parameter: str
    worst_ratio: float
    """<g, reference> / <reference, reference> of the worst parameter's slice."""
    common_ratio: float
    """The same of all parameters together: a wrong scale shows here."""
    scaled_error: float
    """|g - common_ratio * reference| / |common_ratio * reference| of all parameters together."""
    wrong_parameters: int
    """How many parameters are beyond the tolerance on some rank."""
    num_parameters: int
    """How many have a gradient that is not zero."""

    @property
    def loss_agrees(self) -> bool:
        """Whether the reported loss is the reference's; NaN is not."""
        scale = max(1.0, abs(self.reference_loss))
        return abs(self.step.loss - self.reference_loss) <= 2 * self.step.tolerance * scale

    @property
    def samples_counted_once(self) -> bool:
        """Whether the checksum is 1; NaN is not."""
        return abs(self.step.checksum - 1.0) <= CHECKSUM_TOLERANCE

    @property
    def passed(self) -> bool:
        """Whether loss, gradients and checksum agree; NaN does not."""
        gradients_agree = self.gradient_error <= self.step.tolerance
        return gradients_agree and self.loss_agrees and self.samples_counted_once
