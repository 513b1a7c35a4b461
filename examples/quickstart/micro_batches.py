"""Samples into micro-batches of bounded size."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_pg import Sample


def split_into_micro_batches(samples: Sequence[Sample], max_tokens: int) -> list[list[Sample]]:
    """Fill one micro-batch after the other, in order; the same on every rank that holds the same samples.

    Raises:
        ValueError: a sample is longer than a whole micro-batch.
    """
    micro_batches: list[list[Sample]] = [[]]
    room = max_tokens
    for sample in samples:
        if sample.total_length > max_tokens:
            raise ValueError(
                f"{sample.name} has {sample.total_length} tokens: raise --max-tokens-per-microbatch ({max_tokens})"
            )
        if sample.total_length > room:
            micro_batches.append([])
            room = max_tokens
        micro_batches[-1].append(sample)
        room -= sample.total_length
    return micro_batches
