"""Weights of a Hugging Face folder into Megatron-Core's GPTModel and back, tensor by tensor.

A rank reads the rows or columns that it holds; on the way back rank 0 has one file of the result in memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.utils import unwrap_model
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .hugging_face_config import (
    MAPPING,
    WeightsError,
    carry_over,
    differences,
    place_of,
    read_config,
)


@dataclass(frozen=True)
class Piece:
    """Slice `index` of `count` along `dimension`: of one tensor of a folder, or of some whose rows alternate."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dimension: int
    index: int
    count: int
    groups: int
    """How often they alternate in the whole: q, k and v in each query group, gate and up in each slice."""
    local_shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, tensors: dict[str, Any]) -> Tensor:
        """The parameter, of no more of the tensors than it takes; without the rows that pad a vocabulary."""
        parts = [tensors[name].get_slice(name) for name in self.names]
        if len(parts) > 1 and self.groups % self.count:  # more ranks than query groups
            return _join([part[:] for part in parts], self.groups).chunk(self.count)[self.index]
        slices, total = [], sum(shape[self.dimension] for shape in self.shapes)
        for part, shape in zip(parts, self.shapes, strict=True):
            whole = shape[self.dimension]
            size = self.local_shape[self.dimension] * whole // total
            start, stop = (min(place * size, whole) for place in (self.index, self.index + 1))
            slices.append(part[start:stop] if self.dimension == 0 else part[:, start:stop])
        return slices[0] if len(slices) == 1 else _join(slices, self.groups // self.count)

    def whole(self, slices: list[Tensor]) -> dict[str, Tensor]:
        """The tensors by name, of all slices in order."""
        joined = torch.cat(slices, self.dimension)
        if len(self.names) == 1:
            return {self.names[0]: joined[: self.shapes[0][0]].contiguous()}
        rows = joined.reshape(self.groups, -1, *joined.shape[1:])
        parts = rows.split([shape[0] // self.groups for shape in self.shapes], 1)
        return {n: part.flatten(0, 1) for n, part in zip(self.names, parts, strict=True)}


def _join(parts: list[Tensor], groups: int) -> Tensor:
    return torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 1)


def load_hugging_face(chunks: Sequence[torch.nn.Module], folder: str | Path) -> None:
    """Gives the model the weights of a folder; every rank of the world calls it, before an optimizer copies them.

    Args:
        chunks: this rank's chunks of a GPTModel, wrapped (DDP, Float16Module) or not, at any TP, PP, VPP and EP.
        folder: config.json and safetensors files of any dtype, readable on every rank.

    Raises:
        WeightsError: on every rank, before anything is changed: a tensor is missing, left over, of another shape or
            unreadable, or the model is not the folder's.
    """
    config, tensors, problems = read_config(folder), {}, []
    for file in sorted(Path(folder).glob("model*.safetensors")):
        try:
            opened = safe_open(file, "pt")
            tensors |= dict.fromkeys(opened.keys(), opened)
        except (SafetensorError, OSError) as error:
            problems.append(f"{file} cannot be read ({error}): copy it anew")
    pieces = _pieces(chunks, config, problems)
    needed = {n: s for piece, _ in pieces for n, s in zip(piece.names, piece.shapes, strict=True)}
    for name, shape in needed.items():
        found = tuple(tensors[name].get_slice(name).get_shape()) if name in tensors else "missing"
        if found != shape:
            problems.append(f"{name} in {folder} is {found}, and the model needs {shape}")
    known = set().union(*_agree(problems, set(needed)))
    # A tied output layer is the embedding; old checkpoints have a constant of the rotary embedding.
    known |= {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    left = [n for n in tensors if n not in known and not n.endswith("rotary_emb.inv_freq")]
    _agree([f"{name} in {folder} has no place in the model" for name in left], None)
    with torch.no_grad():
        for piece, parameter in pieces:
            value = piece.read(tensors)
            parameter[: len(value)].copy_(value)
            parameter[len(value) :].zero_()


def save_hugging_face(
    chunks: Sequence[torch.nn.Module],
    folder: str | Path,
    source: str | Path,
    file_bytes: int = 5 * 10**9,
) -> None:
    """Writes the model as a folder that `transformers` loads; every rank of the world calls it.

    Args:
        chunks: as in `load_hugging_face`; the weights are written in their dtype.
        folder: a new one on rank 0's disk, which has its name once it is whole (`.partial` follows it until then).
        source: the folder whose config.json and tokenizer are carried over.
        file_bytes: at which a safetensors file is full; with a second one comes an index.

    Raises:
        WeightsError: on every rank: `folder` exists, or the model is not that of `source`.
    """
    folder, is_writer, problems = Path(folder), dist.get_rank() == 0, []
    pieces = _pieces(chunks, read_config(source), problems)
    if is_writer and folder.exists():
        problems.append(f"{folder} exists: remove it or name another")
    holders: dict[tuple[str, ...], dict[int, tuple[int, Piece]]] = {}
    for rank, held in enumerate(_agree(problems, [piece for piece, _ in pieces])):
        for piece in held:
            holders.setdefault(piece.names, {}).setdefault(piece.index, (rank, piece))
    mine = {piece.names: parameter.detach() for piece, parameter in pieces}
    partial = folder.with_name(f"{folder.name}.partial")
    if is_writer:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        partial.mkdir(parents=True)
    tensors, files = {}, {}
    for count, (names, slices) in enumerate(holders.items(), 1):
        tensors |= _gather(slices, mine.get(names), pieces[0][1].device)
        is_full = sum(tensor.nbytes for tensor in tensors.values()) >= file_bytes
        if is_writer and (is_full or count == len(holders)):
            file = f"model-{len(set(files.values())) + 1:05}.safetensors"
            save_file(tensors, partial / file, {"format": "pt"})
            files |= dict.fromkeys(tensors, file)
            tensors = {}
    if is_writer:
        if file == "model-00001.safetensors":
            (partial / file).rename(partial / "model.safetensors")
        else:
            index = {"metadata": {}, "weight_map": files}
            (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        carry_over(source, partial, pieces[0][0].dtype)
        partial.rename(folder)
    dist.barrier()


def _gather(
    slices: dict[int, tuple[int, Piece]], parameter: Tensor | None, device: torch.device
) -> dict[str, Tensor]:
    """The whole tensors on rank 0, nothing elsewhere; `parameter` is this rank's slice, if it has one."""
    received, rank = [], dist.get_rank()
    for _, (holder, piece) in sorted(slices.items()):
        if rank == 0:
            part = parameter
            if holder != 0:
                part = torch.empty(piece.local_shape, dtype=piece.dtype, device=device)
                dist.recv(part, holder)
            received.append(part.cpu())
        elif rank == holder:
            dist.send(parameter.contiguous(), 0)
    return piece.whole(received) if rank == 0 else {}


def _agree(problems: list[str], mine: Any) -> list[Any]:
    """What every rank has, by rank; the problems of any are raised on all."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (problems, mine))
    found = dict.fromkeys(problem for each, _ in everyone for problem in each)
    if found:
        raise WeightsError("\n".join([*found][:12]))
    return [each for _, each in everyone]


def _pieces(
    chunks: Sequence[torch.nn.Module], config: dict[str, Any], problems: list[str]
) -> list[tuple[Piece, Tensor]]:
    """Every parameter of this rank, and the piece of a folder's tensors that it is."""
    tensor = (mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size())
    expert = (mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_tensor_parallel_world_size())
    found = []
    for model in unwrap_model(list(chunks)):
        problems += differences(model, config)
        heads, kv = model.config.num_attention_heads, model.config.num_query_groups
        for name, parameter in model.named_parameters():
            key, above = place_of(model, name)
            if key not in MAPPING:
                problems.append(f"{name} of the model has no place in a Hugging Face folder")
                continue
            cut, *names = MAPPING[key]
            index, count = (0, 1) if cut is None else expert if "experts" in key else tensor
            whole = list(parameter.shape)
            whole[cut or 0] *= count
            if not above and cut == 0:  # the embedding or the output layer: without padding
                whole[0] = min(whole[0], config["vocab_size"])
            shares, groups = ((heads, kv, kv), kv) if len(names) == 3 else ([1] * len(names), count)
            shapes = tuple((whole[0] * share // sum(shares), *whole[1:]) for share in shares)
            names, local = tuple(above + each for each in names), tuple(parameter.shape)
            piece = Piece(names, shapes, cut or 0, index, count, groups, local, parameter.dtype)
            found.append((piece, parameter))
    return found
