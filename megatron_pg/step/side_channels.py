"""Fields that travel with the tokens beside the numbers of the loss: kept sets, and fields of a user's own."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_pg.head.ragged import Ragged, offsets_of

LARGEST_VOCABULARY = 2**31
"""Ids of a kept set are below it."""


class WrongSet(ValueError):
    """Kept sets that cannot be what a token was sampled from."""

    def __init__(self, name: str, at: int | None, found: str, expected: str) -> None:
        self.field = "kept_tokens" if at is None else f"kept_tokens[{at}]"
        self.found, self.expected = found, expected
        super().__init__(f"{name}: {self.field} is {found}, expected {expected}")


def checked_kept_tokens(
    kept_tokens: Any,
    name: str,
    tokens: Tensor,
    loss_mask: Tensor,
    num_ids: int = LARGEST_VOCABULARY,
) -> Ragged:
    """Check the kept sets of a sample and convert them to [response_length] rows of int64 ids on the host.

    Args:
        kept_tokens: a sequence of ids for each response token, or a `Ragged` of them; empty where all tokens were kept.
        tokens: [total_length] of the sample, to find the response tokens in their sets; masked ones need not be.
        num_ids: ids are below it.

    Raises:
        WrongSet: naming the sample, the position and the id.
    """
    length = loss_mask.numel()
    kept = _ragged(kept_tokens, name)
    if len(kept) != length:
        expected = f"one for each response token ({length}), empty where all tokens were kept"
        raise WrongSet(name, None, f"of {len(kept)} sets", expected)
    rows, ids = kept.row_of_element(), kept.values
    order = torch.sort(rows * LARGEST_VOCABULARY + ids, stable=True).indices
    again = torch.zeros_like(ids, dtype=torch.bool)
    again[order[1:]] = (ids[order].diff() == 0) & (rows[order].diff() == 0)
    for is_wrong, problem, expected in (
        ((ids < 0) | (ids >= num_ids), "", f"ids of the vocabulary, 0 or more and below {num_ids}"),
        (again, " twice", "distinct ids: it would count twice"),
    ):
        wrong = is_wrong.nonzero()[:, 0]
        if wrong.numel():
            found = f"a set with id {int(ids[wrong[0]])}{problem}"
            raise WrongSet(name, int(rows[wrong[0]]), found, expected)
    targets = tokens[tokens.numel() - length :]
    has_target = kept.sizes == 0
    has_target[rows[ids == targets[rows]]] = True
    missing = (loss_mask & ~has_target).nonzero()[:, 0]
    if missing.numel():
        at = int(missing[0])
        found = f"a set of {kept.row(at).numel()} ids without {int(targets[at])}"
        expected = "the token that was sampled there among them, or an empty set where all tokens were kept"
        raise WrongSet(name, at, found, expected)
    return kept


def checked_side_channels(
    side_channels: Mapping[str, Any], name: str, lengths: tuple[int, int]
) -> dict[str, Tensor | Ragged]:
    """Check the side channels of a sample and copy the mapping, not the values.

    Args:
        lengths: response and total length: how many rows a channel may have.

    Raises:
        ValueError: naming the sample and the channel.
    """
    channels: dict[str, Tensor | Ragged] = {}
    for channel, values in side_channels.items():
        where = f"{name}: side_channels[{channel!r}]"
        if not isinstance(values, (Tensor, Ragged)) or (
            isinstance(values, Tensor) and values.dim() == 0
        ):
            raise ValueError(f"{where} is a {type(values).__name__}, expected a tensor or a Ragged")
        device = values.values.device if isinstance(values, Ragged) else values.device
        if device.type != "cpu":
            raise ValueError(f"{where} is on {device}, expected it on the host")
        if len(values) not in lengths:
            raise ValueError(
                f"{where} has {len(values)} rows, expected one per response token ({lengths[0]}) or per token of the "
                f"sequence ({lengths[1]})"
            )
        channels[channel] = values
    return channels


def _ragged(kept_tokens: Any, name: str) -> Ragged:
    expected = "a sequence of integer ids for each response token, on the host"
    if isinstance(kept_tokens, Ragged):
        kept = kept_tokens
    else:
        try:
            rows = list(map(list, kept_tokens))
            values = torch.as_tensor(list(itertools.chain.from_iterable(rows)))
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise WrongSet(name, None, f"no such thing ({error})", expected) from error
        kept = Ragged(values, offsets_of(torch.tensor(list(map(len, rows)), dtype=torch.int64)))
    values = kept.values
    is_integer = not (values.is_floating_point() or values.dtype == torch.bool)
    if values.device.type != "cpu" or values.dim() != 1 or (values.numel() and not is_integer):
        found = f"{values.dtype} of shape {list(values.shape)} on {values.device}"
        raise WrongSet(name, None, found, expected)
    return Ragged(values.detach().to(torch.int64), kept.offsets)
