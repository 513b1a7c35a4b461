"""The package's loss function of one micro-batch, as a function that a mutant can stand in for."""

from collections.abc import Callable
from typing import Any

from megatron_pg import PackedBatch, PolicyLossConfig, StepTotals
from megatron_pg.megatron import PolicyStep


def step_loss(
    config: PolicyLossConfig, batch: PackedBatch, totals: StepTotals, **keywords: Any
) -> Callable[..., Any]:
    """`loss_func` of a step with these totals; `keywords` are those of `PolicyStep`."""
    step = PolicyStep(config, totals=totals, **keywords)
    step._has_loss = True  # one object per micro-batch, with other totals in some mutants
    return step.head(batch).loss_func
