"""The torch-only attention: packed and context parallel equals each sequence alone in one process."""

import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_pg.megatron.context_layout import require_partition_mode
from megatron_pg.megatron.cpu.layer_spec import PackedCoreAttention
from megatron_pg.megatron.groups import unwrapped
from tests.oracle import PlainSample
from tests.random_steps import random_sample

from .compare import assert_case
from .launch import run_ranks
from .models import (
    ModelOptions,
    Sharding,
    build_model,
    initialize_groups,
    relative_error,
    transformer_config,
)
from .one_step import Outcome, run_steps
from .reference import reference_steps, thd
from .steps import VOCAB_SIZE, Run

DENSE = ModelOptions(dtype=torch.float64)
EVEN, ONE_LONG = [9, 2, 14, 1, 16], [40, 2, 3, 1, 4, 2, 5, 3]
"""Lengths of sequences that lie in a row each, and of a long one among short ones, which lie in one row together."""


@dataclass(frozen=True)
class LengthsRun(Run):
    """One micro-batch of each kind of pack, every token of which has a gradient by the KL term."""

    regularized: bool = True

    @property
    def samples(self) -> list[PlainSample]:
        rng, lengths = random.Random(1), {"prompt_length": 1, "active_rate": 1.0}
        return [
            random_sample(rng, response_length=length - 1, **lengths, group_index=0)
            for length in EVEN + ONE_LONG
        ]

    def micro_batches(self, data_size: int, data_rank: int, multiple: int) -> list[list[int]]:
        indices = range(len(self.samples))
        return [[*indices[: len(EVEN)]], [*indices[len(EVEN) :]]]


@pytest.fixture(scope="module")
def reference() -> list[Outcome]:
    return run_ranks(reference_steps, 1, DENSE, [LengthsRun()])[0]


@pytest.mark.parametrize("name", ["one process", "CP2", "CP4", "TP2 CP2", "TP2+SP CP2"])
def test_packed_context_parallel_model_equals_each_sequence_alone(name, reference) -> None:
    runs = [LengthsRun()]
    assert_case(name, DENSE, run_steps, runs, {DENSE.unsharded: reference}, runs)


def logits_of_a_rank_alone() -> tuple[Tensor, Tensor]:
    """A model of two context-parallel ranks whose group is exchanged for one of this rank alone, and one without any."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    tokens = torch.arange(sum(EVEN))[None] % VOCAB_SIZE
    positions = torch.cat([torch.arange(length) for length in EVEN])[None]
    packed = thd([0, *itertools.accumulate(EVEN)])
    logits = []
    for sharding in (Sharding(context=2), Sharding(data=2)):
        initialize_groups(sharding)
        (model,) = build_model(sharding, DENSE)
        if sharding.context > 1:
            model.module.pg_collection.cp = alone
        with torch.no_grad():
            logits.append(model(tokens, positions, None, packed_seq_params=packed))
    return logits[0], logits[1]


def test_a_context_parallel_model_runs_alone_with_another_group() -> None:
    """As when it generates: the group is read when the model is called."""
    for logits, expected in run_ranks(logits_of_a_rank_alone, 2):
        assert relative_error(logits, expected) < 1e-12


@pytest.mark.parametrize(
    ("flag", "name", "value"),
    [
        ("--attention-dropout", "attention_dropout", 0.1),
        ("--window-size", "window_size", (4, 0)),
        ("--softmax-type", "softmax_type", "off-by-one"),
    ],
)
def test_settings_that_the_attention_does_not_know_are_refused(flag, name, value) -> None:
    config = transformer_config(Sharding(), ModelOptions())
    if not hasattr(config, name):
        pytest.skip(f"this version of Megatron-Core has no {name}")
    setattr(config, name, value)
    groups = ProcessGroupCollection()
    with pytest.raises(NotImplementedError, match=flag):
        PackedCoreAttention(config, attention_type="self", pg_collection=groups)


def refusals_of_modes() -> list[str]:
    """What a model says of a mode; "" where it takes it. Learned positions take both, rotary ones the zigzag."""
    initialize_groups(Sharding())
    said = []
    for cut in ("contiguous", "zigzag"):
        model = build_model(Sharding(), ModelOptions(cp_partition_mode=cut))
        said += [words_of_mode(model, mode) for mode in ("zigzag", "contiguous")]
    return said


def words_of_mode(model: Any, mode: str) -> str:
    """What a model says of a mode; "" where it takes it."""
    try:
        require_partition_mode(model, mode)
    except NotImplementedError as error:
        return str(error)
    return ""


def test_a_cut_of_the_pack_that_the_attention_does_not_have_is_refused() -> None:
    *taken, rotary = run_ranks(refusals_of_modes, 1)[0]
    assert taken == [""] * 3
    assert "rotary positions of this megatron-core" in rotary
    assert "contiguous" in rotary and "cp_partition_modes" in rotary


class ContiguousAttention(PackedCoreAttention):
    cp_partition_modes = ("contiguous",)


class ZigzagAttention(PackedCoreAttention):
    cp_partition_modes = ("zigzag",)


class LayerWithMixer(TransformerLayer):
    """A layer that names its attention as Mamba's layers do."""

    @property
    def self_attention(self) -> Any:
        return self.mixer


class Wrapper(torch.nn.Module):
    """An adapter around attention."""

    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.to_wrap = attention

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return self.to_wrap(*args, **keywords)


def refusals_of_own_attention() -> list[str]:
    """What contiguous and zigzag attention, under other names than Megatron's, say of either mode."""
    initialize_groups(Sharding())
    said = []
    for kind in (ContiguousAttention, ZigzagAttention):
        for mode in ("contiguous", "zigzag"):
            (model,) = build_model(Sharding(), ModelOptions(cp_partition_mode="contiguous"))
            for layer in unwrapped(model).decoder.layers:
                layer.self_attention.core_attention.__class__ = kind
                layer.mixer = Wrapper(layer._modules.pop("self_attention"))
                layer.__class__ = LayerWithMixer
            said.append(words_of_mode(model, mode))
    return said


def test_attention_of_any_name_is_asked_for_its_modes() -> None:
    both, contiguous, zigzag, neither = run_ranks(refusals_of_own_attention, 1)[0]
    assert both == neither == ""
    assert "ContiguousAttention of decoder.layers.0.mixer.to_wrap.core" in contiguous
    assert "ZigzagAttention of decoder.layers.0.mixer.to_wrap.core" in zigzag
