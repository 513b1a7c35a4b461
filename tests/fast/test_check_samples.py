"""The step of ``megatron-pg check`` hides no mistake."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_pg.check.options import LEAN_PERIOD, CheckOptions
from megatron_pg.check.samples import cut, cut_evenly, make_even_samples, make_samples


@pytest.mark.parametrize("data_size", [1, 2, 5, 64])
@pytest.mark.parametrize("pipeline_size", [1, 8])
def test_every_micro_batch_but_one_in_the_middle_has_gradient(data_size, pipeline_size):
    options = CheckOptions(pipeline_model_parallel_size=pipeline_size)
    samples = make_samples(options, data_size)
    seen = []
    for rank in range(data_size):
        count = options.num_microbatches(rank)
        assert count >= pipeline_size + 2
        micro_batches = cut(samples[rank::data_size], count)
        active = [sum(sample.num_active_tokens for sample in each) for each in micro_batches]
        assert [place for place, tokens in enumerate(active) if not tokens] == [count // 2]
        assert len({len(each) for each in micro_batches}) > 2 or data_size * pipeline_size > 5
        seen += [sample.name for each in micro_batches for sample in each]
    assert sorted(seen) == sorted(sample.name for sample in samples)


@pytest.mark.parametrize("tensor_size", [1, 2, 3, 4, 8, 16])
def test_responses_have_ids_of_every_vocabulary_shard(tensor_size):
    options = CheckOptions(tensor_model_parallel_size=tensor_size)
    assert options.padded_vocab_size % tensor_size == 0
    assert options.padded_vocab_size > options.vocab_size
    width = options.padded_vocab_size // tensor_size
    samples = make_samples(options, 1)
    responses = torch.cat([sample.tokens[sample.prompt_length :] for sample in samples])
    assert set((responses // width).tolist()) == set(range(tensor_size))
    assert responses.max() < options.vocab_size
    # The ids whose tokens pull the model one way.
    assert bool((responses % LEAN_PERIOD < LEAN_PERIOD // 2).all())


def test_the_step_hides_nothing():
    options = CheckOptions(context_parallel_size=2)
    samples = make_samples(options, 2)
    for rank in range(2):
        mine = samples[rank::2]
        lengths = sorted(sample.total_length for sample in mine)
        # Two span both chunks of both ranks, by more than a tile; the others are short.
        assert lengths[-1] == 139 and lengths[-2] > 120 and lengths[-3] <= 12
        assert max(sample.prompt_length for sample in mine) > 100
        assert max(sample.response_length for sample in mine) > 100
        assert not all(sample.num_active_tokens for sample in mine)
    assert samples[0].rollout_id == samples[-1].rollout_id
    prompts: dict[Any, set[Any]] = {}
    for sample in samples:
        prompt = tuple(sample.tokens[: sample.prompt_length].tolist())
        prompts.setdefault(sample.group_index, set()).add(prompt)
    # One prompt in each group, and each group on both ranks.
    assert all(len(each) == 1 for each in prompts.values())
    assert {s.group_index for s in samples[::2]} == {s.group_index for s in samples[1::2]}


def test_even_samples_need_no_padding():
    options = CheckOptions(context_parallel_size=2, tensor_model_parallel_size=2)
    samples = make_even_samples(options, 3)
    assert all(sample.total_length % 8 == 0 for sample in samples)
    for rank in range(3):
        micro_batches = cut_evenly(samples[rank::3], options.num_microbatches(rank))
        assert all(micro_batches) and sum(map(len, micro_batches)) == len(samples) // 3
