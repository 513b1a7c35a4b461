"""The fused head in verl's Megatron engine, by `actor_rollout_ref.model.external_lib`."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_pg.integrations.fused_head import OutputFactors, leave_out_logits, require_equal

VERL = "actor_rollout_ref.model.external_lib=megatron_pg.integrations.verl_fused_head"
NEED_LOGITS = ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")
"""A batch's settings for which verl reads logits."""


def put_in() -> None:
    """Install the fused head in verl's Megatron engine. A second call does nothing.

    The first micro-batch raises ValueError for `use_fused_kernels`, and if verl's scores or
    gradients differ.
    """
    path = "verl.workers.engine.megatron.transformer_impl"
    engine = importlib.import_module(path).MegatronEngineWithLMHead
    step, process = engine.forward_step, engine._lm_head_logits_processor
    if hasattr(step, "has_fused_head"):
        return
    is_verified = False

    @functools.wraps(step)
    def forward_step(self: Any, batch_iter: Any, model: Any, *others: Any, **named: Any) -> Any:
        if self.engine_config.use_fused_kernels:
            switch = "actor_rollout_ref.model.use_fused_kernels"
            raise ValueError(f"{VERL}: {switch}=True selects verl's own kernels: set False")
        leave_out_logits(model, VERL)
        return step(self, batch_iter, model, *others, **named)

    @functools.wraps(process)
    def logits_processor(self: Any, logits: Tensor, *others: Any, **named: Any) -> Any:
        nonlocal is_verified
        if not is_verified:
            verify(functools.partial(process, self), logits.device)
            is_verified = True
        return scores_of(logits, *others, **named)

    forward_step.has_fused_head = True  # type: ignore[attr-defined]
    engine.forward_step, engine._lm_head_logits_processor = forward_step, logits_processor


def scores_of(
    logits: Tensor, label: Tensor, temperature: Tensor, *, calculate_entropy: bool, **others: Any
) -> dict[str, Tensor]:
    """Compute the results of `_lm_head_logits_processor` from attached factors, [batch, sequence]
    each.
    """
    for name in NEED_LOGITS:
        if others.get(name):
            raise NotImplementedError(f"{VERL}: {name} requires logits: remove one of the two")
    # Padding has temperature 0. verl's function also waits for the device here.
    low, high = torch.stack(temperature[temperature > 0].aminmax()).tolist()
    if low != high:
        raise NotImplementedError(
            f"{VERL}: the samples of a micro-batch have temperatures from {low:g} to {high:g}: use "
            "one temperature, or remove external_lib"
        )
    log_probs, entropy = OutputFactors.noted(logits, VERL).scores(None, label.flatten(), low)
    scores = {"entropy": entropy.view_as(label)} if calculate_entropy else {}
    return scores | {"log_probs": log_probs.view_as(label)}


def verify(theirs: Callable[..., Any], device: torch.device) -> None:
    """Raise ValueError if verl's `_lm_head_logits_processor` gives different scores or
    gradients.
    """
    label = (torch.arange(10, device=device) % 7)[None]
    named: dict[str, Any] = dict.fromkeys(NEED_LOGITS, False) | {"calculate_entropy": True}
    named |= {"label": label, "temperature": torch.full_like(label, 0.75, dtype=torch.float32)}
    named |= {"data_format": "thd", "logits_processor_func": None, "batch": None}
    ours = functools.partial(scores_of, **named)
    require_equal(VERL, functools.partial(theirs, **named), ours, device)
