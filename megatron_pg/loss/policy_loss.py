"""The policy loss of one micro-batch on one rank, from logits or from log-probs."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig, required_inputs
from megatron_pg.head import log_probs_and_entropy
from megatron_pg.loss.corrections import Corrected, apply_corrections
from megatron_pg.loss.divergence import kl_penalty
from megatron_pg.loss.metrics import MicroBatchMetrics, checksum, policy_metrics, step_sums
from megatron_pg.loss.objectives import ObjectiveOutput, get_objective
from megatron_pg.loss.reduction import (
    StepReduction,
    policy_gradient_reduction,
    sample_mean_reduction,
)
from megatron_pg.loss.sequence import sequence_log_ratios
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.sample import LOG_PROB_FIELDS
from megatron_pg.step.totals import StepTotals


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
) -> tuple[Tensor, MicroBatchMetrics]:
    """This rank's loss of one micro-batch; summed over ranks and micro-batches it is the objective of the step.

    Every rank of the tensor- and context-parallel groups of the last pipeline stage must call it, those whose window
    is empty included. It does no host synchronisation.

    Args:
        config: the objective and its aggregation.
        batch: the packed micro-batch, on the logits' device.
        logits: ``[1, local_tokens, v/tp]`` or ``[local_tokens, v/tp]``, bf16, fp16 or fp32: the model's output.
            They may be overwritten by their gradient in backward.
        totals: the totals of the whole step.
        tensor_parallel_group: the group over which the vocabulary is split; None where it is not.
        context_parallel_group: the group over which sequences are split; None at size 1.
        vocab_size: the vocabulary without padding; None counts every column.
        step_share: the part of the step's report that this call carries. Over ranks (data times context parallel)
            and micro-batches the shares add up to 1: ``1 / (ranks * num_microbatches)``.

    Returns:
        The 0-d loss, to be differentiated, and the detached metrics (see :mod:`megatron_pg.loss.metrics`).

    Raises:
        ValueError: the batch lacks an input of the objective, or does not fit the logits.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    if rows.shape[0] != batch.window.local_tokens:
        raise ValueError(
            f"logits have {rows.shape[0]} rows and the micro-batch {batch.window.local_tokens} tokens on this rank: "
            "feed the model batch.tokens, and pack with the cp_rank and cp_size that the model runs with"
        )
    check_vocabulary(batch, rows.shape[-1], tensor_parallel_group, vocab_size)
    log_probs, entropy = log_probs_and_entropy(
        rows,
        batch.targets,
        tensor_parallel_group=tensor_parallel_group,
        temperature=config.rollout_temperature,
        row_mask=batch.row_mask,
        vocab_size=vocab_size,
        with_entropy=needs_entropy(config),
    )
    return policy_loss_from_log_probs(
        config,
        batch,
        log_probs[batch.logit_rows],
        None if entropy is None else entropy[batch.logit_rows],
        totals=totals,
        context_parallel_group=context_parallel_group,
        step_share=step_share,
    )


def policy_loss_from_log_probs(
    config: PolicyLossConfig,
    batch: PackedBatch,
    log_probs: Tensor,
    entropy: Tensor | None,
    *,
    totals: StepTotals,
    context_parallel_group: dist.ProcessGroup | None = None,
    step_share: float = 1.0,
    reductions: LossReductions | None = None,
) -> tuple[Tensor, MicroBatchMetrics]:
    """:func:`policy_loss_function` for a model that returns log-probs.

    Args:
        log_probs: ``[window]`` float32, of the window's response tokens at the rollout temperature.
        entropy: ``[window]`` float32, nats; None where neither the loss nor a metric needs it (`needs_entropy`).
        reductions: ``LossReductions.build(config, batch, totals)``, where it is at hand.
        The others are those of :func:`policy_loss_function`.

    Raises:
        ValueError: the batch lacks an input of the objective, or the entropy is needed and None.
    """
    check_inputs(config, batch)
    if entropy is None and needs_entropy(config):
        raise ValueError(
            "entropy is None, and --entropy-coef or --pg-metrics with_entropy needs it: give the entropy [window] of "
            "the window's response tokens, in nats"
        )
    if reductions is None:
        reductions = LossReductions.build(config, batch, totals)
    terms = loss_terms(
        config,
        batch,
        log_probs,
        entropy,
        reductions,
        context_parallel_group=context_parallel_group,
    )
    pg_loss = terms.inner_sum / reductions.policy_gradient.outer_count
    reported = {"loss": pg_loss + terms.penalty, "pg_loss": pg_loss, **terms.regularizers}
    metrics = step_sums(reported, step_share)
    metrics.add(checksum(reductions.policy_gradient, step_share, terms.loss.device))
    metrics.add(
        policy_metrics(
            config,
            batch,
            log_probs,
            entropy,
            terms.outcome,
            terms.corrected,
            step_share=step_share,
        )
    )
    return terms.loss, metrics


