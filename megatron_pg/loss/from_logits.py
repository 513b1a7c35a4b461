"""The way from the model's output to the policy loss: log-probs, entropy and divergence of the window, from logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.head import log_probs_and_divergence, log_probs_and_entropy
from megatron_pg.loss.distillation import teacher_of
from megatron_pg.loss.inputs import check_vocabulary
from megatron_pg.loss.metrics import MicroBatchMetrics
from megatron_pg.loss.micro_batch import MicroBatchLoss
from megatron_pg.step.batch import PackedBatch
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
    teacher_weight: Tensor | None = None,
) -> tuple[Tensor, MicroBatchMetrics]:
    """Compute this rank's loss of one micro-batch. Its sum over ranks and micro-batches is the objective of the step.

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
    vocabulary: dict[str, Any] = {
        "tensor_parallel_group": tensor_parallel_group,
        "vocab_size": vocab_size,
    }
    if config.distills and batch.samples:
        loss = MicroBatchLoss(config, batch, totals, context_parallel_group, step_share)
        return loss(*_with_divergence(config, batch, logits, teacher_weight, **vocabulary))
    log_probs, entropy = log_probs_of_logits(
        config, batch, logits, with_entropy=config.needs_entropy, **vocabulary
    )
    if config.kept_set_mass:
        of_vocabulary = replace(config, replay_sampling_set=False, kept_set_mass=False)
        with torch.no_grad():  # log p - log p_K of any token of K is the log of the mass of K
            whole, _ = log_probs_of_logits(of_vocabulary, batch, logits, **vocabulary)
            batch = replace(batch, kept_set_mass=(whole - log_probs).exp())
    loss = MicroBatchLoss(config, batch, totals, context_parallel_group, step_share)
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
    teacher = teacher_of(config, batch, rows.shape[-1], group, teacher_weight, of_rows, vocab_size)
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
    """Return the logits as [local_tokens, v/tp], or refuse those that are not of this micro-batch."""
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
    """Compute the loss as `policy_loss_function` does, for a model that returns log-probs. Further arguments are the same.

    Args:
        log_probs: `[window]` float32, of the window's response tokens at the rollout temperature, and over their kept sets
            under `--replay-sampling-set`.
        entropy: `[window]` float32, nats; None where neither the loss nor a metric needs it (`config.needs_entropy`).

    Raises:
        ValueError: the batch lacks an input of the objective, or the entropy is needed and None.
    """
    loss = MicroBatchLoss(config, batch, totals, context_parallel_group, step_share)
    return loss(log_probs, entropy)
