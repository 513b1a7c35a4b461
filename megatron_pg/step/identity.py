"""Fixed hashes of samples: a number that says what a sample is, and coefficients by which a sum tells samples apart.

The hash of token ids x is multilinear, `sum_i k_i x_i mod 2^64` with fixed odd 64-bit keys k_i (Carter and Wegman,
doi:10.1016/0022-0000(79)90044-8; as Lemire and Kaser, doi:10.1093/comjnl/bxt070, section 2), and then mixed: one
multiplication a token, and two samples that differ share a hash with a probability of about 2^-44 or less.
"""

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

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio, odd: the step of splitmix64's counter."""
CHUNK = 128
"""Samples that are hashed together."""
CRITIC_FIELDS = ("old_values", "returns")
VALUE_FIELDS = ("advantages", *LOG_PROB_FIELDS, *CRITIC_FIELDS)
"""Fields that a trainer may fill after the step is counted. Fields that are filled by then are hashed."""
_NOT_KEPT = torch.zeros(1, dtype=torch.bool, device="cpu")
_NONE = _NOT_KEPT[:0]


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
    """Store `num_active_tokens`, `identity`, `prompt_hash`, `active_coefficients` and `loss_weight` in samples; see `Sample`.

    The identity has the `fields` of `VALUE_FIELDS`, `filled_fields(samples)` where None. Samples that are hashed with them
    already keep their hashes. The tokens of many samples are one vector: a call for each takes longer than its arithmetic.
    """
    fields = filled_fields(samples) if fields is None else fields
    samples = [sample for sample in samples if vars(sample).get("hashed_fields") != fields]
    for start in range(0, len(samples), CHUNK):
        chunk = samples[start : start + CHUNK]
        tokens, weights = [s.tokens for s in chunk], [s.loss_weights for s in chunk]
        responses = np.array([sample.response_length for sample in chunk])
        prompts = np.array([vector.numel() for vector in tokens]) - responses
        parts = np.stack([prompts, responses], axis=1).reshape(-1)
        prompt_sums, response_sums = _sums(_keys, tokens, parts).reshape(-1, 2).T
        active, mask_sums, position_sums = _sums_of_kept(
            [sample.loss_mask for sample in chunk], _ones, _keys, _position_coefficients
        )
        has_weights = np.array([vector is not None for vector in weights])
        if has_weights.any():
            weighted = _sums(_position_coefficients, _filled(weights))
            position_sums = np.where(has_weights, weighted, position_sums)
        hashed = prompt_sums + response_sums + _FACTORS["loss_mask"] * mask_sums
        hashed += _value_sums(chunk, fields)
        identities = mixed(
            _with_count(hashed, prompts + responses) + mixed(responses.astype(np.uint64))
        )
        columns = {
            "identity": identities,
            "prompt_hash": mixed(_with_count(prompt_sums, prompts)),
            "active_coefficients": coefficient_of(identities) * position_sums,
            "num_active_tokens": active,
        }
        # Sums of loss weights here too: a cached property's first call takes longer than all of these.
        sums = [None if vector is None else float(vector.double().sum()) for vector in weights]
        rows = zip(*(column.tolist() for column in columns.values()), sums, strict=True)
        names = (*columns, "loss_weight")
        for sample, row in zip(chunk, rows, strict=True):
            vars(sample).update(zip(names, row, strict=True), hashed_fields=fields)


def hash_of(tokens: Tensor) -> int:
    """Hash token ids [tokens] int64 on the host to 64 bits."""
    return int(mixed(_with_count(_sums(_keys, [tokens]), np.array([len(tokens)])))[0])


def _value_sums(samples: Sequence[Any], fields: Sequence[str]) -> Integers:
    """Hash the bits of fields, the loss weights and the kept sets, [samples] int64."""
    names = (*fields, "loss_weights", "kept_tokens")
    columns = {name: [getattr(sample, name) for sample in samples] for name in names}
    columns["kept_tokens"] = [  # empty sets are not none
        None if kept is None else torch.cat([kept.sizes + 1, kept.values])
        for kept in columns["kept_tokens"]
    ]
    total = np.zeros(len(samples), dtype=np.int64)
    for name, vectors in columns.items():
        if any(vector is not None for vector in vectors):
            total += _FACTORS[name] * _sums(_keys, _filled(vectors))
    return total


