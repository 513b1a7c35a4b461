"""Per-token estimates of the divergence from the reference policy (joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.config.rows import Row, Table
from megatron_pg.loss.masking import clamped_log_ratio, given_log_probs, masked
from megatron_pg.step.batch import PackedBatch

MAX_LOW_VAR_KL = 10.0
"""The bound of `low_var_kl`, which is k3 held within +-10, with zero gradient outside."""


@dataclass(frozen=True, kw_only=True)
class KLEstimate(Row):
    """An estimate of KL(policy || reference)."""

    function: Callable[[Tensor], Tensor]
    """The formula, d = log_prob - ref_log_prob [window] -> its estimate [window]."""
    inputs: tuple[str, ...] = ("ref_log_probs",)
    flag: str = "--kl-loss-coef {config.kl_loss_coef:g}"
    when: Callable[[Any], bool] | None = lambda config: config.kl_loss_coef > 0


KL_ESTIMATES: Table[KLEstimate] = Table(
    "kl_loss_type", also_known_as={"kl": "k1", "mse": "k2", "low_var": "low_var_kl"}
)
"""The rows by the name that `--kl-loss-type` takes."""


def _k3(difference: Tensor) -> Tensor:
    """The estimate k3, which needs exp(-d), so that d is held within +-20 first, with zero gradient outside."""
    difference = clamped_log_ratio(difference)
    # expm1 keeps the digits that exp(-d) - 1 loses near d = 0, where the estimate is d^2 / 2.
    return (-difference).expm1() + difference


def _low_var_kl(difference: Tensor) -> Tensor:
    k3 = _k3(difference)
    return torch.where(k3 > MAX_LOW_VAR_KL, MAX_LOW_VAR_KL, k3)


KL_ESTIMATES.add(
    KLEstimate(
        name="k1",
        formula="d",
        about="as a loss, its expected gradient is zero on-policy",
        function=lambda difference: difference,
    ),
    KLEstimate(name="k2", formula="d^2 / 2", function=lambda difference: difference.square() / 2),
    KLEstimate(name="k3", formula="exp(-d) - 1 + d", about="d held within +-20", function=_k3),
    KLEstimate(name="low_var_kl", formula="k3 clamped to +-10", function=_low_var_kl),
)


def kl_penalty(config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor) -> Tensor:
    """The estimate [window] of KL(policy || reference) of each token, by `--kl-loss-type`, in nats.

    With `--use-unbiased-kl` it is weighted by r = exp(log_prob - old_log_prob), gradient through r
    (DeepSeek-V3.2, arXiv:2512.02556): then its expectation over the policy that sampled the tokens
    is the divergence of the policy in training. Masked positions are exactly 0 without gradient.

    Args:
        config: the settings of the loss.
        batch: with `ref_log_probs`, and `old_log_probs` for the unbiased form.
        log_probs: [window] with gradient.

    Raises:
        ValueError: the batch lacks log-probs that the settings need.
    """
    reference = given_log_probs(batch, "ref_log_probs", "--kl-loss-coef")
    log_probs = masked(log_probs, batch.loss_mask)
    kl = KL_ESTIMATES[config.kl_loss_type].function(log_probs - reference)
    if not config.use_unbiased_kl:
        return kl
    old_log_probs = given_log_probs(batch, "old_log_probs", "--use-unbiased-kl")
    return clamped_log_ratio(log_probs - old_log_probs).exp() * kl
