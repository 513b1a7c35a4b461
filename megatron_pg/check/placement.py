"""The place of a rank's parameters and gradients in the whole model, from the keys, shapes and
offsets of Megatron's `sharded_state_dict`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_pg.megatron.groups import unwrapped


@dataclass(frozen=True)
class Piece:
    """A block of a whole parameter, as a view of the rank's tensor.

    A rank may hold several blocks: the two halves of a SwiGLU layer are sharded separately.
    """

    name: str
    """The parameter's key in a checkpoint, with the place of an expert in brackets."""
    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    offset: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    """The view of the rank's tensor: size, stride and first element."""
    is_vocabulary: bool = False
    is_stated: bool = True
    """False for a parameter without an entry, which is assumed to be whole on every rank."""

    def view(self, local: Tensor) -> Tensor:
        """Return the block of a tensor with the shape of the rank's parameter."""
        return local.as_strided(self.size, self.stride, local.storage_offset() + self.start)

    def cut(self, whole: Tensor) -> Tensor:
        """Return the block of the whole parameter, or of its gradient."""
        starts = zip(self.offset, self.size, strict=True)
        return whole[tuple(slice(first, first + count) for first, count in starts)]


Part = tuple[Piece, Tensor]
"""A rank's block of a parameter, its gradient or its update, with its place."""


def placed(model: Any, values: Mapping[str, Tensor] | None = None) -> Iterator[Part]:
    """Yield the blocks of an unwrapped chunk's parameters, or of tensors with their names and
    shapes.
    """
    named = dict(model.named_parameters())
    pieces = pieces_of(model, named)
    for name, tensor in (named if values is None else values).items():
        yield from ((piece, piece.view(tensor.detach())) for piece in pieces[name])


def pieces_of(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, list[Piece]]:
    """Return the pieces of each tensor of an unwrapped chunk by its local name."""
    found, stated = {}, _stated(model, tensors)
    rename = _renaming(stated)
    for name, tensor in tensors.items():
        if name in stated:
            found[name] = stated[name]
            continue
        shape, offset = tuple(tensor.shape), (0,) * tensor.dim()
        view = shape, offset, shape, tensor.stride(), 0
        found[name] = [Piece(rename(name), *view, is_stated=False)]
    return found


def names_in_whole(model: Any) -> Callable[[str], str]:
    """Return a function from a module's or parameter's name in a chunk to its name in the whole
    model, which numbers layers differently.
    """
    return _renaming(_stated(model, dict(model.named_parameters())))


def _renaming(stated: Mapping[str, Sequence[Piece]]) -> Callable[[str], str]:
    """Take a name's layer numbers from the keys of neighboring parameters."""
    prefixes = {"": ""}
    for name, pieces in stated.items():
        key, _, place = pieces[0].name.partition("[")
        numbers = [part for part in key.split(".") if part.isdigit()]
        numbers += place.removesuffix("]").split(",") if place else []
        own = name.split(".")
        if len(numbers) == sum(part.isdigit() for part in own):
            whole = [numbers.pop(0) if part.isdigit() else part for part in own]
            prefixes |= {
                ".".join(own[:count]): ".".join(whole[:count]) for count in range(1, len(own))
            }

    def rename(name: str) -> str:
        parts = name.split(".")
        known = next(k for k in range(len(parts), -1, -1) if ".".join(parts[:k]) in prefixes)
        return ".".join([prefixes[".".join(parts[:known])], *parts[known:]]).lstrip(".")

    return rename


