"""Checks of per-token values on the host; errors name the sample and the position."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_pg.head.ragged import Ragged
from megatron_pg.step.side_channels import LARGEST_VOCABULARY

LARGEST_LOG_PROB = 2.0**-10
"""The largest log-prob that rounding explains.

In float32 a log-prob is z - logsumexp(z). The logsumexp is off by its spacing at most, 2^-23 of it: 2^-10 for logits up to 8192.
"""
HALF_SPACING_OF_BFLOAT16 = 2.0**-8
"""The largest relative error of a number that was rounded to bfloat16."""
LOG_PROB = f"a log-prob: a finite number of at most 0 (rounding may leave {LARGEST_LOG_PROB:.1e})"


def refuse_values(where: str, values: Tensor, is_wrong: Tensor, problem: str) -> None:
    """Refuse host values of any shape of which some are wrong, naming the first of them."""
    wrong = is_wrong.nonzero()
    if wrong.numel():
        index = wrong[0].tolist()
        raise ValueError(f"{where}{index} is {values[tuple(index)].item()}{problem}")


def check_mask(where: str, mask: Tensor) -> None:
    """Refuse a host mask of any shape with values other than 0 and 1."""
    problem = (
        ", expected 0 or 1 (a mask of document ids or weights would be summed as token counts)"
    )
    refuse_values(where, mask, (mask != 0) & (mask != 1), problem)


def check_log_probs(where: str, log_probs: Tensor, is_active: Tensor) -> None:
    """Refuse log-probs that are infinite or above 0 at an active token. NaN passes: the step's metrics name it.

    Args:
        log_probs: [response_length] or [response_length, k].
        is_active: bool, of a shape that broadcasts to it.
    """
    is_wrong = is_active & ((log_probs > LARGEST_LOG_PROB) | (log_probs == -math.inf))
    refuse_values(where, log_probs, is_wrong, f" at an active token, expected {LOG_PROB}")


def check_teacher(channels: Mapping[str, Tensor | Ragged], name: str, loss_mask: Tensor) -> None:
    """Refuse a teacher's k likeliest tokens that are no tokens of one distribution, at active tokens.

    Args:
        channels: the side channels of a sample; without `teacher_ids` and `teacher_log_probs` nothing is checked.
        name: how errors call the sample.
        loss_mask: [response_length] bool.

    Raises:
        ValueError: naming the sample, the channel and the position.
    """
    shapes = {}
    for channel, values in channels.items():
        if channel not in ("teacher_ids", "teacher_log_probs"):
            continue
        where = f"{name}: side_channels[{channel!r}]"
        if not isinstance(values, Tensor) or values.dim() != 2 or len(values) != len(loss_mask):
            shape = list(values.shape) if isinstance(values, Tensor) else "a Ragged"
            raise ValueError(
                f"{where} is of shape {shape}, expected a tensor [response_length, k], here [{len(loss_mask)}, k]"
            )
        shapes[channel] = list(values.shape)
        is_ids = channel == "teacher_ids"
        (_check_teacher_ids if is_ids else _check_teacher_log_probs)(where, values, loss_mask)
    if len({tuple(shape) for shape in shapes.values()}) > 1:
        raise ValueError(
            f"{name}: side_channels['teacher_ids'] has shape {shapes['teacher_ids']} and side_channels['teacher_log_probs'] "
            f"{shapes['teacher_log_probs']}: give the log-prob of each id"
        )


def _check_teacher_ids(where: str, ids: Tensor, loss_mask: Tensor) -> None:
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"{where} has dtype {ids.dtype}, expected integers")
    is_active = loss_mask[:, None]
    is_outside = is_active & ((ids < 0) | (ids >= LARGEST_VOCABULARY))
    refuse_values(where, ids, is_outside, ", expected an id of the vocabulary, 0 or more")
    ascending, order = ids.sort(dim=1, stable=True)
    again = torch.zeros_like(ids, dtype=torch.bool)
    again.scatter_(1, order[:, 1:], is_active & (ascending.diff(dim=1) == 0))
    refuse_values(where, ids, again, " a second time, expected distinct ids: it would count twice")


def _check_teacher_log_probs(where: str, log_probs: Tensor, loss_mask: Tensor) -> None:
    """Refuse log-probs of k tokens whose probabilities add up to more than 1.

    Rounding each to bfloat16 makes q at most q^(1 - 2^-8), so that a sum of 1 becomes k^(2^-8) at most.
    """
    check_log_probs(where, log_probs, loss_mask[:, None])
    log_sum = log_probs.double().logsumexp(1)
    k = max(log_probs.shape[1], 1)
    is_more = log_sum > LARGEST_LOG_PROB + HALF_SPACING_OF_BFLOAT16 * math.log(k)
    problem = (
        ", expected at most 1: log-probs of distinct tokens, in nats, at the rollout temperature"
    )
    total = f"{where}: the sum of the probabilities of token "
    refuse_values(total, log_sum.exp(), loss_mask & is_more, problem)
