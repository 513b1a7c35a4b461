"""Padding in a mixture of experts: no router counts a token that only aligns a pack.

In megatron-core 0.16.1 to 0.19.2, the `padding_mask=` of layer blocks keeps tokens out of
load-balancing losses, z loss and expert bias (transformer/moe/router.py). Padding still passes
through the experts, where no other token sees it, and uses expert capacity. This module fixes seven
mistakes of these versions:

- GPTModel splits the mask for sequence parallelism only on its first pipeline stage, HybridModel
  never, and a user's forward may not pass it on. The blocks get it from a hook.
- `_apply_expert_bias` fails on a mask (fixed in 0.20, MLM#6114).
- A load-balancing loss over no token is NaN.
- Multi-token prediction shifts the mask like tokens, and so counts padding and leaves out tokens.
  Its layers get the unshifted mask.
- `_apply_global_aux_loss` divides the counts of all micro-batches so far by the last one's tokens
  (MLM#7213). Outside of per-token mode, data parallelism divides its sum over ranks again
  (MLM#3672).
- `apply_z_loss` averages the ranks' means, although their numbers of tokens differ. Its coefficient
  is weighted by the rank's share.
- In per-token mode, `valid_token_count` is the count V of all ranks that share the micro-batch
  (MLM#7481). With n = V, up to 0.18.2, a load-balancing loss has the weight V over the sum of V,
  which is its mean over tokens. 0.19.2 also multiplies by the number of these ranks.
  `moe_grad_scale_func` undoes this, so the z loss gets the factor back.
"""

import functools
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import router as megatron_router
from megatron.core.transformer.moe.moe_utils import get_tokens_per_expert_and_token_count
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn import Module

from megatron_pg.config import versions
from megatron_pg.megatron.groups import ParallelGroups, chunks_of, unwrapped
from megatron_pg.megatron.scale_contract import has_router_loss
from megatron_pg.step.batch import PackedBatch, to_device
from megatron_pg.step.values import host_tensor


def take_padding_mask(model: Any, groups: ParallelGroups) -> bool:
    """Let every chunk accept a whole micro-batch's `padding_mask=`. Every rank and stage calls it.

    Returns:
        False for a model without experts, or with layers that accept no mask.

    Raises:
        NotImplementedError: custom layers without a mask, with routers that count tokens; per-token
            mode with a router loss, without a mask or with a Megatron that counts each rank's
            tokens; quantile_balancing.
        ValueError: routers were built in a different loss mode than the config has.
    """
    chunks = [unwrapped(chunk) for chunk in chunks_of(model)]
    config = chunks[0].config
    if not getattr(config, "num_moe_experts", None):
        return False
    counts_tokens = config.calculate_per_token_loss and has_router_loss(config)
    blocks = [[*_blocks(chunk)] if isinstance(chunk, Module) else [] for chunk in chunks]
    if not any(blocks):
        if counts_tokens:
            raise NotImplementedError(
                "--calculate-per-token-loss with a router loss requires layers with padding_mask=: "
                "Megatron would count padding as tokens. Turn per-token mode off (the policy "
                "gradient is the same), or use megatron-core 0.16 or later"
            )
        counts = has_router_loss(config) or getattr(config, "moe_router_enable_expert_bias", False)
        has_padding = groups.context_size > 1 or getattr(config, "sequence_parallel", False)
        if counts and has_padding and versions.masks_padding():
            raise NotImplementedError(
                "a router loss or bias requires layers with padding_mask=: Megatron would count "
                "padding as tokens. Let the module that has your layers accept padding_mask= and "
                "pass it to each layer, like Megatron's TransformerBlock"
            )
        return False
    if config.moe_router_load_balancing_type == "quantile_balancing":
        raise NotImplementedError(
            "--moe-router-load-balancing-type quantile_balancing: its quantiles count padding, and "
            "Megatron refuses a padding_mask for it. Use a different type"
        )
    megatron_router.get_tokens_per_expert_and_token_count = _counts_to_divide_by
    for chunk, its_blocks in zip(chunks, blocks, strict=True):
        if not hasattr(chunk, "_takes_padding_mask"):
            if counts_tokens and versions.multiplies_by_ranks():
                _require_count_of_group(chunk)
            masks: dict[Any, Tensor] = {}
            take = functools.partial(_take_mask, groups, its_blocks, masks)
            chunk._takes_padding_mask = chunk.register_forward_pre_hook(take, with_kwargs=True)
            give = functools.partial(_give_mask, masks)
            for block in its_blocks:
                block.register_forward_pre_hook(give, with_kwargs=True)
            for layer in (m for m in chunk.modules() if _shifts_padding_mask(m)):
                layer._get_embeddings = functools.partial(_keep_padding_mask, layer)
        for router in _routers(chunk):
            _require_mode(router, config)
            router.apply_z_loss = functools.partial(_weighted_z_loss, router)
            if router.get_aux_loss_coeff("global_aux_loss"):
                router._apply_global_aux_loss = functools.partial(_global_loss, router)
                router.get_aux_loss_coeff = functools.partial(_coefficient, router)
            is_megatrons = type(router)._apply_expert_bias is TopKRouter._apply_expert_bias
            if router.enable_expert_bias and is_megatrons and not versions.masks_expert_bias():
                router._apply_expert_bias = functools.partial(_count_tokens, router)
    size = groups.tensor_size * groups.context_size
    scale = getattr(config, "moe_grad_scale_func", None)
    is_scaled = getattr(scale, "func", None) is _scale_of_a_rank  # by the first step
    if counts_tokens and versions.multiplies_by_ranks() and size > 1 and not is_scaled:
        config.moe_grad_scale_func = functools.partial(_scale_of_a_rank, config, size, scale)
    return True