def _stated(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, list[Piece]]:
    """Return the pieces of the tensors that have an entry."""
    held = sorted((tensor.data_ptr(), name) for name, tensor in tensors.items() if tensor.numel())
    addresses = [address for address, _ in held]
    found: dict[str, list[Piece]] = {}
    with torch.no_grad():
        metadata = {"non_homogeneous_layers": True}
        try:
            state = model.sharded_state_dict(metadata=metadata)
        except AssertionError:
            # A tied weight fails on a stage with multi-token prediction. Megatron's checkpoints do
            # this.
            state = MegatronModule.sharded_state_dict(model, metadata=metadata)
        for key, entry in state.items():
            built = {key: entry}
            apply_factories(built)
            blocks = [each for each in nested_values(built) if isinstance(each, ShardedTensor)]
            pieces: dict[str, list[Piece]] = {}
            for block in blocks:
                if block.data is None or not block.data.numel():
                    continue
                at = bisect.bisect_right(addresses, block.data.data_ptr()) - 1
                name = held[max(at, 0)][1] if held else ""
                start = block.data.data_ptr() - addresses[at] if at >= 0 else -1
                start //= block.data.element_size()
                if 0 <= start < tensors[name].numel() if name else False:
                    pieces.setdefault(name, []).append(_piece(block, start))
            for name, parts in pieces.items():
                # A second entry of a tied tensor adds nothing.
                if sum(torch.Size(p.size).numel() for p in parts) == tensors[name].numel():
                    found.setdefault(name, parts)
    return found


def _piece(block: ShardedTensor, start: int) -> Piece:
    first, data = block.prepend_axis_num, block.data
    place = ",".join(map(str, block.global_offset[:first]))
    return Piece(
        f"{block.key}[{place}]" if place else block.key,
        tuple(block.global_shape[first:]),
        tuple(block.global_offset[first:]),
        tuple(data.shape),
        data.stride(),
        start,
        is_vocabulary=block.allow_shape_mismatch,
    )


def whole_tensors(parts: Sequence[Part]) -> dict[str, Tensor]:
    """Assemble the blocks of an unsharded model into whole tensors, by name."""
    wholes: dict[str, Tensor] = {}
    for piece, tensor in parts:
        if piece.name not in wholes:
            wholes[piece.name] = tensor.new_zeros(piece.shape)
        piece.cut(wholes[piece.name]).copy_(tensor)
    return wholes


@torch.no_grad()
def gradient_parts(
    chunks: Sequence[Any], reference: Mapping[str, Tensor] | None = None
) -> Iterator[Part]:
    """Yield this rank's blocks of gradients: DDP's `main_grad` or a bare model's `grad`. A frozen
    parameter has none.

    The distributed optimizer has reduced only each rank's own part. The rest is gathered, or copied
    from the reference.
    """
    for chunk in chunks:
        model = unwrapped(chunk)
        named = dict(model.named_parameters())
        pieces = pieces_of(model, named)
        buckets = [(grads, own, own.clone(), ranks) for grads, own, ranks in _buckets(chunk)]
        if buckets and reference is not None:
            for name, parameter in named.items():
                for piece in pieces[name] if hasattr(parameter, "main_grad") else ():
                    piece.view(parameter.main_grad).copy_(piece.cut(reference[piece.name]))
        for gradients, own, kept, ranks in buckets:
            if reference is None:
                dist.all_gather_into_tensor(gradients, kept, group=ranks)
            own.copy_(kept)
        for name, parameter in named.items():
            gradient = getattr(parameter, "main_grad", parameter.grad)
            if gradient is None and not parameter.requires_grad:
                continue
            gradient = torch.zeros_like(parameter) if gradient is None else gradient.detach()
            yield from ((piece, piece.view(gradient)) for piece in pieces[name])


def _buckets(chunk: Any) -> Iterator[tuple[Tensor, Tensor, dist.ProcessGroup]]:
    """Yield the buckets that the distributed optimizer divides over ranks: the gradients, this
    rank's part and the ranks.
    """
    if not (hasattr(chunk, "ddp_config") and chunk.ddp_config.use_distributed_optimizer):
        return
    for group in itertools.chain(chunk.bucket_groups, chunk.expert_parallel_bucket_groups):
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            yield bucket.grad_data, bucket.grad_data.chunk(ranks.size())[ranks.rank()], ranks
