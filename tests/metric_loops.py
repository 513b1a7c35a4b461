"""The metrics of a step by plain loops over its active tokens, without code of `megatron_pg`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Token:
    """One active token and all that metrics are made of."""

    document: int
    log_prob: float
    old: float
    ref: float
    rollout: float
    advantage: float
    version: int
    entropy: float
    divergence: float = 0.0
    set_size: float = 0.0
    set_mass: float = 1.0
    kl_type: str = "k3"
    clip_range: tuple[float, float] = (0.8, 1.2)

    r = property(lambda token: math.exp(token.log_prob - token.old))
    w = property(lambda token: math.exp(token.old - token.rollout))
    d = property(lambda token: token.old - token.rollout)
    is_outside = property(lambda token: not token.clip_range[0] <= token.r <= token.clip_range[1])
    is_clipped_above = property(lambda token: token.advantage > 0 and token.r > token.clip_range[1])
    is_clipped_below = property(lambda token: token.advantage < 0 and token.r < token.clip_range[0])

    def kl_ref(self) -> float:
        difference = self.log_prob - self.ref
        if self.kl_type == "k1":
            return difference
        if self.kl_type == "k2":
            return difference**2 / 2
        k3 = math.exp(-difference) - 1 + difference
        return min(k3, 10.0) if self.kl_type == "low_var_kl" else k3


def document_mean(value: Callable[[Token], float], tokens: Sequence[Token]) -> float:
    means = []
    for document in sorted({token.document for token in tokens}):
        values = [float(value(token)) for token in tokens if token.document == document]
        means.append(sum(values) / len(values))
    return sum(means) / len(means)


TOLD_VERSION = 9
"""The version that the step is told, for the metrics of staleness."""
Loops = Callable[[Sequence[Token]], float]


def mean(value: Callable[[Token], float]) -> Loops:
    return lambda tokens: document_mean(value, tokens)


def total(value: Callable[[Token], float]) -> Loops:
    return lambda tokens: sum(value(token) for token in tokens)


def token_mean(value: Callable[[Token], float]) -> Loops:
    return lambda tokens: sum(value(token) for token in tokens) / len(tokens)


def kish(weights: list[float]) -> float:
    return sum(weights) ** 2 / sum(weight**2 for weight in weights)


def standard_deviation(tokens: Sequence[Token]) -> float:
    center = document_mean(lambda t: abs(t.d), tokens)
    return math.sqrt(document_mean(lambda t: (abs(t.d) - center) ** 2, tokens))


METRIC_LOOPS: dict[str, Loops] = {
    "new_logprobs": mean(lambda t: t.log_prob),
    "advantage": mean(lambda t: t.advantage),
    "num_tokens": len,
    "old_logprobs": mean(lambda t: t.old),
    "ratio_new_old": mean(lambda t: t.r),
    "ppo_kl": mean(lambda t: t.old - t.log_prob),
    "kl_new_old": mean(lambda t: t.r - 1 - (t.log_prob - t.old)),
    "clipped_ratio_fraction": mean(lambda t: t.is_outside),
    "clipped_ratio_effective_fraction": mean(lambda t: t.is_clipped_above or t.is_clipped_below),
    "pg_clipfrac": mean(lambda t: t.is_clipped_above or t.is_clipped_below),
    "pg_clipfrac_positive": mean(lambda t: t.is_clipped_above),
    "pg_clipfrac_negative": mean(lambda t: t.is_clipped_below),
    "ratio_new_old_sum": total(lambda t: t.r),
    "ratio_new_old_squared_sum": total(lambda t: t.r**2),
    "ref_logprobs": mean(lambda t: t.ref),
    "kl_ref": mean(Token.kl_ref),
    "ratio_ref_new": mean(lambda t: math.exp(t.ref - t.log_prob)),
    "rollout_ratio": mean(lambda t: t.w),
    "rollout_kl": mean(lambda t: t.w - 1 - t.d),
    "rollout_abs_difference": mean(lambda t: abs(t.d)),
    "max_rollout_abs_difference": lambda tokens: max(abs(t.d) for t in tokens),
    "rollout_abs_difference_squared": mean(lambda t: t.d**2),
    "rollout_chi_square": mean(lambda t: t.w**2 - 1),
    "rollout_log_ppl_diff": mean(lambda t: t.rollout - t.old),
    "rollout_ratio_of_tokens": token_mean(lambda t: t.w),
    "rollout_ratio_squared_of_tokens": token_mean(lambda t: t.w**2),
    "policy_version": mean(lambda t: t.version),
    "min_policy_version": lambda tokens: min(t.version for t in tokens),
    "entropy": mean(lambda t: t.entropy),
    "kept_set_size": mean(lambda t: t.set_size),
    "kept_set_mass": mean(lambda t: t.set_mass),
    "teacher_divergence": mean(lambda t: t.divergence),
    "max_advantage": lambda tokens: max(t.advantage for t in tokens),
    "min_advantage": lambda tokens: min(t.advantage for t in tokens),
}
DERIVED_LOOPS: dict[str, Loops] = {
    "effective_sample_size": lambda tokens: kish([t.r for t in tokens]),
    "rollout_abs_difference_std": standard_deviation,
    "rollout_ppl_ratio": lambda tokens: math.exp(document_mean(lambda t: -t.d, tokens)),
    "rollout_effective_sample_size": lambda tokens: kish([t.w for t in tokens]) / len(tokens),
    "staleness": lambda tokens: TOLD_VERSION - document_mean(lambda t: t.version, tokens),
    "max_staleness": lambda tokens: TOLD_VERSION - min(t.version for t in tokens),
}
