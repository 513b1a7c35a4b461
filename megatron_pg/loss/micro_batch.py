"""The boundary between a packed micro-batch and the page: here samples become tensors, and inputs
are checked.

`MicroBatchLoss` is built on the host before the model has run. Called with log-probs, it evaluates
`policy_loss` and the metrics: in a few generated kernels on a GPU, operator by operator elsewhere.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.config.custom import CUSTOM_FUNCTIONS
from megatron_pg.config.policy_loss import LOG_PROB_FIELDS, PolicyLossConfig, required_inputs
from megatron_pg.config.tables import REPLACED_BY, Row, is_replaced, rows_on
from megatron_pg.loss import compiled
from megatron_pg.loss.aggregation import Weights, host_weights
from megatron_pg.loss.compiled import Function, Outputs, Tensors
from megatron_pg.loss.corrections import CORRECTIONS
from megatron_pg.loss.metrics import MicroBatchMetrics, PairTable, measure, metric_table
from megatron_pg.loss.objectives import OBJECTIVES
from megatron_pg.loss.policy_loss import policy_loss
from megatron_pg.loss.reducer import add_over_group, get_reduction
from megatron_pg.loss.sequence import (
    SequenceSums,
    sequence_sum_names,
    sums_of_rank,
    units_of_window,
)
from megatron_pg.loss.tokens import DIFFERENTIATED, Tokens
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.totals import StepTotals

logger = logging.getLogger("megatron_pg")

BATCH_FIELDS = (
    *("loss_mask", "advantages", "loss_weights", "policy_version", "kept_set_size"),
    *LOG_PROB_FIELDS,
)
"""The fields of a packed micro-batch that are fields of `Tokens` by the same name."""
TEACHER_CHANNELS = {
    "logits": ("teacher_logits",),
    "hidden": ("teacher_hidden",),
    "top_k": ("teacher_ids", "teacher_log_probs"),
}
"""The side channels that hold a teacher, by `--distill-teacher`. Each has a row for every response
token."""
TOLERANCE = 1e-3  # rounding of an engine's log-prob of 0, in nats


class MicroBatchLoss:
    """The loss of one micro-batch on one rank, as a function of its log-probs.

    Arguments and errors are those of `policy_loss_function`.
    """

    def __init__(
        self,
        config: PolicyLossConfig,
        batch: PackedBatch,
        totals: StepTotals,
        context_parallel_group: dist.ProcessGroup | None = None,
        step_share: float = 1.0,
    ) -> None:
        _require_inputs(config, batch)
        self.config, self.batch, self._totals = config, batch, totals
        self._group = context_parallel_group
        step_numbers, sample_weights = host_weights(config, batch, totals, step_share)
        self._tensors: dict[str, Tensor | None] = {
            **{name: getattr(batch, name) for name in BATCH_FIELDS},
            "sample_ids": batch.window_segment_ids,
            "step_numbers": step_numbers,
            "sample_weights": sample_weights,
        }
        if config.sequence_unit == "turn":
            units = units_of_window(config, batch)
            self._tensors["unit_ids"], self._tensors["samples_of_units"] = units
        self._reduce = get_reduction(config, batch, context_parallel_group)

    def __call__(
        self,
        log_probs: Tensor,
        entropy: Tensor | None,
        divergence: Tensor | None = None,
        kept_set_mass: Tensor | None = None,
    ) -> tuple[Tensor, MicroBatchMetrics]:
        """Compute the loss, to be differentiated, and its detached metrics. Arguments are [window]
        float32, in nats.

        Every rank of the context-parallel group must call it, those whose window is empty included.
        The divergence is from the teacher; the mass, of `--kept-set-mass`, is 1 for an empty set.
        """
        tensors = self._inputs(log_probs, entropy, divergence, kept_set_mass)
        loss, maxima, is_nan, *parts = self._bind(self._loss_and_metrics, tensors)()
        table = self._table(tensors)
        pairs = table.pairs(parts, tensors["step_numbers"])
        metrics = MicroBatchMetrics(table, pairs, maxima, is_nan, self.batch, self._totals)
        return loss, metrics

    def loss(self, log_probs: Tensor, *others: Tensor | None) -> Tensor:
        """Compute the loss without metrics; arguments as for a call."""
        loss: Tensor = self._bind(self._loss_alone, self._inputs(log_probs, *others))()[0]
        return loss

    def _inputs(
        self,
        log_probs: Tensor,
        entropy: Tensor | None,
        divergence: Tensor | None = None,
        kept_set_mass: Tensor | None = None,
    ) -> Tensors:
        """Collect the tensors that the loss depends on by name, with the sums over sequences of
        every rank.
        """
        config = self.config
        if divergence is None and config.distills and not self.batch.samples:
            divergence = 0.0 * log_probs
        if config.needs_entropy and entropy is None:
            raise ValueError(
                "entropy is None, and --entropy-coef or --pg-metrics with_entropy needs it: give "
                "the entropy [window] of the "
                "window's response tokens, in nats"
            )
        if config.distills and divergence is None:
            raise ValueError(
                "divergence is None, and --policy-loss distill and --distill-coef need the "
                "divergence from the teacher, which is "
                "made of logits or of hidden states: use PolicyStep or policy_loss_function"
            )
        tensors = self._tensors | {
            "log_probs": log_probs,
            "entropy": entropy if config.needs_entropy else None,
            "divergence": divergence,
            "kept_set_mass": kept_set_mass,
        }
        if reads_sequences(config):
            # The config and the samples alone decide if there is an all-reduce, and of what size:
            # every rank of the group joins it, those that have no token and those that could not
            # compile included.
            (sums,) = self._bind(self._sums_of_rank, tensors, differentiated=())()
            tensors |= {"sums": add_over_group(sums, self._group)}
        return tensors

    def _bind(
        self, function: Function, tensors: Tensors, differentiated: Sequence[str] = DIFFERENTIATED
    ) -> Callable[[], Outputs]:
        log_probs, mask = tensors["log_probs"], tensors["loss_mask"]
        # Sizes of 0 and 1 would be graphs of their own.
        is_regular = len(log_probs) > 1 and log_probs.shape == mask.shape
        settings = _compiled_settings(self.config) if is_regular else None
        return compiled.bind(function, settings, tensors, differentiated)

    def _table(self, tensors: Tensors) -> PairTable:
        names = (*BATCH_FIELDS, "kept_set_mass")
        return metric_table(self.config, frozenset(x for x in names if tensors.get(x) is None))

    # Functions of tensors by name, which a GPU runs as compiled programs.

    def _loss_and_metrics(self, tensors: Tensors) -> Outputs:
        tokens, weights, sums = self._arguments(tensors)
        terms = policy_loss(self.config, tokens, weights, sums, self._reduce)
        return terms.loss, *measure(self.config, self._table(tensors), tokens, weights, terms)

    def _loss_alone(self, tensors: Tensors) -> Outputs:
        return (policy_loss(self.config, *self._arguments(tensors), self._reduce).loss,)

    def _sums_of_rank(self, tensors: Tensors) -> Outputs:
        tokens = Tokens.masked(tensors, self.batch.side_channels)
        of_units = tensors.get("samples_of_units", tensors["sample_weights"])
        return (sums_of_rank(self.config, tokens, of_units.shape[-1]),)

    def _arguments(self, tensors: Tensors) -> tuple[Tokens, Weights, SequenceSums]:
        tokens = Tokens.masked(tensors, self.batch.side_channels)
        window = (tokens.loss_mask, tokens.sample_ids, tokens.loss_weights)
        weights = Weights.spread(tensors["step_numbers"], tensors["sample_weights"], *window)
        sums = SequenceSums.of_table(self.config, tokens.unit_ids, tensors.get("sums"))
        return tokens, weights, sums


@functools.lru_cache(maxsize=64)
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
        "%s: a loss with functions of your own is not compiled and runs operator by operator, with "
        "more launches (said once)",
        paths,
    )


_MAKERS = {
    "old_log_probs": "; megatron_pg.megatron.compute_log_probs makes them with the model that is "
    "trained",
    "ref_log_probs": "; megatron_pg.megatron.compute_log_probs makes them with a reference model, "
    "which --ref-load names "
    "for examples/train.py",
}
"""The way to fields that a rollout engine does not return."""


def _require_inputs(config: PolicyLossConfig, batch: PackedBatch) -> None:
    """Refuse a micro-batch that lacks an input of the loss, naming the sample, the field and the
    flags that ask for it.
    """
    for field, flags in required_inputs(config).items():
        if field != "group_index" and batch.samples and getattr(batch, field) is None:
            raise ValueError(
                f"{batch.samples[0].name} has no {field}, which {' and '.join(flags)} needs: give "
                f"Sample({field}=...) to every sample of the step{_MAKERS.get(field, '')}"
            )
    if config.replay_sampling_set and batch.kept_tokens is not None:
        _refuse_other_distributions(config, batch, batch.kept_tokens.sizes == 1)
    teacher = TEACHER_CHANNELS[str(config.distill_teacher)] if config.distills else ()
    for name in teacher if batch.samples else ():
        channel, length = batch.side_channels.get(name), len(batch.window)
        if not isinstance(channel, Tensor) or len(channel) != length:
            problem = "none" if channel is None else f"{len(channel)} rows for {length} tokens"
            raise ValueError(
                f"{batch.samples[0].name}: side_channels[{name!r}] is missing or of the wrong "
                f"length ({problem}), and "
                f"--distill-teacher {config.distill_teacher} needs it: give a tensor "
                f"[response_length, ...] to every sample"
            )


def _refuse_other_distributions(
    config: PolicyLossConfig, batch: PackedBatch, is_alone: Tensor
) -> None:
    """Refuse log-probs of another distribution than the one renormalised to the kept set, by sample
    and position.

    A token that is alone in its set has the log-prob 0. Another number there belongs to the whole
    vocabulary, or to another set, and so do the numbers at other tokens: a ratio to them would
    compare two supports.
    """
    window, fields = batch.window, [x for x in LOG_PROB_FIELDS if x in required_inputs(config)]
    for field in fields if is_alone.any() else ():
        values = torch.cat([getattr(sample, field) for sample in batch.samples])
        values = values[window.response_indices]
        wrong = (is_alone & (values.abs() > TOLERANCE)).nonzero()
        if wrong.numel():
            token = int(wrong[0])
            sample = int(window.window_segment_ids[token])
            position = int(window.response_indices[token]) - sum(window.response_lengths[:sample])
            raise ValueError(
                f"{batch.samples[sample].name}: {field}[{position}] is {float(values[token]):.4g}, "
                f"and its token is the only one "
                "of its kept set, where the log-prob over the set is 0: these are log-probs of "
                "another distribution. Under "
                "--replay-sampling-set give those over the same sets (compute_log_probs under the "
                "same flag; of an engine, "
                "those that it sampled from), or drop the flag"
            )


class GradientScope(NamedTuple):
    """The log-probs and entropies that decide a token's gradient: its own, its sequence's or the
    micro-batch's.

    The fused head works chunk by chunk where they are the token's own.
    """

    tokens: Literal["token", "sequence", "micro_batch"]
    leaves_out_zero_advantages: bool
    """A token whose advantage is 0 has no gradient at all: the objective is then the only term of
    the loss."""


def gradient_scope(config: PolicyLossConfig) -> GradientScope:
    """Read the scope off the rows. Of a function of the user's own nothing is known."""
    objectives = rows_on(OBJECTIVES, config)
    has_penalties = config.kl_loss_coef or config.entropy_coef or config.distill_coef
    leaves_out = not has_penalties and any(o.zero_advantage_is_zero_gradient for o in objectives)
    rows: list[Row] = [*objectives, *rows_on(CORRECTIONS, config)]
    has_custom = any(is_replaced(setting, config) for setting in REPLACED_BY)
    if has_custom or not all(row.is_sum_over_tokens for row in rows):
        return GradientScope("micro_batch", leaves_out)
    return GradientScope("sequence" if reads_sequences(config) else "token", leaves_out)


def reads_sequences(config: PolicyLossConfig) -> bool:
    """Tell whether a row that is on reads a sum over sequences."""
    return bool(sequence_sum_names(config))