def padding_mask(batch: PackedBatch) -> Tensor:
    """Make the `padding_mask=` of the model's forward, [1, local_tokens] bool on the batch's
    device, True at padding.

    `PolicyStep.head` includes it in `model_inputs`. An empty micro-batch is all padding, and adds 0
    to the router losses.
    """
    return to_device(batch.window.token_indices < 0, batch.tokens.device)[None]


def _routers(chunk: Any) -> Iterator[Any]:
    """Find a chunk's routers, including the routers of multi-token prediction."""
    return (module for module in chunk.modules() if hasattr(module, "apply_z_loss"))


def _blocks(module: Any) -> Iterator[Any]:
    """Find the outermost modules in a model that pass a `padding_mask=` to their layers."""
    for child in module.children():
        has_layers = hasattr(child, "layers")
        if has_layers and "padding_mask" in inspect.signature(child.forward).parameters:
            yield child
        else:
            yield from _blocks(child)


def _take_mask(
    groups: ParallelGroups,
    blocks: list[Any],
    masks: dict[Any, Tensor],
    chunk: Any,
    args: Any,
    keywords: dict[str, Any],
) -> tuple[Any, Any]:
    """Keep a chunk's mask for its blocks, split for sequence parallelism."""
    mask, config = keywords.pop("padding_mask", None), chunk.config
    if mask is None and config.calculate_per_token_loss and has_router_loss(config):
        if torch.is_grad_enabled():
            raise ValueError(
                "per-token mode with a router loss requires padding_mask in every call of the "
                "model: Megatron would scale the router loss by different tokens than the policy "
                "loss counts. Call it with **head.model_inputs, or add "
                "padding_mask=megatron_pg.megatron.padding_mask(batch)"
            )
    if mask is not None and config.sequence_parallel:
        mask = mask.chunk(groups.tensor_size, dim=1)[groups.tensor_rank]
    masks.update(dict.fromkeys(blocks, mask))
    return args, keywords


def _give_mask(
    masks: dict[Any, Tensor], block: Any, args: Any, keywords: dict[str, Any]
) -> tuple[Any, Any]:
    mask = masks.pop(block, None)
    return args, keywords if mask is None else {**keywords, "padding_mask": mask}


def _require_mode(router: Any, config: Any) -> None:
    """Raise ValueError for a router built while its config had a different loss mode, which the
    router keeps.
    """
    mode, wanted = bool(router.calculate_per_token_loss), bool(config.calculate_per_token_loss)
    if mode != wanted and has_router_loss(config):
        raise ValueError(
            f"the model's config has calculate_per_token_loss={wanted}, but its routers were built "
            f"with {mode}: the gradient of their loss would be wrong by a factor of the step's "
            "tokens. Set it before building the model"
        )


def _counts_to_divide_by(*args: Any, **keywords: Any) -> tuple[Tensor, Any, Any]:
    """Count tokens for a load-balancing loss, with at least 1 in all, by which Megatron divides."""
    of_experts, local, total = get_tokens_per_expert_and_token_count(*args, **keywords)
    return of_experts, local, total.clamp(min=1) if isinstance(total, Tensor) else total


