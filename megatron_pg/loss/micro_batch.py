"""Loss of a packed micro-batch: converts samples to tensors and checks inputs for `policy_loss`.

`MicroBatchLoss` is built on the host before the model runs. Called with log-probs, it evaluates
`policy_loss` and the metrics in a few generated kernels on a GPU, or else operator by operator.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.config.tables import LOG_PROB_FIELDS
from megatron_pg.loss import compiled
from megatron_pg.loss.aggregation import Weights, host_weights
from megatron_pg.loss.compiled import Function, Outputs, Tensors
from megatron_pg.loss.corrections import counts_accepted_afterwards
from megatron_pg.loss.metrics import MicroBatchMetrics, PairTable, Scored, measure
from megatron_pg.loss.policy_loss import policy_loss
from megatron_pg.loss.reducer import add_over_group, weighted_sum
from megatron_pg.loss.resolved import ResolvedLoss
from megatron_pg.loss.sequence import SequenceSums, sums_of_rank, units_of_window
from megatron_pg.loss.tokens import DIFFERENTIATED, Tokens, weighted_log_probs
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.totals import StepTotals
from megatron_pg.step.values import refuse_values


def refuse_second_step(batch: PackedBatch, totals: StepTotals) -> None:
    """Raise a ValueError for a sample from an earlier step: its old policy is not the current
    one.
    """
    for sample in batch.samples:
        if sample.trained_in is None:
            vars(sample)["trained_in"] = totals
        elif sample.trained_in is not totals:
            raise ValueError(
                f"--old-log-probs current: {sample.name} is in a second optimizer step, but its "
                "old policy precedes the first. Use --old-log-probs given, with old_log_probs from "
                "megatron_pg.megatron.compute_log_probs."
            )


def rollout_share(batch: PackedBatch, policy_version: int | None) -> Tensor:
    """Compute the rollout's share alpha in interpolated old log-probs, [window] float64.

    alpha is 1 / d for staleness d, the step's version minus the token's version, and 0 if d is 0
    (A-3PO, arXiv:2512.06547).

    Raises:
        ValueError: the step's version is unknown, or less than an active token's version.
    """
    flag = "--old-log-probs interpolated"
    if policy_version is None:
        raise ValueError(
            f"{flag} requires the policy version at the start of the step. Pass "
            "PolicyStep(policy_version=...), counted like Sample.policy_version."
        )
    for sample in batch.samples:
        versions = torch.as_tensor(sample.policy_version, device="cpu").expand(
            sample.response_length
        )
        is_newer = sample.loss_mask & (versions > policy_version)
        problem = (
            f", newer than the step's policy_version {policy_version}. Both must count the "
            f"optimizer steps of the same run ({flag})."
        )
        refuse_values(f"{sample.name}: policy_version", versions, is_newer, problem)
    versions_of_window: Any = batch.policy_version  # a required field
    staleness = (policy_version - versions_of_window).double()
    return torch.where(staleness > 0, 1 / staleness, 0.0)


BATCH_FIELDS = (
    *("loss_mask", "advantages", "loss_weights", "policy_version", "kept_set_size"),
    *LOG_PROB_FIELDS,
)
"""Fields of a packed micro-batch that `Tokens` has under the same name."""


class MicroBatchLoss:
    """Loss of one micro-batch on one rank, as a function of its log-probs.

    For arguments and errors see `policy_loss_function`. `scales_gradients` is True if the caller
    scales the step's gradients by its accepted count, where the settings require it.
    """

    def __init__(
        self,
        resolved: ResolvedLoss,
        batch: PackedBatch,
        totals: StepTotals,
        context_parallel_group: dist.ProcessGroup | None = None,
        step_share: float = 1.0,
        policy_version: int | None = None,
        *,
        scales_gradients: bool = False,
    ) -> None:
        if counts_accepted_afterwards(resolved.config) and not scales_gradients:
            raise ValueError(
                f"--old-log-probs {resolved.old_log_probs} --rejection-denominator accepted: the "
                "step's gradients are multiplied by its tokens over its accepted tokens after the "
                "last micro-batch, as only PolicyStep does: use PolicyStep, or "
                "--rejection-denominator original"
            )
        for require in resolved.requirements:
            require(batch)
        self.resolved, self.batch, self._totals = resolved, batch, totals
        if resolved.old_log_probs == "current" and torch.is_grad_enabled():
            refuse_second_step(batch, totals)
        if resolved.old_log_probs == "interpolated":
            self._rollout_share = rollout_share(batch, policy_version)
        self._group, own_reducer = context_parallel_group, resolved.own_reducer
        of_step = resolved.normalization, batch, totals, step_share
        step_numbers, sample_weights = host_weights(*of_step)
        self._tensors: dict[str, Tensor | None] = {
            **{name: getattr(batch, name) for name in BATCH_FIELDS},
            "sample_ids": batch.window_segment_ids,
            "step_numbers": step_numbers,
            "sample_weights": sample_weights,
        }
        if resolved.is_by_turn:
            units = units_of_window(resolved.config, batch)
            self._tensors["unit_ids"], self._tensors["samples_of_units"] = units
        self._reduce = (
            own_reducer.reduction(batch, context_parallel_group) if own_reducer else weighted_sum
        )

    def __call__(
        self,
        log_probs: Tensor,
        entropy: Tensor | None,
        score: Tensor | None = None,
        kept_set_mass: Tensor | None = None,
    ) -> tuple[Tensor, MicroBatchMetrics]:
        """Compute the loss, with gradient, and its detached metrics. Arguments are [window]
        float32, in nats.

        Every rank of the context-parallel group must call it, even with an empty window. `score` is
        the divergence from the teacher, or the [5, window] values of `head.Centering`.
        `kept_set_mass` is 1 for an empty set.
        """
        tensors = self._inputs(log_probs, entropy, score, kept_set_mass)
        loss, maxima, is_nan, *parts = self._bind(self._loss_and_metrics, tensors)()
        table = self._table(tensors)
        pairs = table.pairs(parts, tensors["step_numbers"])
        metrics = MicroBatchMetrics(table, pairs, maxima, is_nan, self.batch, self._totals)
        return loss, metrics

    def loss(self, log_probs: Tensor, *others: Tensor | None) -> Tensor:
        """Compute the loss without metrics. For arguments see `__call__`."""
        loss: Tensor = self._bind(self._loss_alone, self._inputs(log_probs, *others))()[0]
        return loss

    def _inputs(
        self,
        log_probs: Tensor,
        entropy: Tensor | None,
        score: Tensor | None = None,
        kept_set_mass: Tensor | None = None,
    ) -> Tensors:
        """Collect the loss's input tensors by name, including sums over sequences on all ranks."""
        resolved, scorer = self.resolved, self.resolved.scorer
        if score is None and scorer and not self.batch.samples:
            score = 0.0 * log_probs.expand(*scorer.shape, -1)
        if resolved.head.with_entropy and entropy is None:
            raise ValueError(
                "entropy is None, but --entropy-coef or --pg-metrics with_entropy requires it. "
                "Pass the entropy [window] of the window's response tokens, in nats."
            )
        if scorer and score is None:
            raise ValueError(
                f"{scorer.flags} requires the {scorer.output} of each token, which comes from "
                "logits or hidden states. Use PolicyStep or policy_loss_function."
            )
        tensors = self._tensors | {
            "log_probs": log_probs,
            "entropy": entropy if resolved.head.with_entropy else None,
            **({scorer.output: score} if scorer else {}),
            "kept_set_mass": kept_set_mass,
        }
        if resolved.old_log_probs == "current":
            tensors["old_log_probs"] = log_probs.detach()
        if resolved.old_log_probs == "interpolated":
            tensors["old_log_probs"] = self._interpolated(log_probs.detach())
        if resolved.sequence_sums:
            # Only settings and samples decide whether there is an all-reduce and its size, so that
            # every rank joins, including those without tokens and those that could not compile.
            (sums,) = self._bind(self._sums_of_rank, tensors, differentiated=())()
            tensors |= {"sums": add_over_group(sums, self._group)}
        return tensors

    def _interpolated(self, log_probs: Tensor) -> Tensor:
        rollout: Any = self._tensors["rollout_log_probs"]  # a required field
        share = self._rollout_share
        parts = weighted_log_probs(share, rollout), weighted_log_probs(1 - share, log_probs)
        return torch.add(*parts).to(log_probs.dtype)

    def _bind(
        self, function: Function, tensors: Tensors, differentiated: Sequence[str] = DIFFERENTIATED
    ) -> Callable[[], Outputs]:
        log_probs, mask = tensors["log_probs"], tensors["loss_mask"]
        # Sizes 0 and 1 would need separate graphs.
        is_regular = len(log_probs) > 1 and log_probs.shape == mask.shape
        settings = self.resolved.compiled_settings if is_regular else None
        return compiled.bind(function, settings, tensors, differentiated)

    def _table(self, tensors: Tensors) -> PairTable:
        names = (*BATCH_FIELDS, "kept_set_mass")
        return self.resolved.metric_table(frozenset(x for x in names if tensors.get(x) is None))

    # Functions of tensors by name that a GPU runs as compiled programs.

    def _loss_and_metrics(self, tensors: Tensors) -> Outputs:
        tokens, weights, sums = self._arguments(tensors)
        resolved, table = self.resolved, self._table(tensors)
        terms = policy_loss(resolved, tokens, weights, sums, self._reduce)
        scored = Scored(resolved.config, tokens, terms.outcome, terms.corrected)
        return terms.loss, *measure(scored, resolved.metrics, table, weights, terms.reported)

    def _loss_alone(self, tensors: Tensors) -> Outputs:
        return (policy_loss(self.resolved, *self._arguments(tensors), self._reduce).loss,)

    def _sums_of_rank(self, tensors: Tensors) -> Outputs:
        tokens = Tokens.masked(tensors, self.batch.side_channels)
        of_units = tensors.get("samples_of_units", tensors["sample_weights"])
        config, names = self.resolved.config, self.resolved.sequence_sums
        return (sums_of_rank(config, names, tokens, of_units.shape[-1]),)

    def _arguments(self, tensors: Tensors) -> tuple[Tokens, Weights, SequenceSums]:
        tokens = Tokens.masked(tensors, self.batch.side_channels)
        window = (tokens.loss_mask, tokens.sample_ids, tokens.loss_weights)
        weights = Weights.spread(tensors["step_numbers"], tensors["sample_weights"], *window)
        sums = SequenceSums.of_table(
            self.resolved.sequence_sums, tokens.unit_ids, tensors.get("sums")
        )
        return tokens, weights, sums
