"""Padding beside a mixture of experts: no router counts a token that only aligns a pack.

The `padding_mask=` of blocks of layers of megatron-core 0.16.1 to 0.19.2 keeps tokens out of the
load-balancing losses, the z loss and the experts' bias (transformer/moe/router.py). Padding still
passes through the experts, where no other token sees it, and takes part of an expert's capacity.
Six things of these versions are made right here:

- GPTModel cuts the mask for sequence parallelism on its first pipeline stage only, HybridModel
  never, and a forward of the user's own may not pass it on: the blocks get it from a hook;
- `_apply_expert_bias` fails on a mask (mended in 0.20, MLM#6114);
- multi-token prediction shifts the mask as it shifts tokens, and so counts padding and leaves out
  tokens: its layers get the mask of the model's tokens;
- `_apply_global_aux_loss` divides the counts of all micro-batches so far by the tokens of the last
  (MLM#7213), and outside of per-token mode data parallelism divides its sum over ranks once
  more (MLM#3672);
- `apply_z_loss` takes the mean of the ranks' means, which have other numbers of tokens: its
  coefficient gets a rank's share;
- in per-token mode `valid_token_count` is the count V of all ranks that share the micro-batch
  (MLM#7481). With n = V a load-balancing loss is weighted by V over the sum of V, its mean over
  tokens, up to 0.18.2. 0.19.2 multiplies it by the number of those ranks besides, which
  `moe_grad_scale_func` undoes, and so the z loss gets that factor back.
"""

import functools
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
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
    """Let every chunk take the `padding_mask=` of a whole micro-batch. Every rank and stage calls
    it.

    Returns:
        False for a model without experts, or one whose layers take no mask.

    Raises:
        NotImplementedError: layers of the user's own that take no mask, with routers that count
            tokens; per-token mode with a loss of routers, and no mask, or a Megatron that counts
            the tokens of each rank; a router that takes no mask.
        ValueError: routers were built in a different loss mode than the config's.
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
                "--calculate-per-token-loss with a loss of routers, and a model whose layers take "
                "no "
                "padding_mask: Megatron would count padding as tokens. Turn per-token mode off "
                "(the "
                "policy gradient is the same), or use megatron-core 0.16 or later"
            )
        counts = has_router_loss(config) or getattr(config, "moe_router_enable_expert_bias", False)
        has_padding = groups.context_size > 1 or getattr(config, "sequence_parallel", False)
        if counts and has_padding and versions.masks_padding():
            raise NotImplementedError(
                "a loss or bias of routers, and layers of your own that take no padding_mask: "
                "Megatron would count padding as tokens. Let the module that has the layers take "
                "padding_mask= and hand it to each, as Megatron's TransformerBlock does"
            )
        return False
    if config.moe_router_load_balancing_type == "quantile_balancing":
        raise NotImplementedError(
            "--moe-router-load-balancing-type quantile_balancing: its quantiles count padding, and "
            "Megatron refuses a "
            "padding_mask there; use another type"
        )
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
    device: True at padding.

    `PolicyStep.head` has it among its `model_inputs`. One token of an empty micro-batch is left:
    Megatron's mean over no token would be no number.
    """
    is_padding = batch.window.token_indices < 0
    if not batch.samples and batch.window.cp_rank == 0:
        is_padding[0] = False
    return to_device(is_padding, batch.tokens.device)[None]


def _routers(chunk: Any) -> Iterator[Any]:
    """Find the routers of a chunk, those of multi-token prediction included."""
    return (module for module in chunk.modules() if hasattr(module, "apply_z_loss"))


