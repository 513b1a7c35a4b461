"""Parameters and gradients of a sharded Megatron model by their place in the whole model."""

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_pg.check.options import LEAN_PERIOD
from megatron_pg.megatron.groups import unwrapped

COMMON, LEAN, PULL = 0, 1, 2
"""The seeds of `set_parameters`' directions."""


@dataclass(frozen=True)
class Shard:
    """The place of a rank's slice in the whole parameter: `index` of `count` along `dimension`."""

    name: str
    dimension: int
    index: int
    count: int

    def cut(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.count, self.dimension)[self.index] if self.count > 1 else whole


Part = tuple[Shard, Tensor]
"""A rank's slice of a gradient, or of a parameter's update, with its place."""


def shards(model: torch.nn.Module) -> Iterator[tuple[Shard, torch.nn.Parameter]]:
    """Yield each parameter of an unwrapped chunk with its place in the whole model."""
    for name, parameter in model.named_parameters():
        dimension, ranks = 0, None
        if ".experts." in name:
            # An expert's first layer is cut by rows, its second by columns.
            dimension = int("linear_fc2" in name)
            ranks = parallel_state.get_expert_tensor_parallel_group()
        elif getattr(parameter, "tensor_model_parallel", False):
            dimension = int(getattr(parameter, "partition_dim", 0))
            ranks = parallel_state.get_tensor_model_parallel_group()
        index, count = (ranks.rank(), ranks.size()) if ranks else (0, 1)
        yield Shard(_whole_name(model, name), dimension, index, count), parameter


def _whole_name(model: Any, name: str) -> str:
    """Return the name in the unsharded model, with global layer and expert numbers."""
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        # On another pipeline stage a tied output layer is a copy of the embedding.
        return "embedding.word_embeddings.weight"
    parts = name.split(".")
    if "layers" in parts and parts[0] == "decoder":
        place = parts.index("layers") + 1
        parts[place] = str(model.decoder.layers[int(parts[place])].layer_number - 1)
    if "local_experts" in parts:
        place = parts.index("local_experts") + 1
        ranks = parallel_state.get_expert_model_parallel_group()
        first = model.config.num_moe_experts // ranks.size() * ranks.rank()
        parts[place] = str(first + int(parts[place]))
    return ".".join(parts)


@torch.no_grad()
def set_parameters(model: Any) -> None:
    """Give every parameter values that depend on its name in the whole model alone, so that every
    sharding is one function.

    float32 computes its gradients to a few parts in ten million at any depth. Layers add little to
    the residual stream, so that every parameter's gradient is judged by its own size. All rows of
    the embedding share a direction. In the embedding and the output layer eight ids lean one way
    and the next eight the other (`LEAN_PERIOD`): responses of the first eight pull every parameter
    one way at every token, and every tensor-parallel rank has ids of both kinds.
    """
    for shard, parameter in shards(model):
        generator = torch.Generator().manual_seed(zlib.crc32(shard.name.encode()))
        shape = list(parameter.shape)
        shape[shard.dimension] *= shard.count
        whole = torch.randn(shape, generator=generator)
        if "norm" in shard.name:
            whole = 0.1 * whole + (0.0 if shard.name.endswith("bias") else 1.0)
            if "final" in shard.name and model.share_embeddings_and_output_weights:
                whole *= 0.1 / math.sqrt(whole.shape[0])  # the embedding is no small output layer
        elif "embedding" in shard.name:
            common, lean = 2.0 * _direction(COMMON, whole.shape[1]), _leaning(whole, LEAN)
            is_learned = getattr(model, "position_embedding_type", "") == "learned_absolute"
            if model.share_embeddings_and_output_weights and is_learned:
                # A direction that a tied output layer's rows share cancels in the softmax and costs
                # digits. The positions have it instead.
                whole += common if "position" in shard.name else lean
            else:
                whole += common + lean
        elif whole.dim() == 1:
            whole *= 0.02
        elif "output_layer" in shard.name:
            whole = 0.3 / math.sqrt(whole.shape[1]) * (whole + _leaning(whole, PULL))
        elif "table" not in shard.name:
            whole *= 0.1 / math.sqrt(whole.shape[1])
            if "linear_qkv" in shard.name:
                # With smaller queries and keys, attention would be the mean over the tokens before.
                groups = whole.view(model.config.num_query_groups, -1, whole.shape[1])
                groups[:, : -model.config.kv_channels] *= 4.0
            elif ".local_experts." in shard.name and (
                model.config.moe_router_topk < model.config.num_moe_experts
            ):
                # Each expert makes another step along the loss's pull: a router's gradient comes
                # from the difference between experts. All step one way: steps that cancel would
                # cost the norm before them digits.
                step = 0.1
                if "linear_fc2" in shard.name:
                    place = 1 + int(shard.name.split(".local_experts.")[1].split(".")[0])
                    size = 0.1 * place / model.config.num_moe_experts
                    step = size * _direction(PULL, whole.shape[0]).unsqueeze(1)
                whole += step / math.sqrt(whole.shape[1])
            elif "router" in shard.name:
                # The router ignores the tokens' common directions, so that every expert gets
                # tokens.
                for seed in (COMMON, LEAN):
                    direction = _direction(seed, whole.shape[1])
                    whole -= torch.outer(whole @ direction, direction) / direction.square().sum()
        parameter.copy_(shard.cut(whole))


