"""The experts that an engine chose: what a sample refuses, their way through a pack and a file, and
the engines' forms.
"""

import base64
import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pg import PolicyLossConfig, Sample, pack, policy_loss_function, step_totals
from megatron_pg.rollout_files import RolloutFiles, routed_experts_of_engine
from megatron_pg.step.routed_experts import no_choice

from .refusals import assert_refused
from .test_rollout_files import pull_all, write

LAYERS, TOPK = 3, 2


def random_experts(seed: int, tokens: int, most: int = 8) -> list[list[list[int]]]:
    """Experts [LAYERS][tokens][TOPK]; the last token has none."""
    rng = random.Random(seed)
    chosen = [[rng.sample(range(most), TOPK) for _ in range(tokens)] for _ in range(LAYERS)]
    for layer in chosen:
        layer[-1] = [-1] * TOPK
    return chosen


def sample(routed_experts: Any, tokens: int = 4) -> Sample:
    fields = {"tokens": list(range(1, tokens + 1)), "response_length": 2, "loss_mask": [1, 1]}
    return Sample(**fields, routed_experts=routed_experts, name="row 7")


def changed(layer: int, position: int, row: list[int]) -> list[list[list[int]]]:
    experts = random_experts(0, 4)
    experts[layer][position] = row
    return experts


def given_logits() -> None:
    batch = pack([sample(random_experts(0, 4))])
    config = PolicyLossConfig(replay_routing=True)
    policy_loss_function(config, batch, torch.zeros(4, 8), totals=step_totals(batch.samples))


def of_engine(tokens: int, dtype: type = np.int16, **keywords: Any) -> None:
    routed_experts_of_engine(np.zeros((5, LAYERS, TOPK), dtype), tokens, **keywords)


REFUSED_SAMPLES = {
    "shape [3, 5, 2], expected [layers, total_length, k], here [layers, 4, k]": random_experts(
        0, 5
    ),
    "shape [3, 4], expected": [[1, 2, 3, 4]] * LAYERS,
    "not an array of numbers": [[[1, 2], [3]]],
    "torch.float32 on cpu, expected integers": torch.zeros(LAYERS, 4, TOPK),
    "layer 1, position 2 has expert 32768, expected 0 to 32767": changed(1, 2, [32768, 1]),
    "layer 2, position 0 has expert -2, expected 0": changed(2, 0, [-2, 1]),
    "layer 0, position 3 has expert 4, in a row with -1": changed(0, 3, [-1, 4]),
    "layer 1, position 1 has expert 5, twice": changed(1, 1, [5, 5]),
}
REFUSED_CALLS: dict[str, Callable[[], Any]] = {
    "has no routed_experts and | for every sample or for none": lambda: pack(
        [sample(random_experts(0, 4)), sample(None)]
    ),
    "[3, 2] in sample 0 of the micro-batch and [2, 2] in sample 1": lambda: pack(
        [sample(random_experts(0, 4)), sample(random_experts(0, 4)[:2])]
    ),
    "here [layers, 39, k]": lambda: dataclasses.replace(
        sample(random_experts(0, 40), 40), tokens=list(range(39))
    ),
    "--replay-routing does not work | Use PolicyStep": given_logits,
    "shape [5, 3, 2], expected | up to 0 fewer": lambda: of_engine(6, most_missing=0),
    "for 7 tokens | the prompt's experts": lambda: of_engine(7),
    "float64, expected integers": lambda: of_engine(6, np.float64),
    "for 4 tokens": lambda: of_engine(4),
} | {
    f"row 7: routed_experts | {problem}": functools.partial(sample, experts)
    for problem, experts in REFUSED_SAMPLES.items()
}


@pytest.mark.parametrize("words", REFUSED_CALLS)
def test_wrong_experts_are_refused_by_place(words: str) -> None:
    assert_refused(words, REFUSED_CALLS[words])


