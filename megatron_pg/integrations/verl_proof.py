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

from megatron_pg.integrations.proof import SAMPLES, TOLERANCE, numbers, token_weights

DATA_SIZE = 2
"""The data-parallel size of the proof, by which verl multiplies a loss."""


def prove(
    aggregation: str,
    objective: str,
    divisor: float | None,
    config: Any,
    weighted_loss: Callable[..., Any],
    group_factors: Callable[..., Any],
) -> None:
    """Raise a ValueError where verl's own loss is not the aggregation, with the numbers; once a process for each loss.

    `config` is verl's `ActorConfig`, whose clip ranges are those of the proof. Every rank that computes a loss calls it. The
    two functions are those of `megatron_pg.integrations.verl`.
    """
    key = aggregation, objective, divisor
    if key in _proven:
        return
    with torch.enable_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        functions = weighted_loss, group_factors
        wrong = _difference(aggregation, objective, divisor, config, *functions)
    if wrong is not None:
        version = getattr(sys.modules.get("verl"), "__version__", "")
        raise ValueError(
            f"megatron_pg {aggregation} by verl's {objective}: the installed verl {version} computes "
            f"something else: {wrong}. Install a version that docs/records/other_trainers.md lists as exact, or set "
            f"actor_rollout_ref.actor.policy_loss.loss_mode={objective}, its own"
        )
    _proven.add(key)


_proven: set[tuple[str, str, float | None]] = set()


def _difference(aggregation: str, objective: str, divisor: float | None, config: Any) -> str | None:
    """Return the largest difference from the loops in words, or None."""
    from megatron_pg.integrations.verl import group_factors, weighted_loss

    width = max(len(sample.mask) for sample in SAMPLES)
    masks = [(*sample.mask, *[0] * (width - len(sample.mask))) for sample in SAMPLES]
    response_mask = torch.tensor(masks, dtype=torch.bool)
    old, log_prob, advantages = (numbers(len(SAMPLES), width, seed=seed) for seed in (1, 2, 3))
    expected = _gradient(aggregation, objective, divisor, old, log_prob, advantages, config)
    if aggregation == "prompt_mean":
        groups = np.array([sample.group for sample in SAMPLES])
        advantages = advantages * group_factors(response_mask, groups)[0].float()[:, None]
    tiny = copy.deepcopy(config)
    totals = {"global_batch_size": len(SAMPLES), "batch_num_tokens": int(response_mask.sum())}
    tiny.global_batch_info.update(dp_size=DATA_SIZE, loss_scale_factor=divisor, **totals)
    log_prob.requires_grad_()
    batch = old, log_prob, advantages, response_mask
    try:
        loss, _ = weighted_loss(aggregation, objective, divisor, batch, tiny, None)
        found = torch.autograd.grad(loss, log_prob)[0].double() / DATA_SIZE
    except Exception as error:  # verl's code may raise anything at all
        return f"it cannot be run on tiny samples: {type(error).__name__}: {error}"
    errors = (found - expected).abs()
    sample, token = divmod(int(errors.argmax()), width)
    if float(errors.max()) <= TOLERANCE * float(expected.abs().max()):
        return None
    mine, right = float(found[sample, token]), float(expected[sample, token])
    return f"the gradient of log-prob {token} of tiny sample {sample} is {mine:.6g}, expected {right:.6g}"


def _gradient(
    aggregation: str,
    objective: str,
    divisor: float | None,
    old: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    config: Any,
) -> Tensor:
    """Compute the gradient of the log-probs, [samples, response] float64, in plain loops."""
    leaf = log_prob.double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    weights = token_weights(aggregation, divisor)
    for row, sample in enumerate(SAMPLES):
        active = [token for token, is_active in enumerate(sample.mask) if is_active]
        changes = {token: leaf[row, token] - float(old[row, token]) for token in active}
        mean = sum(float(change.detach()) for change in changes.values()) / len(active)
        for token, change in changes.items():
            if objective == "gspo":
                change = mean + leaf[row, token] - leaf[row, token].detach()
            loss = _token_loss(change.exp(), float(advantages[row, token]), objective, config)
            total = total + weights[row] * loss
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
