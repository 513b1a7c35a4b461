"""A proof at startup that the installed verl's own policy losses compute an aggregation with this package's factors.

The tiny samples of `megatron_pg.integrations.proof` go through them on the CPU at the first policy loss of a process. The
gradient of every log-prob is compared with plain loops in float64, whatever the version.
"""

import copy
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_pg.integrations.proof import SAMPLES, TOLERANCE, numbers, require, token_weights

DATA_SIZE = 2
"""The data-parallel size of the proof, by which verl multiplies a loss."""
Loss = tuple[str, str, float | None]
"""The aggregation, the name of verl's own policy loss, and L of `constant`."""


def prove(
    loss: Loss,
    config: Any,
    weighted_loss: Callable[..., Any],
    group_factors: Callable[[Tensor, Any], tuple[Tensor, int]],
) -> None:
    """Raise a ValueError where verl's own loss is not the aggregation, with the numbers; once a process for each loss.

    `config` is verl's `ActorConfig`, whose clip ranges are those of the proof. Every rank that computes a loss calls it. The
    two functions are those of `megatron_pg.integrations.verl`.
    """

    def find() -> str | None:
        rows = [torch.tensor(sample.mask, dtype=torch.bool, device="cpu") for sample in SAMPLES]
        mask = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        old, log_prob, advantages = (numbers(*mask.shape, seed=seed) for seed in (1, 2, 3))
        with torch.enable_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
            expected = _gradient(loss, (old, log_prob, advantages), config)
            if loss[0] == "prompt_mean":
                groups = np.array([sample.group for sample in SAMPLES])
                advantages = advantages * group_factors(mask, groups)[0].float()[:, None]
            batch = old, log_prob.requires_grad_(), advantages, mask
            tiny, tokens = copy.deepcopy(config), int(mask.sum())
            totals = {"global_batch_size": len(SAMPLES), "batch_num_tokens": tokens}
            tiny.global_batch_info.update(dp_size=DATA_SIZE, loss_scale_factor=None, **totals)
            share, _ = weighted_loss(*loss, batch, tiny, None)
            found = torch.autograd.grad(share / DATA_SIZE, log_prob)[0]
        errors = (found.double() - expected).abs()
        row, token = place = divmod(int(errors.argmax()), errors.shape[1])
        if float(errors.max()) <= TOLERANCE * float(expected.abs().max()):
            return None
        text = f"{float(found[place]):.6g}, expected {float(expected[place]):.6g}"
        return f"the gradient of log-prob {token} of tiny sample {row} is {text}"

    version = getattr(sys.modules.get("verl"), "__version__", "")
    require(
        ("verl", *loss),
        find,
        f"megatron_pg {loss[0]} by verl's {loss[1]}: the installed verl {version} computes something else: ",
        f"set actor_rollout_ref.actor.policy_loss.loss_mode={loss[1]}, its own",
    )


def _gradient(loss: Loss, batch: tuple[Tensor, Tensor, Tensor], config: Any) -> Tensor:
    """Compute the gradient of the log-probs, [samples, response] float64, in plain loops."""
    (aggregation, objective, divisor), (old, log_prob, advantages) = loss, batch
    leaf = log_prob.double().requires_grad_()
    total = leaf.new_zeros(())
    weights = token_weights(aggregation, divisor)
    for row, sample in enumerate(SAMPLES):
        active = [token for token, is_active in enumerate(sample.mask) if is_active]
        changes = {token: leaf[row, token] - float(old[row, token]) for token in active}
        mean = sum(float(change.detach()) for change in changes.values()) / len(active)
        for token, change in changes.items():
            if objective == "gspo":
                change = mean + leaf[row, token] - leaf[row, token].detach()
            advantage = float(advantages[row, token])
            total = total + weights[row] * _token_loss(change.exp(), advantage, objective, config)
    return torch.autograd.grad(total, leaf)[0]


def _token_loss(ratio: Tensor, advantage: float, objective: str, config: Any) -> Tensor:
    """Compute verl's clipped loss of a token; PPO holds it below clip_ratio_c times a negative advantage."""
    low, high = (
        config.clip_ratio if bound is None else bound
        for bound in (config.clip_ratio_low, config.clip_ratio_high)
    )
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
    is_held = objective == "vanilla" and advantage < 0
    return torch.clamp(loss, max=-advantage * config.clip_ratio_c) if is_held else loss
