"""The four aggregations inside verl, unmodified: policy losses and advantage estimators that it loads by itself.

    actor_rollout_ref.actor.policy_loss.loss_mode=megatron_pg_prompt_mean        # PPO; megatron_pg_prompt_mean_gspo: GSPO
    algorithm.adv_estimator=megatron_pg_prompt_mean_grpo                         # for prompt_mean alone

verl imports `megatron_pg.integrations.verl_plugin` through the entry point group `verl.plugins`, which calls `register`.

The way of a policy loss through verl (read in 0.8.0, 0.9.0, 0.9.1 and main). x is the per-token loss, m the mask, n_j the
tokens of micro-batch j with prompts, and R their sum over data-parallel ranks and micro-batches:

1. `workers/utils/losses.py`, `ppo_loss`: the policy loss gets the log-probs of the whole micro-batch, gathered over context
   parallelism, and `config.global_batch_info` of the whole mini-batch: `dp_size` = DP, `batch_num_tokens` = T and
   `global_batch_size` = N (`ppo_mini_batch_size * rollout.n`). verl adds KL and entropy, by `actor.loss_agg_mode`.
2. `models/mcore/util.py`, `postprocess_thd_engine`: the gathered log-probs carry gradient for this rank's own part
   alone, so the gradients of the CP ranks of one group add up to that of the loss.
3. `workers/engine/megatron/transformer_impl.py`, `postprocess_micro_batch_func`: returns `loss * M` in a pair, of which
   Megatron makes `1 / DP * sum of loss`. In per-token mode (Megatron-Bridge forces it under context parallelism; verl follows
   since 0.9) it returns `(loss * R / DP, n_j // CP)`, of which Megatron makes F times that, `F = R / (CP * sum of floor(n_j / CP))`.

So a policy loss of `DP * sum of w m x` gives `sum of w m x`, in per-token mode F times it. F is 1 where CP divides every n_j,
and 1.07 for micro-batches of 77 tokens at CP 8. No input of a policy loss shows n_j, so F stays.

w is 1 / (N D_i) for sample_mean, 1 / T for token_mean, 1 / (N L) for constant. The per-token loss of verl's own `vanilla`
(PPO, dual clip) or `gspo` is multiplied by N D_i w, as by its `rollout_is_weights`, under `seq-mean-token-mean`, the one mode
that GSPO has in every version.

A policy loss does not see prompt groups and other ranks. The advantage estimator does, on the driver, once per step:
`megatron_pg_prompt_mean_<name>` is verl's estimator <name> with its advantages times `N D_i / (P G_g)`. Both losses are
homogeneous in the advantage, so with weight 1 / (N D_i) the objective is the prompt mean, where the batch is one optimizer
step, which is checked. The advantages carry a tag in their last two bits (2.4e-7 of their size), and the policy loss
refuses those without it.
"""

import argparse
import functools
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from logging.handlers import BufferingHandler
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_pg.integrations import verl_proof
from megatron_pg.integrations.reducers import DIVISOR_VARIABLE, HOOKS, find_divisor

PREFIX = "megatron_pg_"
"""The beginning of every registered name."""
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
BATCH_KEY = "actor_rollout_ref.actor.ppo_mini_batch_size"
DIVISOR_KEY = "actor_rollout_ref.actor.loss_scale_factor"
OBJECTIVES = {"": "vanilla", "_gspo": "gspo"}
"""verl's policy losses by the end of our names for them."""
NEED_MORE = {"gae", "gdpo", "optimal_token_baseline", "remax", "tir_optimal_token_baseline"}
"""Estimators that verl makes, or gives further inputs, by their own names. It would not do so under ours."""
TAG, TAG_BITS = 0b01, 0b11
"""The last bits of an advantage that carries its prompt group's weight."""


