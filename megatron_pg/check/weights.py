"""The tiny models' parameter values, which depend on the place in the whole model."""

import math
import zlib
from typing import Any

import torch
from torch import Tensor

from megatron_pg.check.options import LEAN_PERIOD
from megatron_pg.check.placement import Piece, pieces_of, placed

COMMON, LEAN, PULL = 0, 1, 2
"""The seeds of `set_parameters`' directions."""


@torch.no_grad()
def set_parameters(model: Any) -> None:
    """Give every parameter values that depend only on its name in the whole model, so that every
    sharding computes one function.

    float32 computes its gradients to a few parts in ten million at any depth. Layers add little to
    the residual stream, so that every parameter's gradient is judged by its own size. All embedding
    rows share a direction. In the embedding and the output layer, eight ids lean one way and the
    next eight the opposite way (`LEAN_PERIOD`). So responses of the first eight pull every
    parameter one way at every token, and every tensor-parallel rank has ids of both kinds.
    """
    for piece, parameter in placed(model):
        generator = torch.Generator().manual_seed(zlib.crc32(piece.name.encode()))
        whole = torch.randn(piece.shape, generator=generator)
        if "norm" in piece.name:
            whole = 0.1 * whole + (0.0 if piece.name.endswith("bias") else 1.0)
            if "final" in piece.name and model.share_embeddings_and_output_weights:
                whole *= 0.1 / math.sqrt(whole.shape[0])  # the tied output layer is large
        elif "embedding" in piece.name:
            common, lean = 2.0 * _direction(COMMON, whole.shape[1]), _leaning(whole, LEAN)
            is_learned = getattr(model, "position_embedding_type", "") == "learned_absolute"
            if model.share_embeddings_and_output_weights and is_learned:
                # A direction that all rows of a tied output layer share cancels in the softmax and
                # costs digits. The positions have it instead.
                whole += common if "position" in piece.name else lean
            else:
                whole += common + lean
        elif whole.dim() == 1:
            whole *= 0.02
        elif "output_layer" in piece.name:
            whole = 0.3 / math.sqrt(whole.shape[1]) * (whole + _leaning(whole, PULL))
        elif "table" not in piece.name:
            whole *= 0.1 / math.sqrt(whole.shape[1])
            if "linear_qkv" in piece.name:
                # With smaller queries and keys, attention would average earlier tokens.
                groups = whole.view(model.config.num_query_groups, -1, whole.shape[1])
                groups[:, : -model.config.kv_channels] *= 4.0
            elif ".experts." in piece.name and (
                model.config.moe_router_topk < model.config.num_moe_experts
            ):
                # Each expert makes a different step along the loss's pull, because a router's
                # gradient comes from differences between experts. All step one way, because
                # canceling steps would cost the preceding norm digits.
                step = 0.1
                if "linear_fc2" in piece.name:
                    place = 1 + int(piece.name.split("[")[1].removesuffix("]"))
                    size = 0.1 * place / model.config.num_moe_experts
                    step = size * _direction(PULL, whole.shape[0]).unsqueeze(1)
                whole += step / math.sqrt(whole.shape[1])
            elif "router" in piece.name:
                # The router ignores the tokens' common directions, so that every expert gets
                # tokens.
                for seed in (COMMON, LEAN):
                    direction = _direction(seed, whole.shape[1])
                    whole -= torch.outer(whole @ direction, direction) / direction.square().sum()
        parameter.copy_(piece.cut(whole))


def _leaning(whole: Tensor, seed: int) -> Tensor:
    """Return a direction [columns] for the first half of each period's rows, and its opposite for
    the second half.
    """
    is_first = torch.arange(whole.shape[0]).unsqueeze(1) % LEAN_PERIOD < LEAN_PERIOD // 2
    lean = _direction(seed, whole.shape[1])
    return torch.where(is_first, lean, -lean)


def _direction(seed: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def biased_routers(model: torch.nn.Module) -> list[tuple[Piece, Any]]:
    """Return an unwrapped chunk's routers with an expert bias, with the place of the bias."""
    routers = {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "expert_bias", None) is not None
    }
    pieces = pieces_of(model, {name: router.expert_bias for name, router in routers.items()})
    return [(pieces[name][0], router) for name, router in routers.items()]


def expert_bias(name: str, like: Tensor) -> Tensor:
    """Return a router's bias [experts] by its name in the whole model, with the device and dtype of
    `like`.

    The values are as small as differences between scores, and exact in every dtype.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (torch.randint(-4, 5, like.shape, generator=generator) * 2.0**-8).to(like)
