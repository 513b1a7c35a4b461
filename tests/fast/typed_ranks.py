"""The loss path run once, with what each of its tensors is on every axis of parallelism carried
along by `spmd_types`.

One rank of a mesh of 2 x 2 x 2 (data, context, tensor parallel) whose collectives do nothing:
values mean nothing here, and types everything. On each axis a tensor is different on each rank (V;
sharded, where the dimension is known), the same on each (R where ranks have each a part of its
gradient, I where that is the same as well), or a part of a pending sum (P). The library works out
the type of every operator's result, refuses operands for which none is right, and finds by itself
that a sum over a dimension sharded over context- or tensor-parallel ranks is a part of a pending
one. The package does not import it.

Where it ends, version 0.3.1: data-parallel ranks hold samples of their own under indices of their
own, so that on that axis it knows no dimension, and V becomes P by our word where a loss leaves the
rank; what `say_by_hand` and `Supplement` list; numbers of the host (the counts of a step, the
factors of the scale contract); and the backward of an op of our own.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock

import pytest
import spmd_types as spmd
import spmd_types.checker
import torch
import torch.distributed as dist
from spmd_types import I, P, R, S, SpmdTypeError, V
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_pg.head import log_probs, rows_torch
from megatron_pg.loss import from_logits, metrics, micro_batch
from megatron_pg.loss.sequence import SequenceSums
from megatron_pg.megatron.cpu import runtime
from megatron_pg.megatron.groups import ParallelGroups
from megatron_pg.step.batch import PackedBatch

AXES = ("dp", "cp", "tp")
ALL_GATHER = dist.all_gather_into_tensor
HEAD = log_probs.LogProbsAndEntropy
CASTS = {Tensor.double, Tensor.to}
HOST_READS = {Tensor.tolist, Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__bool__}

Seen = dict[str, str]
"""The types of tensors by name, on data-, context- and tensor-parallel ranks, such as "P P I"."""


@contextmanager
def torch_itself() -> Iterator[None]:
    """Without what the CPU runtime puts in the place of torch's functions: the library knows
    functions by identity.
    """
    with pytest.MonkeyPatch.context() as patch:
        for owner in (torch, Tensor):
            for name, function in list(vars(owner).items()):
                if getattr(function, "__globals__", None) is vars(runtime):
                    patch.setattr(owner, name, getattr(function, "__wrapped__", function))
        yield


@contextmanager
def fake_mesh() -> Iterator[tuple[DeviceMesh, ParallelGroups]]:
    """The mesh, of which this process is rank 0 of 8, and its groups, with one pipeline stage."""
    dist.init_process_group(backend="fake", rank=0, world_size=8, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=AXES)
        data, context, tensor = map(mesh.get_group, AXES)
        both, pipeline = dist.new_group([0, 2, 4, 6]), dist.new_group([0])
        yield mesh, ParallelGroups(tensor, context, data, both, pipeline)
    finally:
        dist.destroy_process_group()


def types_of(tensor: Tensor) -> str:
    """As `Seen` has them."""
    found = spmd.get_local_type(tensor)
    return " ".join(found[spmd.normalize_axis(axis)].value for axis in AXES)


@contextmanager
def typed(mesh: DeviceMesh) -> Iterator[Seen]:
    """What runs inside is typed; what was found goes into the dict."""
    seen: Seen = {}
    with (
        pytest.MonkeyPatch.context() as patch,
        spmd.set_current_mesh(mesh, local_axes=("dp",)),
        spmd.checker.typecheck(local=False),
        Supplement(seen),
    ):
        say_by_hand(patch, seen)
        yield seen


class Supplement(TorchFunctionMode):
    """Three rules beside those of the library.

    What the host reads is the same on every rank, or ranks would go different ways. A change of
    dtype or device changes no type, that of a pending sum neither. And a maximum over a sharded
    dimension is V: there is no type for a pending one.
    """

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if not spmd.is_type_checking():
            return func(*args, **(kwargs or {}))
        if func in HOST_READS:
            self.seen["read on the host"] = found = types_of(args[0])
            if set(found) & set("VP"):
                raise SpmdTypeError(f"{func.__name__} reads a tensor on the host that is {found}")
        if func not in CASTS and not (func is Tensor.amax and spmd.get_partition_spec(args[0])):
            return func(*args, **(kwargs or {}))
        with spmd.no_typecheck():
            result = func(*args, **(kwargs or {}))
        (spmd.assert_type_like if func in CASTS else spmd.assert_local_type_like)(result, args[0])
        return result


def of_tokens(tensor: Tensor, tensor_parallel: Any = R) -> Tensor:
    """A tensor [..., tokens], sharded by tokens over context-parallel ranks, and typed so over
    tensor-parallel ones.
    """
    return spmd.assert_type(tensor, {"dp": V, "cp": S(-1), "tp": tensor_parallel})


def type_batch(batch: PackedBatch) -> None:
    """Types the tensors of a micro-batch: sharded by tokens, the same on tensor-parallel ranks."""
    for field in dataclasses.fields(batch):
        if isinstance(value := getattr(batch, field.name), Tensor):
            of_tokens(value)


def say_by_hand(patch: pytest.MonkeyPatch, seen: Seen) -> None:
    """Types what the library cannot, each function by what it is documented to return."""

    def untyped(of: Any, name: str, like: Callable[..., Tensor], **axes: Any) -> None:
        """Runs a function without types; its result is typed like that tensor but on some axes."""
        function = getattr(of, name)

        def stated(*args: Any) -> Tensor:
            with spmd.no_typecheck():
                found = function(*args)
            spmd.assert_local_type_like(found, like(*args), axes)
            return found

        patch.setattr(of, name, stated)

    # Writes through an index, `statistics[part, 0] = ...`, leave the type of what is written to as
    # it was.
    untyped(rows_torch, "_local_statistics", lambda rows: rows.logits)
    # An index of samples is the rank's own, and adding by index is a sum over the window.
    untyped(
        micro_batch, "sums_of_rank", lambda config, names, tokens, samples: tokens.loss_mask, cp=P
    )
    # Sums of tokens and a summand of the host lie in one tensor, which has one type.
    untyped(metrics, "checksums", lambda weights: weights.loss, cp=P)

    # Numbers of this rank's samples come from the host, where there are no types.
    build = micro_batch.host_weights

    def build_typed(*args: Any) -> tuple[Tensor, Tensor]:
        with spmd.no_typecheck():
            built = build(*args)
        for numbers in built:
            spmd.assert_type(numbers, {"dp": V, "cp": R, "tp": R})
        return built

    units_of = micro_batch.units_of_window

    def units_typed(*args: Any) -> tuple[Tensor, Tensor]:
        with spmd.no_typecheck():
            units, samples = units_of(*args)
        return of_tokens(units), spmd.assert_type(samples, {"dp": V, "cp": R, "tp": R})

    pairs_of = metrics.PairTable.pairs

    def pairs_typed(self: Any, parts: Any, step_numbers: Tensor) -> Tensor:
        if wrong := {types_of(each) for each in parts} - {"V P I", "V P R"}:
            raise SpmdTypeError(f"a micro-batch reports {wrong}, no parts of pending sums")
        with spmd.no_typecheck():
            found = pairs_of(self, parts, step_numbers)
        return spmd.assert_type(found, {"dp": P, "cp": P, "tp": R})

    # The rows that score a response token are indices of the rank's own, as those of samples are.
    of_logits = from_logits.log_probs_of_logits

    def of_logits_typed(*args: Any, **keywords: Any) -> tuple[Tensor, Tensor | None, None]:
        with spmd.local():
            log_probs, entropy, _ = of_logits(*args, **keywords)
        seen["log_probs"] = types_of(log_probs)
        if entropy is not None:
            seen["entropy"] = types_of(of_tokens(entropy, I))
        return of_tokens(log_probs, I), entropy, None

    sums_of = SequenceSums.of_table

    def sums_seen(names: Any, unit_ids: Tensor, table: Tensor | None) -> SequenceSums:
        if table is not None:
            seen["sums over sequences"] = types_of(table)
        return sums_of(names, unit_ids, table)

    patch.setattr(micro_batch, "host_weights", build_typed)
    patch.setattr(micro_batch, "units_of_window", units_typed)
    patch.setattr(metrics.PairTable, "pairs", pairs_typed)
    patch.setattr(from_logits, "log_probs_of_logits", of_logits_typed)
    patch.setattr(SequenceSums, "of_table", sums_seen)
    patch.setattr(log_probs, "LogProbsAndEntropy", HeadTyped)
    patch.setattr(metrics, "torch", TorchOfSums())
    patch.setattr(dist, "all_gather_into_tensor", all_gather_typed)
    patch.setattr(dist, "all_reduce", all_reduce_typed)


class HeadTyped:
    """The op of log-probs and entropy, its forward typed operator by operator, its collective
    included.

    What is the same on tensor-parallel ranks becomes I, and not R, by its backward: each rank takes
    the gradient that arrives as the whole, for its own columns, and nothing is added up.
    """

    @staticmethod
    def apply(logits: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            typed = HEAD.forward(MagicMock(), logits, *args)
        with spmd.no_typecheck():
            found = HEAD.apply(logits, *args)
        for result, like in zip(found, typed, strict=True):
            if result is not None:
                spmd.assert_type_like(result, spmd.reinterpret_no_grad(like, "tp", dst=I))
        return found


class TorchOfSums:
    """`torch` as `reduce_metrics` sees it, whose zeros are empty sums: parts of pending ones
    too.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *shape: int, **options: Any) -> Tensor:
        return spmd.mutate_type(torch.zeros(*shape, **options), src=R, dst=P)


