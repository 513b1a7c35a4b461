"""Checks of a sample's values on the host. Errors name the sample, the field and the position."""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_pg.head.ragged import Ragged, offsets_of

LARGEST_LOG_PROB = 2.0**-10
"""The largest log-prob that rounding can cause.

In float32 a log-prob is z - logsumexp(z). The logsumexp is off by at most its spacing, 2^-23 times
its size: 2^-10 for logits up to 8192.
"""
HALF_SPACING_OF_BFLOAT16 = 2.0**-8
"""The largest relative error of rounding to bfloat16."""
LOG_PROB = f"a log-prob: a finite number of at most 0 (rounding may leave {LARGEST_LOG_PROB:.1e})"
LARGEST_VOCABULARY = 2**31
"""Upper bound of ids in a sampling set."""
TEACHER_CHANNELS = ("teacher_ids", "teacher_log_probs")

host_float64 = functools.partial(torch.tensor, dtype=torch.float64, device="cpu")
"""Make a float64 host tensor, independent of the process's default dtype and device."""


def host_tensor(values: Any) -> Tensor:
    """Convert numbers to a host tensor, independent of the process's defaults. A tensor is
    returned unchanged.

    None in a list becomes NaN: an engine has no log-prob for a token that it did not sample.

    Raises:
        TypeError, ValueError, RuntimeError, OverflowError: the values are not numbers.
    """
    if isinstance(values, Tensor):
        return values
    try:
        array = np.asarray(values)
    except (RuntimeError, TypeError):  # elements that are tensors of bfloat16, or with gradient
        return torch.as_tensor(values, device="cpu")
    if array.dtype == object and array.ndim == 1:
        array = np.asarray([math.nan if value is None else value for value in array])
    return torch.from_numpy(array)


@functools.cache
def _keys(size: int) -> NDArray[np.uint64]:
    """Draw fixed odd 64-bit keys [size]."""
    return np.random.default_rng(0).integers(2**63, size=size, dtype=np.uint64) * 2 + 1


def hash_of_tokens(tokens: Tensor) -> int:
    """Hash token ids [tokens] int64 on the host to 64 bits: the multilinear `sum_i k_i x_i`.

    Carter and Wegman, doi:10.1016/0022-0000(79)90044-8. Different lists have the same hash with a
    probability of about 2^-60.
    """
    count = tokens.numel()
    keys = _keys(max(1 << count.bit_length(), 1024))
    total = np.dot(tokens.numpy().view(np.uint64), keys[1 : count + 1])
    return (int(total) + int(keys[0]) * count) % 2**64


def refuse_values(where: str, values: Tensor, is_wrong: Tensor, problem: str) -> None:
    """Raise a ValueError that names the first wrong host value, in any shape."""
    wrong = is_wrong.nonzero()
    if wrong.numel():
        index = wrong[0].tolist()
        raise ValueError(f"{where}{index} is {values[tuple(index)].item()}{problem}")


def has_integers(values: Tensor) -> bool:
    """Return whether a tensor has an integer type, not bool."""
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)


def check_mask(where: str, mask: Tensor) -> None:
    """Raise a ValueError if a host mask of any shape has values except 0 and 1."""
    expected = "0 or 1 (segment ids or weights would be summed as token counts)"
    refuse_values(where, mask, (mask != 0) & (mask != 1), f", expected {expected}")


def check_log_probs(where: str, log_probs: Tensor, is_active: Tensor) -> None:
    """Raise a ValueError if a log-prob is NaN, infinite or above 0 at an active token."""
    # Non-finite values become inf, above 0.
    above = log_probs.nan_to_num(math.inf, neginf=math.inf) > LARGEST_LOG_PROB
    refuse_values(where, log_probs, is_active & above, f" at an active token, expected {LOG_PROB}")


def checked_kept_tokens(where: str, kept: Any, targets: Tensor, loss_mask: Tensor) -> Ragged:
    """Convert a sample's sampling sets to a row of int64 ids per response token, and check that
    each contains its token.
    """
    if not isinstance(kept, Ragged):
        try:
            rows = list(map(list, kept))
            values = host_tensor(list(itertools.chain.from_iterable(rows)))
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(
                f"{where} is invalid ({error}), expected a sequence of integer ids per response "
                "token"
            ) from error
        kept = Ragged(values, offsets_of(host_tensor([*map(len, rows)]).to(torch.int64)))
    ids = kept.values
    if ids.device.type != "cpu" or ids.dim() != 1 or (ids.numel() and not has_integers(ids)):
        raise ValueError(
            f"{where} is {ids.dtype} of shape {list(ids.shape)} on {ids.device}, expected one row "
            "of integer ids per response token on the host"
        )
    if len(kept) != len(targets):
        raise ValueError(
            f"{where} has {len(kept)} sets, expected one per response token ({len(targets)}), "
            "empty for the whole vocabulary"
        )
    sets = Ragged(ids.detach().to(torch.int64), kept.offsets)
    check_sets(where, sets)
    rows_of_ids = sets.row_of_element()
    has_target = sets.sizes == 0
    has_target[rows_of_ids[sets.values == targets[rows_of_ids]]] = True
    missing = (loss_mask & ~has_target).nonzero()[:, 0].tolist()
    if missing:
        raise ValueError(
            f"{where}[{missing[0]}] is a set of {sets.row(missing[0]).numel()} ids without "
            f"{int(targets[missing[0]])}, expected the sampled token in it, or an empty set for "
            "the whole vocabulary"
        )
    return sets


