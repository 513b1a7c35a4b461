"""Fixed hashes of samples: a number that says what a sample is, and coefficients by which a sum tells samples apart.

The hash of token ids x is multilinear, `sum_i k_i x_i mod 2^64` with fixed odd 64-bit keys k_i (Carter and Wegman,
doi:10.1016/0022-0000(79)90044-8; as Lemire and Kaser, doi:10.1093/comjnl/bxt070, section 2), and then mixed: one
multiplication a token, and two samples that differ share a hash with a probability of about 2^-44 or less.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_pg.config.policy_loss import LOG_PROB_FIELDS

Integers = NDArray[np.int64]
Words = NDArray[np.uint64]
Table = Callable[[int], NDArray[Any]]
"""A function (size) -> the coefficients of that many positions."""

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio, odd: the step of splitmix64's counter."""
MASK = 2**64 - 1
GOLDEN_FRACTION = GOLDEN / 2**64
CHUNK = 128
"""Samples that are hashed together."""
CRITIC_FIELDS = ("old_values", "returns")
VALUE_FIELDS = ("advantages", *LOG_PROB_FIELDS, *CRITIC_FIELDS)
"""Fields that a trainer may fill after the step is counted. Fields that are filled by then are hashed."""
_NOT_KEPT = torch.zeros(1, dtype=torch.bool)


def filled_fields(samples: Sequence[Any]) -> tuple[str, ...]:
    """List the fields of `VALUE_FIELDS` that all samples have. Advantages of 0 alone are not filled."""
    filled = [
        name
        for name in VALUE_FIELDS
        if not any(value is None for value in map(operator.attrgetter(name), samples))
    ]
    if not any(sample.advantages.any() for sample in samples):
        filled.remove("advantages")
    return tuple(filled)


def store_hashes(samples: Sequence[Any], fields: tuple[str, ...] | None = None) -> None:
    """Store `num_active_tokens`, `identity`, `prompt_hash` and `active_coefficients` in samples; see `Sample`.

    The tokens of many samples are one vector: a call for each sample takes longer than its arithmetic.

    Args:
        samples: of type `Sample`. Samples that are hashed with the same fields already keep their hashes.
        fields: fields of `VALUE_FIELDS` in the identity; None is `filled_fields(samples)`.
    """
    fields = filled_fields(samples) if fields is None else fields
    samples = [sample for sample in samples if vars(sample).get("hashed_fields") != fields]
    for start in range(0, len(samples), CHUNK):
        chunk = samples[start : start + CHUNK]
        tokens, masks = [s.tokens for s in chunk], [s.loss_mask for s in chunk]
        totals = np.array([vector.numel() for vector in tokens])
        responses = np.array([sample.response_length for sample in chunk])
        prompts = totals - responses
        lengths = np.stack([prompts, responses], axis=1).reshape(-1)
        parts = _sums(torch.cat(tokens).numpy(), totals, lengths, _keys)
        prompt_sums, response_sums = parts.reshape(-1, 2).T
        active, mask_sums, position_sums = _sums_of_kept(
            masks, _ones, _keys, _position_coefficients
        )
        weights = {n: s.loss_weights for n, s in enumerate(chunk) if s.loss_weights is not None}
        if weights:
            counts, together = responses[list(weights)], torch.cat(list(weights.values())).numpy()
            position_sums[list(weights)] = _sums(together, counts, counts, _position_coefficients)
        hashed = _token_part(prompt_sums + response_sums, totals) + _mask_part(mask_sums, responses)
        identities = mixed(hashed + _value_part(chunk, responses, fields))
        for n, sample in enumerate(chunk):
            if sample.loss_weights is not None or sample.kept_tokens is not None:
                identities[n] = _with_other_parts(int(identities[n]), sample)
        coefficients = coefficient_of(identities) * position_sums
        columns = (identities, mixed(_token_part(prompt_sums, prompts)), coefficients, active)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for sample, (identity, prompt_hash, total, count) in zip(chunk, rows, strict=True):
            vars(sample).update(
                identity=identity,
                prompt_hash=prompt_hash,
                active_coefficients=total,
                num_active_tokens=count,
                hashed_fields=fields,
            )


def hash_of(tokens: Tensor, loss_mask: Tensor | None = None) -> int:
    """Hash token ids [tokens] int64 on the host, and the loss mask [response] bool of the last of them, to 64 bits."""
    counts = np.array([tokens.numel()])
    hashed = _token_part(_sums(tokens.numpy(), counts, counts, _keys), counts)
    if loss_mask is not None:
        (sums,) = _sums_of_kept([loss_mask], _keys)
        hashed = hashed + _mask_part(sums, np.array([loss_mask.numel()]))
    return int(mixed(hashed)[0])


def _sums(vectors: NDArray[Any], counts: Integers, lengths: Integers, table: Table) -> NDArray[Any]:
    """Compute `sum_i t_i x_i` of a table t over each part of vectors x that lie end to end; of integers, modulo 2^64.

    Args:
        vectors: the vectors x.
        counts: the number of elements of each vector.
        lengths: the lengths of the parts: `counts`, or finer.
        table: the function (size) -> the first t_i.
    """
    factors = table(_table_size(max(counts.tolist())))
    products = np.concatenate([factors[:count] for count in counts.tolist()])
    products *= vectors
    filled = lengths > 0  # reduceat has no empty sum
    starts = (np.cumsum(lengths) - lengths)[filled]
    sums = np.zeros(len(lengths), dtype=products.dtype)
    if starts.size:
        sums[filled] = np.add.reduceat(products, starts)
    return sums