def _count_tokens(router: Any, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
    """Count each expert's tokens for its bias, instead of `_apply_expert_bias`."""
    if torch.is_grad_enabled():
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask[:, None]
        router.local_tokens_per_expert += routing_map.sum(dim=0)


def _shifts_padding_mask(layer: Any) -> bool:
    prepare = getattr(layer, "_get_embeddings", None)
    return prepare is not None and "padding_mask" in inspect.signature(prepare).parameters


def _keep_padding_mask(layer: Any, *, padding_mask: Tensor | None = None, **inputs: Any) -> Any:
    """Prepare a multi-token prediction layer's inputs with an unshifted mask, instead of
    `_get_embeddings`.
    """
    tokens, positions, _, *hidden = type(layer)._get_embeddings(layer, **inputs)
    return tokens, positions, padding_mask, *hidden


def _global_loss(router: Any, probs: Tensor, scores: Tensor, choices: Tensor, **masked: Any) -> Any:
    """Attach the global load-balancing loss, instead of `_apply_global_aux_loss`.

    Expert shares count all tokens of the step so far, and probabilities the micro-batch's tokens,
    on all data-parallel ranks.
    """
    count = choices.sum()
    dist.all_reduce(count, group=router.tp_dp_cp_group)
    # Megatron adds 1 and divides the counts so far by it.
    router.ga_steps.copy_(router.global_tokens_per_expert.sum() / count.clamp(min=1))
    return type(router)._apply_global_aux_loss(router, probs, scores, choices, **masked)


def _coefficient(router: Any, kind: str) -> float:
    """Return a load-balancing loss's coefficient. The global loss's is multiplied by the ranks over
    which its sum is averaged.
    """
    size = 1
    if kind == "global_aux_loss" and not router.config.calculate_per_token_loss:
        size = router.tp_dp_cp_group.size() // router.tp_cp_group.size()
    coefficient: float = type(router).get_aux_loss_coeff(router, kind)
    return coefficient * size


def _weighted_z_loss(router: Any, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """Attach the z loss over all ranks' tokens, instead of `apply_z_loss`, which averages the
    ranks' means.
    """
    config, group, weight = router.config, router.tp_cp_group, 1.0
    coefficient = config.moe_z_loss_coeff
    is_attached = coefficient is not None and router.training and torch.is_grad_enabled()
    if is_attached and padding_mask is not None:
        weight = group.size()
        if not config.calculate_per_token_loss:
            count = (~padding_mask).sum()
            dist.all_reduce(whole := count.clone(), group=group)
            weight = weight * count / whole.clamp(min=1)
        config.moe_z_loss_coeff = coefficient * weight
    try:
        attached: Tensor = type(router).apply_z_loss(router, logits, padding_mask)
    finally:
        config.moe_z_loss_coeff = coefficient
    return attached


def _scale_of_a_rank(config: Any, size: int, before: Any = None) -> Tensor:
    """Return the scale of the routers' losses, instead of the schedule's, which in 0.19.2 is `size`
    times too large.
    """
    if before is not None:  # the trainer's `moe_grad_scale_func`
        return host_tensor(before()) / size
    one = torch.ones(1, dtype=torch.float32, device=torch.cuda.current_device())
    scale: Tensor = one if config.grad_scale_func is None else config.grad_scale_func(one)
    return scale / size


def _require_count_of_group(chunk: Any) -> None:
    """Raise NotImplementedError for a Megatron that multiplies by one rank's tokens, because
    `_scale_of_a_rank` expects the group's (MLM#7481).
    """
    for router in itertools.islice(_routers(chunk), 1):
        is_global = router.get_aux_loss_coeff("global_aux_loss")
        group = router.tp_dp_cp_group if is_global else router.tp_cp_group
        mask = torch.ones(1, 1, dtype=torch.bool, device=router.weight.device)
        keywords = {"topk": 1, "with_padding_mask": True}
        if int(get_tokens_per_expert_and_token_count(mask, group, **keywords)[1]) != group.size():
            raise NotImplementedError(
                "--calculate-per-token-loss with a router loss over several ranks: this "
                "megatron-core multiplies the loss by each rank's tokens, and padding makes these "
                "differ. Turn per-token mode off (the policy gradient is the same)"
            )
