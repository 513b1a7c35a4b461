"""Fixed hashes of samples: a number that says what a sample is, and coefficients by which a sum tells samples apart.

The hash of token ids x is multilinear, `sum_i k_i x_i mod 2^64` with fixed odd 64-bit keys k_i (Carter and Wegman,
doi:10.1016/0022-0000(79)90044-8; as Lemire and Kaser, doi:10.1093/comjnl/bxt070, section 2), and then mixed: one
multiplication a token, and two samples that differ share a hash with a probability of about 2^-44 or less.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio, odd: the step of splitmix64's counter."""
MASK = 2**64 - 1
GOLDEN_FRACTION = GOLDEN / 2**64


def hash_of(
    tokens: Tensor,
    loss_mask: Tensor | None = None,
    loss_weights: Tensor | None = None,
    *more: Tensor,
) -> int:
    """The hash, 64 bits, of token ids [tokens] int64 on the host, of the loss mask [response] bool and the loss weights
    [response] float32 of the last of them, and of further vectors of int64."""
    count = tokens.numel()
    keys = _keys(_table_size(count))[:count]
    total = int(np.dot(keys, tokens.numpy())) + GOLDEN * count
    if loss_mask is not None:
        # No difference of two token ids is the one that a bit of the mask makes.
        active = np.dot(keys[: loss_mask.numel()], loss_mask.numpy())
        total += GOLDEN * int(active) + mixed(loss_mask.numel())
    if loss_weights is not None:
        bits = loss_weights.numpy().view(np.int32).astype(np.int64)
        total = mixed(total) + int(np.dot(keys[: bits.size], bits)) + GOLDEN
    for vector in more:
        keys = _keys(_table_size(vector.numel()))[: vector.numel()]
        total = mixed(total) + int(np.dot(keys, vector.numpy())) + GOLDEN * (1 + vector.numel())
    return mixed(total)


def mixed(number: int) -> int:
    """A bijection of 64-bit integers whose output looks random: the finalizer of splitmix64 (Steele, Lea and Flood,
    doi:10.1145/2660193.2660195)."""
    number &= MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


def coefficient_of(identity: int) -> float:
    """What the tokens of a sample count in the sum of identities: in [0.5, 1.5), by the hash alone."""
    return 0.5 + identity / 2**64


def coefficients_of_positions(count: int) -> Tensor:
    """What the first `count` response tokens of any sample count, [count] float64 in [0.5, 1.5): a view of a fixed table."""
    return _position_coefficients(_table_size(count))[:count]


def coefficient_of_rank(rank: int) -> float:
    """What a data-parallel rank counts, in [0.5, 1.5): multiples of the golden ratio, of which no two are near."""
    return 0.5 + (rank + 1) * GOLDEN_FRACTION % 1.0


def _table_size(count: int) -> int:
    """A power of two, so that few tables are ever made; a longer one begins with a shorter one."""
    return max(1 << (count - 1).bit_length(), 1024) if count else 1024


@functools.cache
def _keys(size: int) -> NDArray[np.int64]:
    """Odd keys [size] int64: splitmix64 of the place."""
    number = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((number ^ (number >> np.uint64(31))) | np.uint64(1)).view(np.int64)


@functools.cache
def _position_coefficients(size: int) -> Tensor:
    return torch.from_numpy(0.5 + (_keys(size) >> 11 & (2**53 - 1)) / 2.0**53)