def register() -> None:
    """Register the policy losses and the advantage estimators with the verl of this process; twice is once."""
    from verl.trainer.ppo import core_algos

    for aggregation in HOOKS:  # those that `sample_factors` knows
        for ending, objective in OBJECTIVES.items():
            loss = functools.partial(policy_loss, aggregation, objective=objective)
            core_algos.register_policy_loss(PREFIX + aggregation + ending)(loss)
    for name in sorted(set(core_algos.ADV_ESTIMATOR_REGISTRY) - NEED_MORE):
        ours = f"{PREFIX}prompt_mean_{name}"
        if not name.startswith(PREFIX) and ours not in core_algos.ADV_ESTIMATOR_REGISTRY:
            core_algos.register_adv_est(ours)(functools.partial(prompt_mean_advantages, name))


def policy_loss(
    aggregation: str,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    objective: str = "vanilla",
) -> tuple[Tensor, dict[str, Any]]:
    """Compute a policy loss as verl calls it, for each micro-batch on every rank of the last pipeline stage.

    Tensors are `[samples, response]`, and `config` is verl's `ActorConfig`. `loss_agg_mode` is not followed. A ValueError
    names settings that the aggregation cannot be computed with, or says that this verl computes something else.

    Returns:
        The 0-d loss, DP times this micro-batch's share of the objective, and the metrics of verl's own loss.
    """
    _refuse_context_parallelism(config.engine)
    divisor = _divisor(config.loss_scale_factor) if aggregation == "constant" else None
    verl_proof.prove((aggregation, objective, divisor), config, weighted_loss, group_factors)
    if aggregation == "prompt_mean":
        _refuse_untagged(advantages, response_mask)
    batch = old_log_prob, log_prob, advantages, response_mask
    return weighted_loss(aggregation, objective, divisor, batch, config, rollout_is_weights)


def weighted_loss(
    aggregation: str,
    objective: str,
    divisor: float | None,
    batch: tuple[Tensor, Tensor, Tensor, Tensor],
    config: Any,
    rollout_is_weights: Tensor | None,
) -> tuple[Tensor, dict[str, Any]]:
    """Call verl's own policy loss with each sample's factor; `batch` has the first four tensors of `policy_loss`."""
    from verl.trainer.ppo import core_algos

    old_log_prob, log_prob, advantages, response_mask = batch
    factors = sample_factors(aggregation, response_mask, config.global_batch_info, divisor)
    factors = factors if rollout_is_weights is None else factors * rollout_is_weights
    return core_algos.get_policy_loss_fn(objective)(  # type: ignore[no-any-return]
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=response_mask,
        loss_agg_mode="seq-mean-token-mean",
        config=config,
        rollout_is_weights=factors,
    )


def _refuse_context_parallelism(engine: Any) -> None:
    """Refuse groups of each micro-batch, and a verl without the token counts that per-token mode divides by."""
    setting = f"{LOSS_MODE}={PREFIX}... with actor_rollout_ref.actor.megatron."
    if getattr(engine, "dynamic_context_parallel", False):
        raise ValueError(
            f"{setting}dynamic_context_parallel=True: each micro-batch is scaled by a group of its own there, for which no "
            "weight was derived; set it to False"
        )
    if getattr(engine, "context_parallel_size", 1) == 1:
        return
    from verl.workers.engine.megatron import transformer_impl

    scale = transformer_impl.MegatronEngineWithLMHead.postprocess_micro_batch_func
    if "calculate_per_token_loss" not in scale.__code__.co_names:
        raise ValueError(
            f"{setting}context_parallel_size={engine.context_parallel_size}: "
            "this verl returns no token count in the per-token mode that Megatron-Bridge forces then, and nothing would divide; "
            "set it to 1, or install verl 0.9 or later"
        )


def sample_factors(
    aggregation: str, response_mask: Tensor, totals: Mapping[str, Any], divisor: float | None
) -> Tensor:
    """Return what a sample mean is multiplied by, `[samples, 1]` float32. `prompt_mean_advantages` has the group's part.

    `response_mask` is `[samples, response]` of whole samples, and `totals` verl's `global_batch_info`.
    """
    needed = ["global_batch_size", *(["batch_num_tokens"] if aggregation == "token_mean" else [])]
    if lacking := [name for name in needed if totals.get(name) is None]:
        raise ValueError(
            f"policy_loss.loss_mode={PREFIX}{aggregation}: verl's global_batch_info has no {lacking[0]}, the count of the whole "
            "optimizer step that the loss is divided by; this trainer class does not set it"
        )
    tokens: Tensor = response_mask.sum(dim=-1, keepdim=True).float()
    if aggregation == "token_mean":
        mean_length: float = max(totals["batch_num_tokens"], 1) / totals["global_batch_size"]
        return tokens / mean_length
    return torch.ones_like(tokens) if divisor is None else tokens / divisor


