"""The token layout of context parallelism, simulated literally: the oracle of `TokenWindow`.

Sequences are padded, shifted by one to find targets, cut and handed to ranks. Like `tests.oracle`
it shares no code with `megatron_pg`.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """One position of the packed sequence. None: padding, or no response token is scored here."""

    segment: int
    """Which sequence of the packing; the extra padding sequence, if any, is the last."""
    position: int
    """Position inside the sequence, its padding included."""
    token: int | None
    """Index of the token into the concatenation of the unpadded sequences."""
    target: int | None
    """Index, in the same concatenation, of the response token predicted here."""
    response: int | None
    """Index of that response token into the concatenation of all responses."""


def padded_length(total_length: int, cp_size: int) -> int:
    """The length rounded up to two chunks per rank."""
    length = total_length
    while cp_size > 1 and length % (2 * cp_size) != 0:
        length += 1
    return length


def segment_lengths(
    total_lengths: Sequence[int], cp_size: int, pad_to_multiple: int = 1
) -> list[int]:
    """Padded length of every sequence of the packing, the extra padding sequence included.

    The extra one is there where the whole must divide by `pad_to_multiple` and does not, or where
    there is no sample at all; it is as short as it can be and is cut like any other.
    """
    lengths = [padded_length(total_length, cp_size) for total_length in total_lengths]
    extra = 0
    while (total := sum(lengths) + extra) == 0 or total % pad_to_multiple:
        extra = padded_length(extra + 1, cp_size)
    return [*lengths, extra] if extra else lengths


def sequence_rows(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    cp_size: int,
    pad_to_multiple: int = 1,
) -> list[list[Row]]:
    """Every packed sequence, padded but not yet cut: one `Row` per position.

    Targets are the tokens shifted by one, and the shift is done here, on whole sequences.
    """
    sequences = []
    first_token = first_response = 0
    lengths = segment_lengths(total_lengths, cp_size, pad_to_multiple)
    for segment, length in enumerate(lengths):
        total = total_lengths[segment] if segment < len(total_lengths) else 0
        response = response_lengths[segment] if segment < len(total_lengths) else 0
        prompt = total - response
        rows = []
        for position in range(length):
            predicted = position + 1
            is_scored = prompt <= predicted < total
            rows.append(
                Row(
                    segment=segment,
                    position=position,
                    token=first_token + position if position < total else None,
                    target=first_token + predicted if is_scored else None,
                    response=first_response + predicted - prompt if is_scored else None,
                )
            )
        sequences.append(rows)
        first_token += total
        first_response += response
    return sequences


def token_layout(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    cp_size: int,
    pad_to_multiple: int = 1,
) -> list[list[Row]]:
    """The rows that each context-parallel rank holds, in the order in which it holds them.

    Each sequence is cut into `2 * cp_size` chunks; rank r is handed chunks r and
    2 cp_size - 1 - r. Without context parallelism the only rank holds everything.
    """
    ranks: list[list[Row]] = [[] for _ in range(cp_size)]
    sequences = sequence_rows(total_lengths, response_lengths, cp_size, pad_to_multiple)
    for rows in sequences:
        if cp_size == 1:
            ranks[0].extend(rows)
            continue
        chunk_length = len(rows) // (2 * cp_size)
        starts = range(0, len(rows), chunk_length)
        chunks = [rows[start : start + chunk_length] for start in starts]
        for rank in range(cp_size):
            ranks[rank].extend(chunks[rank])
            ranks[rank].extend(chunks[2 * cp_size - 1 - rank])
    return ranks
