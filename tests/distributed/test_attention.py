"""The torch-only attention: packed and context parallel equals each sequence alone in one process."""

from __future__ import annotations

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
        chunks = build_model(Sharding())
        total = 0.0
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


@pytest.mark.parametrize(
    "sharding",
    [
        Sharding(),
        Sharding(context=2),
        Sharding(context=4),
        Sharding(tensor=2, context=2),
        Sharding(tensor=2, context=2, sequence_parallel=True),
    ],
    ids=str,
)
def test_packed_context_parallel_model_equals_each_sequence_alone(
    sharding: Sharding, reference: dict[str, tuple[float, dict[str, Tensor]]]
) -> None:
    found = run_ranks(all_lengths, sharding.world_size, sharding)[0]
    for name, (total, gradients) in found.items():
        expected_total, expected = reference[name]
        assert total == pytest.approx(expected_total, rel=1e-5)
        assert gradients.keys() == expected.keys()
        errors = {
            key: relative_error(gradient, expected[key]) for key, gradient in gradients.items()
        }
        assert max(errors.values()) < TOLERANCE, (name, errors)


def logits_of_a_rank_alone() -> tuple[Tensor, Tensor]:
    """A model of two context-parallel ranks whose group is exchanged for one of this rank alone."""
    sharding = Sharding(context=2)
    initialize_groups(sharding)
    (model,) = build_model(sharding)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    tokens, _ = sequences(LENGTHS["even"])
    boundaries = torch.tensor([0, *torch.tensor(LENGTHS["even"]).cumsum(0)], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=max(LENGTHS["even"]),
        max_seqlen_kv=max(LENGTHS["even"]),
    )
    positions = torch.cat([torch.arange(length) for length in LENGTHS["even"]])
    model.module.pg_collection.cp = alone
    with torch.no_grad():
        logits = model(torch.cat(tokens)[None], positions[None], None, packed_seq_params=packed)
    initialize_groups(Sharding(data=2))
    (reference,) = build_model(Sharding(data=2))
    with torch.no_grad():
        expected = reference(
            torch.cat(tokens)[None], positions[None], None, packed_seq_params=packed
        )
    return logits, expected


def test_a_context_parallel_model_runs_alone_with_another_group() -> None:
    """As when it generates: the group is read when the model is called."""
    for logits, expected in run_ranks(logits_of_a_rank_alone, 2):
        assert relative_error(logits, expected) < TOLERANCE


REFUSED = {
    "--attention-dropout": {"attention_dropout": 0.1},
    "--window-size": {"window_size": (4, 0)},
    "--softmax-type": {"softmax_type": "off-by-one"},
}


@pytest.mark.parametrize("flag", REFUSED)
def test_settings_that_the_attention_does_not_know_are_refused(flag: str) -> None:
    config = transformer_config(Sharding(), ModelOptions())
    for name, value in REFUSED[flag].items():
        if not hasattr(config, name):
            pytest.skip(f"this version of Megatron-Core has no {name}")
        setattr(config, name, value)
    with pytest.raises(NotImplementedError, match=flag):
        PackedCoreAttention(
            config, 1, AttnMaskType.causal, "self", pg_collection=ProcessGroupCollection()
        )


MODES = {
    "zigzag": ({"cp_partition_mode": "contiguous"}, "zigzag"),
    "contiguous": ({"cp_partition_mode": "contiguous"}, "contiguous"),
    "rotary zigzag": ({}, "zigzag"),
    "rotary": ({}, "contiguous"),
}


def refusals_of_modes() -> dict[str, str]:
    """By case what a model says of a mode; "" where it takes it."""
    initialize_groups(Sharding())
    found = {}
    for name, (model, mode) in MODES.items():
        try:
            require_partition_mode(build_model(Sharding(), ModelOptions(**model)), mode)
            found[name] = ""
        except NotImplementedError as error:
            found[name] = str(error)
    return found


def test_a_cut_of_the_pack_that_the_attention_does_not_have_is_refused() -> None:
    said = run_ranks(refusals_of_modes, 1)[0]
    assert said["rotary zigzag"] == said["contiguous"] == said["zigzag"] == ""
    assert "rotary positions of this megatron-core" in said["rotary"]
    assert "contiguous" in said["rotary"] and "cp_partition_modes" in said["rotary"]
