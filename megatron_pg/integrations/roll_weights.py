"""Weights of a step for ROLL's worker, and the settings under which they are exact. The import needs nothing of ROLL."""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.integrations.proof import (
    SAMPLES,
    difference,
    numbers,
    padded_mask,
    require,
    token_weights,
)
from megatron_pg.integrations.reducers import DIVISOR_VARIABLE, find_divisor
from megatron_pg.loss.aggregation import AGGREGATIONS
from megatron_pg.step.agreement import gather
from megatron_pg.step.totals import BareSample, step_totals


def step_weights(
    aggregation: str,
    tokens: Sequence[int],
    prompts: Sequence[bytes] | None,
    group: dist.ProcessGroup | None,
    *,
    rollouts_per_prompt: int,
    divisor: float | None,
) -> np.ndarray[Any, Any]:
    """Weigh one active token of each sample of this rank in the whole optimizer step's objective, `[samples]` float64.

    Every rank of the data-parallel group calls it once a step. `tokens` are the active tokens of each sample before any
    filter of the loss. `prompts` has a hash of each sample's prompt, for `prompt_mean`, which refuses with a ValueError a
    prompt whose samples are split over optimizer steps, or that is in the step twice.
    """
    mine = list(zip(prompts or [b""] * len(tokens), tokens, strict=True))
    everyone = [pair for pairs in gather(mine, group) for pair in pairs]
    sizes = Counter(prompt for prompt, _ in everyone)
    split = [size for size in sizes.values() if size != rollouts_per_prompt]
    if split and aggregation == "prompt_mean":
        raise ValueError(
            f"megatron_pg prompt_mean: {len(split)} of the {len(sizes)} prompts of this optimizer step have {split[0]} samples "
            f"in it and not {rollouts_per_prompt} (num_return_sequences_in_group). With more, the prompt was drawn twice: "
            "groups are told apart by their prompt's tokens, so remove it from the data or the batch. With fewer, the group is "
            "split over steps; let actor_train.training_args.per_device_train_batch_size times gradient_accumulation_steps times "
            "data parallelism be the whole batch (rollout_batch_size times num_return_sequences_in_group)"
        )
    group_of = {prompt: number for number, prompt in enumerate(sizes)}
    totals = step_totals([BareSample(count, group_of[prompt]) for prompt, count in everyone])
    samples = [BareSample(count, group_of[prompt]) for prompt, count in mine]
    row = AGGREGATIONS[aggregation]
    return (1.0 / (row.divisors_of(totals, samples, divisor) * row.outer_count(totals))).numpy()


def sample_factors(weights: Sequence[float], kept: Tensor, valid_samples: Tensor | float) -> Tensor:
    """Return each sample's factor for `seq-mean-token-mean`, `[samples]` float32; `kept` is the mask that ROLL's loss sums over."""
    per_token = torch.as_tensor(np.asarray(weights, dtype=np.float64), device=kept.device)
    return (per_token * kept.sum(dim=-1) * valid_samples).float()


def prove(aggregation: str, divisor: float | None, agg_loss: Callable[..., Tensor]) -> None:
    """Raise a ValueError where ROLL's own `agg_loss` does not make the aggregation of the factors, with the numbers.

    The tiny samples of `megatron_pg.integrations.proof` go through it on the CPU; every rank calls it once.
    """

    def find() -> str | None:
        groups = [str(sample.group).encode() for sample in SAMPLES]
        with torch.enable_grad(), torch.device("cpu"):
            mask = padded_mask().long()
            losses = numbers(*mask.shape, seed=0).requires_grad_()
            tokens = mask.sum(dim=-1).tolist()
            sizes: dict[str, Any] = {"rollouts_per_prompt": len(SAMPLES) // len(set(groups))}
            weights = step_weights(aggregation, tokens, groups, None, divisor=divisor, **sizes)
            loss = agg_loss(
                loss_mat=losses,
                loss_mask=mask,
                loss_agg_mode="seq-mean-token-mean",
                batch_num_tokens=sum(tokens),
                global_valid_samples=len(SAMPLES),
                weights=sample_factors(weights.tolist(), mask, len(SAMPLES)),
            )
            found = torch.autograd.grad(loss, losses)[0]
            per_sample = torch.tensor(token_weights(aggregation, divisor), dtype=torch.float64)
        return difference(found, per_sample[:, None] * mask, "the weight of token")

    require(
        ("ROLL", aggregation, divisor, agg_loss),
        find,
        f"megatron_pg {aggregation}: agg_loss of the installed ROLL computes something else with seq-mean-token-mean: ",
        "set actor_train.worker_cls to ROLL's own",
    )


def refuse_settings(
    aggregation: str, config: Any, environment: Mapping[str, str] = os.environ
) -> float | None:
    """Return L of `constant`, in tokens; None for the others. A ValueError names ROLL's key of a setting that does not fit."""
    name = f"megatron_pg {aggregation}"
    if config.loss_agg_mode != "seq-mean-token-mean":
        raise ValueError(
            f"{name} with loss_agg_mode: {config.loss_agg_mode}: the weights are made for the mean over each sample, which KL "
            "and entropy then have too; set loss_agg_mode: seq-mean-token-mean"
        )
    for key in ("difficulty_loss_weight", "length_loss_weight"):
        if getattr(config, key, False):
            raise ValueError(
                f"{name} with {key}: true: these weights are made to add up to one per micro-batch, so the objective would "
                f"depend on how the step is cut; set {key}: false"
            )
    if not getattr(config.actor_train, "apply_loss_scale", True):
        raise ValueError(
            f"{name} with actor_train.apply_loss_scale: false: the gradient would be divided by micro-batches and data "
            "parallelism; set it to true"
        )
    if aggregation != "constant":
        return None
    place = f"{DIVISOR_VARIABLE} under actor_train.system_envs"
    remedy = f"set {place} to a finite number of tokens above 0"
    return find_divisor(name, {}, remedy, environment)