def check_sets(where: str, sets: Ragged) -> None:
    """Raise a ValueError if a set has an id outside any vocabulary, or an id twice."""
    rows, ids = sets.row_of_element(), sets.values
    order = torch.sort(rows * LARGEST_VOCABULARY + ids, stable=True).indices
    again = torch.zeros_like(ids, dtype=torch.bool)
    again[order[1:]] = (ids[order].diff() == 0) & (rows[order].diff() == 0)
    for is_wrong, problem in (
        ((ids < 0) | (ids >= LARGEST_VOCABULARY), ", expected ids in [0, 2^31)"),
        (again, " twice, expected distinct ids"),
    ):
        if is_wrong.any():
            at = int(is_wrong.nonzero()[0])
            raise ValueError(f"{where}[{int(rows[at])}] is a set with id {int(ids[at])}{problem}")


def checked_side_channels(
    name: str, side_channels: Mapping[str, Any], loss_mask: Tensor, total_length: int
) -> dict[str, Tensor | Ragged]:
    """Check the side channels of the sample `name`, and copy the mapping, not the values."""
    for channel, values in side_channels.items():
        where = f"{name}: side_channels[{channel!r}]"
        content = values.values if isinstance(values, Ragged) else values
        if not isinstance(content, Tensor) or content.dim() == 0:
            raise ValueError(f"{where} is a {type(values).__name__}, expected a tensor or a Ragged")
        if content.device.type != "cpu":
            raise ValueError(f"{where} is on {content.device}, expected it on the host")
        if len(values) not in (len(loss_mask), total_length):
            raise ValueError(
                f"{where} has {len(values)} rows, expected one per response token "
                f"({len(loss_mask)}) or per token of the sequence ({total_length})"
            )
        if channel in TEACHER_CHANNELS:
            _check_teacher(where, channel, values, loss_mask)
        # Not teacher_logits, because NaN is legal in padding columns, whose number is unknown here.
        if channel == "teacher_hidden" and content.shape[:-1] == loss_mask.shape:
            is_wrong = loss_mask[:, None] & ~torch.isfinite(content)
            problem = " at an active token, expected a finite number"
            refuse_values(where, content, is_wrong, problem)
    shapes = [list(side_channels[key].shape) for key in TEACHER_CHANNELS if key in side_channels]
    if shapes[1:] and shapes[0] != shapes[1]:
        raise ValueError(
            f"{name}: side_channels['teacher_ids'] has shape {shapes[0]} and "
            f"side_channels['teacher_log_probs'] has shape {shapes[1]}, expected a log-prob per id"
        )
    return dict(side_channels)


def _check_teacher(where: str, channel: str, values: Any, loss_mask: Tensor) -> None:
    """Raise a ValueError if a teacher's top-k ids or log-probs do not form a distribution at an
    active token.
    """
    if not isinstance(values, Tensor) or values.dim() != 2 or len(values) != len(loss_mask):
        shape = list(values.shape) if isinstance(values, Tensor) else "a Ragged"
        raise ValueError(
            f"{where} has shape {shape}, expected a tensor [response_length, k], here "
            f"[{len(loss_mask)}, k]"
        )
    k = values.shape[1]
    if channel == "teacher_ids":
        if not has_integers(values):
            raise ValueError(f"{where} has dtype {values.dtype}, expected integers")
        offsets = torch.arange(len(values) + 1, dtype=torch.int64, device="cpu") * k
        sets = Ragged(values.long().flatten(), offsets)
        check_sets(where, sets.only(loss_mask))
        return
    check_log_probs(where, values, loss_mask[:, None])
    # Rounding to bfloat16 makes q at most q^(1 - 2^-8), so that a sum of 1 becomes at most
    # k^(2^-8).
    log_sum = values.double().logsumexp(1)
    is_more = log_sum > LARGEST_LOG_PROB + HALF_SPACING_OF_BFLOAT16 * math.log(max(k, 1))
    total = f"{where}: the sum of the probabilities of token "
    expected = "at most 1: log-probs of distinct tokens, in nats, at the rollout temperature"
    refuse_values(total, log_sum.exp(), loss_mask & is_more, f", expected {expected}")