def all_gather_typed(output: Tensor, local: Tensor, group: dist.ProcessGroup) -> None:
    """Types what is written to, which the library's rule for the call then compares with what is
    sent.

    Every rank sends the same numbers: a loss that is NaN would be looked for on the host.
    """
    if spmd.is_type_checking():
        spmd.mutate_type(output, group, src=V, dst=R)
    ALL_GATHER(output, local, group=group)
    with spmd.no_typecheck():
        output.view(-1, *local.shape).copy_(local)


def all_reduce_typed(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
    """A pending sum becomes the same everywhere, on each axis that the group spans.

    The library's rule for the call knows groups of one axis alone, and takes a maximum for a sum.
    """
    ranks = set(dist.get_process_group_ranks(group or dist.group.WORLD))
    for axis in spmd.current_mesh():
        if ranks.issuperset(axis.layout.all_ranks_from_zero()):
            pending = P if op == dist.ReduceOp.SUM else spmd.get_axis_local_type(tensor, axis)
            spmd.mutate_type(tensor, axis, src=pending, dst=R)


def contributed(found: metrics.MicroBatchMetrics) -> metrics.MicroBatchMetrics:
    """What tensor-parallel rank 0 brings to the step's sums, where its peers bring zeros."""
    pairs = spmd.convert(found.pairs, "tp", src=R, dst=P)
    return metrics.MicroBatchMetrics(found.table, pairs, found.maxima)
