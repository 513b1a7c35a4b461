"""When the loss is a sum over tokens, and which tokens of a micro-batch it is a sum over."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.step.batch import PackedBatch

_PROPORTIONAL_TO_ADVANTAGE = ("ppo", "cispo", "reinforce")
"""Objectives whose gradient to a token is a multiple of its advantage."""


def is_sum_over_tokens(config: PolicyLossConfig) -> bool:
    """Whether a token's gradient coefficient depends on that token's log-prob and entropy alone.

    Then it is known as soon as they are. A sequence ratio or mask is not, nor what a custom function may do.
    """
    custom = (
        config.custom_policy_loss_path,
        config.custom_tis_function_path,
        config.custom_pg_loss_reducer_function_path,
    )
    sequence_level = (
        config.policy_loss == "gspo"
        or config.use_opsm
        or config.use_geometric_rejection
        or (config.use_tis and config.tis_level == "sequence")
    )
    return not sequence_level and all(path is None for path in custom)


def active_rows(config: PolicyLossConfig, batch: PackedBatch) -> tuple[Tensor, int]:
    """Which tokens of the window are scored, on the host: those with a gradient first.

    Where the policy objective is the only term of the loss, a token whose advantage is 0 has none: its log-prob is
    wanted for the metrics alone.

    Returns:
        [active tokens] int64 into the window, and how many of them have a gradient.
    """
    in_window = batch.window.response_indices
    nothing = [torch.zeros(0)]
    active = torch.cat(nothing + [sample.loss_mask for sample in batch.samples])[in_window].bool()
    with_gradient = active
    if config.policy_loss in _PROPORTIONAL_TO_ADVANTAGE and not (
        config.kl_loss_coef or config.entropy_coef
    ):
        advantages = torch.cat(nothing + [sample.advantages for sample in batch.samples])
        with_gradient = active & (advantages[in_window] != 0)
    first = with_gradient.nonzero()[:, 0]
    rest = (active & ~with_gradient).nonzero()[:, 0]
    return torch.cat([first, rest]), len(first)