@pytest.mark.parametrize("topk", [1, 2, 3, 5, 8])
def test_an_expert_twice_is_found_at_any_two_places(topk) -> None:
    for first in range(topk):
        for second in range(first):
            row = list(range(topk))
            row[second] = row[first]
            with pytest.raises(ValueError, match="twice"):
                sample([[list(range(topk))] * 3 + [row]])


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32]
)
def test_experts_of_every_integer_type_are_the_same(dtype) -> None:
    experts = torch.tensor(random_experts(1, 4)).clamp(min=0)
    experts[:, -1] = torch.tensor([0, 1])
    assert torch.equal(sample(experts.to(dtype)).routed_experts, sample(experts).routed_experts)


@pytest.mark.parametrize(("most", "dtype"), [(8, torch.uint8), (300, torch.int16)])
def test_experts_are_stored_once_in_the_smallest_type(most, dtype) -> None:
    experts = torch.tensor(random_experts(1, 40, most))
    one = sample(experts, 40)
    assert one.routed_experts.dtype == dtype
    read = one.routed_experts.long()
    assert torch.equal(read.masked_fill(read == no_choice(one.routed_experts), -1), experts)
    other = dataclasses.replace(one, old_log_probs=[-1.0, -2.0])
    assert other.routed_experts is one.routed_experts
    experts[0, 0] = -1
    assert not (one.routed_experts[0, 0] == no_choice(one.routed_experts)).any()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(3, 9), min_size=1, max_size=5),
    cp_size=st.sampled_from([1, 2, 4]),
    multiple=st.sampled_from([1, 2, 8]),
    most=st.sampled_from([8, 300]),
)
def test_a_pack_has_the_experts_of_its_tokens_and_none_at_padding(
    lengths, cp_size, multiple, most
) -> None:
    """Each local row against the token that the window says lies there."""
    everything = [random_experts(n, length, most if n else 8) for n, length in enumerate(lengths)]
    samples = [sample(e, length) for e, length in zip(everything, lengths, strict=True)]
    by_token = [
        [layer[t] for layer in experts]
        for experts, length in zip(everything, lengths, strict=True)
        for t in range(length)
    ]
    for cp_rank in range(cp_size):
        layout = {"cp_rank": cp_rank, "cp_size": cp_size}
        batch = pack(samples, **layout, pad_to_multiple=multiple * cp_size)
        experts = batch.routed_experts.long()
        experts[experts == no_choice(batch.routed_experts)] = -1
        expected = [
            by_token[index] if index >= 0 else [[-1] * TOPK] * LAYERS
            for index in batch.window.token_indices.tolist()
        ]
        assert experts.tolist() == expected


def test_no_sample_needs_experts() -> None:
    assert pack([sample(None)]).routed_experts is None
    assert pack([]).routed_experts is None


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_has_them_layer_by_layer(tmp_path, kind) -> None:
    experts = [random_experts(seed, 4) for seed in range(3)]
    rows = [
        {"prompt_ids": [1, 2], "response_ids": [5, 6], "reward": 1.0, "routed_experts": e}
        for e in experts
    ]
    source = RolloutFiles([write(tmp_path, rows, kind)], required_fields=["routed_experts"])
    for one, expected in zip(pull_all(source), experts, strict=True):
        read = one.routed_experts.long()
        assert read.masked_fill(read == 255, -1).tolist() == expected
    for wrong in ([[[0, 1], [2]]], [0.5, 1.5], [[0.5, 1.5]]):
        path = write(tmp_path, [{**rows[0], "routed_experts": wrong}], kind)
        with pytest.raises(ValueError, match=r"routed_experts is .*, expected lists \[layers\]"):
            pull_all(RolloutFiles([path]))


def test_engines_give_tokens_first_and_no_entry_of_the_last_token() -> None:
    expected = torch.tensor(random_experts(2, 6))
    expected[1] = -1  # a layer without experts: the engine's buffer is never written
    of_vllm = expected.transpose(0, 1)[:-1].numpy().astype(np.int16)
    of_vllm[:, 1] = 0
    text = base64.b64encode(of_vllm.astype(np.int32).tobytes()).decode()
    of_sglang = np.frombuffer(base64.b64decode(text), np.int32).reshape(-1, LAYERS, TOPK)
    for returned in (of_vllm, of_sglang, of_vllm.tolist()):
        assert torch.equal(routed_experts_of_engine(returned, 6).long(), expected)
        assert sample(routed_experts_of_engine(returned, 6), 6).routed_experts is not None
