"""The torch-only attention: packed and context parallel equals each sequence alone in one process."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_pg.megatron.context_layout import require_partition_mode
from megatron_pg.megatron.cpu.attention import PackedCoreAttention

from .launch import run_ranks
from .models import (
    ModelOptions,
    Sharding,
    build_model,
    gather_gradients,
    initialize_groups,
    relative_error,
    transformer_config,
)
from .reference import thd
from .steps import VOCAB_SIZE

TOLERANCE = 1e-6
LENGTHS = {"even": [9, 2, 14, 1, 16], "one long among short": [40, 2, 3, 1, 4, 2, 5, 3]}


def sequences(lengths: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens and, for every logit, its weight in the scalar that is differentiated."""
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in lengths]
    weights = [torch.randn(length, VOCAB_SIZE, generator=generator) for length in lengths]
    return tokens, weights


def owned_positions(length: int, rank: int, size: int) -> list[int]:
    """Positions of a padded sequence that a context-parallel rank holds, in its order."""
    chunk = length // (2 * size)
    if size == 1:
        return list(range(length))
    return [
        position
        for owner in (rank, 2 * size - 1 - rank)
        for position in range(owner * chunk, (owner + 1) * chunk)
    ]


def pack(sharding: Sharding, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, PackedSeqParams]:
    """This rank's tokens, positions and weights (0 at padding) of all sequences in one pack."""
    rank, size = parallel_state.get_context_parallel_rank(), sharding.context
    multiple = 2 * size * (sharding.tensor if sharding.sequence_parallel else 1)
    tokens, positions, weights, cu_seqlens = [], [], [], [0]
    for sequence, weight in zip(*sequences(lengths), strict=True):
        padded = len(sequence) + (-len(sequence) % multiple if multiple > 2 else 0)
        cu_seqlens.append(cu_seqlens[-1] + padded)
        for position in owned_positions(padded, rank, size):
            real = position < len(sequence)
            positions.append(position)
            tokens.append(int(sequence[position]) if real else 0)
            weights.append(weight[position] if real else torch.zeros(VOCAB_SIZE))
    return torch.tensor([tokens]), torch.tensor([positions]), torch.stack(weights), thd(cu_seqlens)


def forward_backward(sharding: Sharding, lengths: list[int]) -> tuple[float, dict[str, Tensor]]:
    """The weighted sum of all logits, and its gradients, of one sharded pack."""
    initialize_groups(sharding)
    chunks = build_model(sharding)
    tokens, positions, weights, packed = pack(sharding, lengths)
    logits = chunks[0](tokens, positions, None, packed_seq_params=packed)[0]
    columns = weights.chunk(sharding.tensor, 1)[parallel_state.get_tensor_model_parallel_rank()]
    total = (logits * columns).sum()
    total.backward()
    total = total.detach()
    group = parallel_state.get_tensor_and_context_parallel_group()
    dist.all_reduce(total, group=group)
    # Under Megatron's DDP gradients are averaged over context parallelism: undo it.
    chunks[0].finish_grad_sync()
    if sharding.sequence_parallel:
        for parameter in chunks[0].parameters():
            if getattr(parameter, "sequence_parallel", False):
                tensor_group = parallel_state.get_tensor_model_parallel_group()
                dist.all_reduce(parameter.main_grad, group=tensor_group)
    gradients = gather_gradients(chunks) or {}
    return float(total), {name: value * sharding.context for name, value in gradients.items()}


def all_lengths(sharding: Sharding) -> dict[str, tuple[float, dict[str, Tensor]]]:
    return {name: forward_backward(sharding, lengths) for name, lengths in LENGTHS.items()}


def each_alone() -> dict[str, tuple[float, dict[str, Tensor]]]:
    """One process, one sequence at a time: no packing, no padding, no context parallelism."""
    results = {}
    for name, lengths in LENGTHS.items():
        initialize_groups(Sharding())
        chunks, total = build_model(Sharding()), 0.0
        for tokens, weights in zip(*sequences(lengths), strict=True):
            length = len(tokens)
            inputs = (tokens[None], torch.arange(length)[None], None)
            logits = chunks[0](*inputs, packed_seq_params=thd([0, length]))[0]
            value = (logits * weights).sum()
            with chunks[0].no_sync():
                value.backward()
            total += value.item()
        results[name] = (total, gather_gradients(chunks) or {})
    return results


@pytest.fixture(scope="module")
def reference() -> dict[str, tuple[float, dict[str, Tensor]]]:
    return run_ranks(each_alone, 1)[0]


@pytest.mark.parametrize("name", ["one process", "CP2", "CP4", "TP2 CP2", "TP2+SP CP2"])
def test_packed_context_parallel_model_equals_each_sequence_alone(name, reference) -> None:
    sharding = Sharding.named(name)
    found = run_ranks(all_lengths, sharding.world_size, sharding)[0]
    for lengths, (total, gradients) in found.items():
        expected_total, expected = reference[lengths]
        assert total == pytest.approx(expected_total, rel=1e-5)
        assert gradients.keys() == expected.keys()
        errors = {key: relative_error(gradients[key], expected[key]) for key in expected}
        assert max(errors.values()) < TOLERANCE, (lengths, errors)


def logits_of_a_rank_alone() -> tuple[Tensor, Tensor]:
    """A model of two context-parallel ranks whose group is exchanged for one of this rank alone, and one without any."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    lengths = LENGTHS["even"]
    tokens = torch.cat(sequences(lengths)[0])[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = thd([0, *itertools.accumulate(lengths)])
    logits = []
    for sharding in (Sharding(context=2), Sharding(data=2)):
        initialize_groups(sharding)
        (model,) = build_model(sharding)
        if sharding.context > 1:
            model.module.pg_collection.cp = alone
        with torch.no_grad():
            logits.append(model(tokens, positions, None, packed_seq_params=packed))
    return logits[0], logits[1]


def test_a_context_parallel_model_runs_alone_with_another_group() -> None:
    """As when it generates: the group is read when the model is called."""
    for logits, expected in run_ranks(logits_of_a_rank_alone, 2):
        assert relative_error(logits, expected) < TOLERANCE


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
        PackedCoreAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)


def refusals_of_modes() -> list[str]:
    """What a model says of a mode; "" where it takes it. Learned positions take both, rotary ones the zigzag."""
    initialize_groups(Sharding())
    said = []
    for cut in ("contiguous", "zigzag"):
        model = build_model(Sharding(), ModelOptions(cp_partition_mode=cut))
        for mode in ("zigzag", "contiguous"):
            try:
                require_partition_mode(model, mode)
                said.append("")
            except NotImplementedError as error:
                said.append(str(error))
    return said


def test_a_cut_of_the_pack_that_the_attention_does_not_have_is_refused() -> None:
    *taken, rotary = run_ranks(refusals_of_modes, 1)[0]
    assert taken == [""] * 3
    assert "rotary positions of this megatron-core" in rotary
    assert "contiguous" in rotary and "cp_partition_modes" in rotary
