"""Bins and plans of a step: every sample once, no bin above its capacity, nothing left to
chance.
"""

import argparse
import dataclasses
import functools
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pg import Sample, TokenWindow, step_totals
from megatron_pg.config.planning import PlanningConfig, add_planning_args, validate_planning_args
from megatron_pg.step import SampleCost, assign_to_data_parallel_ranks, plan_bins, plan_step
from tests.fast.refusals import assert_refused

Bins = list[list[int]]


def planned(lengths: list[int], capacity: int, **keywords: object) -> Bins:
    return [members.tolist() for members in plan_bins(lengths, capacity, **keywords)]


def fewest_bins(lengths: list[int], capacity: int) -> int:
    """By the loads of every assignment; for a handful of sequences."""
    reached: set[tuple[int, ...]] = {()}
    for length in lengths:
        reached = {
            tuple(sorted((*loads[:n], load + length, *loads[n + 1 :])))
            for loads in reached
            for n, load in enumerate((*loads, 0))
            if load + length <= capacity
        }
    return min(map(len, reached))


def check_bins(bins: Bins, lengths: list[int], capacity: int, cost=lambda length: length) -> None:
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    for members in bins:
        assert members == sorted(members)
        assert len(members) == 1 or sum(lengths[i] for i in members) <= capacity
    loads = [sum(cost(lengths[i]) for i in members) for members in bins]
    assert loads == sorted(loads, reverse=True)


@pytest.mark.parametrize(
    ("lengths", "capacity", "multiple", "bins"),
    [
        ([6, 5, 4, 3, 2], 10, 1, [[0, 2], [1, 3, 4]]),
        ([5, 5, 5], 10, 3, [[0], [1], [2]]),
        ([1, 1], 10, 4, [[0], [1], [], []]),
        ([], 10, 2, [[], []]),
        # Loads are even where a bin is full: first fit, not needed here, would leave the third
        # empty.
        ([5, 1, 1, 1], 5, 3, [[0], [1, 3], [2]]),
        # First fit takes over where even loads do not fit: longest-to-lightest makes 5 + 4, 5 + 3 +
        # 3.
        ([5, 5, 4, 3, 3], 10, 1, [[0, 1], [2, 3, 4]]),
    ],
)
def test_bins_of_known_cases(lengths, capacity, multiple, bins) -> None:
    assert planned(lengths, capacity, multiple=multiple) == bins


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), max_size=60),
    multiple=st.integers(1, 4),
    seed=st.none() | st.integers(0, 3),
)
def test_every_sequence_is_in_one_bin_within_its_capacity(lengths, multiple, seed) -> None:
    bins = planned(lengths, 40, multiple=multiple, seed=seed)
    check_bins(bins, lengths, 40)
    assert len(bins) % multiple == 0 and bins
    assert bins == planned(lengths, 40, multiple=multiple, seed=seed)


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), max_size=60),
    multiple=st.integers(1, 4),
    capacity=st.sampled_from((40, 57, 400)),
)
def test_time_is_evened_out_within_the_capacity_and_with_no_more_bins(lengths, multiple, capacity):
    """Integers, so that costs add up without rounding."""
    cost = SampleCost(3.0, 2.0)
    bins = planned(lengths, capacity, multiple=multiple, cost=cost)
    check_bins(bins, lengths, capacity, lambda length: 3 * length + 2 * length * length)
    assert len(bins) == len(planned(lengths, capacity, multiple=multiple))


def lengths_in(bins: Bins, lengths: list[int]) -> list[list[int]]:
    return sorted(sorted(lengths[i] for i in members) for members in bins)


