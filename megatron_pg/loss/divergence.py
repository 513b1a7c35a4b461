"""Per-token estimates of the divergence from the reference policy (joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig, anchor_of
from megatron_pg.config.rows import Row, Table
from megatron_pg.loss.masking import clamped_log_ratio, given_log_probs, masked
from megatron_pg.step.batch import PackedBatch


@dataclass(frozen=True, kw_only=True)
class KLEstimate(Row):
    """An estimate of KL(policy || reference)."""

    function: Callable[[Tensor], Tensor]
    """The formula, d = log_prob - ref_log_prob [window] -> its estimate [window]."""
    limit: float | None = None
    """What the estimate is held within, with zero gradient outside: itself, or with `--use-unbiased-kl` its product with r.
    None does not hold it."""
    inputs: tuple[str, ...] = ("ref_log_probs",)
    options: tuple[str, ...] = ("use_unbiased_kl", "kl_loss_gradient")
    flag: str = "--kl-loss-coef {config.kl_loss_coef:g}"
    when: Callable[[Any], bool] | None = lambda config: config.kl_loss_coef > 0

    def __call__(self, difference: Tensor, weight: Tensor | None = None) -> Tensor:
        """The estimate [window] of d = log_prob - ref_log_prob [window], times a weight, held within the limit."""
        kl = self.function(difference)
        kl = kl if weight is None else weight * kl
        return kl if self.limit is None else clamped_log_ratio(kl, self.limit)


KL_ESTIMATES: Table[KLEstimate] = Table(
    "kl_loss_type", also_known_as={"kl": "k1", "mse": "k2", "low_var": "low_var_kl"}
)
"""The rows by the name that `--kl-loss-type` takes."""


def _k3(difference: Tensor) -> Tensor:
    """The estimate k3, which needs exp(-d), so that d is held within +-20 first, with zero gradient outside."""
    difference = clamped_log_ratio(difference)
    # expm1 keeps the digits that exp(-d) - 1 loses near d = 0, where the estimate is d^2 / 2.
    return (-difference).expm1() + difference


KL_ESTIMATES.add(
    KLEstimate(
        name="k1",
        formula="d",
        about="as a loss, its expected gradient is zero on-policy",
        function=lambda difference: difference,
    ),
    KLEstimate(name="k2", formula="d^2 / 2", function=lambda difference: difference.square() / 2),
    KLEstimate(name="k3", formula="exp(-d) - 1 + d", about="d held within +-20", function=_k3),
    KLEstimate(
        name="low_var_kl",
        formula="k3 clamped to +-10",
        about="with --use-unbiased-kl the product r k3 is clamped",
        function=_k3,
        limit=10.0,
    ),
)


def kl_penalty(config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor) -> Tensor:
    """The estimate [window] of KL(policy || reference) of each token, by `--kl-loss-type`, in nats.

    With `--use-unbiased-kl` it is weighted by r = exp(log_prob - old_log_prob), gradient through r
    (DeepSeek-V3.2, arXiv:2512.02556): then its expectation over the policy that sampled the tokens
    is the divergence of the policy in training. With `--kl-loss-gradient k2` its gradient is that of
    k2, whose expectation is the divergence's own (Tang and Munos, arXiv:2506.09477). Masked positions
    are exactly 0 without gradient.

    Args:
        config: the settings of the loss.
        batch: with `ref_log_probs`, and those of `--ratio-anchor` for the unbiased form.
        log_probs: [window] with gradient.

    Raises:
        ValueError: the batch lacks log-probs that the settings need.
    """
    reference = given_log_probs(batch, "ref_log_probs", "--kl-loss-coef")
    log_probs = masked(log_probs, batch.loss_mask)
    difference, ratio = log_probs - reference, None
    if config.use_unbiased_kl:
        anchor = given_log_probs(batch, anchor_of(config), "--use-unbiased-kl")
        ratio = clamped_log_ratio(log_probs - anchor).exp()
    kl = KL_ESTIMATES[config.kl_loss_type](difference, ratio)
    if config.kl_loss_gradient == "estimate":
        return kl
    k2 = KL_ESTIMATES["k2"](torch.where(difference.isinf(), 0.0, difference))
    return kl.detach() + (k2 - k2.detach())
