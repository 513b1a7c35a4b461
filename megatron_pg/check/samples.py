"""The samples of a check's step, chosen to hide no mistake, and their micro-batches."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_pg.check.cases import Case
from megatron_pg.check.model import model_config
from megatron_pg.check.options import LEAN_PERIOD, CheckOptions
from megatron_pg.step.sample import Sample

T = TypeVar("T")
PROMPTS, RESPONSES = (3, 2, 1, 2), (5, 2, 8, 1, 6, 4, 9, 3, 4, 5)
"""The cycles of prompt lengths (by group) and response lengths (by sample), in tokens. A rank has
twenty short samples. float32 loses least if a GEMM sums over few tokens and every gradient is the
mean of many."""
LONG_RESPONSE, LONG_PROMPT = 1, 2
"""The indices of a rank's samples with the long response and the long prompt. No micro-batch, and
so no GEMM, has both."""


def samples_of(options: CheckOptions, data_size: int, case: Case) -> list[Sample]:
    """Make all samples of a case, without log-probs."""
    if case.is_even:
        samples = make_even_samples(options, data_size, is_padded=not case.logit_coefficient)
    else:
        samples = make_samples(options, data_size)
    if case.has_experts:
        samples = with_routed_experts(options, samples)
    if case.has_heads:
        samples = with_sampler_top_k(options, samples)
    return with_kept_sets(options, samples) if case.has_sets else samples


def make_samples(
    options: CheckOptions, data_size: int, vocab_size: int | None = None
) -> list[Sample]:
    """Make all samples of the step, without log-probs. A data-parallel rank has
    `[rank::data_size]`.

    With a `vocab_size` (the user's model), tokens are arbitrary and half the samples fill their
    padded length.

    Masks are partial, and some are empty. Groups span all ranks. One rollout lies in two
    micro-batches or on two ranks.
    """
    draw = _Draw(options, 20, vocab_size)
    multiple = 2 * options.context_parallel_size * options.tensor_model_parallel_size
    # Two samples per rank span several attention tiles and all chunks of every context-parallel
    # rank.
    long = options.longest - 1
    prompts = [draw.prompt(length) for length in (*PROMPTS, long - 9)]
    count = data_size * max(
        20 if data_size <= 16 else 10, options.num_microbatches(min(data_size, 2) - 1)
    )
    samples = []
    for index in range(count):
        place, rank = divmod(index, data_size)
        is_last = index == count - 1
        group = 0 if is_last else len(PROMPTS) if place == LONG_PROMPT else place % len(PROMPTS)
        length = RESPONSES[(place + rank) % len(RESPONSES)]
        if place == LONG_RESPONSE:
            length = long - PROMPTS[group]
        if vocab_size is not None and place % 2 == 0:
            length += -(len(prompts[group]) + length) % multiple
        # The first and the last are one rollout.
        sample = draw.sample(prompts[group], length, group, rollout_id=0 if is_last else index)
        # `cut` puts these into the first micro-batch, with others.
        if (place + 1) % options.num_microbatches(rank) == 0 and not is_last:
            sample = replace(sample, loss_mask=torch.zeros_like(sample.loss_mask))
        samples.append(sample)
    return samples


def make_even_samples(options: CheckOptions, data_size: int, *, is_padded: bool) -> list[Sample]:
    """Make about two samples per micro-batch. Routers must leave out their padding. Without
    `is_padded`, every second sample of a rank fills its padded length.
    """
    draw = _Draw(options, 22)
    multiple = 2 * options.context_parallel_size * options.tensor_model_parallel_size
    samples = []
    for index in range(2 * options.num_microbatches(min(data_size, 2) - 1) * data_size):
        lacks = index % multiple if is_padded or index // data_size % 2 else 0
        length = multiple * (2 + index % 3) - 1 - lacks
        samples.append(draw.sample(draw.prompt(1), length, group=index, rollout_id=index))
    return samples


class _Draw:
    """Random samples whose tokens pull a model of `set_parameters` one way."""

    def __init__(self, options: CheckOptions, seed: int, vocab_size: int | None = None) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._ids = torch.arange(vocab_size or options.vocab_size)
        leans = self._ids % LEAN_PERIOD < LEAN_PERIOD // 2
        # A few ids also pull a model with random weights one way.
        self._leaning = self._ids[::8] if vocab_size else self._ids[leans]

    def _tokens(self, ids: Tensor, count: int) -> Tensor:
        return ids[torch.randint(len(ids), (count,), generator=self._generator)]

    def prompt(self, length: int) -> Tensor:
        return self._tokens(self._ids, length)

    def sample(self, prompt: Tensor, length: int, group: int, rollout_id: int) -> Sample:
        """Draw a response of `length` tokens. About 70% are active, among them the first and the
        last.
        """
        mask = torch.rand(length, generator=self._generator) < 0.7
        mask[0] = mask[-1] = True
        return Sample(
            # These ids lean one way on every tensor-parallel shard. Gradients of all ids would
            # cancel and leave float32 few digits.
            tokens=torch.cat((prompt, self._tokens(self._leaning, length))),
            response_length=length,
            loss_mask=mask,
            # One sign also avoids cancellation.
            advantages=0.5 + torch.rand(length, generator=self._generator),
            group_index=group,
            rollout_id=rollout_id,
            name=f"sample {rollout_id}",
            id_source="check",  # one rollout may lie on two ranks
        )


def with_kept_sets(options: CheckOptions, samples: Sequence[Sample]) -> list[Sample]:
    """Add sets that the tokens might be sampled from: two to nine ids, or all ids for one token in
    five.
    """
    generator = torch.Generator().manual_seed(23)

    def kept_ids(target: int) -> list[int]:
        size = int(torch.randint(1, 11, (1,), generator=generator))
        order = torch.randperm(options.vocab_size, generator=generator).tolist()
        # A set of one token would give it the log-prob 0 under every model, and `with_log_probs`
        # would move it.
        return [] if size > 8 else [target, *(id for id in order if id != target)][: size + 1]

    responses = [sample.tokens[sample.prompt_length :].tolist() for sample in samples]
    sets: list[Any] = [list(map(kept_ids, targets)) for targets in responses]
    return [replace(s, kept_tokens=kept) for s, kept in zip(samples, sets, strict=True)]


def with_sampler_top_k(options: CheckOptions, samples: Sequence[Sample]) -> list[Sample]:
    """Add an engine's likeliest ids with their log-probs: one to six ids, which hold half of the
    probability to all but a tenth, the sampled token among them or not.
    """
    generator = torch.Generator().manual_seed(25)

    def head(_: int) -> tuple[list[int], list[float]]:
        size = int(torch.randint(1, 7, (1,), generator=generator))
        ids = torch.randperm(options.vocab_size, generator=generator)[:size]
        logits, rest = torch.rand(size, generator=generator), torch.rand(1, generator=generator)
        mass = torch.log(0.9 - 0.4 * rest)
        return ids.tolist(), (logits.log_softmax(0) + mass).tolist()

    heads = [list(map(head, range(sample.response_length))) for sample in samples]
    pairs: list[Any] = [tuple(map(list, zip(*each, strict=True))) for each in heads]
    return [replace(s, sampler_top_k=pair) for s, pair in zip(samples, pairs, strict=True)]


def with_routed_experts(options: CheckOptions, samples: Sequence[Sample]) -> list[Sample]:
    """Add random experts for every token and layer. The last token has none, as in engines."""
    generator = torch.Generator().manual_seed(24)
    config = model_config(options, sharded=False)

    def chosen(tokens: int) -> Tensor:
        scores = torch.rand(config.num_layers, tokens, config.num_moe_experts, generator=generator)
        experts = scores.topk(config.moe_router_topk).indices
        experts[:, -1] = -1
        return experts

    return [replace(s, routed_experts=chosen(s.total_length)) for s in samples]


def with_log_probs(samples: Sequence[Sample], log_probs: Sequence[Tensor]) -> list[Sample]:
    """Set log-probs near the model's. Old and reference log-probs are inside the clip range, half
    of the rollout log-probs are outside, and none is on its edge.
    """
    generator = torch.Generator().manual_seed(21)

    def near(values: Tensor) -> Tensor:
        noise = 0.2 * torch.rand(values.shape, generator=generator) - 0.1
        return (values.float() + noise).clamp(max=0.0)

    def half_far(values: Tensor) -> Tensor:
        # Two in three of the far ones are lower, because log-probs cannot exceed 0.
        draws = torch.randint(6, values.shape, generator=generator)
        return near(values + torch.tensor([0.0, 0.0, 0.0, -0.4, -0.4, 0.4])[draws])

    return [
        replace(
            sample,
            old_log_probs=near(values),
            ref_log_probs=near(values),
            rollout_log_probs=half_far(values),
        )
        for sample, values in zip(samples, log_probs, strict=True)
    ]


def cut(samples: Sequence[Sample], num_microbatches: int) -> list[list[Sample]]:
    """Split a data-parallel rank's samples into uneven micro-batches. All have a gradient except
    the empty one in the middle.
    """
    micro_batches: list[list[Sample]] = [[] for _ in range(num_microbatches - 1)]
    for place, sample in enumerate(samples):
        # The first micro-batch also takes the empty one's share.
        micro_batches[(place + 1) % num_microbatches % (num_microbatches - 1)].append(sample)
    micro_batches.insert(num_microbatches // 2, [])
    return micro_batches


def cut_evenly(samples: Sequence[T], num_microbatches: int) -> list[list[T]]:
    """Split a rank's `make_even_samples` into nonempty micro-batches."""
    return [list(samples[place::num_microbatches]) for place in range(num_microbatches)]