def dealt_to_the_cheapest(lengths: list[int], num_bins: int, capacity: int) -> Bins | None:
    """Longest first, each to the bin of least cost that has room; by looking at every bin."""
    bins: Bins = [[] for _ in range(num_bins)]
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        room = [b for b in bins if sum(lengths[i] for i in b) + lengths[index] <= capacity]
        if not room:
            return None
        min(room, key=lambda b: sum(lengths[i] + lengths[i] ** 2 for i in b)).append(index)
    return bins


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40))
def test_bins_are_those_of_the_plain_rule(lengths: list[int]) -> None:
    found = planned(lengths, 60, cost=SampleCost(1.0, 1.0))
    plain = dealt_to_the_cheapest(lengths, len(found), 60)
    if plain is not None:
        assert lengths_in(found, lengths) == lengths_in(plain, lengths)


def test_one_long_sequence_weighs_as_many_short_ones() -> None:
    """81 against five times 16: by tokens the long one has company."""
    lengths, square = [9, 4, 4, 4, 4, 4], SampleCost(0.0, 1.0)
    assert planned(lengths, 100, multiple=2) == [[1, 2, 3, 5], [0, 4]]
    assert planned(lengths, 100, multiple=2, cost=square) == [[0], [1, 2, 3, 4, 5]]
    samples = samples_of(lengths)
    assert assign_to_data_parallel_ranks(samples, 2, cost=square) == [[0], [1, 2, 3, 4, 5]]


def test_cost_of_a_model_is_its_operations() -> None:
    """By hand: 2 layers of hidden 8, 4 heads of 2, 2 key-value groups, gated 16; vocabulary 10."""
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "num_query_groups": 2}
    shape = SimpleNamespace(**sizes, kv_channels=2, ffn_hidden_size=16, gated_linear_unit=True)
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16
    cost = SampleCost.of_model(shape, 10)
    assert cost == SampleCost(2.0 * (2 * layer + 80), 2.0 * 2 * 8)
    assert cost.of_lengths([3]) == [3 * cost.per_token + 9 * cost.per_square]
    shape.num_moe_experts, shape.moe_router_topk, shape.moe_ffn_hidden_size = 8, 2, 4
    experts = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 4 * 2
    assert SampleCost.of_model(shape, 0).per_token == 2.0 * 2 * experts
    assert SampleCost.balancing("tokens", shape, 10).per_square == 0
    # Megatron's arguments without --group-query-attention, and the config that is made of them.
    one_group = {**vars(shape), "num_query_groups": 1, "group_query_attention": False}
    arguments = SimpleNamespace(**one_group)
    shape.num_query_groups = 4
    assert SampleCost.of_model(arguments, 10) == SampleCost.of_model(shape, 10)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_number_of_bins_is_within_the_guarantee_of_first_fit(lengths: list[int]) -> None:
    found, fewest = len(planned(lengths, 20)), fewest_bins(lengths, 20)
    assert fewest <= found <= 11 / 9 * fewest + 6 / 9


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), max_size=40), seed=st.integers(0, 2**32))
def test_lengths_of_the_bins_do_not_depend_on_the_order(lengths: list[int], seed: int) -> None:
    shuffled = random.Random(seed).sample(lengths, len(lengths))
    found = (lengths_in(planned(order, 40), order) for order in (lengths, shuffled))
    assert next(found) == next(found)


@pytest.mark.parametrize(
    ("words", "lengths", "settings"),
    [
        ("lengths[1] is 0", [1, 0], {"capacity": 5}),
        ("lengths[1] is 12 | 10", [4, 12, 5], {"capacity": 10}),
        ("at least 1", [1], {"capacity": 0}),
        ("at least 1", [1], {"capacity": 5, "multiple": 0}),
    ],
)
def test_bins_out_of_range_are_refused(words, lengths, settings) -> None:
    assert_refused(words, plan_bins, lengths, **settings)


def test_oversized_sequences() -> None:
    assert planned([4, 12, 5], 10, oversized_alone=True) == [[1], [0, 2]]
    assert planned([12, 4, 5, 13], 10, oversized_alone=True, multiple=4) == [[3], [0], [2], [1]]


