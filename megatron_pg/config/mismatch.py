"""Settings of the corrections: importance weights and rejection against the mismatch of rollout engine and trainer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from megatron_pg.config.fields import Interval, Settings, flag_of

MAX_LOG_RATIO = 20.0
"""Bound of a log-ratio's size before it is exponentiated: every ratio is in [e^-20, e^20], and e^20 is 4.9e8."""
# Bounds of a ratio that some ratio meets.
_LOWER_BOUND = Interval(0, math.exp(MAX_LOG_RATIO), closed=True)
_UPPER_BOUND = Interval(math.exp(-MAX_LOG_RATIO), closed=True)
_OPEN_UPPER_BOUND = Interval(math.exp(-MAX_LOG_RATIO), closed=True, or_infinite=True)
BOUNDS = {
    "tis_clip_low": "tis_clip",
    "geometric_rejection_low": "geometric_rejection_high",
    "sequence_rejection_low": "sequence_rejection_high",
}
"""The upper bound of a ratio by its lower one."""


@dataclass(frozen=True)
class MismatchSettings(Settings):
    """Settings of importance weights, and of the rejection of tokens and sequences."""

    use_tis: bool = False
    """Truncated importance sampling against the mismatch of rollout engine and trainer: multiply
    the per-token loss by the weight of tis_level and tis_mode. Needs rollout_log_probs."""

    custom_tis_function_path: str | None = None
    """Import path of f(config, tokens, log_probs, pg_loss) -> (pg_loss, loss_mask). Takes the place
    of the weights of use_tis, which must be on."""

    tis_level: Literal["token", "sequence", "geometric"] = "token"
    """Unit of the importance weight w, with d = old_log_prob - rollout_log_prob. token: w = exp(d).
    sequence: w = exp(sum_t d), one for all tokens of the sample. geometric: w = exp(mean_t d),
    likewise."""

    tis_mode: Literal["truncate", "mask"] = "truncate"
    """Treatment of w. truncate: clamp(w, tis_clip_low, tis_clip). mask: w inside [tis_clip_low,
    tis_clip], else 0 (token level: IcePop)."""

    tis_clip: Annotated[float, _UPPER_BOUND] = 2.0
    """Upper bound of the importance weight. At least e^-20, the smallest weight."""

    tis_clip_low: Annotated[float, _LOWER_BOUND] = 0.0
    """Lower bound of the importance weight. At least 0, at most e^20 and tis_clip."""

    use_geometric_rejection: bool = False
    """Keep a sequence only if exp(mean_t d), d = old_log_prob - rollout_log_prob, lies between
    geometric_rejection_low and geometric_rejection_high. Needs rollout_log_probs."""

    geometric_rejection_low: Annotated[float, _LOWER_BOUND] = 0.999
    """Smallest exp(mean_t d) that is kept. At most e^20; 0 leaves the bound open."""

    geometric_rejection_high: Annotated[float, _OPEN_UPPER_BOUND] = 1.001
    """Largest exp(mean_t d) that is kept. At least e^-20; inf leaves the bound open."""

    use_sequence_rejection: bool = False
    """Keep a sequence only if exp(sum_t d), d = old_log_prob - rollout_log_prob, lies between
    sequence_rejection_low and sequence_rejection_high. Needs rollout_log_probs."""

    sequence_rejection_low: Annotated[float, _LOWER_BOUND] = 0.5
    """Smallest exp(sum_t d) that is kept. At most e^20; 0 leaves the bound open."""

    sequence_rejection_high: Annotated[float, _OPEN_UPPER_BOUND] = 2.0
    """Largest exp(sum_t d) that is kept. At least e^-20; inf leaves the bound open."""

    use_opsm: bool = False
    """Off-policy sequence masking: drop a sequence if A < 0 and mean_t(old_log_prob - log_prob) >
    opsm_delta."""

    opsm_delta: Annotated[float, Interval(0, closed=True)] = 1e-4
    """Threshold of use_opsm, in nats per token. At least 0."""

    rejection_denominator: Literal["original", "accepted"] = "original"
    """Totals that the aggregation divides by when tokens or sequences are rejected. original: those
    before rejection, so that a rejected token counts as a zero. accepted: those of what was kept."""

    def conflicts(self, given: Mapping[str, Any]) -> Iterator[str]:
        """Yield the bounds that exclude each other."""
        for low, high in BOUNDS.items():
            lowest, highest = getattr(self, low), getattr(self, high)
            if lowest > highest:
                found = f"{flag_of(low)} {lowest:g} exceeds {flag_of(high)} {highest:g}"
                yield f"{found}: the lower bound must not be above the upper one"