def _blocks(module: Any) -> Iterator[Any]:
    """Find the outermost modules inside of a model that hand a `padding_mask=` to their layers."""
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
    """Keep a chunk's mask for its blocks, cut for sequence parallelism."""
    mask, config = keywords.pop("padding_mask", None), chunk.config
    if mask is None and config.calculate_per_token_loss and has_router_loss(config):
        if torch.is_grad_enabled():
            raise ValueError(
                "per-token mode with a loss of routers, and a call of the model without "
                "padding_mask: Megatron would scale that "
                "loss by other tokens than the policy loss counts. Call it with "
                "**head.model_inputs, or add "
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
    """Refuse a router that was built when its config had the other loss mode, which it keeps."""
    mode, wanted = bool(router.calculate_per_token_loss), bool(config.calculate_per_token_loss)
    if mode != wanted and has_router_loss(config):
        raise ValueError(
            f"the model's config has calculate_per_token_loss={wanted} and its routers were built "
            f"with {mode}: the gradient of their loss would be off by a factor of the step's "
            "tokens. Set it before the model is built"
        )


def _count_tokens(router: Any, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
    """Count the tokens of each expert for its bias, in the place of `_apply_expert_bias`."""
    if torch.is_grad_enabled():
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask[:, None]
        router.local_tokens_per_expert += routing_map.sum(dim=0)


def _shifts_padding_mask(layer: Any) -> bool:
    prepare = getattr(layer, "_get_embeddings", None)
    return prepare is not None and "padding_mask" in inspect.signature(prepare).parameters


def _keep_padding_mask(layer: Any, *, padding_mask: Tensor | None = None, **inputs: Any) -> Any:
    """Prepare the inputs of a layer of multi-token prediction, in the place of `_get_embeddings`,
    with the mask as it is.
    """
    tokens, positions, _, *hidden = type(layer)._get_embeddings(layer, **inputs)
    return tokens, positions, padding_mask, *hidden


def _global_loss(router: Any, probs: Tensor, scores: Tensor, choices: Tensor, **masked: Any) -> Any:
    """Attach the global load-balancing loss, in the place of `_apply_global_aux_loss`.

    Its shares of experts are of all tokens of the step so far, on all data-parallel ranks; its
    probabilities are of the micro-batch's, on these ranks.
    """
    count = choices.sum()
    dist.all_reduce(count, group=router.tp_dp_cp_group)
    # Megatron adds 1, and divides the counts so far by it.
    router.ga_steps.copy_(router.global_tokens_per_expert.sum() / count)
    return type(router)._apply_global_aux_loss(router, probs, scores, choices, **masked)


def _coefficient(router: Any, kind: str) -> float:
    """Return a load-balancing loss's coefficient, for the global one times the ranks over which its
    sum is averaged.
    """
    size = 1
    if kind == "global_aux_loss" and not router.config.calculate_per_token_loss:
        size = router.tp_dp_cp_group.size() // router.tp_cp_group.size()
    coefficient: float = type(router).get_aux_loss_coeff(router, kind)
    return coefficient * size


def _weighted_z_loss(router: Any, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """Attach the z loss of all ranks' tokens, in the place of `apply_z_loss`, which takes the mean
    of the ranks' means.
    """
    config, group, weight = router.config, router.tp_cp_group, 1.0
    coefficient = config.moe_z_loss_coeff
    is_attached = coefficient is not None and router.training and torch.is_grad_enabled()
    if is_attached and padding_mask is not None:
        weight = group.size()
        if not config.calculate_per_token_loss:
            count = (~padding_mask).sum()
            dist.all_reduce(whole := count.clone(), group=group)
            weight = weight * count / whole
        config.moe_z_loss_coeff = coefficient * weight
    try:
        attached: Tensor = type(router).apply_z_loss(router, logits, padding_mask)
    finally:
        config.moe_z_loss_coeff = coefficient
    return attached


def _scale_of_a_rank(config: Any, size: int, before: Any = None) -> Tensor:
    """Return the scale of the routers' losses, in the place of the schedule's, which 0.19.2 makes
    `size` times too large.
    """
    if before is not None:  # the trainer's own `moe_grad_scale_func`
        return host_tensor(before()) / size
    one = torch.ones(1, dtype=torch.float32, device=torch.cuda.current_device())
    scale: Tensor = one if config.grad_scale_func is None else config.grad_scale_func(one)
    return scale / size


def _require_count_of_group(chunk: Any) -> None:
    """Refuse a Megatron that multiplies by the tokens of one rank where `_scale_of_a_rank` expects
    the group's (MLM#7481).
    """
    for router in itertools.islice(_routers(chunk), 1):
        is_global = router.get_aux_loss_coeff("global_aux_loss")
        group = router.tp_dp_cp_group if is_global else router.tp_cp_group
        mask = torch.ones(1, 1, dtype=torch.bool, device=router.weight.device)
        keywords = {"topk": 1, "with_padding_mask": True}
        if int(get_tokens_per_expert_and_token_count(mask, group, **keywords)[1]) != group.size():
            raise NotImplementedError(
                "--calculate-per-token-loss with a loss of routers over several ranks: this "
                "megatron-core multiplies the loss "
                "by each rank's own tokens, and padding makes these differ. Turn per-token mode "
                "off (the policy gradient is the "
                "same)"
            )
