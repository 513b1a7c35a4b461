"""The settings of the policy loss, read once: the rows that are on, and what follows from them.

A step resolves its settings before its first micro-batch. After that only formulas read a setting,
each those of its own.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from megatron_pg.config.custom import CUSTOM_FUNCTIONS
from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.config.tables import REPLACED_BY, is_replaced, required_inputs, rows_on
from megatron_pg.head import HeadOptions
from megatron_pg.loss.aggregation import Normalization
from megatron_pg.loss.corrections import CORRECTIONS, Correction
from megatron_pg.loss.kept_sets import require_heads_in_sets, require_kept_set_log_probs
from megatron_pg.loss.metrics import Metric, PairTable, metric_table, metrics_on
from megatron_pg.loss.objectives import OBJECTIVES, Formula, Objective, get_objective
from megatron_pg.loss.reducer import OwnReducer
from megatron_pg.loss.sampler_head import SamplerHead
from megatron_pg.loss.sequence import sequence_sum_names
from megatron_pg.loss.teacher import TeacherChannels
from megatron_pg.step.batch import PackedBatch

logger = logging.getLogger("megatron_pg")


class GradientScope(NamedTuple):
    """The log-probs and entropies that decide a token's gradient: its own, its sequence's or the
    micro-batch's.

    The fused head works chunk by chunk where they are the token's own.
    """

    tokens: Literal["token", "sequence", "micro_batch"]
    leaves_out_zero_advantages: bool
    """A token whose advantage is 0 has no gradient at all: the objective is then the only term of
    the loss."""


@dataclass(frozen=True, eq=False)
class ResolvedLoss:
    """The policy loss that settings name. `resolve` builds it."""

    config: PolicyLossConfig
    """The settings, for formulas and terms to read their coefficients."""
    objective: Formula
    corrections: tuple[Correction, ...]
    normalization: Normalization
    sequence_sums: tuple[str, ...]
    """The sums over whole sequences that rows read; empty for none, and then there is no
    all-reduce."""
    is_by_turn: bool
    """These sums are those of turns."""
    own_reducer: OwnReducer | None
    """The user's reducer, which takes the place of the weighted sum."""
    scope: GradientScope
    metrics: tuple[Metric, ...]
    metric_table: Callable[[frozenset[str]], PairTable]
    """The table of metrics for samples that lack these fields."""
    requirements: tuple[Callable[[PackedBatch], None], ...]
    """The functions that refuse a micro-batch which lacks an input of the loss."""
    head: HeadOptions
    """The options of the head, without process group and vocabulary."""
    old_log_probs: Literal["given", "current", "interpolated"]
    """The source of the old log-probs: the samples, or the forward pass that is trained."""
    has_float32_logits: bool
    """The model's own output layer gives float32 logits."""
    is_over_kept_sets: bool
    """Log-probs and entropy are those over the sets that tokens were sampled from."""
    has_kept_set_mass: bool
    scorer: TeacherChannels | SamplerHead | None
    """The source of a further score of each token."""
    compiled_settings: PolicyLossConfig | None
    """The settings that generated kernels depend on; None for a loss that is not compiled."""


