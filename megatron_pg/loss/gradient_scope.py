"""The tokens that a token's gradient depends on: the fused head works chunk by chunk where that is the token alone."""

from __future__ import annotations

from typing import Literal

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.config.rows import Row
from megatron_pg.loss.aggregation import AGGREGATIONS
from megatron_pg.loss.corrections import CORRECTIONS
from megatron_pg.loss.objectives import OBJECTIVES
from megatron_pg.loss.sequence import sequence_sum_names


def gradient_scope(config: PolicyLossConfig) -> Literal["token", "sequence", "micro_batch"]:
    """Name the tokens whose log-probs and entropy decide a token's gradient: its own, its sequence's, or the micro-batch's.

    The rows state it. Of a function of the user's own nothing is known.
    """
    rows: list[Row] = [*OBJECTIVES.rows_on(config), *CORRECTIONS.rows_on(config)]
    is_replaced = OBJECTIVES.is_replaced(config) or AGGREGATIONS.is_replaced(config)
    if is_replaced or not all(row.is_sum_over_tokens for row in rows):
        return "micro_batch"
    return "sequence" if sequence_sum_names(config) else "token"


def leaves_out_zero_advantages(config: PolicyLossConfig) -> bool:
    """Say if a token whose advantage is 0 has no gradient at all: the objective is then the only term of the loss."""
    if config.kl_loss_coef or config.entropy_coef or config.distill_coef:
        return False
    return any(row.zero_advantage_is_zero_gradient for row in OBJECTIVES.rows_on(config))
