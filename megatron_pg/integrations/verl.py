"""The four aggregations inside verl, unmodified, by policy losses and advantage estimators.

    actor_rollout_ref.actor.policy_loss.loss_mode=megatron_pg_prompt_mean  # PPO; ..._gspo: GSPO
    algorithm.adv_estimator=megatron_pg_prompt_mean_grpo                   # only for prompt_mean

verl imports `megatron_pg.integrations.verl_plugin`, which calls `register`, through the entry point
group `verl.plugins`.

How verl uses a policy loss (read in 0.8.0, 0.9.0, 0.9.1 and main), with x the per-token loss, m the
mask, n_j the tokens of micro-batch j including prompts, and R their sum over data-parallel ranks
and micro-batches:

1. `workers/utils/losses.py`, `ppo_loss`: the policy loss gets the log-probs of the micro-batch,
   gathered over context parallelism, and `config.global_batch_info` of the mini-batch: `dp_size`,
   `batch_num_tokens` = T, `global_batch_size` = N. verl adds KL and entropy, by `loss_agg_mode`.
2. `models/mcore/util.py`, `postprocess_thd_engine`: gathered log-probs have gradient only for this
rank's part, so the CP ranks' gradients add up.
3. `workers/engine/megatron/transformer_impl.py`, `postprocess_micro_batch_func`: returns `loss * M`
   in a pair, from which Megatron computes `1 / DP * sum of loss`. In per-token mode (since 0.9,
   forced under CP), it returns `(loss * R / DP, n_j // CP)`, from which Megatron computes F times
   that sum, `F = R / (CP * sum of floor(n_j / CP))`: 1 if CP divides every n_j, 1.07 for 77 tokens
   at CP 8.

So a policy loss of `DP * sum of w m x` gives `sum of w m x`, with w = 1 / (N D_i) for sample_mean,
1 / T for token_mean, 1 / (N L) for constant. verl's `vanilla` or `gspo` multiplies its per-token
loss by N D_i w, passed as `rollout_is_weights`, under `seq-mean-token-mean`.

A policy loss does not get prompt groups. The advantage estimator does, on the driver, once per
step: `megatron_pg_prompt_mean_<name>` is verl's estimator <name> with advantages times `N D_i / (P
G_g)`. Both losses are homogeneous in the advantage, so the objective is the prompt mean if the
batch is one optimizer step, which is checked. Advantages have a tag in their last two bits (2.4e-7
of their size), and the policy loss refuses advantages without it.
"""

import argparse
import copy
import functools
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
from torch.nn.utils.rnn import pad_sequence

from megatron_pg.integrations import verify
from megatron_pg.integrations.reducers import DIVISOR_VARIABLE, HOOKS, find_divisor

PREFIX = "megatron_pg_"
"""The prefix of every registered name."""
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
BATCH_KEY = "actor_rollout_ref.actor.ppo_mini_batch_size"
DIVISOR_KEY = "actor_rollout_ref.actor.loss_scale_factor"
OBJECTIVES = {"": "vanilla", "_gspo": "gspo"}
"""verl's policy losses by the suffix of the registered name."""
NEED_MORE = {"gae", "gdpo", "optimal_token_baseline", "remax", "tir_optimal_token_baseline"}
"""Estimators that verl treats specially by name, which would not work under a new name."""
TAG, TAG_BITS = 0b01, 0b11
"""The last bits of an advantage that includes its prompt group's weight."""
Batch = tuple[Tensor, Tensor, Tensor, Tensor]
"""Old log-probs, log-probs, advantages and response mask, [samples, response] each."""


def register() -> None:
    """Register the policy losses and advantage estimators. A second call changes nothing."""
    from verl.trainer.ppo import core_algos

    for aggregation in HOOKS:  # the aggregations of `sample_factors`
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
    """Compute a policy loss. verl calls it per micro-batch on ranks of the last pipeline stage.

    Tensors are [samples, response], and `config` is verl's `ActorConfig`. `loss_agg_mode` is
    ignored. Raises ValueError for settings that exclude the aggregation, and if the installed verl
    computes something else.

    Returns:
        The 0-d loss, which is DP times this micro-batch's share of the objective, and verl's
        metrics.
    """
    _refuse_context_parallelism(config.engine)
    divisor = _divisor(config.loss_scale_factor) if aggregation == "constant" else None
    verify_loss(aggregation, objective, divisor, config)
    if aggregation == "prompt_mean":
        _refuse_untagged(advantages, response_mask)
    batch = old_log_prob, log_prob, advantages, response_mask
    return weighted_loss(aggregation, objective, divisor, batch, config, rollout_is_weights)


