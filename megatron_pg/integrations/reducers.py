"""Reducers for slime, miles and their kin, which load one by import path, one path for each aggregation.

    --custom-pg-loss-reducer-function-path megatron_pg.integrations.constant

Such a trainer calls `f(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)` for each micro-batch,
takes the reducer's inner sum s of the rank, and scales it itself. N are the rollouts of the step; DP, CP and M are those
of `megatron_pg.megatron.scale_contract`. (Read in slime/backends/megatron_utils/loss.py, `loss_function`, commit
00c2d6db.)

1. `calculate_per_token_loss` off: returns `(s * M / N * DP * CP, 1, metrics)`. Megatron divides by 1 and by M and
   averages over DP * CP ranks. The objective is `sum of s / N`, which is exact where the outer count is N: for
   `constant`, and for `sample_mean` of rollouts of one sample (the call carries no rollout totals).
2. `calculate_per_token_loss` on: returns `(s * CP, n, metrics)`. n are the mask sums of the whole micro-batch, at least
   1 for each sample, the same on every CP rank. Megatron sums the gradients and divides them by the sum of n over
   DP * CP ranks and micro-batches, `CP * (T + Z)`. Z samples have no active token. The objective is
   `sum of s / (T + Z)`: `token_mean` where Z is 0, and 1 / (1 + Z / T) of it otherwise.

An aggregation under the other value of the flag would be divided by the other count, and `prompt_mean` needs G and P,
which the call does not carry. Both are refused. The import needs nothing of the trainer's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

from torch import Tensor

from megatron_pg.integrations.settings import HOOKS, divisor_of_args
from megatron_pg.loss.reducer import Reducer, get_pg_loss_reducer
from megatron_pg.megatron.trainer_globals import context_parallel_place, global_args

PREFIX = "--custom-pg-loss-reducer-function-path megatron_pg.integrations."


def _reducer(
    aggregation: str,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    calculate_per_token_loss: bool = False,
) -> Reducer:
    """Make the reducer of one micro-batch. The functions of this module are its partials.

    Args:
        aggregation: one of the four.
        total_lengths: prompt and response tokens of each sample of the micro-batch, over its context-parallel group.
        response_lengths: response tokens of each sample.
        loss_masks: a [response_length] tensor of 0 and 1 for each sample.
        calculate_per_token_loss: the trainer's flag; on for `token_mean`, off for the others.

    Returns:
        `reducer(x [window]) -> 0-d` inner sum of this rank, which the trainer scales.

    Raises:
        ValueError: the flag is not the one that the aggregation needs, or lengths and masks do not fit.
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


sample_mean, prompt_mean, token_mean, constant = (
    functools.partial(_reducer, name) for name in HOOKS
)
"""The reducers. `sample_mean` (GRPO) is of rollouts that are one sample each.

`token_mean` is over the whole step, exact where every sample has an active token: the trainer counts one otherwise.
`constant` is Dr.GRPO's: every active token weighs 1 / L, before the trainer's 1 / N. `prompt_mean` is always refused.
"""
