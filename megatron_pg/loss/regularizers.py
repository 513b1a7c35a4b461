"""Per-token estimates of the divergence from the reference policy
(joschu.net/blog/kl-approx.html).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.config.tables import TABLES, Row, add_rows
from megatron_pg.config.values import FLOAT32
from megatron_pg.loss.tokens import Tokens, clamped_log_ratio


@dataclass(frozen=True, kw_only=True)
class KLEstimate(Row):
    """Estimate of KL(policy || reference)."""

    setting: ClassVar[str] = "kl_loss_type"

    function: Callable[[Tensor], Tensor]
    """The formula, a function of d = log_prob - ref_log_prob [window]."""
    limit: float | None = None
    """Bound for the estimate, or with `--use-unbiased-kl` for its product with r, with zero
    gradient outside. None: no bound."""
    inputs: tuple[str, ...] = ("ref_log_probs",)
    options: tuple[str, ...] = ("use_unbiased_kl", "kl_loss_gradient", "kl_target")
    flag: str = "--kl-loss-coef {config.kl_loss_coef:g}"
    when: Callable[[Any], bool] | None = lambda config: config.kl_loss_coef > 0

    def __call__(self, difference: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the estimate [window] times a weight, clamped to the limit."""
        kl = self.function(difference)
        kl = kl if weight is None else weight * kl
        return kl if self.limit is None else clamped_log_ratio(kl, self.limit)


KL_ESTIMATES: dict[str, KLEstimate] = TABLES["kl_loss_type"]


def _k3(difference: Tensor) -> Tensor:
    difference = clamped_log_ratio(difference)
    # expm1 keeps the digits that exp(-d) - 1 loses near d = 0, where the estimate is d^2 / 2.
    return (-difference).expm1() + difference


add_rows(
    KL_ESTIMATES,
    KLEstimate(
        name="k1",
        formula="d",
        about="its expected gradient is zero on-policy",
        function=lambda difference: difference,
    ),
    KLEstimate(name="k2", formula="d^2 / 2", function=lambda difference: difference.square() / 2),
    KLEstimate(name="k3", formula="exp(-d) - 1 + d", about="d clamped to +-20", function=_k3),
    KLEstimate(
        name="low_var_kl",
        formula="k3 clamped to +-10",
        about="with --use-unbiased-kl the product r k3 is clamped",
        function=_k3,
        limit=10.0,
    ),
)


def adapted_kl(
    config: PolicyLossConfig, metrics: Mapping[str, float], num_rollouts: int
) -> PolicyLossConfig:
    """Return the settings of the next step, with the KL coefficient adapted to `--kl-target`.

        beta (1 + clip(kl / kl_target - 1, -0.2, 0.2) min(n / kl_horizon, 1))

    Ziegler et al., arXiv:1909.08593 sec. 2.2. kl is the step's `kl_loss`, n its rollouts. No
    communication, because every rank has the same metrics. `kl_loss_coef` is the whole state: save
    it in the run's checkpoint. Without a target or a finite `kl_loss`, the settings are unchanged.

    Args:
        config: the settings of the step.
        metrics: the step's metrics from `PolicyStep.metrics`.
        num_rollouts: `StepTotals.num_rollouts`.
    """
    kl = metrics.get("kl_loss", math.nan)
    if config.kl_target is None or not math.isfinite(kl):
        return config
    error = min(max(kl / config.kl_target - 1.0, -0.2), 0.2)
    moved = config.kl_loss_coef * (1.0 + error * min(num_rollouts / config.kl_horizon, 1.0))
    smallest, largest = FLOAT32
    return dataclasses.replace(config, kl_loss_coef=min(max(moved, smallest), largest))


def kl_estimate(config: PolicyLossConfig, tokens: Tokens) -> Tensor:
    """Estimate KL(policy || reference) per token by `--kl-loss-type`, [window] in nats, 0 if
    masked.

    `--use-unbiased-kl` weights the estimate by the ratio r, with gradient through r (DeepSeek-V3.2,
    arXiv:2512.02556). Its expectation over the sampling policy is then the divergence of the policy
    in training. `--kl-loss-gradient k2` uses the gradient of k2, whose expectation is the
    divergence's gradient (arXiv:2506.09477).
    """
    difference, ratio = tokens.log_probs - tokens.given("ref_log_probs"), None
    if config.use_unbiased_kl:
        ratio = clamped_log_ratio(tokens.log_probs - tokens.anchor(config)).exp()
    kl = KL_ESTIMATES[config.kl_loss_type](difference, ratio)
    if config.kl_loss_gradient == "estimate":
        return kl
    k2 = KL_ESTIMATES["k2"](torch.where(difference.isinf(), 0.0, difference))
    return kl.detach() + (k2 - k2.detach())