def samples_of(lengths: list[int]) -> list[Sample]:
    rows = [([0] * n, n - 1, [1] * (n - 1)) for n in lengths]
    return [Sample(*row, name=f"answer-{i}", group_index=i // 3) for i, row in enumerate(rows)]


def packed_tokens(samples: list[Sample], cp_size: int, pad_to_multiple: int) -> int:
    lengths = [s.total_length for s in samples], [s.response_length for s in samples]
    window = TokenWindow.build(*lengths, cp_size=cp_size, pad_to_multiple=pad_to_multiple)
    return window.num_tokens


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 30), max_size=25),
    cp_size=st.sampled_from((1, 2, 4)),
    pad_to_multiple=st.sampled_from((1, 3, 8)),
    group_size=st.integers(1, 4),
)
def test_a_plan_keeps_the_budget_and_counts_what_is_packed(lengths, group_size, **layout) -> None:
    samples, settings = samples_of(lengths), {"microbatch_group_size": group_size, **layout}
    plan = plan_step(samples, max_tokens_per_microbatch=61, **settings)
    assert plan.num_microbatches % group_size == 0 and plan.num_microbatches
    assert sorted(i for indices in plan.microbatches for i in indices) == list(range(len(lengths)))
    found = [packed_tokens([samples[i] for i in part], **layout) for part in plan.microbatches]
    assert list(plan.microbatch_tokens) == found and max(found) <= 61
    assert plan.totals.num_tokens == sum(sample.total_length for sample in samples)
    assert dataclasses.replace(plan.totals, num_tokens=None) == step_totals(samples)


def test_a_sample_longer_than_the_budget_is_named_or_gets_its_own_microbatch() -> None:
    samples, layout = samples_of([4, 17, 4]), {"max_tokens_per_microbatch": 16, "cp_size": 2}
    words = "answer-1 takes 20 | --max-tokens-per-microbatch | 16"
    assert_refused(words, plan_step, samples, **layout)
    plan = plan_step(samples, **layout, oversized="own_microbatch")
    assert plan.microbatches == ((1,), (0, 2))
    assert plan.microbatch_tokens == (20, 8)


def test_the_seed_deals_equally_long_samples_differently() -> None:
    samples, seeds = samples_of([3] * 40), (None, 1, 2, 1)
    plans = [plan_step(samples, max_tokens_per_microbatch=12, seed=seed) for seed in seeds]
    plans = [plan.microbatches for plan in plans]
    assert len(set(plans)) == 3 and plans[1] == plans[3]


def test_settings_out_of_range_are_refused_by_flag() -> None:
    plan = functools.partial(plan_step, [], max_tokens_per_microbatch=3)
    assert_refused("--max-tokens-per-microbatch is 3 | at least 4", plan, cp_size=2)
    assert_refused("--oversized-samples | not 'drop'", plan, oversized="drop")