def _leaning(whole: Tensor, seed: int) -> Tensor:
    """Return a direction [columns] for the first half of each period's rows, its opposite for the
    others.
    """
    is_first = torch.arange(whole.shape[0]).unsqueeze(1) % LEAN_PERIOD < LEAN_PERIOD // 2
    lean = _direction(seed, whole.shape[1])
    return torch.where(is_first, lean, -lean)


def _direction(seed: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def biased_routers(model: torch.nn.Module) -> Iterator[tuple[Shard, Any]]:
    """Yield each router of an unwrapped chunk that adds a bias to its experts' scores, with the
    place of that bias.
    """
    for name, module in model.named_modules():
        if getattr(module, "expert_bias", None) is not None:
            yield Shard(_whole_name(model, f"{name}.expert_bias"), 0, 0, 1), module


def expert_bias(name: str, like: Tensor) -> Tensor:
    """Return the bias [experts] of a router by its name in the whole model, with the device and
    dtype of another tensor.

    The values are as small as the differences between scores, and exact in every dtype.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (torch.randint(-4, 5, like.shape, generator=generator) * 2.0**-8).to(like)


@torch.no_grad()
def gradient_slices(
    chunks: Sequence[Any], reference: Mapping[str, Tensor] | None = None
) -> Iterator[Part]:
    """Yield this rank's gradient slices: DDP's `main_grad` or a bare model's `grad`.

    The distributed optimizer has reduced each rank's part alone. The rest is gathered, or copied
    from the reference.
    """
    for chunk in chunks:
        slices: list[tuple[Shard, Any]] = list(shards(unwrapped(chunk)))
        buckets = [(grads, own, own.clone(), ranks) for grads, own, ranks in _buckets(chunk)]
        if buckets and reference is not None:
            for shard, parameter in slices:
                parameter.main_grad.copy_(shard.cut(reference[shard.name]))
        for gradients, own, kept, ranks in buckets:
            if reference is None:
                dist.all_gather_into_tensor(gradients, kept, group=ranks)
            own.copy_(kept)
        for shard, parameter in slices:
            gradient = getattr(parameter, "main_grad", parameter.grad)
            yield shard, torch.zeros_like(parameter) if gradient is None else gradient.detach()


def _buckets(chunk: Any) -> Iterator[tuple[Tensor, Tensor, dist.ProcessGroup]]:
    """Yield the buckets that ranks of the distributed optimizer divide: the gradients, this rank's
    part, the ranks.
    """
    if not (hasattr(chunk, "ddp_config") and chunk.ddp_config.use_distributed_optimizer):
        return
    for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            yield bucket.grad_data, bucket.grad_data.chunk(ranks.size())[ranks.rank()], ranks
