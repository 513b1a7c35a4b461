"""The policy loss of one micro-batch on one rank, from logits or from log-probs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig, required_inputs
from megatron_pg.config.rows import Row
from megatron_pg.head import log_probs_and_divergence, log_probs_and_entropy
from megatron_pg.loss.aggregation import AGGREGATIONS
from megatron_pg.loss.checksum import checksums
from megatron_pg.loss.corrections import CORRECTIONS, Scored, apply_corrections
from megatron_pg.loss.distillation import given_divergence, refuse_without_teacher, teacher_of
from megatron_pg.loss.divergence import kl_penalty
from megatron_pg.loss.kept_set import refuse_other_distributions
from megatron_pg.loss.metrics import MicroBatchMetrics, metric_columns, policy_metrics, step_sums
from megatron_pg.loss.objectives import OBJECTIVES, get_objective
from megatron_pg.loss.reducer import aggregated, policy_gradient_reduction
from megatron_pg.loss.sequence import sequence_log_ratios
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.sample import Sample
from megatron_pg.step.totals import StepTotals


def is_sum_over_tokens(config: PolicyLossConfig) -> bool:
    """Whether a token's gradient coefficient depends on that token's log-prob and entropy alone.

    Then it is known as soon as they are. The rows say it of themselves; of a user's function nothing is known.
    """
    if OBJECTIVES.is_replaced(config) or AGGREGATIONS.is_replaced(config):
        return False
    rows: list[Row] = [*OBJECTIVES.rows_on(config), *CORRECTIONS.rows_on(config)]
    return all(row.is_sum_over_tokens for row in rows)


def leaves_out_zero_advantages(config: PolicyLossConfig) -> bool:
    """Whether a token whose advantage is 0 has no gradient at all: the objective is the only term of the loss."""
    if config.kl_loss_coef or config.entropy_coef or config.distill_coef:
        return False
    return any(row.zero_advantage_is_zero_gradient for row in OBJECTIVES.rows_on(config))


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
        for field, flags in required_inputs(config).items():
            if field != "group_index" and getattr(batch, field) is None:
                raise ValueError(
                    f"{batch.samples[0].name} has no {field}, which {' and '.join(flags)} needs: give "
                    f"Sample({field}=...) to every sample of the step"
                )
        refuse_other_distributions(config, batch)
        refuse_without_teacher(config, batch)
        self.config, self.batch, self._totals = config, batch, totals
        self._group, self._step_share = context_parallel_group, step_share
        counted = totals.counted_in(config.loss_weight_denominator)
        self._policy_gradient = policy_gradient_reduction(config, batch, counted)
        self._metric_columns = metric_columns(config, batch, totals)
        if config.kl_loss_coef or config.entropy_coef:
            self._sample_mean = aggregated(AGGREGATIONS["sample_mean"], batch, counted)

    def terms(
        self, log_probs: Tensor, entropy: Tensor | None, divergence: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor], Scored]:
        """The loss without its metrics: objective, corrections, aggregation, regularizers.

        Args:
            log_probs: [window] float32.
            entropy: [window] float32, or None.
            divergence: [window] float32 from the teacher, where one is distilled.

        Returns:
            The 0-d loss to be differentiated, the 0-d terms to be reported by name, and what the metrics are made of.
        """
        config, batch = self.config, self.batch
        if config.distills:
            is_empty = divergence is None and not batch.samples
            batch = replace(batch, divergence=0.0 * log_probs if is_empty else divergence)
        sequence = sequence_log_ratios(config, batch, log_probs, context_parallel_group=self._group)
        outcome = get_objective(config)(config, batch, log_probs, sequence=sequence)
        scored = Scored(config, batch, log_probs, outcome, entropy, sequence)
        corrected = apply_corrections(scored)
        inner_sum = self._policy_gradient.inner_sum(corrected.pg_loss)
        pg_loss = inner_sum / self._policy_gradient.outer_count
        reported = {"pg_loss": pg_loss}
        loss = pg_loss if config.grad_divisor is None else inner_sum / config.grad_divisor
        penalty: Tensor | float = 0.0
        if config.kl_loss_coef:
            reported["kl_loss"] = self._sample_mean(kl_penalty(config, batch, log_probs))
            penalty = penalty + config.kl_loss_coef * reported["kl_loss"]
        if config.entropy_coef and entropy is not None:
            reported["entropy_loss"] = self._sample_mean(entropy)
            penalty = penalty - config.entropy_coef * reported["entropy_loss"]
        if config.distill_coef:
            of_teacher = self._policy_gradient.inner_sum(given_divergence(batch))
            reported["distill_loss"] = of_teacher / self._policy_gradient.outer_count
            penalty = penalty + config.distill_coef * reported["distill_loss"]
        reported["loss"] = pg_loss + penalty
        loss = loss + penalty
        if config.divide_gradient_twice:
            loss = loss / self._policy_gradient.outer_count
        return loss, reported, replace(scored, corrected=corrected)

    def __call__(
        self, log_probs: Tensor, entropy: Tensor | None, divergence: Tensor | None = None
    ) -> tuple[Tensor, MicroBatchMetrics]:
        """The loss, to be differentiated, and its detached metrics; arguments as for `terms`.

        Raises:
            ValueError: the entropy is needed and None.
        """
        config = self.config
        if entropy is None and config.needs_entropy:
            raise ValueError(
                "entropy is None, and --entropy-coef or --pg-metrics with_entropy needs it: give the entropy [window] "
                "of the window's response tokens, in nats"
            )
        loss, reported, scored = self.terms(log_probs, entropy, divergence)
        metrics = policy_metrics(scored, self._metric_columns, share=self._step_share)
        metrics |= step_sums(reported, self._step_share)
        metrics |= checksums(self._policy_gradient, self._step_share, loss.device)
        metrics.batch, metrics.totals = self.batch, self._totals
        return loss, metrics


def policy_loss_function(
    config: PolicyLossConfig,
    batch: PackedBatch,
    logits: Tensor,
    *,
    totals: StepTotals,
    tensor_parallel_group: dist.ProcessGroup | None = None,
    context_parallel_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    step_share: float = 1.0,
    teacher_weight: Tensor | None = None,
) -> tuple[Tensor, MicroBatchMetrics]:
    """This rank's loss of one micro-batch; summed over ranks and micro-batches it is the objective of the step.

    Every rank of the tensor- and context-parallel groups of the last pipeline stage must call it, those whose window
    is empty included. It does no host synchronisation.

    Args:
        config: the objective and its aggregation.
        batch: the packed micro-batch, on the logits' device.
        logits: `[1, local_tokens, v/tp]` or `[local_tokens, v/tp]`, bf16, fp16 or fp32: the model's output.
            They may be overwritten by their gradient in backward.
        totals: the totals of the whole step.
        tensor_parallel_group: the group over which the vocabulary is split; None where it is not.
        context_parallel_group: the group over which sequences are split; None at size 1.
        vocab_size: the vocabulary without padding; None counts every column.
        step_share: the part of the step's report that this call carries. Over ranks (data times context parallel)
            and micro-batches the shares add up to 1: `1 / (ranks * num_microbatches)`.
        teacher_weight: see `PolicyStep`.

    Returns:
        The 0-d loss, to be differentiated, and the detached metrics (see `megatron_pg.loss.metrics`).

    Raises:
        ValueError: the batch lacks an input of the objective, or does not fit the logits.
    """
    loss = MicroBatchLoss(config, batch, totals, context_parallel_group, step_share)
    vocabulary: dict[str, Any] = {
        "tensor_parallel_group": tensor_parallel_group,
        "vocab_size": vocab_size,
    }
    if config.distills and batch.samples:
        return loss(*_with_divergence(config, batch, logits, teacher_weight, **vocabulary))
    log_probs, entropy = log_probs_of_logits(
        config, batch, logits, with_entropy=config.needs_entropy, **vocabulary
    )
    if config.kept_set_mass:
        of_vocabulary = replace(config, replay_sampling_set=False, kept_set_mass=False)
        with torch.no_grad():  # log p - log p_K of any token of K is the log of the mass of K
            whole, _ = log_probs_of_logits(of_vocabulary, batch, logits, **vocabulary)
            loss.batch = replace(batch, kept_set_mass=(whole - log_probs).exp())
    return loss(log_probs, entropy)


def _with_divergence(
    config: PolicyLossConfig,
    batch: PackedBatch,
    logits: Tensor,
    teacher_weight: Tensor | None,
    *,
    tensor_parallel_group: dist.ProcessGroup | None,
    vocab_size: int | None,
) -> list[Tensor]:
    """Log-probs, entropy and divergence from the teacher, [window] each."""
    rows = _checked_rows(config, batch, logits, tensor_parallel_group, vocab_size)

    def of_rows(channel: Tensor) -> Tensor:
        everywhere = channel.new_zeros(len(rows), *channel.shape[1:])
        return everywhere.index_copy(0, batch.logit_rows, channel)

    group = tensor_parallel_group
    teacher = teacher_of(config, batch, rows.shape[-1], group, teacher_weight, of_rows)
    found = log_probs_and_divergence(
        rows,
        batch.targets,
        teacher,
        tensor_parallel_group=group,
        temperature=config.rollout_temperature,
        row_mask=batch.row_mask,
        vocab_size=vocab_size,
    )
    return [each[batch.logit_rows] for each in found]


def log_probs_of_logits(
    config: PolicyLossConfig,
    batch: PackedBatch,
    logits: Tensor,
    *,
    tensor_parallel_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropy of the window's response tokens at the rollout temperature; 0 at masked ones.

    Over the kept sets under `--replay-sampling-set`. Every rank of the tensor-parallel group must call it.

    Args:
        config: its temperature.
        batch, logits, tensor_parallel_group, vocab_size: as for `policy_loss_function`.
        with_entropy: also return the entropy.

    Returns:
        `[window]` float32 each, in nats, differentiable; None for the entropy without `with_entropy`.

    Raises:
        ValueError: the batch does not fit the logits, or these are narrower than `--fp32-lm-head` says.
    """
    rows = _checked_rows(config, batch, logits, tensor_parallel_group, vocab_size)
    log_probs, entropy = log_probs_and_entropy(
        rows,
        batch.targets,
        tensor_parallel_group=tensor_parallel_group,
        temperature=config.rollout_temperature,
        row_mask=batch.row_mask,
        vocab_size=vocab_size,
        with_entropy=with_entropy,
        kept=batch.kept_tokens_of_rows if config.replay_sampling_set else None,
    )
    return log_probs[batch.logit_rows], None if entropy is None else entropy[batch.logit_rows]


