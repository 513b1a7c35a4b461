"""The tokens that a token's gradient depends on: the fused head works chunk by chunk where that is the token alone."""

from typing import Literal, NamedTuple

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.config.rows import Row
from megatron_pg.loss.aggregation import AGGREGATIONS
from megatron_pg.loss.corrections import CORRECTIONS
from megatron_pg.loss.objectives import OBJECTIVES
from megatron_pg.loss.sequence import sequence_sum_names


class GradientScope(NamedTuple):
    """The log-probs and entropies that decide a token's gradient: its own, its sequence's or the micro-batch's."""

    tokens: Literal["token", "sequence", "micro_batch"]
    leaves_out_zero_advantages: bool
    """A token whose advantage is 0 has no gradient at all: the objective is then the only term of the loss."""


def gradient_scope(config: PolicyLossConfig) -> GradientScope:
    """Read the scope off the rows. Of a function of the user's own nothing is known."""
    objectives = OBJECTIVES.rows_on(config)
    has_penalties = config.kl_loss_coef or config.entropy_coef or config.distill_coef
    leaves_out = not has_penalties and any(o.zero_advantage_is_zero_gradient for o in objectives)
    rows: list[Row] = [*objectives, *CORRECTIONS.rows_on(config)]
    is_replaced = OBJECTIVES.is_replaced(config) or AGGREGATIONS.is_replaced(config)
    if is_replaced or not all(row.is_sum_over_tokens for row in rows):
        return GradientScope("micro_batch", leaves_out)
    return GradientScope("sequence" if sequence_sum_names(config) else "token", leaves_out)
