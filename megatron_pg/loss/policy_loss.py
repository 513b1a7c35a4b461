"""The policy loss of one micro-batch on one rank, from logits or from log-probs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.config.rows import Row
from megatron_pg.head import log_probs_and_entropy
from megatron_pg.loss.aggregation import AGGREGATIONS
from megatron_pg.loss.corrections import CORRECTIONS
from megatron_pg.loss.metrics import MicroBatchMetrics
from megatron_pg.loss.micro_batch import MicroBatchLoss
from megatron_pg.loss.objectives import OBJECTIVES
from megatron_pg.loss.sequence import sums_over_sequences
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.sample import Sample
from megatron_pg.step.totals import StepTotals


def gradient_scope(config: PolicyLossConfig) -> Literal["token", "sequence", "micro_batch"]:
    """Whose log-probs and entropy a token's gradient coefficient depends on; as soon as they are known, so is it.

    The rows say it of themselves; of a user's function nothing is known.
    """
    rows: list[Row] = [*OBJECTIVES.rows_on(config), *CORRECTIONS.rows_on(config)]
    is_replaced = OBJECTIVES.is_replaced(config) or AGGREGATIONS.is_replaced(config)
    if is_replaced or not all(row.is_sum_over_tokens for row in rows):
        return "micro_batch"
    return "sequence" if sums_over_sequences(config) else "token"


def leaves_out_zero_advantages(config: PolicyLossConfig) -> bool:
    """Whether a token whose advantage is 0 has no gradient at all: the objective is the only term of the loss."""
    if config.kl_loss_coef or config.entropy_coef:
        return False
    return any(row.zero_advantage_is_zero_gradient for row in OBJECTIVES.rows_on(config))


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
        logits: `[1, local_tokens, v/tp]` or `[local_tokens, v/tp]`, bf16, fp16 or fp32: the model's output.
            They may be overwritten by their gradient in backward.
        totals: the totals of the whole step.
        tensor_parallel_group: the group over which the vocabulary is split; None where it is not.
        context_parallel_group: the group over which sequences are split; None at size 1.
        vocab_size: the vocabulary without padding; None counts every column.
        step_share: the part of the step's report that this call carries. Over ranks (data times context parallel)
            and micro-batches the shares add up to 1: `1 / (ranks * num_microbatches)`.

    Returns:
        The 0-d loss, to be differentiated, and the detached metrics (see `megatron_pg.loss.metrics`).

    Raises:
        ValueError: the batch lacks an input of the objective, or does not fit the logits.
    """
    log_probs, entropy = log_probs_of_logits(
        config,
        batch,
        logits,
        tensor_parallel_group=tensor_parallel_group,
        vocab_size=vocab_size,
        with_entropy=config.needs_entropy,
    )
    loss = MicroBatchLoss(config, batch, totals, context_parallel_group, step_share)
    return loss(log_probs, entropy)


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

    Every rank of the tensor-parallel group must call it.

    Args:
        config: its temperature.
        batch, logits, tensor_parallel_group, vocab_size: as for `policy_loss_function`.
        with_entropy: also return the entropy.

    Returns:
        `[window]` float32 each, in nats, differentiable; None for the entropy without `with_entropy`.

    Raises:
        ValueError: the batch does not fit the logits, or these are narrower than `--fp32-lm-head` says.
    """
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
    log_probs, entropy = log_probs_and_entropy(
        rows,
        batch.targets,
        tensor_parallel_group=tensor_parallel_group,
        temperature=config.rollout_temperature,
        row_mask=batch.row_mask,
        vocab_size=vocab_size,
        with_entropy=with_entropy,
    )
    return log_probs[batch.logit_rows], None if entropy is None else entropy[batch.logit_rows]


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
        log_probs: `[window]` float32, of the window's response tokens at the rollout temperature.
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
    """Refuses, by name, the first sample with a response token outside the vocabulary."""
    for sample in samples:
        largest = sample.tokens[sample.prompt_length :].amax() if sample.response_length else -1
        if largest >= vocab_size:
            raise ValueError(
                f"{sample.name}: response token id {int(largest)} is outside the vocabulary of {vocab_size}: "
                "tokenizer and model do not belong together"
            )
