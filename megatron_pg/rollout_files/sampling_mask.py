"""Conversion of vLLM's and SGLang's sampling sets to `Sample.kept_tokens` or a rollout file's
column.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def kept_tokens_of_engine(mask: Any, response_ids: Sequence[int]) -> list[list[int]]:
    """Convert an engine's sampling mask to the ids that each response token was sampled from.

    The mask is a list of ids per token (`sampling_mask` in vLLM's `/inference/v1/generate`,
    `output_token_sampling_mask` in SGLang's `meta_info`), or an object or mapping with `token_ids`
    and, if they are flat, `offsets` (vLLM's `SamplingMask`) or `lengths` (SGLang's
    `SamplingMaskChunk`). For a tool's text within a response, insert empty sets.

    Args:
        mask: the engine's mask for one response, as lists or arrays.
        response_ids: the tokens that the engine sampled.

    Returns:
        A list of ids per token, in the engine's order.

    Raises:
        ValueError: there is no mask, the numbers of sets and tokens differ, or a set lacks its
            token. The message has the position.
    """
    if mask is None:
        raise ValueError(
            "the engine returned no sampling mask. Use vLLM with --return-sampling-mask, SGLang "
            'with "return_sampling_mask": true, and both with a finite top_k.'
        )
    ids, offsets, lengths = (
        mask.get(name) if isinstance(mask, Mapping) else getattr(mask, name, None)
        for name in ("token_ids", "offsets", "lengths")
    )
    ids = mask if ids is None else ids
    if lengths is not None:
        offsets = itertools.accumulate(lengths, initial=0)
    if offsets is not None:
        ids = [ids[start:end] for start, end in itertools.pairwise(offsets)]
    sets = [list(map(int, row)) for row in ids]
    if len(sets) != len(response_ids):
        raise ValueError(
            f"the engine's sampling mask has {len(sets)} sets for {len(response_ids)} tokens, "
            "expected one per token. Truncate both at the same token."
        )
    for position, (token, kept) in enumerate(zip(response_ids, sets, strict=True)):
        if token not in kept:
            raise ValueError(
                f"set {position} of the engine's sampling mask has {len(kept)} ids without "
                f"{token}, the sampled token. Pass tokens and mask of the same response."
            )
    return sets