def prompt_mean_advantages(
    base: str,
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    config: Any = None,
    index: Any = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """Estimate advantages by verl's estimator `base`, as verl calls it, on the driver, once per training step.

    Tensors are `[samples, response]`. `config` is verl's `algorithm` section, a part of the whole configuration, and
    `index` has the prompt of each sample, verl's `uid`. Errors are those of `refuse_estimator_settings`.

    Returns:
        The advantages, float32 with the weight of each sample's prompt group and the tag, and verl's returns.
    """
    from verl.trainer.ppo import core_algos

    refuse_estimator_settings(base, config, len(response_mask), index)
    if base == "grpo":  # verl calls its own with this setting
        more["norm_adv_by_std_in_grpo"] = config.get("norm_adv_by_std_in_grpo", True)
    advantages, returns = core_algos.get_adv_estimator_fn(base)(
        token_level_rewards=token_level_rewards,
        response_mask=response_mask,
        config=config,
        index=index,
        **more,
    )
    factors, num_groups = group_factors(response_mask, np.asarray(index))
    sizes = f"{num_groups} prompt groups, {len(response_mask)} samples in the step"
    _warn_once(f"megatron_pg: prompt_mean is on: {sizes}")
    return _tagged(advantages * factors.to(advantages.device, torch.float32)[:, None]), returns


def group_factors(response_mask: Tensor, index: np.ndarray[Any, Any]) -> tuple[Tensor, int]:
    """Return the factor `N D_i / (P G_g)` of each sample of the optimizer step, `[samples]` float64, and P.

    verl's padding samples (uid `pad` and 32 hexadecimal digits, no active token) are in its N and in no prompt group.
    """
    tokens = response_mask.sum(dim=-1).double().cpu().numpy()
    groups, group_ids = np.unique([str(uid) for uid in index], return_inverse=True)
    group_tokens = np.bincount(group_ids, weights=tokens, minlength=len(groups))
    is_padding = np.array([len(uid) == 35 and uid.startswith("pad") for uid in groups])
    num_groups = max(len(groups) - int((is_padding & (group_tokens == 0)).sum()), 1)
    factors = len(tokens) * tokens / (num_groups * np.maximum(group_tokens, 1)[group_ids])
    return torch.from_numpy(factors), num_groups


def _tagged(advantages: Tensor) -> Tensor:
    """Put the tag in the last bits of the advantages in float32; zeros stay zeros."""
    bits = advantages.to(torch.float32).contiguous().view(torch.int32)
    return torch.where(bits << 1 == 0, bits, bits & ~TAG_BITS | TAG).view(torch.float32)


def _refuse_untagged(advantages: Tensor, response_mask: Tensor) -> None:
    """Refuse advantages that no estimator of this module made, until some have been seen in the process."""
    global _seen_tagged
    if _seen_tagged:
        return
    bits = advantages.float().contiguous().view(torch.int32)
    looked_at = (bits << 1 != 0) & response_mask.bool()
    if bool((looked_at & (bits & TAG_BITS != TAG)).any()):
        raise ValueError(
            f"policy_loss.loss_mode={PREFIX}prompt_mean without its advantage estimator: the advantages do not carry the "
            f"weight of their prompt groups; set algorithm.adv_estimator={PREFIX}prompt_mean_grpo, or one of the others that "
            "`python -m megatron_pg integrations verl` lists"
        )
    _seen_tagged = bool(looked_at.any())


_seen_tagged = False
_warn_once = functools.cache(logging.getLogger(__name__).warning)  # verl shows warnings


def _divisor(loss_scale_factor: float | None) -> float:
    return find_divisor(
        f"{LOSS_MODE}={PREFIX}constant",
        {DIVISOR_KEY: loss_scale_factor},
        f"set {DIVISOR_KEY} to a number of tokens, for example the longest response, or {DIVISOR_VARIABLE} in the "
        "environment of the training processes",
    )


def refuse_estimator_settings(base: str, config: Any, num_samples: int, index: Any) -> None:
    """Raise a ValueError, by verl's key, for settings under which an estimator cannot make a prompt mean's advantages."""
    name = f"algorithm.adv_estimator={PREFIX}prompt_mean_{base}"
    actor, rollout = (
        _select(config, f"..actor_rollout_ref.{part}") for part in ("actor", "rollout")
    )
    if actor is None or rollout is None:
        raise ValueError(
            f"{name}: this trainer hands its estimators no configuration in which actor_rollout_ref can be found, so "
            f"nobody can check that {LOSS_MODE} and {BATCH_KEY} fit; use verl's own trainers"
        )
    if actor.policy_loss.loss_mode not in [f"{PREFIX}prompt_mean{ending}" for ending in OBJECTIVES]:
        raise ValueError(
            f"{name} with {LOSS_MODE}={actor.policy_loss.loss_mode}: the advantages would carry prompt groups' weights into "
            f"another aggregation; set {LOSS_MODE}={PREFIX}prompt_mean for verl's vanilla, or {PREFIX}prompt_mean_gspo for its "
            "gspo; its other losses have no prompt mean here"
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
    try:
        from omegaconf import OmegaConf

        return OmegaConf.select(config, key)
    except (ImportError, ValueError, TypeError, AttributeError):
        return None


def main(arguments: Sequence[str]) -> int:
    """Report whether the installed verl has loaded the plugin (`python -m megatron_pg integrations verl`).

    verl logs the failed import of a plugin at DEBUG level only: this imports verl, in the Python that runs it, and listens.
    Return 0 where verl has all policy losses of this module and an estimator for prompt_mean, 1 otherwise.
    """
    module = "megatron_pg.integrations.verl_plugin"
    about = "Is this package seen by a trainer?"
    parser = argparse.ArgumentParser(prog="megatron-pg integrations", description=about)
    parser.add_argument("trainer", choices=["verl"], help="the trainer to import and to ask")
    parser.parse_args(arguments)
    if importlib.util.find_spec("verl") is None:
        print("verl: not installed in this Python")
        return 1
    named = [point for point in entry_points(group="verl.plugins") if point.value == module]
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    print(
        f"plugin: entry point {named[0].name} ({module}); VERL_USE_EXTERNAL_PLUGINS={policy}"
        if named
        else f"plugin: no entry point of the group verl.plugins names {module}; install this package again (pip install)"
    )
    heard, log = BufferingHandler(sys.maxsize), logging.getLogger("verl")
    log.addHandler(heard)
    log.setLevel(logging.DEBUG)
    try:
        import verl
        from verl.trainer.ppo import core_algos
    except Exception as error:  # verl may lack any of its own requirements
        print(f"verl: its import fails: {type(error).__name__}: {error}")
        return 1
    print(f"verl: {verl.__version__}, {os.path.dirname(str(verl.__file__))}")
    messages = (record.getMessage() for record in heard.buffer)
    print(*(f"plugin: verl says: {m}\n" for m in messages if "plugin" in m), sep="", end="")
    losses, estimators = (
        sorted(name for name in registry if name.startswith(PREFIX))
        for registry in (core_algos.POLICY_LOSS_REGISTRY, core_algos.ADV_ESTIMATOR_REGISTRY)
    )
    print(
        f"policy losses (actor_rollout_ref.actor.policy_loss.loss_mode): {', '.join(losses) or 'none'}"
    )
    print(f"advantage estimators (algorithm.adv_estimator): {', '.join(estimators) or 'none'}")
    return 0 if len(losses) == len(HOOKS) * len(OBJECTIVES) and estimators else 1
