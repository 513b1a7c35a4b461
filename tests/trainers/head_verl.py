"""A step of verl's Megatron engine on a small GPTModel: its forward pass alone and its training
step, with and without the head.
"""

import functools
import importlib
from dataclasses import replace
from typing import Any

import torch

from megatron_pg.megatron import enable_cpu_runtime
from tests.distributed.models import ModelOptions, Sharding, gather_gradients
from tests.distributed.one_step import build
from tests.random_steps import VOCAB_SIZE

from . import head_step, verl_step
from .head_step import Outcome
from .logit_table import LENGTHS, step_of
from .sources import find_verl

CASE = verl_step.Case("vanilla")


def run(engine: Any, temperature: float) -> Outcome:
    from verl.workers.utils.losses import ppo_loss

    samples = [replace(s, tokens=[t % VOCAB_SIZE for t in s.tokens]) for s in step_of(LENGTHS)]
    data = verl_step.batch_of(samples, verl_step.verl_advantages(samples, CASE), len(samples), CASE)
    data["temperature"] = torch.full((len(samples),), temperature)
    (model,) = engine.module
    widths: list[int] = []
    hook = model.register_forward_hook(lambda *given: widths.append(given[-1].shape[-1]))
    with torch.no_grad():
        scored = engine.forward_backward_batch(data.clone(), None, forward_only=True)
    scores = {
        name: list(scored["model_output"][name].unbind()) for name in ("log_probs", "entropy")
    }
    model.zero_grad_buffer()
    loss = functools.partial(ppo_loss, config=verl_step.actor_config(CASE))
    trained = engine.forward_backward_batch(data, loss)
    hook.remove()
    numbers = {"loss": float(torch.as_tensor(trained["loss"]).sum())}
    return Outcome(scores, numbers, gather_gradients(engine.module) or {}, max(widths))


def theirs_and_ours(
    name: str, sharding: Sharding, options: ModelOptions, settings: list[dict[str, Any]]
) -> list[list[Outcome]]:
    """As `head_step.theirs_and_ours`."""
    enable_cpu_runtime()
    find_verl()
    model = build(sharding, options)
    engine = verl_step.engine_of(model, sharding.context, bool(options.mtp_num_layers))
    if options.mtp_num_layers:
        from verl.models.mcore.mtp_patch import patch_postprocess

        patch_postprocess(model[0])
    temperatures = [case["rollout_temperature"] for case in settings]
    outcomes = [[run(engine, temperature)] for temperature in temperatures]
    importlib.import_module("megatron_pg.integrations.verl_fused_head")
    for _ in head_step.right_and_mutants():
        for temperature, found in zip(temperatures, outcomes, strict=True):
            found.append(run(engine, temperature))
    return outcomes
