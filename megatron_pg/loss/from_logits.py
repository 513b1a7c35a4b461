"""Policy loss from the model's output: log-probs, entropy and divergence in the window, from
logits.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.head import HeadOptions, Ragged, log_probs_and_entropy, log_probs_and_score
from megatron_pg.head.from_logits import Scorer
from megatron_pg.loss.metrics import MicroBatchMetrics
from megatron_pg.loss.micro_batch import MicroBatchLoss
from megatron_pg.loss.resolved import resolve
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
    policy_version: int | None = None,
) -> tuple[Tensor, MicroBatchMetrics]:
    """Compute this rank's loss of one micro-batch. Its sum over ranks and micro-batches is the
    step's objective.

    Every rank in the tensor- and context-parallel groups of the last pipeline stage must call it,
    even with an empty window. It does not synchronize with the host.

    Args:
        config: the objective and its aggregation.
        batch: the packed micro-batch, on the logits' device.
        logits: `[1, local_tokens, v/tp]` or `[local_tokens, v/tp]`, bf16, fp16 or fp32: the model's
            output. Backward may overwrite them with their gradient.
        totals: the step totals.
        tensor_parallel_group: the group over which the vocabulary is split. None: not split.
        context_parallel_group: the group over which sequences are split. None at size 1.
        vocab_size: the vocabulary without padding. None: every column.
        step_share: this call's share of the step's report, `1 / (ranks * num_microbatches)`, with
            data-parallel times context-parallel ranks. The shares must add up to 1.
        teacher_weight: see `PolicyStep`.
        policy_version: see `PolicyStep`.

    Returns:
        The 0-d loss, with gradient, and the detached metrics (see `megatron_pg.loss.metrics`).

    Raises:
        ValueError: the batch lacks an input of the objective or does not match the logits, or
            `--replay-routing` is on.
    """
    if config.replay_routing:
        raise ValueError(
            "--replay-routing does not work with policy_loss_function, because routing happens "
            "before the logits. Use PolicyStep, whose model_inputs pass the engine's choices."
        )
    resolved = resolve(config)
    resolved.normalization.require(totals)
    options = replace(
        resolved.head, tensor_parallel_group=tensor_parallel_group, vocab_size=vocab_size
    )
    of_step = context_parallel_group, step_share, policy_version
    loss = MicroBatchLoss(resolved, batch, totals, *of_step)
    return loss_of_logits(loss, logits, options, teacher_weight)


def loss_of_logits(
    loss: MicroBatchLoss, logits: Tensor, options: HeadOptions, teacher_weight: Tensor | None
) -> tuple[Tensor, MicroBatchMetrics]:
    """Compute the loss and metrics of a micro-batch. See `policy_loss_function`."""
    resolved, batch = loss.resolved, loss.batch
    if resolved.has_float32_logits:
        require_float32(logits)

    def in_rows(channel: Tensor) -> Tensor:
        rows = channel.new_zeros(batch.window.local_tokens, *channel.shape[1:])
        return rows.index_copy(0, batch.logit_rows, channel)

    scorer = mass = None
    if resolved.scorer:
        others = logits.shape[-1], options, teacher_weight
        scorer = resolved.scorer.on_rows(batch, in_rows, *others)
    kept = batch.kept_tokens_of_rows if resolved.is_over_kept_sets else None
    scores = log_probs_of_logits(batch, logits, options, kept, scorer)
    if resolved.has_kept_set_mass:
        alone = replace(options, with_entropy=False)
        with torch.no_grad():  # log p - log p_K of any token in K is the log mass of K
            whole, *_ = log_probs_of_logits(batch, logits, alone)
            mass = (whole - scores[0]).exp()
    return loss(*scores, mass)


def require_float32(logits: Tensor) -> None:
    """Raise a ValueError for logits below float32, which `--fp32-lm-head` did not make."""
    if logits.element_size() < 4:
        raise ValueError(
            f"--fp32-lm-head requires float32 logits, but they are {logits.dtype}. Call "
            "megatron_pg.megatron.set_fp32_lm_head(model) or remove the flag."
        )


def log_probs_of_logits(
    batch: PackedBatch,
    logits: Tensor,
    options: HeadOptions,
    kept: Ragged | None = None,
    scorer: Scorer | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute log-probs and entropy of the window's response tokens, [window] float32 in nats, and
    a `Scorer`'s score.

    They are 0 at masked tokens, at the rollout temperature, and over the sampling sets in `kept`.
    Results that are not requested are None. Every rank of the tensor-parallel group must call it.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    if len(rows) != batch.window.local_tokens:
        raise ValueError(
            f"logits have {len(rows)} rows and the micro-batch {batch.window.local_tokens} tokens "
            "on this rank. Run the model on batch.tokens, and pack with the model's cp_rank and "
            "cp_size."
        )
    check_vocabulary(batch, rows.shape[-1], options)
    settings: dict[str, Any] = {
        "tensor_parallel_group": options.tensor_parallel_group,
        "temperature": options.temperature,
        "row_mask": batch.row_mask,
        "vocab_size": options.vocab_size,
    }
    scores: Any
    settings["kept"] = kept
    if scorer is not None:
        scores = log_probs_and_score(rows, batch.targets, scorer, **settings)
    else:
        settings["with_entropy"] = options.with_entropy
        scores = *log_probs_and_entropy(rows, batch.targets, **settings), None
    log_probs, *others = scores
    entropy, score = (None if x is None else x[..., batch.logit_rows] for x in others)
    return log_probs[batch.logit_rows], entropy, score


def check_vocabulary(batch: PackedBatch, local_columns: int, options: HeadOptions) -> None:
    """Raise a ValueError if a response token has no column in the logits. Does not read the
    device.
    """
    group, vocab_size = options.tensor_parallel_group, options.vocab_size
    if vocab_size is None:
        vocab_size = local_columns * (1 if group is None else dist.get_world_size(group))
    if batch.largest_target >= vocab_size:
        refuse_tokens_outside(batch.samples, vocab_size)


def refuse_tokens_outside(samples: Iterable[Sample], vocab_size: int) -> None:
    """Raise a ValueError with the name of the first sample with a response token, or an id in a
    sampling set or of a teacher, outside the vocabulary.
    """
    for sample in samples:
        ids_by_name = {"response token": sample.tokens[sample.prompt_length :]}
        if sample.kept_tokens is not None:
            ids_by_name["kept_tokens: token"] = sample.kept_tokens.values
        if sample.sampler_top_k is not None:
            ids_by_name["sampler_top_k: token"] = sample.sampler_top_k.ids.values
        for what, ids in ids_by_name.items():
            if ids.numel() and ids.amax() >= vocab_size:
                raise ValueError(
                    f"{sample.name}: {what} id {int(ids.amax())} is outside the vocabulary of "
                    f"{vocab_size}. Use the model's tokenizer."
                )
        if isinstance(teacher_ids := sample.side_channels.get("teacher_ids"), Tensor):
            where = f"{sample.name}: side_channels['teacher_ids']"
            is_outside = sample.loss_mask[:, None] & (teacher_ids >= vocab_size)
            remedy = "Teacher and model must have the same vocabulary."
            problem = f", outside the vocabulary of {vocab_size}. {remedy}"
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
    policy_version: int | None = None,
) -> tuple[Tensor, MicroBatchMetrics]:
    """Compute the loss like `policy_loss_function`, for a model that returns log-probs. For further
    arguments see there.

    Args:
        log_probs: `[window]` float32, for the window's response tokens at the rollout temperature,
            and over their sampling sets with `--replay-sampling-set`.
        entropy: `[window]` float32, in nats. None if neither the loss nor a metric needs it
            (`config.needs_entropy`).

    Raises:
        ValueError: the batch lacks an input of the objective, or the entropy is needed but None.
    """
    of_step = context_parallel_group, step_share, policy_version
    resolved = resolve(config)
    resolved.normalization.require(totals)
    return MicroBatchLoss(resolved, batch, totals, *of_step)(log_probs, entropy)