def _sums_of_kept(masks: Sequence[Tensor], *tables: Table) -> list[NDArray[Any]]:
    """Add up each table over the tokens that each mask keeps, run by run: most masks have one run."""
    separated = (part for mask in masks for part in (mask, _NOT_KEPT))
    kept = torch.cat([_NOT_KEPT, *separated]).numpy()
    edges = np.flatnonzero(kept[1:] != kept[:-1])  # first, end, first, end ...
    ends_of_masks = np.cumsum([mask.numel() + 1 for mask in masks])
    mask_of_run = np.searchsorted(ends_of_masks, edges[::2], side="right")
    starts = np.concatenate([[0], ends_of_masks])
    first, end = edges[::2] - starts[mask_of_run], edges[1::2] - starts[mask_of_run]
    totals = []
    for table in tables:
        up_to = _running_sums(table, _table_size(int(end.max(initial=0))))
        sums = np.zeros(len(masks), dtype=up_to.dtype)
        np.add.at(sums, mask_of_run, up_to[end] - up_to[first])
        totals.append(sums)
    return totals


def _value_part(samples: Sequence[Any], responses: Integers, fields: Sequence[str]) -> Words:
    """Add up the hashes of the fields' bits, each times a number of the field."""
    total = np.zeros(len(samples), dtype=np.uint64)
    for name in fields:
        columns = (getattr(sample, name) for sample in samples)
        values = [
            torch.zeros(length) if value is None else value
            for value, length in zip(columns, responses.tolist(), strict=True)
        ]
        sums = _sums(torch.cat(values).numpy().view(np.int32), responses, responses, _keys)
        total += _FACTORS[name] * sums.view(np.uint64)
    return total


def _token_part(sums: Integers, counts: Integers) -> Words:
    return sums.view(np.uint64) + np.uint64(GOLDEN) * counts.astype(np.uint64)


def _mask_part(sums: Integers, counts: Integers) -> Words:
    # No difference of two token ids is the one that a bit of the mask makes.
    return np.uint64(GOLDEN) * sums.view(np.uint64) + mixed(counts.astype(np.uint64))


def _with_other_parts(number: int, sample: Any) -> int:
    """Extend the hash of tokens and mask by the loss weights and kept sets of a sample."""
    vectors: list[tuple[Integers, int]] = []
    if sample.loss_weights is not None:
        vectors.append((sample.loss_weights.numpy().view(np.int32).astype(np.int64), 1))
    if (kept := sample.kept_tokens) is not None:
        vectors += [(ids.numpy(), 1 + ids.numel()) for ids in (kept.values, kept.offsets)]
    for vector, count in vectors:
        total = int(np.dot(_keys(_table_size(vector.size))[: vector.size], vector))
        word = np.array([(number + total + GOLDEN * count) & MASK], dtype=np.uint64)
        number = int(mixed(word)[0])
    return number


def mixed(numbers: Words) -> Words:
    """Map 64-bit integers one to one to ones that look random.

    The finalizer of splitmix64 (Steele, Lea and Flood, doi:10.1145/2660193.2660195).
    """
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


_FACTORS = {
    name: mixed(np.array([number], dtype=np.uint64)) | np.uint64(1)
    for number, name in enumerate(VALUE_FIELDS, start=1)
}
"""The odd factor of each field's bits."""


def coefficients_of(samples: Sequence[Any], fields: tuple[str, ...]) -> Tensor:
    """Compute the coefficients [len(samples)] float64 of samples whose identities have these fields."""
    store_hashes(samples, fields)
    identities = np.array([vars(sample)["identity"] for sample in samples], dtype=np.uint64)
    return torch.as_tensor(coefficient_of(identities), dtype=torch.float64)


def coefficient_of(identity: Any) -> Any:
    """Compute the coefficient, in [0.5, 1.5), of the tokens of a sample from its hash; elementwise for arrays."""
    return 0.5 + identity / 2.0**64


def coefficients_of_positions(count: int) -> Tensor:
    """Return the coefficients of the first response tokens of any sample, [count] float64 in [0.5, 1.5), from a fixed table."""
    return torch.from_numpy(_position_coefficients(_table_size(count))[:count])


def coefficient_of_rank(rank: int) -> float:
    """Compute the coefficient, in [0.5, 1.5), of a data-parallel rank: multiples of the golden ratio are far apart."""
    return 0.5 + (rank + 1) * GOLDEN_FRACTION % 1.0


def _table_size(count: int) -> int:
    """Round up to a power of two, so that few tables are made."""
    return max(1 << (count - 1).bit_length(), 1024) if count else 1024


@functools.cache
def _keys(size: int) -> Integers:
    """Odd keys [size] int64: splitmix64 of the place."""
    counter = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    return (mixed(counter) | np.uint64(1)).view(np.int64)


@functools.cache
def _position_coefficients(size: int) -> NDArray[np.float64]:
    # Of 32 bits, so that the sums of a million of them are exact, in whatever order.
    return 0.5 + (_keys(size) >> 32 & (2**32 - 1)) / 2.0**32


def _ones(size: int) -> Integers:
    return np.ones(size, dtype=np.int64)


@functools.cache
def _running_sums(table: Table, size: int) -> NDArray[Any]:
    """Compute the sums of the first 0, 1, ..., size entries."""
    return np.concatenate([[0], table(size)]).cumsum()