def _checked_rows(
    config: PolicyLossConfig,
    batch: PackedBatch,
    logits: Tensor,
    tensor_parallel_group: dist.ProcessGroup | None,
    vocab_size: int | None,
) -> Tensor:
    """The logits [local_tokens, v/tp] of a micro-batch, once it is known that they are its own."""
    rows = logits.reshape(-1, logits.shape[-1])
    if rows.shape[0] != batch.window.local_tokens:
        raise ValueError(
            f"logits have {rows.shape[0]} rows and the micro-batch {batch.window.local_tokens} tokens on this rank: "
            "feed the model batch.tokens, and pack with the cp_rank and cp_size that the model runs with"
        )
    if config.changes_output_layer and logits.element_size() < 4:
        raise ValueError(
            f"--fp32-lm-head, and logits are {logits.dtype}: call megatron_pg.megatron.set_fp32_lm_head(model), or drop "
            "the flag"
        )
    check_vocabulary(batch, rows.shape[-1], tensor_parallel_group, vocab_size)
    return rows


def policy_loss_from_log_probs(
    config: PolicyLossConfig,
    batch: PackedBatch,
    log_probs: Tensor,
    entropy: Tensor | None,
    *,
    totals: StepTotals,
    context_parallel_group: dist.ProcessGroup | None = None,
    step_share: float = 1.0,
) -> tuple[Tensor, MicroBatchMetrics]:
    """The same as `policy_loss_function` for a model that returns log-probs.

    Args:
        log_probs: `[window]` float32, of the window's response tokens at the rollout temperature, and over their kept sets
            under `--replay-sampling-set`.
        entropy: `[window]` float32, nats; None where neither the loss nor a metric needs it (`config.needs_entropy`).
        The others are those of `policy_loss_function`.

    Raises:
        ValueError: the batch lacks an input of the objective, or the entropy is needed and None.
    """
    loss = MicroBatchLoss(config, batch, totals, context_parallel_group, step_share)
    return loss(log_probs, entropy)


def check_vocabulary(
    batch: PackedBatch,
    local_columns: int,
    tensor_parallel_group: dist.ProcessGroup | None,
    vocab_size: int | None,
) -> None:
    """Refuses a response token that the logits have no column for. Reads no device tensor."""
    if vocab_size is None:
        has_group = tensor_parallel_group is not None
        vocab_size = local_columns * (
            dist.get_world_size(tensor_parallel_group) if has_group else 1
        )
    if batch.largest_target >= vocab_size:
        refuse_tokens_outside(batch.samples, vocab_size)


def refuse_tokens_outside(samples: Iterable[Sample], vocab_size: int) -> None:
    """Refuses, by name, the first sample with a response token, or an id of a kept set, outside the vocabulary."""
    for sample in samples:
        responses = {"response token": sample.tokens[sample.prompt_length :]}
        if sample.kept_tokens is not None:
            responses["kept_tokens: token"] = sample.kept_tokens.values
        for what, ids in responses.items():
            if ids.numel() and ids.amax() >= vocab_size:
                raise ValueError(
                    f"{sample.name}: {what} id {int(ids.amax())} is outside the vocabulary of {vocab_size}: "
                    "tokenizer and model do not belong together"
                )