@functools.lru_cache(maxsize=64)
def resolve(config: PolicyLossConfig) -> ResolvedLoss:
    """Resolve the settings; the same object for equal settings.

    If a row of a table is exchanged for another of its name, `resolve.cache_clear()` forgets it.
    """
    objectives, corrections = rows_on(OBJECTIVES, config), rows_on(CORRECTIONS, config)
    sums, scorer = sequence_sum_names(config), SamplerHead.of(config) or TeacherChannels.of(config)
    required = required_inputs(config)
    requirements: list[Callable[[PackedBatch], None]] = [
        functools.partial(require_fields, required),
        functools.partial(require_temperature, config.rollout_temperature),
    ]
    if config.replay_sampling_set:
        requirements.append(functools.partial(require_kept_set_log_probs, tuple(required)))
        if config.score_centering:
            requirements.append(require_heads_in_sets)
    if isinstance(scorer, TeacherChannels):
        requirements.append(scorer.require)
    return ResolvedLoss(
        config=config,
        objective=get_objective(config),
        corrections=tuple(corrections),
        normalization=Normalization.of(config),
        sequence_sums=sums,
        is_by_turn=config.sequence_unit == "turn",
        own_reducer=OwnReducer.of(config),
        scope=_gradient_scope(config, objectives, corrections, bool(sums)),
        metrics=tuple(metrics_on(config)),
        metric_table=functools.cache(functools.partial(metric_table, config)),
        requirements=tuple(requirements),
        head=HeadOptions(
            temperature=config.rollout_temperature,
            fp32_logits=config.fp32_lm_head,
            memory_gib=config.fused_lm_head_memory_gib,
            with_entropy=config.needs_entropy,
            use_quack=not config.fused_lm_head_without_quack,
        ),
        old_log_probs=config.old_log_probs,
        has_float32_logits=config.changes_output_layer,
        is_over_kept_sets=config.replay_sampling_set,
        has_kept_set_mass=config.kept_set_mass,
        scorer=scorer,
        compiled_settings=_compiled_settings(config),
    )


def _gradient_scope(
    config: PolicyLossConfig,
    objectives: list[Objective],
    corrections: list[Correction],
    reads_sequences: bool,
) -> GradientScope:
    """Read the scope off the rows. Of a function of the user's own nothing is known."""
    has_penalties = config.kl_loss_coef or config.entropy_coef or config.distill_coef
    leaves_out = not has_penalties and any(o.zero_advantage_is_zero_gradient for o in objectives)
    has_custom = any(is_replaced(setting, config) for setting in REPLACED_BY)
    if has_custom or not all(row.is_sum_over_tokens for row in (*objectives, *corrections)):
        return GradientScope("micro_batch", leaves_out)
    return GradientScope("sequence" if reads_sequences else "token", leaves_out)


def _compiled_settings(config: PolicyLossConfig) -> PolicyLossConfig | None:
    """Return what kernels depend on: neither divisor nor beta, which are tensors; None, and log it,
    with the user's functions.
    """
    paths = [path for name in CUSTOM_FUNCTIONS if (path := getattr(config, name)) is not None]
    if paths:
        _say_uncompiled(", ".join(paths))
        return None
    names = [name for name in ("grad_divisor", "kl_loss_coef") if getattr(config, name)]
    numbers: dict[str, Any] = dict.fromkeys(names, 1.0)
    return dataclasses.replace(config, **numbers)


@functools.cache
def _say_uncompiled(paths: str) -> None:
    logger.info(
        "%s: a loss with your own functions is not compiled. It runs operator by operator, with "
        "more kernel launches (logged once)",
        paths,
    )


_MAKERS = {
    "old_log_probs": "; megatron_pg.megatron.compute_log_probs makes them with the model that is "
    "trained",
    "ref_log_probs": "; megatron_pg.megatron.compute_log_probs makes them with a reference model, "
    "which --ref-load names for examples/train.py",
}
"""The way to fields that a rollout engine does not return."""


def require_fields(required: Mapping[str, tuple[str, ...]], batch: PackedBatch) -> None:
    """Refuse a micro-batch that lacks an input of the loss, naming the sample, the field and the
    flags that ask for it.
    """
    for field, flags in required.items():
        if field != "group_index" and batch.samples and getattr(batch, field) is None:
            raise ValueError(
                f"{batch.samples[0].name} has no {field}, which {' and '.join(flags)} needs: give "
                f"Sample({field}=...) to every sample of the step{_MAKERS.get(field, '')}"
            )


def require_temperature(temperature: float, batch: PackedBatch) -> None:
    """Refuse a sample that was sampled at another temperature than the log-probs are computed
    at.
    """
    for sample in batch.samples:
        # An engine may hold it in float32.
        if sample.temperature is not None and not math.isclose(
            sample.temperature, temperature, rel_tol=1e-6
        ):
            raise ValueError(
                f"{sample.name} has temperature {sample.temperature} and --rollout-temperature is "
                f"{temperature}. Log-probs are computed at one temperature per step: give "
                f"--rollout-temperature {sample.temperature}, or put samples of different "
                "temperatures into different steps"
            )
