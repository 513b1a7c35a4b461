"""Reducers for slime, miles and their kin, which load one by import path, one path for each aggregation.

    --custom-pg-loss-reducer-function-path megatron_pg.integrations.constant

Such a trainer calls `f(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)` for each micro-batch, and
scales the reducer's inner sum s of the rank (read in slime/backends/megatron_utils/loss.py, `loss_function`, commit
00c2d6db). N are the rollouts of the step; DP, CP and M are those of `megatron_pg.megatron.scale_contract`.

1. `calculate_per_token_loss` off: returns `(s * M / N * DP * CP, 1, metrics)`, of which Megatron makes `sum of s / N`:
   exact for `constant`, and for `sample_mean` of rollouts of one sample (the call carries no rollout totals).
2. `calculate_per_token_loss` on: returns `(s * CP, n, metrics)`. n are the mask sums of the whole micro-batch, at least 1
   for each sample, the same on every CP rank. Megatron makes `sum of s / (T + Z)` of it, Z the samples without an active
   token: `token_mean` where Z is 0.

The other value of the flag, and `prompt_mean`, whose G and P the call does not carry, are refused.
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
"""The environment variable of the divisor L of `constant`, in tokens."""


def _reducer(
    aggregation: str,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    calculate_per_token_loss: bool = False,
) -> Reducer:
    """Make `reducer(x [window]) -> 0-d` inner sum of this rank for one micro-batch; the module's functions are partials.

    The lengths are in tokens, over the context-parallel group, and the masks [response_length] of 0 and 1, of each sample.

    Raises:
        ValueError: the trainer's flag is not the one that the aggregation needs, or lengths and masks do not fit.
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
"""The reducers. `constant` weighs every active token 1 / L, before the trainer's 1 / N; `prompt_mean` is always refused."""


def refuse_flag(aggregation: str, calculate_per_token_loss: bool) -> None:
    """Raise a ValueError for an aggregation that a reducer cannot compute under the trainer's flag."""
    if aggregation == "prompt_mean":
        why = (
            ": a prompt mean needs the prompt group of every sample and the group's active tokens over the whole step, and "
            "this call carries lengths and masks of one micro-batch; in slime and miles give "
            "--rollout-data-postprocess-path megatron_pg.integrations.slime.prompt_mean or "
            "--custom-convert-samples-to-train-data-path megatron_pg.integrations.miles.prompt_mean instead; elsewhere use "
            "constant, sample_mean or token_mean here, or megatron_pg.megatron.PolicyStep"
        )
    elif aggregation != "token_mean" and calculate_per_token_loss:
        why = (
            " with --calculate-per-token-loss: the trainer would divide the result by the step's tokens and not by its "
            "rollouts; drop --calculate-per-token-loss, or use token_mean"
        )
    elif aggregation == "token_mean" and not calculate_per_token_loss:
        why = (
            " without --calculate-per-token-loss: the trainer would divide the sum of the tokens by its number of rollouts, "
            "and the call does not carry the active tokens of the step; add --calculate-per-token-loss"
        )
    elif aggregation == "token_mean" and "miles.backends.fsdp_utils.actor" in sys.modules:
        why = (
            " with miles' --train-backend fsdp: its training loop drops the token count that the loss is to be divided by, "
            "and the gradient is the count / data-parallel size too large; use --train-backend megatron"
        )
    else:
        return
    raise ValueError(f"{PREFIX}{aggregation}{why}")


def divisor_of_args(path: str, args: Any) -> float:
    """Find L of `constant` in the environment or in Megatron's arguments, which may be None; see `find_divisor`."""
    return find_divisor(
        path,
        {"--loss-aggregation-divisor": getattr(args, "loss_aggregation_divisor", None)},
        f"set {DIVISOR_VARIABLE} in the environment of the training processes, or loss_aggregation_divisor in Megatron's "
        "global args (in slime and miles a line of the YAML of --custom-config-path)",
    )


def find_divisor(path: str, settings: Mapping[str, Any], remedy: str) -> float:
    """Find L of `constant`, in tokens, in the environment or in a trainer's settings, for the setting `path`.

    A setting is a number, its text (YAML reads 8e3 as text) or None. A ValueError says that nothing gives L, that two
    sources differ, or that a value is no finite number above 0.
    """
    values = {DIVISOR_VARIABLE: os.environ.get(DIVISOR_VARIABLE), **settings}
    divisors = {}
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
