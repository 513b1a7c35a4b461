"""Experts that a rollout engine chose for a sample's tokens, per layer: `Sample.routed_experts`.

They are stored by token, so that packing is one copy, as uint8 if possible and else as int16. A row
without a choice is 255 in uint8 and -1 in int16.
"""

import bisect
import itertools
from collections.abc import MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_pg.step.values import has_integers, host_tensor

LARGEST_ID = 2**15 - 1

_largest: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
"""The largest id per tensor in a sample, so that `dataclasses.replace` does not check again."""


def no_choice(experts: Tensor) -> int:
    """Return the value in rows without a choice."""
    return 255 if experts.dtype == torch.uint8 else -1


def checked_routed_experts(where: str, routed: Any, total_length: int) -> Tensor:
    """Convert the ids [layers, total_length, k] to uint8 or int16, or raise a ValueError if no
    router can choose them.
    """
    if isinstance(routed, Tensor) and routed in _largest and routed.shape[1] == total_length:
        return routed
    try:
        experts = host_tensor(routed)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{where} is not an array of numbers ({error})") from error
    shape = list(experts.shape)
    if len(shape) != 3 or shape[1] != total_length or not shape[0] * shape[2]:
        raise ValueError(
            f"{where} has shape {shape}, expected [layers, total_length, k], here [layers, "
            f"{total_length}, k]. If the engine omits the last token, use routed_experts_of_engine."
        )
    if not has_integers(experts) or experts.device.type != "cpu":
        raise ValueError(
            f"{where} is {experts.dtype} on {experts.device}, expected integers on the host"
        )
    # int8 cannot represent the bound below, and other unsigned types cannot be compared.
    if experts.dtype not in (torch.uint8, torch.int16):
        experts = experts.to(torch.int64)
    if experts.dtype == torch.uint8:
        is_none = experts == 255
    else:
        is_none = experts == -1
        is_beyond = (experts < -1) | (experts > LARGEST_ID)
        problem = f"expected 0 to {LARGEST_ID}, or -1 for no choice"
        _refuse(where, experts, is_beyond, problem)
        dtype = torch.uint8 if int(experts.max()) < 255 else torch.int16
        experts = experts.to(dtype)
    has_some = is_none.any(2, keepdim=True) & ~is_none
    _refuse(
        where, experts, has_some, "in a row with -1: pass all k experts of a token, or -1 for each"
    )
    is_again = torch.zeros_like(is_none)
    for shift in range(1, shape[2] // 2 + 1):  # these rotations compare every pair in a row
        is_again |= experts == experts.roll(shift, 2)
    problem = "twice: a router chooses k different experts (pass -1 for a layer without experts)"
    _refuse(where, experts, is_again & ~is_none, problem)
    by_token = experts.transpose(0, 1).clone(memory_format=torch.contiguous_format)
    stored = by_token.transpose(0, 1)
    _largest[stored] = int(experts.masked_fill(is_none, 0).max())
    return stored


def largest_expert(experts: Tensor) -> int:
    """Return the largest expert id in a sample."""
    if experts not in _largest:  # from a different process
        _largest[experts] = int(experts.masked_fill(experts == no_choice(experts), 0).max())
    return _largest[experts]


def _refuse(where: str, experts: Tensor, is_wrong: Tensor, problem: str) -> None:
    if is_wrong.any():
        layer, position, place = is_wrong.nonzero()[0].tolist()
        expert = int(experts[layer, position, place])
        raise ValueError(
            f"{where}: layer {layer}, position {position} has expert {expert}, {problem}"
        )


def routed_experts_of_tokens(parts: Sequence[Tensor], token_indices: Tensor) -> Tensor:
    """Lay out the ids [local_tokens, layers, k] of this rank's tokens in one copy. Padding has no
    choice.

    After the process has initialized CUDA, the result is in pinned memory, which saves a copy on
    the host.

    Args:
        parts: per sample [layers, total_length, k] from `checked_routed_experts`.
        token_indices: see `TokenWindow`.

    Raises:
        ValueError: samples have different numbers of layers or of experts per token.
    """
    shapes = [[part.shape[0], part.shape[2]] for part in parts]
    if len(set(map(tuple, shapes))) > 1:
        other = [shape == shapes[0] for shape in shapes].index(False)
        raise ValueError(
            f"routed_experts has [layers, k] {shapes[0]} in sample 0 of the micro-batch and "
            f"{shapes[other]} in sample {other}: they must be equal in every sample"
        )
    dtype = torch.uint8 if all(part.dtype == torch.uint8 for part in parts) else torch.int16
    by_token = [_as_type(part.transpose(0, 1), dtype).numpy() for part in parts]
    ends = list(itertools.accumulate(map(len, by_token)))
    indices = token_indices.numpy()
    is_pinned = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    shape = len(indices), *by_token[0].shape[1:]
    laid_out = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=is_pinned)
    rows = laid_out.numpy()
    # In a run, tokens ascend by one, also across consecutive samples. Padding is a run too.
    is_end = np.where(indices[:-1] < 0, indices[1:] >= 0, np.diff(indices) != 1)
    place = 0
    for end in [*(np.flatnonzero(is_end) + 1).tolist(), len(indices)]:
        while place < end:
            index, stop = int(indices[place]), end
            if index < 0:
                rows[place:stop] = no_choice(laid_out)
            else:
                number = bisect.bisect_right(ends, index)
                stop = min(end, place + ends[number] - index)
                begin = len(by_token[number]) + index - ends[number]
                rows[place:stop] = by_token[number][begin : begin + stop - place]
            place = stop
    return laid_out


def _as_type(experts: Tensor, dtype: torch.dtype) -> Tensor:
    if experts.dtype == dtype:
        return experts
    return experts.to(dtype).masked_fill_(experts == no_choice(experts), -1)


def routed_experts_of_engine(experts: Any, total_length: int, *, most_missing: int = 1) -> Tensor:
    """Convert the experts that vLLM or SGLang returns for a sequence from `[tokens, layers, k]`
    integers to `[layers, total_length, k]`.

    An engine never runs the last token that it samples, so the last token has no entry. For tokens
    without an entry the trainer's router chooses. No response token is predicted from the last one.
    A layer with only zeros has no experts: the engine never wrote its buffer.

    Args:
        experts: the engine's result for prompt and response, as a NumPy array, a tensor or lists.
        total_length: the tokens in prompt and response.
        most_missing: the number of final tokens that may lack an entry. More than one if a sample
            ends with a tool's text.

    Raises:
        ValueError: the experts are not integers, have the wrong number of dimensions, or have too
            many or too few entries.
    """
    given = torch.tensor(np.asarray(experts), device="cpu")
    if not has_integers(given):
        raise ValueError(f"the engine's routed experts are {given.dtype}, expected integers")
    missing = total_length - len(given)
    if given.dim() != 3 or not 0 <= missing <= most_missing:
        raise ValueError(
            f"the engine's routed experts have shape {list(given.shape)}, expected [tokens, "
            f"layers, k] for {total_length} tokens of prompt and response, or up to {most_missing} "
            "fewer at the end. Prepend the prompt's experts if the engine returns them separately, "
            "or raise most_missing."
        )
    by_layer = torch.nn.functional.pad(given.to(torch.int64), (0, 0, 0, 0, 0, missing), value=-1)
    by_layer = by_layer.transpose(0, 1)
    if given.shape[2] > 1:
        has_no_experts = (given == 0).all(2).all(0)
        by_layer[has_no_experts] = -1
    return by_layer
