"""verl's settings under which an aggregation cannot be computed, refused by verl's own key."""

from __future__ import annotations

import os
from typing import Any

from megatron_pg.integrations.settings import DIVISOR_VARIABLE, one_divisor

LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
BATCH_KEY = "actor_rollout_ref.actor.ppo_mini_batch_size"


def find_divisor(loss_scale_factor: float | None) -> float:
    """Find L of `constant`, in tokens, from verl's `loss_scale_factor` or the environment.

    Raises:
        ValueError: neither gives L, both give different ones, or it is not finite and above 0.
    """
    key = "actor_rollout_ref.actor.loss_scale_factor"
    return one_divisor(
        {key: loss_scale_factor, DIVISOR_VARIABLE: os.environ.get(DIVISOR_VARIABLE)},
        f"{LOSS_MODE}=megatron_pg_constant",
        f"set {key} to a number of tokens, for example the longest response, or {DIVISOR_VARIABLE} in the environment of the "
        "training processes",
    )


def refuse_estimator_settings(base: str, config: Any, num_samples: int, index: Any) -> None:
    """Refuse what the advantages of a prompt mean cannot be made for.

    Args:
        base: the name of verl's estimator.
        config: verl's `algorithm` section inside the whole configuration.
        num_samples: the samples of the batch.
        index: their prompts, or None.

    Raises:
        ValueError: the estimator cannot see the rest of the configuration, the policy loss is another, the batch is not
            one optimizer step, or the samples have no `uid`.
    """
    name = f"algorithm.adv_estimator=megatron_pg_prompt_mean_{base}"
    actor, rollout = (
        _select(config, f"..actor_rollout_ref.{part}") for part in ("actor", "rollout")
    )
    if actor is None or rollout is None:
        raise ValueError(
            f"{name}: this trainer hands its estimators no configuration in which actor_rollout_ref can be found, so "
            f"nobody can check that {LOSS_MODE} and {BATCH_KEY} fit; use verl's own trainers"
        )
    if actor.policy_loss.loss_mode != "megatron_pg_prompt_mean":
        raise ValueError(
            f"{name} with {LOSS_MODE}={actor.policy_loss.loss_mode}: the advantages would carry prompt groups' weights into "
            f"another objective; set {LOSS_MODE}=megatron_pg_prompt_mean"
        )
    per_step = actor.ppo_mini_batch_size * rollout.n
    if num_samples != per_step:
        raise ValueError(
            f"{name}: the batch has {num_samples} samples and an optimizer step takes {per_step} ({BATCH_KEY}="
            f"{actor.ppo_mini_batch_size} times actor_rollout_ref.rollout.n={rollout.n}). A prompt mean needs each group's "
            "tokens of one step, and verl orders samples by length before it cuts the batch, so groups would be split over "
            f"steps; set {BATCH_KEY} to data.train_batch_size, and use agent loops with one output per rollout"
        )
    if index is None:
        raise ValueError(f"{name}: the batch has no uid, which tells the prompt groups apart")


def _select(config: Any, key: str) -> Any:
    """Select a part of the configuration above the section, or None."""
    try:
        from omegaconf import OmegaConf

        return OmegaConf.select(config, key)
    except (ImportError, ValueError, TypeError, AttributeError):
        return None