def test_assignment_to_ranks_is_a_split_with_even_tokens() -> None:
    lengths = np.random.default_rng(0).integers(2, 60, size=64).tolist()
    ranks = assign_to_data_parallel_ranks(samples_of(lengths), 4, cp_size=2)
    assert Counter(i for indices in ranks for i in indices) == Counter(range(64))
    loads = [sum(-(-lengths[i] // 4) * 4 for i in indices) for indices in ranks]
    assert max(loads) - min(loads) <= 8
    # By their padded 4 + 12 and 8 + 8; by the tokens themselves it would be 4 + 5 + 5 and 12.
    padded = samples_of([4, 5, 5, 12])
    assert assign_to_data_parallel_ranks(padded, 2, cp_size=2) == [[0, 3], [1, 2]]
    assert assign_to_data_parallel_ranks(samples_of([4]), 2) == [[0], []]
    assert_refused("at least 1", assign_to_data_parallel_ranks, samples_of([4]), 0)


def parsed(*words: str) -> argparse.Namespace:
    return add_planning_args(argparse.ArgumentParser(exit_on_error=False)).parse_args(words)


def test_flags_become_the_config() -> None:
    words = "--max-tokens-per-microbatch 64 --docs-per-step 8 --docs-per-step-mode exact"
    config = validate_planning_args(parsed(*words.split(), "--keep-prompt-groups"))
    docs = {"docs_per_step": 8, "docs_per_step_mode": "exact"}
    assert config == PlanningConfig(64, keep_prompt_groups=True, **docs)
    assert PlanningConfig.from_args(parsed("--max-tokens-per-microbatch", "9")) == PlanningConfig(9)


@pytest.mark.parametrize(
    ("line", "words"),
    (
        ("", "--max-tokens-per-microbatch must be an integer >= 1, not None"),
        ("--max-tokens-per-microbatch 0", "--max-tokens-per-microbatch must be | not 0"),
        ("--max-tokens-per-microbatch 9 --docs-per-step -1", "--docs-per-step must be | not -1"),
        ("--max-tokens-per-microbatch 9 --keep-prompt-groups", "--keep-prompt-groups"),
        ("--max-tokens-per-microbatch 9 --docs-per-step-mode exact", "--docs-per-step-mode"),
    ),
)
def test_flags_out_of_range_are_refused_by_name(line: str, words: str) -> None:
    assert_refused(words, validate_planning_args, parsed(*line.split()))


def test_ragged_microbatches_are_refused_with_expert_parallelism() -> None:
    args = parsed("--max-tokens-per-microbatch", "9", "--ragged-microbatches")
    assert validate_planning_args(args).ragged_microbatches
    args.expert_model_parallel_size = 2
    words = "--ragged-microbatches does not work with --expert-model-parallel-size"
    assert_refused(words, validate_planning_args, args)


@pytest.mark.parametrize("kinds", ["global_aux_loss", ["aux_loss", "global_aux_loss"]])
def test_ragged_microbatches_are_refused_with_a_global_balancing_loss(
    kinds: str | list[str],
) -> None:
    args = parsed("--max-tokens-per-microbatch", "9", "--ragged-microbatches")
    args.moe_router_load_balancing_type = "aux_loss"
    assert validate_planning_args(args).ragged_microbatches
    args.moe_router_load_balancing_type = kinds
    words = "--moe-router-load-balancing-type global_aux_loss, which all-reduces"
    assert_refused(words, validate_planning_args, args)


def test_a_flag_of_the_parsers_own_is_left_alone_unless_it_stores_elsewhere() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--docs-per-step", type=int, default=5)
    args = add_planning_args(parser).parse_args(["--max-tokens-per-microbatch", "9"])
    assert validate_planning_args(args).docs_per_step == 5
    parser = argparse.ArgumentParser()
    parser.add_argument("--docs-per-step", dest="n")
    assert_refused("--docs-per-step already exists", add_planning_args, parser)


SHARED = {"num_experts": 4, "moe_shared_expert_intermediate_size": 5}
ATTENTION = 8 * (2 * 8 + 2 * 8)  # head size 8 / 2, as many groups as heads


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({}, ATTENTION + 2 * 8 * 32),  # 4 * 8
        ({"swiglu": True}, ATTENTION + 3 * 8 * 32),
        ({"num_experts": 4}, ATTENTION + 2 * 8 * 32),  # one expert for a token
        (SHARED, ATTENTION + 2 * 8 * (32 + 5)),
    ],
)
def test_the_cost_of_a_model_whose_settings_are_left_to_megatron(settings, weights) -> None:
    shape = SimpleNamespace(num_layers=1, hidden_size=8, num_attention_heads=2, **settings)
    assert SampleCost.of_model(shape, 0) == SampleCost(2.0 * weights, 2.0 * 8)
    assert SampleCost.balancing("time", shape, 3).per_token == 2.0 * (weights + 8 * 3)
