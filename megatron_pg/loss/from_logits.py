"""The way from the model's output to the policy loss: log-probs, entropy and divergence of the
window, from logits.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.head import (
    Divergence,
    HeadOptions,
    TopKTeacher,
    WholeTeacher,
    log_probs_and_entropy,
    log_probs_and_score,
)
from megatron_pg.loss.metrics import MicroBatchMetrics
from megatron_pg.loss.micro_batch import TEACHER_CHANNELS, MicroBatchLoss
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.sample import Sample
from megatron_pg.step.totals import StepTotals
from megatron_pg.step.values import refuse_values


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
    """Compute this rank's loss of one micro-batch. Its sum over ranks and micro-batches is the
    objective of the step.

    Every rank of the tensor- and context-parallel groups of the last pipeline stage must call it,
    those whose window is empty included. It does no host synchronisation.

    Args:
        config: the objective and its aggregation.
        batch: the packed micro-batch, on the logits' device.
        logits: `[1, local_tokens, v/tp]` or `[local_tokens, v/tp]`, bf16, fp16 or fp32: the model's
            output. They may be overwritten by their gradient in backward.
        totals: the totals of the whole step.
        tensor_parallel_group: the group over which the vocabulary is split; None where it is not.
        context_parallel_group: the group over which sequences are split; None at size 1.
        vocab_size: the vocabulary without padding; None counts every column.
        step_share: the part of the step's report that this call carries. Over ranks (data times
            context parallel) and micro-batches the shares add up to 1: `1 / (ranks *
            num_microbatches)`.
        teacher_weight: see `PolicyStep`.

    Returns:
        The 0-d loss, to be differentiated, and the detached metrics (see
        `megatron_pg.loss.metrics`).

    Raises:
        ValueError: the batch lacks an input of the objective, or does not fit the logits;
            `--replay-routing`.
    """
    if config.replay_routing:
        raise ValueError(
            "--replay-routing: policy_loss_function sees logits, which routers have made by their "
            "own choices; use PolicyStep, "
            "whose model_inputs give them the engine's"
        )
    loss = MicroBatchLoss(config, batch, totals, context_parallel_group, step_share)
    options = head_options(config, tensor_parallel_group, vocab_size)
    return loss_of_logits(loss, logits, options, teacher_weight)


def head_options(
    config: PolicyLossConfig,
    tensor_parallel_group: dist.ProcessGroup | None,
    vocab_size: int | None,
    chunk_tokens: int | None = None,
) -> HeadOptions:
    """Make the options of the head under a config."""
    return HeadOptions(
        tensor_parallel_group=tensor_parallel_group,
        temperature=config.rollout_temperature,
        vocab_size=vocab_size,
        fp32_logits=config.fp32_lm_head,
        chunk_tokens=chunk_tokens,
        memory_gib=config.fused_lm_head_memory_gib,
        with_entropy=config.needs_entropy,
        use_quack=not config.fused_lm_head_without_quack,
    )


def loss_of_logits(
    loss: MicroBatchLoss, logits: Tensor, options: HeadOptions, teacher_weight: Tensor | None
) -> tuple[Tensor, MicroBatchMetrics]:
    """Compute the loss of a micro-batch and its metrics; see `policy_loss_function`."""
    config, batch = loss.config, loss.batch

    def in_rows(channel: Tensor) -> Tensor:
        rows = channel.new_zeros(batch.window.local_tokens, *channel.shape[1:])
        return rows.index_copy(0, batch.logit_rows, channel)

    teacher = teacher_of(loss, logits.shape[-1], in_rows, options, teacher_weight)
    log_probs, entropy, divergence = log_probs_of_logits(config, batch, logits, options, teacher)
    mass = None
    if config.kept_set_mass:
        whole_vocabulary = replace(config, replay_sampling_set=False, kept_set_mass=False)
        alone = replace(options, with_entropy=False)
        with torch.no_grad():  # log p - log p_K of any token of K is the log of the mass of K
            whole, *_ = log_probs_of_logits(whole_vocabulary, batch, logits, alone)
            mass = (whole - log_probs).exp()
    return loss(log_probs, entropy, divergence, mass)


def log_probs_of_logits(
    config: PolicyLossConfig,
    batch: PackedBatch,
    logits: Tensor,
    options: HeadOptions,
    teacher: WholeTeacher | TopKTeacher | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute log-probs, entropy and divergence from a teacher of the window's response tokens,
    [window] float32 each, in nats.

    They are 0 at masked tokens, at the rollout temperature, and over the kept sets under
    `--replay-sampling-set`; None is one that is not asked for. Every rank of the tensor-parallel
    group must call it.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    if len(rows) != batch.window.local_tokens:
        raise ValueError(
            f"logits have {len(rows)} rows and the micro-batch {batch.window.local_tokens} tokens "
            f"on this rank: "
            "feed the model batch.tokens, and pack with the cp_rank and cp_size that the model "
            "runs with"
        )
    if config.changes_output_layer and logits.element_size() < 4:
        raise ValueError(
            f"--fp32-lm-head, and logits are {logits.dtype}: call "
            f"megatron_pg.megatron.set_fp32_lm_head(model), or drop "
            "the flag"
        )
    check_vocabulary(batch, rows.shape[-1], options)
    settings: dict[str, Any] = {
        "tensor_parallel_group": options.tensor_parallel_group,
        "temperature": options.temperature,
        "row_mask": batch.row_mask,
        "vocab_size": options.vocab_size,
    }
    scores: Any
    if teacher is not None:
        scores = log_probs_and_score(rows, batch.targets, teacher, **settings)
    else:
        settings["kept"] = batch.kept_tokens_of_rows if config.replay_sampling_set else None
        settings["with_entropy"] = options.with_entropy
        scores = *log_probs_and_entropy(rows, batch.targets, **settings), None
    log_probs, *others = scores
    entropy, divergence = (None if x is None else x[batch.logit_rows] for x in others)
    return log_probs[batch.logit_rows], entropy, divergence


def check_vocabulary(batch: PackedBatch, local_columns: int, options: HeadOptions) -> None:
    """Refuse a response token that the logits have no column for, without a look at the device."""
    group, vocab_size = options.tensor_parallel_group, options.vocab_size
    if vocab_size is None:
        vocab_size = local_columns * (1 if group is None else dist.get_world_size(group))
    if batch.largest_target >= vocab_size:
        refuse_tokens_outside(batch.samples, vocab_size)


def refuse_tokens_outside(samples: Iterable[Sample], vocab_size: int) -> None:
    """Refuse, by name, the first sample with a response token, or an id of a kept set or of a
    teacher, outside the vocabulary.
    """
    for sample in samples:
        ids_by_name = {"response token": sample.tokens[sample.prompt_length :]}
        if sample.kept_tokens is not None:
            ids_by_name["kept_tokens: token"] = sample.kept_tokens.values
        for what, ids in ids_by_name.items():
            if ids.numel() and ids.amax() >= vocab_size:
                raise ValueError(
                    f"{sample.name}: {what} id {int(ids.amax())} is outside the vocabulary of "
                    f"{vocab_size}: "
                    "tokenizer and model do not belong together"
                )
        if isinstance(teacher_ids := sample.side_channels.get("teacher_ids"), Tensor):
            where = f"{sample.name}: side_channels['teacher_ids']"
            is_outside = sample.loss_mask[:, None] & (teacher_ids >= vocab_size)
            remedy = "teacher and model need one vocabulary"
            problem = f", outside the vocabulary of {vocab_size}: {remedy}"
            refuse_values(where, teacher_ids, is_outside, problem)


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
    """Compute the loss as `policy_loss_function` does, for a model that returns log-probs. Further
    arguments are the same.

    Args:
        log_probs: `[window]` float32, of the window's response tokens at the rollout temperature,
            and over their kept sets under `--replay-sampling-set`.
        entropy: `[window]` float32, nats; None where neither the loss nor a metric needs it
            (`config.needs_entropy`).

    Raises:
        ValueError: the batch lacks an input of the objective, or the entropy is needed and None.
    """
    loss = MicroBatchLoss(config, batch, totals, context_parallel_group, step_share)
    return loss(log_probs, entropy)


def teacher_of(
    loss: MicroBatchLoss,
    local_columns: int,
    place: Callable[[Any], Tensor],
    options: HeadOptions,
    weight: Tensor | None,
) -> WholeTeacher | TopKTeacher | None:
    """Collect the teacher on the rows that `place` makes of [window, ...]; None where there is
    none, or no sample.

    `local_columns` are those of the student's output layer on this rank, `weight` is [v/tp,
    teacher's hidden].
    """
    config, batch, group = loss.config, loss.batch, options.tensor_parallel_group
    if not config.distills or not batch.samples:
        return None
    divergence = Divergence(config.distill_divergence, config.distill_beta)
    names = TEACHER_CHANNELS[str(config.distill_teacher)]
    first, *others = (place(batch.side_channels[name]) for name in names)
    if config.distill_teacher == "top_k":
        (log_probs,) = others
        is_double = log_probs.dtype == torch.float64
        return TopKTeacher(divergence, first.long(), log_probs if is_double else log_probs.float())
    if config.distill_teacher == "hidden":
        if weight is None:
            raise ValueError(
                "--distill-teacher hidden needs teacher_weight=, the teacher's output weight"
            )
        return WholeTeacher(divergence, hidden=first.to(weight.dtype), weight=weight.detach())
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    padded_width = size * local_columns
    width = options.vocab_size or padded_width
    if first.shape[1:] not in {(width,), (padded_width,)}:
        raise ValueError(
            f"{batch.samples[0].name}: side_channels['teacher_logits'] has rows of "
            f"{list(first.shape[1:])} logits, expected the "
            f"student's vocabulary of {width} (with padding {padded_width}): teacher and student "
            f"need one vocabulary"
        )
    own = first[:, rank * local_columns : (rank + 1) * local_columns]
    return WholeTeacher(divergence, logits=pad(own, (0, local_columns - own.shape[1])))
