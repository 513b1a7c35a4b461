"""The sets that vLLM and SGLang sampled from, as they return them, into `Sample.kept_tokens` or a
rollout file's column.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def kept_tokens_of_engine(mask: Any, response_ids: Sequence[int]) -> list[list[int]]:
    """Read an engine's sampling mask: the ids that each response token was sampled from.

    A list of ids for each token (`sampling_mask` of vLLM's `/inference/v1/generate`,
    `output_token_sampling_mask` of SGLang's `meta_info`), or an object or a mapping with
    `token_ids` and, where these are flat, `offsets` (vLLM's `SamplingMask`) or `lengths` (SGLang's
    `SamplingMaskChunk`). For text of a tool within a response, put empty sets in between.

    Args:
        mask: what the engine returned of one answer, as lists or arrays.
        response_ids: the tokens that the engine sampled.

    Returns:
        A list of ids for each token, in the engine's order.

    Raises:
        ValueError: no mask, another number of sets than tokens, or a set that lacks its token, by
            position.
    """
    if mask is None:
        raise ValueError(
            "the engine returned no sampling mask: serve vLLM with --return-sampling-mask, ask "
            "SGLang for "
            '"return_sampling_mask": true, and give both a finite top_k'
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
            f"expected one for each: cut both at "
            "the same token"
        )
    for position, (token, kept) in enumerate(zip(response_ids, sets, strict=True)):
        if token not in kept:
            raise ValueError(
                f"set {position} of the engine's sampling mask has {len(kept)} ids without "
                f"{token}, the token that it sampled: "
                "give the tokens and the mask of the same answer"
            )
    return sets
