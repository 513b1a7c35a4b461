"""What travels with the tokens beside the numbers of the loss: the kept sets, and fields of a user's own."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_pg.head.ragged import Ragged, offsets_of

NUM_IDS = 2**31
"""Token ids of a kept set are below it."""


def checked_kept_tokens(given: Any, name: str, tokens: Tensor, loss_mask: Tensor) -> Ragged:
    """The sets of a sample's response tokens, [response_length] rows of int64 ids on the host.

    Args:
        given: a sequence of ids for each response token, or a `Ragged` of them; an empty one where all tokens were kept.
        tokens: [total_length] of the sample, to find the response tokens in their sets; masked ones need not be.

    Raises:
        ValueError: naming the sample, the position and the id.
    """
    where = f"{name}: kept_tokens"
    kept = _ragged(given, where)
    if len(kept) != loss_mask.numel():
        raise ValueError(
            f"{where} has {len(kept)} sets, expected one per response token ({loss_mask.numel()}); an empty one where all "
            "tokens were kept"
        )
    rows, ids = kept.row_of_element(), kept.values
    _refuse_id(where, kept, (ids < 0) | (ids >= NUM_IDS), ", expected an id of the vocabulary")
    _, first = torch.sort(rows * NUM_IDS + ids, stable=True)
    again = torch.zeros_like(ids, dtype=torch.bool)
    again[first[1:]] = (ids[first].diff() == 0) & (rows[first].diff() == 0)
    _refuse_id(where, kept, again, " twice, expected distinct ids: it would count twice")
    targets = tokens[tokens.numel() - loss_mask.numel() :]
    has_target = kept.sizes == 0
    has_target[rows[ids == targets[rows]]] = True
    missing = (loss_mask & ~has_target).nonzero()
    if missing.numel():
        at = int(missing[0])
        raise ValueError(
            f"{where}[{at}] has {kept.row(at).numel()} ids and not {int(targets[at])}, the token that was sampled there: "
            "expected the set that it was drawn from, or an empty one where all tokens were kept"
        )
    return kept


def checked_side_channels(
    given: Mapping[str, Any], name: str, lengths: tuple[int, int]
) -> dict[str, Tensor | Ragged]:
    """The side channels of a sample by their names, on the host: a copy of the mapping, not of the values.

    Args:
        lengths: response and total length: how many rows a channel may have.

    Raises:
        ValueError: naming the sample and the channel.
    """
    channels: dict[str, Tensor | Ragged] = {}
    for channel, values in given.items():
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


def _ragged(given: Any, where: str) -> Ragged:
    if isinstance(given, Ragged):
        kept = given
    else:
        try:
            rows = list(map(list, given))
            values = torch.as_tensor(list(itertools.chain.from_iterable(rows)))
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"{where} is no sequence of sequences of ids ({error})") from error
        kept = Ragged(values, offsets_of(torch.tensor(list(map(len, rows)), dtype=torch.int64)))
    values = kept.values
    is_integer = not (values.is_floating_point() or values.dtype == torch.bool)
    if values.device.type != "cpu" or values.dim() != 1 or (values.numel() and not is_integer):
        raise ValueError(
            f"{where} holds {values.dtype} of shape {list(values.shape)} on {values.device}, expected integer ids on the host"
        )
    return Ragged(values.detach().to(torch.int64), kept.offsets)


def _refuse_id(where: str, kept: Ragged, is_wrong: Tensor, problem: str) -> None:
    wrong = is_wrong.nonzero()
    if wrong.numel():
        at, row = int(wrong[0]), int(kept.row_of_element()[wrong[0]])
        raise ValueError(f"{where}[{row}] has id {int(kept.values[at])}{problem}")
