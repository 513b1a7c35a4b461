"""Which values the fields of ``PolicyLossConfig`` may take, each by itself and together."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

if TYPE_CHECKING:
    from megatron_pg.config.policy_loss import PolicyLossConfig

PYTHON_ONLY_FIELDS = frozenset({"grad_divisor"})


@dataclass(frozen=True)
class Interval:
    """The finite numbers above ``lower`` (or equal to it, if closed) and up to ``upper``."""

    lower: float
    upper: float = math.inf
    closed: bool = False

    def contains(self, value: Any) -> bool:
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            return False
        number = float(value)
        above = number >= self.lower if self.closed else number > self.lower
        return above and number <= self.upper and math.isfinite(number)

    def __str__(self) -> str:
        text = f"a finite number {'>=' if self.closed else '>'} {self.lower:g}"
        return text if math.isinf(self.upper) else f"{text} and <= {self.upper:g}"


INTERVALS = {
    "loss_aggregation_divisor": Interval(0),
    "eps_clip": Interval(0, 1),
    "eps_clip_high": Interval(0),
    "eps_clip_c": Interval(1),
    "kl_loss_coef": Interval(0, closed=True),
    "entropy_coef": Interval(0, closed=True),
    "tis_clip": Interval(0),
    "tis_clip_low": Interval(0, closed=True),
    "geometric_rejection_low": Interval(0, 1, closed=True),
    "geometric_rejection_high": Interval(1, closed=True),
    "opsm_delta": Interval(0, closed=True),
    "rollout_temperature": Interval(0),
    "grad_divisor": Interval(0),
}


def flag_of(name: str) -> str:
    """The flag of a field: ``--eps-clip`` of ``eps_clip``; the bare name where it has no flag."""
    return name if name in PYTHON_ONLY_FIELDS else "--" + name.replace("_", "-")


def choices_of(type_hint: Any) -> tuple[str, ...] | None:
    """The words that a field of this type may take; None where it is not a choice of words."""
    return get_args(type_hint) if get_origin(type_hint) is Literal else None


def check_value(name: str, value: Any, type_hint: Any) -> None:
    """Checks one field of ``PolicyLossConfig`` by itself.

    Raises:
        ValueError: Wrong type, unknown word, NaN, or a number out of its interval.
    """
    choices = choices_of(type_hint)
    if value is None and type(None) in get_args(type_hint):
        return
    if choices is not None:
        valid, expected = value in choices, "one of " + ", ".join(choices)
    elif type_hint is bool:
        valid, expected = isinstance(value, bool), "True or False"
    elif name in INTERVALS:
        valid, expected = INTERVALS[name].contains(value), str(INTERVALS[name])
    else:
        valid, expected = isinstance(value, str) and bool(value), "pkg.mod.fn or pkg.mod:fn"
    if not valid:
        raise ValueError(f"{flag_of(name)} ({name}) must be {expected}; found {value!r}")


def check_combinations(config: PolicyLossConfig) -> None:
    """Checks fields against each other.

    Raises:
        ValueError: A setting lacks what it needs, or would silently be ignored.
    """
    _check_divisor(config)
    _check_accepted_denominator(config)
    custom_loss = config.custom_policy_loss_path is not None
    has_dual_clip = config.policy_loss in ("ppo", "gspo") or custom_loss
    if config.eps_clip_c is not None and not has_dual_clip:
        raise ValueError(
            "--eps-clip-c is the dual clip of ppo and gspo: drop it with --policy-loss "
            f"{config.policy_loss}"
        )
    if config.cispo_lower_bound and config.policy_loss != "cispo" and not custom_loss:
        raise ValueError(
            f"--cispo-lower-bound needs --policy-loss cispo; found {config.policy_loss}"
        )
    if config.tis_clip_low > config.tis_clip:
        raise ValueError(
            f"--tis-clip-low {config.tis_clip_low:g} exceeds --tis-clip {config.tis_clip:g}: "
            "the lower bound of the importance weight must not be above the upper one"
        )
    if config.tis_mode == "mask" and config.tis_level == "sequence":
        raise ValueError(
            "--tis-mode mask works per token: use --tis-level token, or reject whole sequences "
            "with --use-geometric-rejection"
        )
    if config.fp32_lm_head and not config.fused_lm_head:
        raise ValueError(
            "--fp32-lm-head takes effect in the fused output layer alone: add --fused-lm-head "
            "(megatron-core 0.18 or later), or drop --fp32-lm-head"
        )
    if config.fused_lm_head and config.qkv_format != "thd":
        raise ValueError(
            f"--fused-lm-head takes packed sequences; found --qkv-format {config.qkv_format}: use "
            "--qkv-format thd, or drop --fused-lm-head"
        )
    if config.custom_tis_function_path is not None and not config.use_tis:
        raise ValueError(
            "--custom-tis-function-path takes the place of the weights of --use-tis: add "
            "--use-tis, or drop the path"
        )


def _check_accepted_denominator(config: PolicyLossConfig) -> None:
    """Totals of what is kept need rejections that the data alone decide, before the step."""
    if config.rejection_denominator != "accepted":
        return
    if config.use_opsm or config.custom_tis_function_path is not None:
        flag = "--use-opsm" if config.use_opsm else "--custom-tis-function-path"
        raise ValueError(
            f"--rejection-denominator accepted cannot count what {flag} rejects, which is unknown "
            "before the step: use --rejection-denominator original"
        )
    if config.use_geometric_rejection and config.use_tis and config.tis_mode == "mask":
        raise ValueError(
            "--rejection-denominator accepted takes one kind of rejection: drop "
            "--use-geometric-rejection or --tis-mode mask, or use --rejection-denominator original"
        )


def _check_divisor(config: PolicyLossConfig) -> None:
    divisor = config.loss_aggregation_divisor
    divides = divisor is not None or config.loss_aggregation == "constant"
    if divides and config.custom_pg_loss_reducer_function_path is not None:
        raise ValueError(
            "--custom-pg-loss-reducer-function-path replaces the reduction and would ignore "
            f"--loss-aggregation-divisor (found {divisor}) and --loss-aggregation constant: drop "
            "the divisor or the path"
        )
    if config.loss_aggregation == "constant" and divisor is None:
        raise ValueError(
            "--loss-aggregation constant needs --loss-aggregation-divisor L, the number of tokens "
            "that every rollout is divided by"
        )
    if config.loss_aggregation != "constant" and divisor is not None:
        raise ValueError(
            f"--loss-aggregation-divisor {divisor:g} belongs to --loss-aggregation constant: drop "
            f"it with --loss-aggregation {config.loss_aggregation}"
        )