@dataclass(frozen=True)
class LossReductions:
    """How the terms of a micro-batch's loss are summed; made on the host, of masks and totals alone."""

    policy_gradient: StepReduction
    sample_mean: StepReduction | None
    """Of KL and entropy terms; None without them."""

    @classmethod
    def build(
        cls, config: PolicyLossConfig, batch: PackedBatch, totals: StepTotals
    ) -> LossReductions:
        """Arguments are those of `policy_loss_from_log_probs`."""
        regularized = bool(config.kl_loss_coef or config.entropy_coef)
        return cls(
            policy_gradient_reduction(config, batch, totals),
            sample_mean_reduction(batch, totals) if regularized else None,
        )


@dataclass(frozen=True)
class LossTerms:
    """The loss of one micro-batch on one rank, and what its metrics are made of."""

    loss: Tensor
    """0-d, to be differentiated."""
    inner_sum: Tensor
    penalty: Tensor | float
    """What the regularizers add to the loss."""
    regularizers: dict[str, Tensor]
    """0-d each, before their coefficients."""
    outcome: ObjectiveOutput
    corrected: Corrected


def loss_terms(
    config: PolicyLossConfig,
    batch: PackedBatch,
    log_probs: Tensor,
    entropy: Tensor | None,
    reductions: LossReductions,
    *,
    context_parallel_group: dist.ProcessGroup | None = None,
) -> LossTerms:
    """The loss without its metrics; arguments as of `policy_loss_from_log_probs`, inputs checked before."""
    sequence = sequence_log_ratios(
        config, batch, log_probs, context_parallel_group=context_parallel_group
    )
    outcome = get_objective(config)(config, batch, log_probs, sequence=sequence)
    corrected = apply_corrections(
        config, batch, log_probs, outcome.loss, batch.loss_mask, sequence=sequence
    )
    policy_gradient = reductions.policy_gradient
    inner_sum = policy_gradient.inner_sum(corrected.pg_loss)

    regularizers = {}
    if reductions.sample_mean is not None:
        if config.kl_loss_coef:
            kl = kl_penalty(config, batch, log_probs)
            regularizers["kl_loss"] = (config.kl_loss_coef, reductions.sample_mean(kl))
        if entropy is not None and config.entropy_coef:
            regularizers["entropy_loss"] = (-config.entropy_coef, reductions.sample_mean(entropy))
    penalty = sum(coefficient * value for coefficient, value in regularizers.values())
    return LossTerms(
        loss=inner_sum / (config.grad_divisor or policy_gradient.outer_count) + penalty,
        inner_sum=inner_sum,
        penalty=penalty,
        regularizers={name: value for name, (_, value) in regularizers.items()},
        outcome=outcome,
        corrected=corrected,
    )


def needs_entropy(config: PolicyLossConfig) -> bool:
    """Whether the loss or a metric reads the entropy."""
    return config.entropy_coef > 0 or config.pg_metrics == "with_entropy"


def check_vocabulary(
    batch: PackedBatch,
    local_columns: int,
    tensor_parallel_group: dist.ProcessGroup | None,
    vocab_size: int | None,
) -> None:
    """Refuses a response token that the logits have no column for. Reads no device tensor."""
    if vocab_size is None:
        tensor_parallel_size = (
            1 if tensor_parallel_group is None else dist.get_world_size(tensor_parallel_group)
        )
        vocab_size = local_columns * tensor_parallel_size
    if batch.largest_target < vocab_size:
        return
    for sample in batch.samples:
        largest = sample.tokens[sample.prompt_length :].amax() if sample.response_length else -1
        if largest >= vocab_size:
            raise ValueError(
                f"{sample.name}: response token id {int(largest)} is outside the vocabulary of {vocab_size}: "
                "tokenizer and model do not belong together"
            )


def check_inputs(config: PolicyLossConfig, batch: PackedBatch) -> None:
    """Refuses a micro-batch without an input that the settings need, naming the flags. Reads no tensor."""
    for field, flags in required_inputs(config).items():
        if field in LOG_PROB_FIELDS and getattr(batch, field) is None:
            raise ValueError(
                f"{batch.samples[0].name} has no {field}, which {' and '.join(flags)} needs: give Sample({field}=...) "
                "to every sample of the step"
            )