def _filled(vectors: Sequence[Tensor | None]) -> list[Tensor]:
    """Put an empty vector in the place of None."""
    return [_NONE if vector is None else vector for vector in vectors]


def _sums(table: Table, vectors: Sequence[Tensor], lengths: Integers | None = None) -> NDArray[Any]:
    """Compute `sum_i t_i x_i` of a table t over each vector x, or over its parts of these lengths.

    Under an integer table it is a sum of integers, or of the bits of floats, modulo 2^64.
    """
    counts = [vector.numel() for vector in vectors]
    factors = table(max(counts))
    products = np.concatenate([factors[:count] for count in counts])
    values = torch.cat(list(vectors)).numpy()
    is_hash = products.dtype == np.int64
    products *= values.view(np.int32) if is_hash and values.dtype == np.float32 else values
    lengths = np.array(counts) if lengths is None else lengths
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
    starts = np.cumsum([0, *(mask.numel() + 1 for mask in masks)])
    mask_of_run = np.searchsorted(starts, edges[::2], side="right") - 1
    first, end = edges[::2] - starts[mask_of_run], edges[1::2] - starts[mask_of_run]
    totals = []
    for table in tables:
        up_to = _running_sums(table)(end.max(initial=0) + 1)
        sums = np.zeros(len(masks), dtype=up_to.dtype)
        np.add.at(sums, mask_of_run, up_to[end] - up_to[first])
        totals.append(sums)
    return totals


def _with_count(sums: Integers, counts: Integers) -> Words:
    return sums.view(np.uint64) + np.uint64(GOLDEN) * counts.astype(np.uint64)


def mixed(numbers: Words) -> Words:
    """Map 64-bit integers one to one to ones that look random.

    The finalizer of splitmix64 (Steele, Lea and Flood, doi:10.1145/2660193.2660195).
    """
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


# No difference of two token ids is the one that a bit of the mask makes.
_FACTORS = {"loss_mask": np.array([GOLDEN], dtype=np.uint64).view(np.int64)} | {
    name: (mixed(np.array([number], dtype=np.uint64)) | np.uint64(1)).view(np.int64)
    for number, name in enumerate((*VALUE_FIELDS, "loss_weights", "kept_tokens"), start=1)
}
"""The odd factor [1] int64 of each field."""


def coefficients_of(samples: Sequence[Any], fields: tuple[str, ...]) -> Tensor:
    """Compute the coefficients [len(samples)] float64 of samples whose identities have these fields."""
    store_hashes(samples, fields)
    identities = np.array([vars(sample)["identity"] for sample in samples], dtype=np.uint64)
    return torch.from_numpy(coefficient_of(identities))


def coefficient_of(identity: Any) -> Any:
    """Compute the coefficient, in [0.5, 1.5), of the tokens of a sample from its hash; elementwise for arrays."""
    return 0.5 + identity / 2.0**64


def coefficients_of_positions(count: int) -> Tensor:
    """Return the coefficients of the first response tokens of any sample, [count] float64 in [0.5, 1.5), from a fixed table."""
    return torch.from_numpy(_position_coefficients(count))


def coefficient_of_rank(rank: Any) -> Any:
    """Compute the coefficient, in [0.5, 1.5), of a data-parallel rank: multiples of the golden ratio are far apart.

    Elementwise for arrays.
    """
    return 0.5 + (rank + 1) * (GOLDEN / 2**64) % 1.0


def _first_entries(table: Table) -> Table:
    """Cache tables of sizes that are powers of two, so that few are made, and return their first entries."""
    cached = functools.cache(table)
    return lambda count: cached(max(1 << int(count - 1).bit_length(), 1024))[:count]


@_first_entries
def _keys(size: int) -> Integers:
    """Odd keys [size] int64: splitmix64 of the place."""
    counter = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    return (mixed(counter) | np.uint64(1)).view(np.int64)


@_first_entries
def _position_coefficients(size: int) -> NDArray[np.float64]:
    # Of 32 bits, so that the sums of a million of them are exact, in whatever order.
    return 0.5 + (_keys(size) >> 32 & (2**32 - 1)) / 2.0**32


@functools.cache
def _running_sums(table: Table) -> Table:
    """Make the table of the sums of the first 0, 1, ... entries."""
    return _first_entries(lambda size: np.concatenate([[0], table(size)]).cumsum())


_ones = functools.partial(np.ones, dtype=np.int64)
