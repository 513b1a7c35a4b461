"""The torch-only attention: packed and context parallel equals each sequence alone in one
process.
"""

import itertools
import random
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_pg.megatron.context_layout import require_zigzag
from megatron_pg.megatron.cpu.layer_spec import PackedCoreAttention
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
"""Lengths of sequences that lie in a row each, and of a long one among short ones, which lie in one
row together."""


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
    """A model of two context-parallel ranks whose group is exchanged for one of this rank alone,
    and one without any.
    """
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


def refusals_of_cuts() -> list[str]:
    """What a model says of each cut in its config, and of none; "" where it takes it."""
    initialize_groups(Sharding())
    model, said = build_model(Sharding(), ModelOptions()), []
    for cut in (None, "zigzag", "contiguous"):
        if cut is not None:  # a field of the development branch
            model[0].config.cp_partition_mode = cut
        try:
            require_zigzag(model)
            said.append("")
        except NotImplementedError as error:
            said.append(str(error))
    return said


def test_a_cut_of_the_pack_other_than_the_zigzag_is_refused() -> None:
    *taken, refused = run_ranks(refusals_of_cuts, 1)[0]
    assert taken == [""] * 2
    assert "cp_partition_mode='contiguous'" in refused and "set it to 'zigzag'" in refused
