"""The loss of one micro-batch on one rank, as a function of its log-probs and entropy."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.config.fields import fields_of
from megatron_pg.config.policy_loss import LOG_PROB_FIELDS, PolicyLossConfig, required_inputs
from megatron_pg.config.rows import read_off_rows
from megatron_pg.loss import compiled
from megatron_pg.loss.corrections import Corrected, Scored, apply_corrections, drops_tokens
from megatron_pg.loss.distillation import given_divergence, refuse_without_teacher
from megatron_pg.loss.divergence import kl_penalty
from megatron_pg.loss.kept_set import refuse_other_distributions
from megatron_pg.loss.metric_table import given
from megatron_pg.loss.metrics import MicroBatchMetrics, metric_table, token_metrics
from megatron_pg.loss.objectives import get_objective
from megatron_pg.loss.sequence import (
    SequenceLogRatios,
    SequenceReduction,
    summands_of_sequences,
    sums_over_sequences,
)
from megatron_pg.loss.weights import MicroBatchWeights
from megatron_pg.step.batch import RESPONSE_FIELDS, PackedBatch
from megatron_pg.step.totals import StepTotals

logger = logging.getLogger("megatron_pg")

SET_FIELDS = ("kept_set_size", "kept_set_mass")
TOKEN_FIELDS = (*RESPONSE_FIELDS, *SET_FIELDS, "window_segment_ids", "coefficients", "divergence")
"""The fields of a packed micro-batch that the loss is a function of."""
DIFFERENTIATED = ("log_probs", "entropy", "divergence")
"""What it has a gradient to."""
CUSTOM_FIELDS = tuple(name for name in fields_of(PolicyLossConfig) if name.startswith("custom_"))


class MicroBatchLoss:
    """The loss of one micro-batch on one rank, as a function of its log-probs and entropy.

    Built on the host before the model has run: the weight of every token is fixed here, by masks and totals alone.

    Args:
        config, batch, totals, context_parallel_group, step_share: as for `policy_loss_function`.

    Raises:
        ValueError: the batch lacks an input of the objective; the flags that ask for it are named.
    """

    def __init__(
        self,
        config: PolicyLossConfig,
        batch: PackedBatch,
        totals: StepTotals,
        context_parallel_group: dist.ProcessGroup | None = None,
        step_share: float = 1.0,
    ) -> None:
        for field, flags in _required_inputs(config).items():
            if field != "group_index" and getattr(batch, field) is None:
                raise ValueError(
                    f"{batch.samples[0].name} has no {field}, which {' and '.join(flags)} needs: give "
                    f"Sample({field}=...) to every sample of the step"
                )
        refuse_other_distributions(config, batch)
        refuse_without_teacher(config, batch)
        self.config, self.batch, self._totals = config, batch, totals
        self._group = context_parallel_group
        self._weights = MicroBatchWeights.build(config, batch, totals, step_share)
        optional = (*LOG_PROB_FIELDS, *SET_FIELDS, "policy_version")
        lacking = (field for field in optional if getattr(batch, field) is None)
        self._table = metric_table(config, frozenset(lacking))
        self._sequence: SequenceLogRatios | None = None  # once every rank has added its part

    def terms(
        self, log_probs: Tensor, entropy: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor], Scored]:
        """The loss without its metrics: objective, corrections, aggregation, regularizers.

        Args:
            log_probs: [window] float32.
            entropy: [window] float32, or None.

        Returns:
            The 0-d loss to be differentiated, the 0-d terms to be reported by name, and what the metrics are made of.
        """
        config, batch, sequence = self.config, self.batch, self._sequence
        outcome = get_objective(config)(config, batch, log_probs, sequence=sequence)
        scored = Scored(config, batch, log_probs, outcome, entropy, sequence)
        corrected = apply_corrections(scored)
        inner_sum = self._weights.inner_sum(corrected.pg_loss, self._masks_of_reducer(corrected))
        outer_count, _, gradient_divisor, *_ = self._weights.scalars.to(inner_sum.dtype)
        pg_loss = inner_sum / outer_count
        reported = {"pg_loss": pg_loss}
        penalties: list[Tensor] = []
        if config.kl_loss_coef:
            reported["kl_loss"] = self._weights.regularizer(kl_penalty(config, batch, log_probs))
            penalties.append(config.kl_loss_coef * reported["kl_loss"])
        if config.entropy_coef and entropy is not None:
            reported["entropy_loss"] = self._weights.regularizer(entropy)
            penalties.append(-config.entropy_coef * reported["entropy_loss"])
        if config.distill_coef:
            of_teacher = self._weights.inner_sum(given_divergence(batch))
            reported["distill_loss"] = of_teacher / outer_count
            penalties.append(config.distill_coef * reported["distill_loss"])
        loss = reported["loss"] = sum(penalties, start=pg_loss)
        if config.grad_divisor is not None and config.regularizer_aggregation == "loss":
            loss = loss * (outer_count / gradient_divisor)
        elif config.grad_divisor is not None:
            loss = sum(penalties, start=inner_sum / gradient_divisor)
        if config.divide_gradient_twice:
            loss = loss / outer_count
        return loss, reported, replace(scored, corrected=corrected)

    def _masks_of_reducer(self, corrected: Corrected) -> Tensor | None:
        """The whole loss masks [response tokens of all samples] that corrections leave, for a reducer of the user's; else None.

        One all-reduce over the context-parallel group. The config and the samples alone decide whether there is one.
        """
        is_custom = self._weights.reducer_of_masks is not None
        if not (is_custom and self.batch.samples and drops_tokens(self.config)):
            return None
        masks = self.batch.window.in_responses(corrected.loss_mask.float())
        ids, num_samples = self.batch.window_segment_ids, len(self.batch.samples)
        return SequenceReduction(ids, num_samples, self._group).over_group(masks)

    def __call__(
        self, log_probs: Tensor, entropy: Tensor | None, divergence: Tensor | None = None
    ) -> tuple[Tensor, MicroBatchMetrics]:
        """The loss, to be differentiated, and its detached metrics; arguments as for `terms`.

        `divergence` [window] float32 is that from the teacher, where one is distilled.

        Raises:
            ValueError: the entropy is needed and None.
        """
        config = self.config
        if entropy is None and config.needs_entropy:
            raise ValueError(
                "entropy is None, and --entropy-coef or --pg-metrics with_entropy needs it: give the entropy [window] "
                "of the window's response tokens, in nats"
            )
        loss, *found = self._given(log_probs, divergence)._evaluated(
            _with_metrics, log_probs, entropy
        )
        maxima, is_nan, *parts = found
        pairs = self._table.pairs(self._weights, map(given, parts))
        metrics = MicroBatchMetrics.of(self._table.names, pairs)
        metrics.maxima, metrics.is_nan = maxima, is_nan
        metrics.batch, metrics.totals = replace(self.batch, side_channels={}), self._totals
        return given(loss), metrics

    def loss(
        self, log_probs: Tensor, entropy: Tensor | None, divergence: Tensor | None = None
    ) -> Tensor:
        """The loss without metrics, to be differentiated; arguments as for a call."""
        other = self._given(log_probs, divergence)
        return given(other._evaluated(_without_metrics, log_probs, entropy)[0])

    def _given(self, log_probs: Tensor, divergence: Tensor | None) -> MicroBatchLoss:
        """The loss of a micro-batch whose divergence from the teacher is known; of one without samples it is 0."""
        if not self.config.distills:
            return self
        other = copy.copy(self)
        is_empty = divergence is None and not self.batch.samples
        other.batch = replace(self.batch, divergence=0.0 * log_probs if is_empty else divergence)
        return other

    def _evaluated(
        self, compute: Compute, log_probs: Tensor, entropy: Tensor | None
    ) -> compiled.Outputs:
        """What `compute` makes of this micro-batch: in a few generated kernels on a GPU, else operator by operator."""
        entropy = entropy if self.config.needs_entropy else None
        is_compiled = self._is_compiled(log_probs)
        sums = self._sums_over_sequences(log_probs, is_compiled)
        if is_compiled:
            inputs = self._inputs(log_probs, entropy, sums)
            traced = functools.partial(self._traced, compute)
            program = compiled.program((compute, *self._settings()), traced, inputs)
            if program is not None:
                call = functools.partial(program, *inputs.tensors.values())
                outputs: compiled.Outputs = compiled.Differentiated.apply(  # type: ignore[no-untyped-call]
                    call, log_probs, entropy, self.batch.divergence
                )
                return outputs
        return compute(self._with_sums(sums), log_probs, entropy)

    def _sums_over_sequences(self, log_probs: Tensor, is_compiled: bool) -> Tensor | None:
        """What the rows that are on need of whole sequences, [1 + names, samples] float64, in one all-reduce.

        The config alone decides whether there is one, and of what size: every rank of the context-parallel group joins it, those
        that have no token and those that could not compile included.
        """
        if not sums_over_sequences(self.config):
            return None
        program = None
        if is_compiled:
            inputs = self._inputs(log_probs, None, None)
            settings = ("sequences", *self._settings())
            program = compiled.program(settings, self._traced_sums, inputs)
        with torch.no_grad():
            if program is None:
                sums = self._sums_of_rank(log_probs)
            else:
                sums = given(program(*inputs.tensors.values())[0])
        ids = self.batch.window_segment_ids
        return SequenceReduction(ids, sums.shape[1], self._group).over_group(sums)

    def _sums_of_rank(self, log_probs: Tensor) -> Tensor:
        """The sums over sequences of this rank's window, [1 + names, samples] float64; as many columns as the weights have."""
        ids, num_samples = self.batch.window_segment_ids, self._weights.per_sample.shape[1]
        summands = summands_of_sequences(self.config, self.batch, log_probs)
        return SequenceReduction(ids, num_samples).of_rank(summands)

    def _with_sums(self, sums: Tensor | None) -> MicroBatchLoss:
        """The same with sums over whole sequences, of every rank."""
        if sums is None:
            return self
        other = copy.copy(self)
        reduction = SequenceReduction(self.batch.window_segment_ids, sums.shape[1])
        other._sequence = SequenceLogRatios.of(self.config, reduction, sums)
        return other

    def _settings(self) -> tuple[PolicyLossConfig, tuple[str, ...]]:
        """What programs depend on besides their tensors."""
        return _without_divisor(self.config), self._weights.rows

    def _is_compiled(self, log_probs: Tensor) -> bool:
        return (
            log_probs.device.type in compiled.DEVICES
            and len(log_probs) >= 2  # sizes of 0 and 1 would be graphs of their own
            and log_probs.shape == self.batch.loss_mask.shape
            and not torch.is_inference_mode_enabled()
            and not _calls_custom_functions(self.config)
        )

    def _inputs(
        self, log_probs: Tensor, entropy: Tensor | None, sums: Tensor | None
    ) -> compiled.Inputs:
        """All tensors that the loss is a function of."""
        tokens = {name: getattr(self.batch, name) for name in TOKEN_FIELDS}
        tokens |= {"log_probs": log_probs, "entropy": entropy}
        return compiled.Inputs(
            {name: None if each is None else each.detach() for name, each in tokens.items()},
            samples={"per_sample": self._weights.per_sample, "sums": sums},
            fixed={"scalars": self._weights.scalars},
        )

    def _of_tensors(self, tensors: Mapping[str, Tensor]) -> MicroBatchLoss:
        """The loss as a function of those tensors, which has nothing else of its micro-batch."""
        other = copy.copy(self)
        fields: dict[str, Any] = {name: tensors.get(name) for name in TOKEN_FIELDS}
        host: Any = {"window": None, "samples": ()}
        other.batch = replace(self.batch, **host, **fields)
        other._weights = replace(
            self._weights,
            batch=other.batch,
            scalars=tensors["scalars"],
            per_sample=tensors["per_sample"],
        )
        return other._with_sums(tensors.get("sums"))

    def _traced_sums(self, tensors: Mapping[str, Tensor]) -> compiled.Outputs:
        return (self._of_tensors(tensors)._sums_of_rank(tensors["log_probs"]),)

    def _traced(self, compute: Compute, tensors: Mapping[str, Tensor]) -> compiled.Outputs:
        """The outputs of `compute`, with the gradients to `DIFFERENTIATED` after the first."""
        with torch.enable_grad():
            leaves = {
                name: tensors[name].detach().requires_grad_()
                for name in DIFFERENTIATED
                if name in tensors
            }
            other = self._of_tensors({**tensors, **leaves})
            loss, *others = compute(other, leaves["log_probs"], leaves.get("entropy"))
            found = torch.autograd.grad(given(loss), list(leaves.values()), allow_unused=True)
        gradients = dict(zip(leaves, found, strict=True))
        return given(loss).detach(), *map(gradients.get, DIFFERENTIATED), *others


