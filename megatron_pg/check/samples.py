"""The step that a check runs: samples that hide no mistake, and the micro-batches that they are cut into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_pg.check.options import LEAN_PERIOD, CheckOptions
from megatron_pg.step.sample import Sample

T = TypeVar("T")
PROMPTS, RESPONSES = (3, 2, 1, 2), (5, 2, 8, 1, 6, 4, 9, 3, 4, 5)
"""Prompt tokens of the groups and response tokens of the samples, over and over. Short, and twenty of them to a rank:
float32 loses least where a GEMM sums over few tokens and every gradient is the mean of many."""
LONG_RESPONSE, LONG_PROMPT = 1, 7
"""Which of a data-parallel rank's samples is long: by its response, and by its prompt."""
SAMPLES_PER_RANK, MANY_RANKS = 20, 16


def make_samples(options: CheckOptions, data_size: int) -> list[Sample]:
    """All samples of the step; those of a data-parallel rank are `[rank::data_size]`.

    Ragged, partly masked, some masked as a whole, groups over all ranks, one rollout in two micro-batches or on two
    ranks. Two of each rank span several tiles of an attention kernel, and all chunks of every context-parallel rank.
    Log-probs of the old and the reference policy are set by `with_log_probs` once a model has been asked.
    """
    draw = _Draw(options, seed=20)
    long = 2 * options.context_parallel_size * options.tokens_per_chunk - 1
    prompts = [draw.prompt(length) for length in (*PROMPTS, long - 9)]
    per_rank = SAMPLES_PER_RANK if data_size <= MANY_RANKS else SAMPLES_PER_RANK // 2
    count = data_size * max(per_rank, options.num_microbatches(1))
    samples = []
    for index in range(count):
        place, rank = divmod(index, data_size)
        is_last = index == count - 1
        num_microbatches = options.num_microbatches(rank)
        group = 0 if is_last else len(PROMPTS) if place == LONG_PROMPT else place % len(PROMPTS)
        length = RESPONSES[(place + rank) % len(RESPONSES)]
        if place == LONG_RESPONSE:
            length = long - PROMPTS[group]
        # These lie in the first micro-batch, beside others (`cut`).
        is_masked = (place + 1) % num_microbatches == 0 and not is_last
        # The first and the last are one rollout.
        sample = draw.sample(prompts[group], length, group, rollout_id=0 if is_last else index)
        mask = torch.zeros_like(sample.loss_mask) if is_masked else sample.loss_mask
        samples.append(replace(sample, loss_mask=mask))
    return samples


def make_even_samples(options: CheckOptions, data_size: int) -> list[Sample]:
    """Samples that no rank has to pad, two or so to a micro-batch: an auxiliary loss of experts counts padding too."""
    draw = _Draw(options, seed=22)
    multiple = 2 * options.context_parallel_size * options.tensor_model_parallel_size
    samples = []
    for index in range(2 * options.num_microbatches(1) * data_size):
        prompt, length = draw.prompt(1), multiple * (2 + index % 3)
        samples.append(draw.sample(prompt, length - 1, group=index, rollout_id=index))
    return samples


class _Draw:
    """Random samples whose tokens pull a model of `set_parameters` one way."""

    def __init__(self, options: CheckOptions, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        ids = torch.arange(options.vocab_size)
        self._prompt_ids, self._response_ids = ids, ids[ids % LEAN_PERIOD < LEAN_PERIOD // 2]

    def _tokens(self, ids: Tensor, count: int) -> Tensor:
        return ids[torch.randint(len(ids), (count,), generator=self._generator)]

    def prompt(self, length: int) -> Tensor:
        """[length] ids of the whole vocabulary."""
        return self._tokens(self._prompt_ids, length)

    def sample(self, prompt: Tensor, length: int, group: int, rollout_id: int) -> Sample:
        """A response of that many tokens, of which seven in ten are active, the first and the last among them."""
        mask = torch.rand(length, generator=self._generator) < 0.7
        mask[0] = mask[-1] = True
        return Sample(
            # Ids that lean one way, of every tensor-parallel shard: the gradients of tokens drawn from all ids would
            # cancel, and leave float32 few digits of what is left.
            tokens=torch.cat((prompt, self._tokens(self._response_ids, length))),
            response_length=length,
            loss_mask=mask,
            # Of one sign, for the same reason.
            advantages=0.5 + torch.rand(length, generator=self._generator),
            group_index=group,
            rollout_id=rollout_id,
            name=f"sample {rollout_id}",
            # One rollout may lie on two ranks.
            id_source="check",
        )


def with_kept_sets(options: CheckOptions, samples: Sequence[Sample]) -> list[Sample]:
    """The samples with sets that their tokens might have been sampled from: two to nine ids, and every fifth all of them.

    Never the token alone: its log-prob would be 0 whatever the model, where `with_log_probs` moves it.
    """
    generator = torch.Generator().manual_seed(23)

    def of_token(target: int) -> list[int]:
        size = int(torch.randint(1, 11, (1,), generator=generator))
        order = torch.randperm(options.vocab_size, generator=generator).tolist()
        return [] if size > 8 else [target, *(id for id in order if id != target)][: size + 1]

    responses = [sample.tokens[sample.prompt_length :].tolist() for sample in samples]
    sets: list[Any] = [list(map(of_token, targets)) for targets in responses]
    return [replace(s, kept_tokens=of_s) for s, of_s in zip(samples, sets, strict=True)]


def with_log_probs(samples: Sequence[Sample], log_probs: Sequence[Tensor]) -> list[Sample]:
    """The samples with old and reference log-probs near the model's: inside the clip range, not on its edge."""
    generator = torch.Generator().manual_seed(21)

    def near(values: Tensor) -> Tensor:
        noise = 0.2 * torch.rand(values.shape, generator=generator) - 0.1
        return (values.float() + noise).clamp(max=0.0)

    return [
        replace(sample, old_log_probs=near(values), ref_log_probs=near(values))
        for sample, values in zip(samples, log_probs, strict=True)
    ]


def cut(samples: Sequence[Sample], num_microbatches: int) -> list[list[Sample]]:
    """The micro-batches of a data-parallel rank's samples, of uneven sizes, one in the middle empty.

    The first, the last and those between carry gradient: a schedule that loses any one of them is seen.
    """
    micro_batches: list[list[Sample]] = [[] for _ in range(num_microbatches - 1)]
    for place, sample in enumerate(samples):
        # The first takes the share of the empty one too.
        micro_batches[(place + 1) % num_microbatches % (num_microbatches - 1)].append(sample)
    micro_batches.insert(num_microbatches // 2, [])
    return micro_batches


def cut_evenly(samples: Sequence[T], num_microbatches: int) -> list[list[T]]:
    """The micro-batches of a rank's `make_even_samples`; none is empty."""
    return [list(samples[place::num_microbatches]) for place in range(num_microbatches)]