def weighted_loss(
    aggregation: str,
    objective: str,
    divisor: float | None,
    batch: Batch,
    config: Any,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Call verl's policy loss with each sample's factor."""
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


def verify_loss(aggregation: str, objective: str, divisor: float | None, config: Any) -> None:
    """Raise ValueError if the installed verl's loss is not the aggregation, once per process.

    Tiny samples have ratio 1, so the gradient of a log-prob is its weight times -advantage.
    """

    def find() -> str | None:
        mask = pad_sequence(list(map(torch.tensor, verify.MASKS)), batch_first=True)
        log_prob, advantages = (verify.numbers(*mask.shape, seed=seed) for seed in (1, 2))
        weights = torch.tensor(verify.token_weights(aggregation, divisor))
        expected = -weights[:, None] * mask * advantages
        if aggregation == "prompt_mean":
            factors, _ = group_factors(mask, np.array(verify.GROUPS))
            advantages = advantages * factors[:, None].float()
        batch = log_prob, log_prob.clone().requires_grad_(), advantages, mask.bool()
        tiny, data_size = copy.deepcopy(config), 2
        totals = {"global_batch_size": len(mask), "batch_num_tokens": int(mask.sum())}
        tiny.global_batch_info.update(totals, dp_size=data_size, loss_scale_factor=None)
        share, _ = weighted_loss(aggregation, objective, divisor, batch, tiny)
        (found,) = torch.autograd.grad(share / data_size, batch[1])
        name = "a gradient of log-probs"
        return verify.difference({name: found}, {name: expected})

    version = getattr(sys.modules.get("verl"), "__version__", "")
    verify.require(
        ("verl", aggregation, objective, divisor),
        find,
        f"megatron_pg {aggregation} with verl's {objective}: the installed verl {version} "
        "computes something else: ",
        f"set {LOSS_MODE}={objective}, its own",
    )


def _refuse_context_parallelism(engine: Any) -> None:
    """Raise ValueError for dynamic context parallelism, and for a verl without token counts in
    per-token mode.
    """
    setting = f"{LOSS_MODE}={PREFIX}... with actor_rollout_ref.actor.megatron."
    if getattr(engine, "dynamic_context_parallel", False):
        raise ValueError(
            f"{setting}dynamic_context_parallel=True scales each micro-batch differently: set False"
        )
    if getattr(engine, "context_parallel_size", 1) == 1:
        return
    from verl.workers.engine.megatron import transformer_impl

    scale = transformer_impl.MegatronEngineWithLMHead.postprocess_micro_batch_func
    if "calculate_per_token_loss" not in scale.__code__.co_names:
        raise ValueError(
            f"{setting}context_parallel_size={engine.context_parallel_size}: this verl returns no "
            "token count in per-token mode. Set it to 1, or install verl 0.9 or later"
        )


def sample_factors(
    aggregation: str, response_mask: Tensor, totals: Mapping[str, Any], divisor: float | None
) -> Tensor:
    """Return each sample mean's factor, [samples, 1] float32, without the prompt group's part.

    `response_mask` is [samples, response] of whole samples, `totals` is verl's `global_batch_info`.
    """
    needed = ["global_batch_size", *(["batch_num_tokens"] if aggregation == "token_mean" else [])]
    if lacking := [name for name in needed if totals.get(name) is None]:
        raise ValueError(
            f"policy_loss.loss_mode={PREFIX}{aggregation}: verl's global_batch_info has no "
            f"{lacking[0]}, the divisor of the loss, because this trainer class does not set it"
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
    """Estimate advantages with verl's estimator `base`. verl calls it on the driver once per step.

    Tensors are [samples, response]. `config` is verl's `algorithm` section within the whole
    configuration. `index` is verl's `uid`, each sample's prompt.

    Returns:
        The advantages, float32 with prompt group weights and the tag, and verl's returns.
    """
    from verl.trainer.ppo import core_algos

    refuse_estimator_settings(base, config, len(response_mask), index)
    if base == "grpo":  # verl passes it to its own grpo
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
    """Return each sample's factor `N D_i / (P G_g)`, [samples] float64, and P.

    verl's padding samples (uid `pad` and 32 hexadecimal digits, no active token) count in N, but
    are in no prompt group.
    """
    tokens = response_mask.sum(dim=-1).double().cpu().numpy()
    groups, group_ids = np.unique([str(uid) for uid in index], return_inverse=True)
    group_tokens = np.bincount(group_ids, weights=tokens, minlength=len(groups))
    is_padding = np.array([len(uid) == 35 and uid.startswith("pad") for uid in groups])
    num_groups = max(len(groups) - int((is_padding & (group_tokens == 0)).sum()), 1)
    factors = len(tokens) * tokens / (num_groups * np.maximum(group_tokens, 1)[group_ids])
    return torch.from_numpy(factors), num_groups


def _tagged(advantages: Tensor) -> Tensor:
    """Write the tag into the advantages' last float32 bits. Zeros stay zeros."""
    bits = advantages.to(torch.float32).contiguous().view(torch.int32)
    return torch.where(bits << 1 == 0, bits, bits & ~TAG_BITS | TAG).view(torch.float32)


def _refuse_untagged(advantages: Tensor, response_mask: Tensor) -> None:
    """Raise ValueError for advantages of verl's estimators, until tagged ones were seen in this
    process.
    """
    global _seen_tagged
    if _seen_tagged:
        return
    bits = advantages.float().contiguous().view(torch.int32)
    looked_at = (bits << 1 != 0) & response_mask.bool()
    if bool((looked_at & (bits & TAG_BITS != TAG)).any()):
        raise ValueError(
            f"policy_loss.loss_mode={PREFIX}prompt_mean without its advantage estimator: the "
            "advantages lack their prompt groups' weight. Set "
            f"algorithm.adv_estimator={PREFIX}prompt_mean_grpo, or an estimator that `megatron-pg "
            "integrations verl` lists"
        )
    _seen_tagged = bool(looked_at.any())


_seen_tagged = False
_warn_once = functools.cache(logging.getLogger(__name__).warning)  # verl shows warnings


def _divisor(loss_scale_factor: float | None) -> float:
    return find_divisor(
        f"{LOSS_MODE}={PREFIX}constant",
        {DIVISOR_KEY: loss_scale_factor},
        f"set {DIVISOR_KEY} to a number of tokens, for example the longest response, or "
        f"{DIVISOR_VARIABLE} in the environment of the training processes",
    )


def refuse_estimator_settings(base: str, config: Any, num_samples: int, index: Any) -> None:
    """Raise ValueError, by verl's key, for settings that exclude a prompt mean's advantages."""
    name = f"algorithm.adv_estimator={PREFIX}prompt_mean_{base}"
    parts = (_select(config, f"..actor_rollout_ref.{part}") for part in ("actor", "rollout"))
    actor, rollout = parts
    if actor is None or rollout is None:
        raise ValueError(
            f"{name}: this trainer gives its estimators no configuration with actor_rollout_ref, "
            f"which is needed to check {LOSS_MODE} and {BATCH_KEY}. Use verl's estimator"
        )
    if actor.policy_loss.loss_mode not in [f"{PREFIX}prompt_mean{ending}" for ending in OBJECTIVES]:
        raise ValueError(
            f"{name} with {LOSS_MODE}={actor.policy_loss.loss_mode}: set "
            f"{LOSS_MODE}={PREFIX}prompt_mean for verl's vanilla, or {PREFIX}prompt_mean_gspo for "
            "its gspo. Its other losses have no prompt mean"
        )
    per_step = actor.ppo_mini_batch_size * rollout.n
    if num_samples != per_step:
        raise ValueError(
            f"{name}: the batch has {num_samples} samples, but an optimizer step {per_step} "
            f"({BATCH_KEY}={actor.ppo_mini_batch_size} times "
            f"actor_rollout_ref.rollout.n={rollout.n}), so prompt groups would be split over "
            f"steps. Set {BATCH_KEY} to data.train_batch_size, and use agent loops with one output "
            "per rollout"
        )
    if index is None:
        raise ValueError(f"{name}: the batch has no uid, which identifies prompt groups")


def _select(config: Any, key: str) -> Any:
    try:
        from omegaconf import OmegaConf

        return OmegaConf.select(config, key)
    except (ImportError, ValueError, TypeError, AttributeError):
        return None


def main(arguments: Sequence[str]) -> int:
    """Report whether the installed verl loaded the plugin (`megatron-pg integrations verl`).

    verl logs a plugin's failed import only at DEBUG level. Returns 0 if verl has all policy losses
    of this module and an estimator for prompt_mean, else 1.
    """
    module = "megatron_pg.integrations.verl_plugin"
    about = "Report whether a trainer loads this package."
    parser = argparse.ArgumentParser(prog="megatron-pg integrations", description=about)
    parser.add_argument("trainer", choices=["verl"], help="the trainer to import")
    parser.parse_args(arguments)
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    named = [point.name for point in entry_points(group="verl.plugins") if point.value == module]
    about = f"{named[0]} ({module})" if named else "none, install this package again (pip install)"
    print(f"plugin: entry point {about}; VERL_USE_EXTERNAL_PLUGINS={policy}")
    heard, log = BufferingHandler(sys.maxsize), logging.getLogger("verl")
    log.addHandler(heard)
    log.setLevel(logging.DEBUG)
    try:
        import verl
        from verl.trainer.ppo import core_algos
    except Exception as error:  # verl may lack any of its requirements
        print(f"verl: import failed: {type(error).__name__}: {error}")
        return 1
    print(f"verl: {verl.__version__}, {os.path.dirname(str(verl.__file__))}")
    for message in (record.getMessage() for record in heard.buffer):
        if "plugin" in message:
            print(f"plugin: verl logged: {message}")
    losses, estimators = (
        sorted(name for name in registry if name.startswith(PREFIX))
        for registry in (core_algos.POLICY_LOSS_REGISTRY, core_algos.ADV_ESTIMATOR_REGISTRY)
    )
    print(f"policy losses ({LOSS_MODE}): {', '.join(losses) or 'none'}")
    print(f"advantage estimators (algorithm.adv_estimator): {', '.join(estimators) or 'none'}")
    return 0 if len(losses) == len(HOOKS) * len(OBJECTIVES) and estimators else 1
