"""The names of the aggregations' functions, and the divisor of `constant` from a trainer's settings or the environment."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

HOOKS = ("sample_mean", "prompt_mean", "token_mean", "constant")
"""The functions of a trainer's module, by aggregation."""
DIVISOR_VARIABLE = "MEGATRON_PG_LOSS_AGGREGATION_DIVISOR"
"""The environment variable of the divisor L of `constant`, in tokens."""


def find_divisor(
    path: str, settings: Mapping[str, Any], remedy: str, environment: Mapping[str, str] = os.environ
) -> float:
    """Find L of `constant`, in tokens, in the environment or in a trainer's settings, for the setting `path`.

    A setting is a number, its text (YAML reads 8e3 as text) or None.

    Raises:
        ValueError: nothing gives L, two sources differ, or a value is no finite number above 0.
    """
    values = {DIVISOR_VARIABLE: environment.get(DIVISOR_VARIABLE), **settings}
    found = {source: _number(text) for source, text in values.items() if text is not None}
    for source, number in found.items():
        if not 0 < number < math.inf:
            raise ValueError(
                f"{source} is {values[source]!r}: expected a finite number of tokens above 0"
            )
    if not found:
        raise ValueError(f"{path} has no divisor: {remedy}")
    if len(set(found.values())) > 1:
        named = " and ".join(f"{source}={number:g}" for source, number in found.items())
        raise ValueError(f"{path} has two divisors, {named}: give one")
    return next(iter(found.values()))


def divisor_of_args(path: str, args: Any) -> float:
    """Find L of `constant` in the environment or in Megatron's arguments, which may be None; see `find_divisor`."""
    return find_divisor(
        path,
        {"--loss-aggregation-divisor": getattr(args, "loss_aggregation_divisor", None)},
        f"set {DIVISOR_VARIABLE} in the environment of the training processes, or loss_aggregation_divisor in Megatron's "
        "global args (in slime and miles a line of the YAML of --custom-config-path)",
    )


def _number(text: Any) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        return math.nan
