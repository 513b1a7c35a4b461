"""The divisor of `constant`, wherever a trainer's user gave it: a YAML of settings, Megatron's args, the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

DIVISOR_VARIABLE = "MEGATRON_PG_LOSS_AGGREGATION_DIVISOR"
"""Environment variable of the divisor L of `constant`."""


def find_divisor(args: Any, path: str) -> float:
    """Find L of `constant`, in tokens, from the environment or the trainer's args.

    Args:
        args: the trainer's arguments, in which `--custom-config-path` leaves `loss_aggregation_divisor`; None where
            there are none.
        path: the flag and import path that need it, for errors.

    Raises:
        ValueError: neither gives L, both give different ones, or it is no number.
    """
    given = {
        DIVISOR_VARIABLE: os.environ.get(DIVISOR_VARIABLE),
        "--loss-aggregation-divisor": getattr(args, "loss_aggregation_divisor", None),
    }
    return one_divisor(
        given,
        path,
        f"set {DIVISOR_VARIABLE} in the environment of the training processes, or loss_aggregation_divisor in Megatron's "
        "global args (in slime and miles a line of the YAML of --custom-config-path), to a finite number of tokens above 0",
    )


def one_divisor(given: Mapping[str, Any], path: str, remedy: str) -> float:
    """Return the one number among the values, which are given by source.

    Args:
        given: by source, a number, its text, or None.
        path: the setting that needs it, for errors.
        remedy: what to do where nothing was given.

    Raises:
        ValueError: nothing was given, or two different numbers, or no finite number above 0.
    """
    found = {source: _number(source, text) for source, text in given.items() if text is not None}
    if not found:
        raise ValueError(f"{path} has no divisor: {remedy}")
    if len(set(found.values())) > 1:
        raise ValueError(
            f"{path} has two divisors, {' and '.join(f'{k}={v:g}' for k, v in found.items())}: give one"
        )
    return next(iter(found.values()))


def _number(source: str, text: Any) -> float:
    """Parse a number: YAML reads 8e3 as text, and the environment has only text."""
    try:
        number = float(text)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source} is {text!r}: expected a number of tokens above 0") from error
    if not 0 < number < float("inf"):
        raise ValueError(f"{source} is {text!r}: expected a finite number of tokens above 0")
    return number