Compute = Callable[[MicroBatchLoss, Tensor, Tensor | None], compiled.Outputs]
"""(loss, log_probs, entropy) -> the loss 0-d; then, with metrics, maxima, NaN tokens and the parts of the pairs."""


def _with_metrics(
    micro_batch: MicroBatchLoss, log_probs: Tensor, entropy: Tensor | None
) -> compiled.Outputs:
    loss, reported, scored = micro_batch.terms(log_probs, entropy)
    values, maxima, is_nan = token_metrics(scored)
    parts = micro_batch._table.parts(micro_batch._weights, reported, values)
    return loss, maxima, is_nan, *parts


def _without_metrics(
    micro_batch: MicroBatchLoss, log_probs: Tensor, entropy: Tensor | None
) -> compiled.Outputs:
    return (micro_batch.terms(log_probs, entropy)[0],)


@read_off_rows
def _required_inputs(config: PolicyLossConfig) -> Mapping[str, tuple[str, ...]]:
    return required_inputs(config)


@functools.lru_cache(maxsize=64)
def _without_divisor(config: PolicyLossConfig) -> PolicyLossConfig:
    """The config as far as kernels depend on it: a divisor, which each step may have of its own, is a tensor there."""
    return config if config.grad_divisor is None else replace(config, grad_divisor=1.0)


@functools.lru_cache(maxsize=64)
def _calls_custom_functions(config: PolicyLossConfig) -> bool:
    """Whether a function of the user's runs in the loss, of which nothing is known; says so."""
    paths = [getattr(config, name) for name in CUSTOM_FIELDS]
    named = [path for path in paths if path is not None]
    if named:
        logger.info(
            "%s: a loss with functions of your own is not compiled and runs operator by operator, with more launches (said once)",
            ", ".join(named),
        )
    return bool(named)
