"""Reducers for slime, miles and their forks, which load a reducer by import path.

    --custom-pg-loss-reducer-function-path megatron_pg.integrations.constant

The trainer calls `f(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)` per
micro-batch and scales the rank's inner sum s (slime/backends/megatron_utils/loss.py,
`loss_function`, commit 00c2d6db). N is the step's number of rollouts. DP, CP and M are as in
`megatron_pg.megatron.scale_contract`.

1. Without `calculate_per_token_loss`, it returns `(s * M / N * DP * CP, 1, metrics)`, and Megatron
computes `sum of s / N`. This is exact for `constant`, and for `sample_mean` if each rollout is one
sample (the call has no rollout totals).
2. With it, it returns `(s * CP, n, metrics)`, where n adds up the whole micro-batch's mask sums, at
least 1 per sample. Megatron computes `sum of s / (T + Z)`, with Z samples without an active token.
This is `token_mean` if Z is 0.

All other combinations, and `prompt_mean`, raise an error.
"""

import functools
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_pg.loss.reducer import Reducer, get_pg_loss_reducer
from megatron_pg.megatron.trainer_globals import context_parallel_place, global_args

PREFIX = "--custom-pg-loss-reducer-function-path megatron_pg.integrations."
HOOKS = ("sample_mean", "prompt_mean", "token_mean", "constant")
"""The functions of a trainer's module, by aggregation."""
DIVISOR_VARIABLE = "MEGATRON_PG_LOSS_AGGREGATION_DIVISOR"
"""The environment variable for the divisor L of `constant`, in tokens."""


def _reducer(
    aggregation: str,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    calculate_per_token_loss: bool = False,
) -> Reducer:
    """Make `reducer(x [window]) -> 0-d`, this rank's inner sum over one micro-batch.

    Lengths are in tokens over the context-parallel group, masks are [response_length] of 0 and 1.

    Raises:
        ValueError: the aggregation excludes the trainer's flag, or lengths and masks are
            inconsistent.
        NotImplementedError: `--qkv-format bshd` under context parallelism.
    """
    refuse_flag(aggregation, calculate_per_token_loss)
    args = global_args()
    cp_rank, cp_size = context_parallel_place()
    return get_pg_loss_reducer(
        total_lengths,
        response_lengths,
        loss_masks,
        aggregation=aggregation,
        divisor=divisor_of_args(f"{PREFIX}constant", args) if aggregation == "constant" else None,
        cp_rank=cp_rank,
        cp_size=cp_size,
        qkv_format=getattr(args, "qkv_format", None) or "thd",
    )


sample_mean, prompt_mean, token_mean, constant = (
    functools.partial(_reducer, name) for name in HOOKS
)
"""The reducers. `constant` weights an active token by 1 / L. `prompt_mean` always raises."""


def refuse_flag(aggregation: str, calculate_per_token_loss: bool) -> None:
    """Raise ValueError if a reducer cannot compute the aggregation under the trainer's flag."""
    if aggregation == "prompt_mean":
        why = (
            ": a reducer does not get the active tokens of a prompt group in the step. Use the "
            "hook of slime or miles (docs/migrating.md), or megatron_pg.megatron.PolicyStep"
        )
    elif aggregation != "token_mean" and calculate_per_token_loss:
        why = (
            " with --calculate-per-token-loss would be divided by the step's tokens instead of its "
            "rollouts. Remove the flag, or use token_mean"
        )
    elif aggregation == "token_mean" and not calculate_per_token_loss:
        why = (
            " without --calculate-per-token-loss would be divided by the trainer's rollouts: add "
            "--calculate-per-token-loss"
        )
    elif aggregation == "token_mean" and "miles.backends.fsdp_utils.actor" in sys.modules:
        why = " with --train-backend fsdp: its training loop drops the token count. Use megatron"
    else:
        return
    raise ValueError(f"{PREFIX}{aggregation}{why}")


def divisor_of_args(path: str, args: Any) -> float:
    """Find L of `constant` in the environment or in Megatron's arguments, which may be None."""
    return find_divisor(
        path,
        {"--loss-aggregation-divisor": getattr(args, "loss_aggregation_divisor", None)},
        f"set {DIVISOR_VARIABLE} in the environment of the training processes, or "
        "loss_aggregation_divisor in the YAML of --custom-config-path",
    )


def find_divisor(path: str, settings: Mapping[str, Any], remedy: str) -> float:
    """Find L of `constant`, in tokens, in the environment or in a trainer's settings.

    A setting is a number, its text (YAML reads 8e3 as text) or None. `path` is the setting that
    needs L, for errors. Raises ValueError for no divisor, two different divisors, or one that is
    not finite and above 0.
    """
    divisors = {}
    values = {DIVISOR_VARIABLE: os.environ.get(DIVISOR_VARIABLE), **settings}
    for source, value in values.items():
        if value is None:
            continue
        try:
            divisors[source] = float(value)
        except (TypeError, ValueError):
            divisors[source] = math.nan
        if not 0 < divisors[source] < math.inf:
            raise ValueError(f"{source} is {value!r}: expected a finite number of tokens above 0")
    if not divisors:
        raise ValueError(f"{path} has no divisor: {remedy}")
    if len(set(divisors.values())) > 1:
        named = " and ".join(f"{source}={number:g}" for source, number in divisors.items())
        raise ValueError(f"{path} has two divisors, {named}: give one")
    return next(iter(divisors.values()))
