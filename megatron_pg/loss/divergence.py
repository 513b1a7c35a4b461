"""Per-token estimates of the divergence from the reference policy (joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_pg.loss.masking import clamped_log_ratio, masked, required_log_probs
from megatron_pg.loss.objectives import clipped_log_ratio

if TYPE_CHECKING:
    from megatron_pg.config import PolicyLossConfig
    from megatron_pg.step.batch import PackedBatch

MAX_LOW_VAR_KL = 10.0
"""``low_var_kl`` is k3 held within +-10, with zero gradient outside."""


def kl_penalty(config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor) -> Tensor:
    """[window] estimate of KL(policy || reference) of each token, by ``--kl-loss-type``, in nats.

    With ``--use-unbiased-kl`` it is weighted by r = exp(log_prob - old_log_prob), gradient through r
    (DeepSeek-V3.2, arXiv:2512.02556): then its expectation over the policy that sampled the tokens
    is the divergence of the policy in training. Masked positions are exactly 0 without gradient.

    Args:
        config: the settings of the loss.
        batch: with ``ref_log_probs``, and ``old_log_probs`` for the unbiased form.
        log_probs: [window] with gradient.

    Raises:
        ValueError: the batch lacks log-probs that the settings need.
    """
    ref_log_probs = required_log_probs(batch, "ref_log_probs", "--kl-loss-coef")
    reference = masked(ref_log_probs.detach(), batch.loss_mask)
    log_probs = masked(log_probs, batch.loss_mask)
    kl = kl_estimate(log_probs - reference, config.kl_loss_type)
    if not config.use_unbiased_kl:
        return kl
    old_log_probs = required_log_probs(batch, "old_log_probs", "--use-unbiased-kl")
    return clipped_log_ratio(log_probs, old_log_probs, batch.loss_mask).exp() * kl


def kl_estimate(difference: Tensor, kind: str) -> Tensor:
    """k1, k2, k3 or low_var_kl of d = log_prob - ref_log_prob, [window] -> [window].

    k3 needs exp(-d), so there d is held within +-20 first, with zero gradient outside.

    Raises:
        ValueError: an unknown kind.
    """
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    if kind not in ("k3", "low_var_kl"):
        raise ValueError(f"--kl-loss-type is {kind!r}: expected k1, k2, k3 or low_var_kl")
    difference = clamped_log_ratio(difference)
    # expm1 keeps the digits that exp(-d) - 1 loses near d = 0, where the estimate is d^2 / 2.
    k3 = (-difference).expm1() + difference
    return k3 if kind == "k3" else torch.where(k3 > MAX_LOW_VAR_KL, MAX_LOW_VAR_KL, k3)
