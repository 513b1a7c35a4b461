"""Fixed hashes of samples: a number that says what a sample is, and coefficients by which a sum tells samples apart.

The hash of token ids x is multilinear, `sum_i k_i x_i mod 2^64` with fixed odd 64-bit keys k_i (Carter and Wegman,
doi:10.1016/0022-0000(79)90044-8; as Lemire and Kaser, doi:10.1093/comjnl/bxt070, section 2), and then mixed: one
multiplication a token, and two samples that differ share a hash with a probability of about 2^-44 or less.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_pg.head.ragged import Ragged

Integers = NDArray[np.int64]
Words = NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio, odd: the step of splitmix64's counter."""
MASK = 2**64 - 1
GOLDEN_FRACTION = GOLDEN / 2**64
CHUNK = 128
"""Samples that are hashed at a time."""
HASHES = {"identity", "prompt_hash", "active_coefficients"}
"""What a sample that has been hashed stores."""


class HashedSample(Protocol):
    """What is hashed of a `Sample`, which has the shapes and the meaning."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def response_length(self) -> int: ...
    @property
    def loss_mask(self) -> Tensor: ...
    @property
    def loss_weights(self) -> Tensor | None: ...
    @property
    def kept_tokens(self) -> Ragged | None: ...


def store_hashes(samples: Sequence[HashedSample]) -> None:
    """Stores `num_active_tokens`, `identity`, `prompt_hash` and `active_coefficients` in samples without; see `Sample`.

    The tokens of many samples are one vector, as a call for each sample takes longer than its tokens do.
    """
    samples = [each for each in samples if not HASHES <= vars(each).keys()]
    for start in range(0, len(samples), CHUNK):
        chunk = samples[start : start + CHUNK]
        tokens, masks = [each.tokens for each in chunk], [each.loss_mask for each in chunk]
        weights = [
            mask if each.loss_weights is None else each.loss_weights
            for each, mask in zip(chunk, masks, strict=True)
        ]
        totals = np.array([each.numel() for each in tokens])
        responses = np.array([each.response_length for each in chunk])
        prompts = totals - responses
        (parts,) = _sums(tokens, np.stack([prompts, responses], axis=1).reshape(-1), _keys)
        of_prompts, of_responses = parts.reshape(-1, 2).T
        of_masks, active = _sums(masks, responses, _keys, np.ones)
        (of_positions,) = _sums(weights, responses, _position_coefficients)
        hashed = _token_part(of_prompts + of_responses, totals) + _mask_part(of_masks, responses)
        columns = (
            mixed(hashed),
            mixed(_token_part(of_prompts, prompts)),
            of_positions,
            active.astype(np.int64),
        )
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for each, (identity, prompt_hash, coefficients, count) in zip(chunk, rows, strict=True):
            identity = _with_other_parts(identity, each)
            vars(each).update(
                identity=identity,
                prompt_hash=prompt_hash,
                active_coefficients=coefficient_of(identity) * coefficients,
                num_active_tokens=count,
            )


def hash_of(tokens: Tensor, loss_mask: Tensor | None = None) -> int:
    """The hash, 64 bits, of token ids [tokens] int64 on the host, and of the loss mask [response] bool of the last of them."""
    counts = np.array([tokens.numel()])
    (sums,) = _sums([tokens], counts, _keys)
    hashed = _token_part(sums, counts)
    if loss_mask is not None:
        counts = np.array([loss_mask.numel()])
        (sums,) = _sums([loss_mask], counts, _keys)
        hashed = hashed + _mask_part(sums, counts)
    return int(mixed(hashed)[0])


def _sums(
    vectors: Sequence[Tensor], lengths: Integers, *tables: Callable[[int], NDArray[Any]]
) -> list[NDArray[Any]]:
    """Of each table t `sum_i t_i x_i` of each vector x, modulo 2^64 where the table is of integers; of the parts of vectors
    whose lengths are given, where these are more than the vectors."""
    values = torch.cat(list(vectors)).numpy()
    counts = [vector.numel() for vector in vectors]
    filled = lengths > 0  # reduceat has no empty sum
    starts = (np.cumsum(lengths) - lengths)[filled]
    found = []
    for table in tables:
        of_positions = table(_table_size(max(counts)))
        products = np.concatenate([of_positions[:count] for count in counts])
        products *= values
        sums = np.zeros(len(lengths), dtype=products.dtype)
        if starts.size:
            sums[filled] = np.add.reduceat(products, starts)
        found.append(sums)
    return found


def _token_part(sums: Integers, counts: Integers) -> Words:
    return sums.view(np.uint64) + np.uint64(GOLDEN) * counts.astype(np.uint64)


def _mask_part(sums: Integers, counts: Integers) -> Words:
    # No difference of two token ids is the one that a bit of the mask makes.
    return np.uint64(GOLDEN) * sums.view(np.uint64) + mixed(counts.astype(np.uint64))


def _with_other_parts(number: int, sample: HashedSample) -> int:
    """The hash of tokens and mask, and of the loss weights and kept sets of a sample that has them."""
    vectors: list[tuple[Integers, int]] = []
    if sample.loss_weights is not None:
        vectors.append((sample.loss_weights.numpy().view(np.int32).astype(np.int64), 1))
    if (kept := sample.kept_tokens) is not None:
        vectors += [(each.numpy(), 1 + each.numel()) for each in (kept.values, kept.offsets)]
    for vector, count in vectors:
        total = int(np.dot(_keys(_table_size(vector.size))[: vector.size], vector))
        word = np.array([(number + total + GOLDEN * count) & MASK], dtype=np.uint64)
        number = int(mixed(word)[0])
    return number


def mixed(numbers: Words) -> Words:
    """A bijection of 64-bit integers whose output looks random: the finalizer of splitmix64 (Steele, Lea and Flood,
    doi:10.1145/2660193.2660195)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def coefficient_of(identity: int) -> float:
    """What the tokens of a sample count in the sum of identities: in [0.5, 1.5), by the hash alone."""
    return 0.5 + identity / 2**64


def coefficients_of_positions(count: int) -> Tensor:
    """What the first `count` response tokens of any sample count, [count] float64 in [0.5, 1.5): a view of a fixed table."""
    return torch.from_numpy(_position_coefficients(_table_size(count))[:count])


def coefficient_of_rank(rank: int) -> float:
    """What a data-parallel rank counts, in [0.5, 1.5): multiples of the golden ratio, of which no two are near."""
    return 0.5 + (rank + 1) * GOLDEN_FRACTION % 1.0


def _table_size(count: int) -> int:
    """A power of two, so that few tables are ever made; a longer one begins with a shorter one."""
    return max(1 << (count - 1).bit_length(), 1024) if count else 1024


@functools.cache
def _keys(size: int) -> Integers:
    """Odd keys [size] int64: splitmix64 of the place."""
    counter = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    return (mixed(counter) | np.uint64(1)).view(np.int64)


@functools.cache
def _position_coefficients(size: int) -> NDArray[np.float64]:
    return 0.5 + (_keys(size) >> 11 & (2**53 - 1)) / 2.0**53
