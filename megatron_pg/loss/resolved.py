"""Resolved settings of the policy loss: the active rows and their consequences.

A step resolves its settings before its first micro-batch. After that only formulas read their
settings.
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
    """Log-probs and entropies that decide a token's gradient: the token's, its sequence's or the
    micro-batch's.

    The fused head works chunk by chunk if they are the token's.
    """

    tokens: Literal["token", "sequence", "micro_batch"]
    leaves_out_zero_advantages: bool
    """Whether tokens with advantage 0 have no gradient. The objective is then the only term."""


@dataclass(frozen=True, eq=False)
class ResolvedLoss:
    """Policy loss for given settings, built by `resolve`."""

    config: PolicyLossConfig
    """The settings, from which formulas and terms read their coefficients."""
    objective: Formula
    corrections: tuple[Correction, ...]
    normalization: Normalization
    sequence_sums: tuple[str, ...]
    """The sums over whole sequences that rows read. If empty, there is no all-reduce."""
    is_by_turn: bool
    """Whether the sums are over turns."""
    own_reducer: OwnReducer | None
    """The custom reducer, which replaces the weighted sum."""
    scope: GradientScope
    metrics: tuple[Metric, ...]
    metric_table: Callable[[frozenset[str]], PairTable]
    """The table of metrics, as a function of the fields that samples lack."""
    requirements: tuple[Callable[[PackedBatch], None], ...]
    """Functions that raise an error if a micro-batch lacks an input of the loss."""
    head: HeadOptions
    """The options of the head, without process group and vocabulary."""
    old_log_probs: Literal["given", "current", "interpolated"]
    """The source of the old log-probs: the samples, the training forward pass, or both."""
    has_float32_logits: bool
    """Whether the model's output layer must return float32 logits."""
    is_over_kept_sets: bool
    """Whether log-probs and entropy are over the sampling sets."""
    has_kept_set_mass: bool
    scorer: TeacherChannels | SamplerHead | None
    """The source of an additional score per token."""
    compiled_settings: PolicyLossConfig | None
    """The settings that generated kernels depend on. None if the loss is not compiled."""


@functools.lru_cache(maxsize=64)
def resolve(config: PolicyLossConfig) -> ResolvedLoss:
    """Resolve the settings. Equal settings return the same object.

    Call `resolve.cache_clear()` after replacing a table row.
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
    """Derive the scope from the rows. For a custom function it is the micro-batch."""
    has_penalties = config.kl_loss_coef or config.entropy_coef or config.distill_coef
    leaves_out = not has_penalties and any(o.zero_advantage_is_zero_gradient for o in objectives)
    has_custom = any(is_replaced(setting, config) for setting in REPLACED_BY)
    if has_custom or not all(row.is_sum_over_tokens for row in (*objectives, *corrections)):
        return GradientScope("micro_batch", leaves_out)
    return GradientScope("sequence" if reads_sequences else "token", leaves_out)


def _compiled_settings(config: PolicyLossConfig) -> PolicyLossConfig | None:
    """Return the settings that kernels depend on, without divisor and beta, which are tensors.
    Return None, with a log message, for custom functions.
    """
    paths = [path for name in CUSTOM_FUNCTIONS if (path := getattr(config, name)) is not None]
    if paths:
        _log_uncompiled(", ".join(paths))
        return None
    names = [name for name in ("grad_divisor", "kl_loss_coef") if getattr(config, name)]
    numbers: dict[str, Any] = dict.fromkeys(names, 1.0)
    return dataclasses.replace(config, **numbers)


@functools.cache
def _log_uncompiled(paths: str) -> None:
    logger.info(
        "%s: a loss with custom functions is not compiled. It runs operator by operator, with more "
        "kernel launches (logged once)",
        paths,
    )


_MAKERS = {
    "old_log_probs": ", from megatron_pg.megatron.compute_log_probs with the model in training",
    "ref_log_probs": ", from megatron_pg.megatron.compute_log_probs with a reference model (in "
    "examples/train.py: --ref-load)",
}
"""Sources of fields that a rollout engine does not return."""


def require_fields(required: Mapping[str, tuple[str, ...]], batch: PackedBatch) -> None:
    """Raise a ValueError, with sample, field and flags, if a micro-batch lacks an input of the
    loss.
    """
    for field, flags in required.items():
        if field != "group_index" and batch.samples and getattr(batch, field) is None:
            raise ValueError(
                f"{batch.samples[0].name} has no {field}, required by {' and '.join(flags)}. Pass "
                f"Sample({field}=...) for every sample of the step{_MAKERS.get(field, '')}."
            )


def require_temperature(temperature: float, batch: PackedBatch) -> None:
    """Raise a ValueError if a sample's temperature differs from the log-probs' temperature."""
    for sample in batch.samples:
        # The engine's temperature may be rounded to float32.
        if sample.temperature is not None and not math.isclose(
            sample.temperature, temperature, rel_tol=1e-6
        ):
            raise ValueError(
                f"{sample.name} has temperature {sample.temperature}, but --rollout-temperature is "
                f"{temperature}. Log-probs are computed at one temperature per step. Use "
                f"--rollout-temperature {sample.temperature}, or put samples with different "
                "temperatures into different steps."
            )
