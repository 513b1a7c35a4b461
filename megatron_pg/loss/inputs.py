"""Checks of a packed micro-batch before its samples become tensors. They look at the host alone."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.config.policy_loss import LOG_PROB_FIELDS, PolicyLossConfig, required_inputs
from megatron_pg.head import HeadOptions
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.sample import Sample
from megatron_pg.step.values import refuse_values

TEACHER_CHANNELS = {
    "logits": ("teacher_logits",),
    "hidden": ("teacher_hidden",),
    "top_k": ("teacher_ids", "teacher_log_probs"),
}
"""The side channels that hold a teacher, by `--distill-teacher`. Each has a row for every response token."""
TOLERANCE = 1e-3  # rounding of an engine's log-prob of 0, in nats


def require_inputs(config: PolicyLossConfig, batch: PackedBatch) -> None:
    """Refuse a micro-batch that lacks an input of the loss, naming the sample, the field and the flags that ask for it."""
    for field, flags in required_inputs(config).items():
        if field != "group_index" and batch.samples and getattr(batch, field) is None:
            raise ValueError(
                f"{batch.samples[0].name} has no {field}, which {' and '.join(flags)} needs: give "
                f"Sample({field}=...) to every sample of the step"
            )
    if config.replay_sampling_set and batch.kept_tokens is not None:
        _refuse_other_distributions(config, batch, batch.kept_tokens.sizes == 1)
    if config.distills and batch.samples:
        _refuse_without_teacher(config, batch)


def _refuse_other_distributions(
    config: PolicyLossConfig, batch: PackedBatch, is_alone: Tensor
) -> None:
    """Refuse log-probs of another distribution than the one renormalised to the kept set, by sample and position.

    A token that is alone in its set has the log-prob 0. Another number there belongs to the whole vocabulary, or to another
    set, and so do the numbers at other tokens: a ratio to them would compare two supports.
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
                f"{batch.samples[sample].name}: {field}[{position}] is {float(values[token]):.4g}, and its token is the only one "
                "of its kept set, where the log-prob over the set is 0: these are log-probs of another distribution. Under "
                "--replay-sampling-set give those over the same sets (compute_log_probs under the same flag; of an engine, "
                "those that it sampled from), or drop the flag"
            )


def _refuse_without_teacher(config: PolicyLossConfig, batch: PackedBatch) -> None:
    for name in TEACHER_CHANNELS[str(config.distill_teacher)]:
        channel = batch.side_channels.get(name)
        if not isinstance(channel, Tensor) or len(channel) != len(batch.window):
            problem = (
                "none" if channel is None else f"{len(channel)} rows for {len(batch.window)} tokens"
            )
            raise ValueError(
                f"{batch.samples[0].name}: side_channels[{name!r}] is missing or of the wrong length ({problem}), and "
                f"--distill-teacher {config.distill_teacher} needs it: give a tensor [response_length, ...] to every sample"
            )


def check_vocabulary(batch: PackedBatch, local_columns: int, options: HeadOptions) -> None:
    """Refuse a response token that the logits have no column for, without a look at the device."""
    group, vocab_size = options.tensor_parallel_group, options.vocab_size
    if vocab_size is None:
        vocab_size = local_columns * (1 if group is None else dist.get_world_size(group))
    if batch.largest_target >= vocab_size:
        refuse_tokens_outside(batch.samples, vocab_size)


def refuse_tokens_outside(samples: Iterable[Sample], vocab_size: int) -> None:
    """Refuse, by name, the first sample with a response token, or an id of a kept set or of a teacher, outside the vocabulary."""
    for sample in samples:
        ids_by_name = {"response token": sample.tokens[sample.prompt_length :]}
        if sample.kept_tokens is not None:
            ids_by_name["kept_tokens: token"] = sample.kept_tokens.values
        for what, ids in ids_by_name.items():
            if ids.numel() and ids.amax() >= vocab_size:
                raise ValueError(
                    f"{sample.name}: {what} id {int(ids.amax())} is outside the vocabulary of {vocab_size}: "
                    "tokenizer and model do not belong together"
                )
        if isinstance(teacher_ids := sample.side_channels.get("teacher_ids"), Tensor):
            where = f"{sample.name}: side_channels['teacher_ids']"
            is_outside = sample.loss_mask[:, None] & (teacher_ids >= vocab_size)
            problem = (
                f"outside the vocabulary of {vocab_size}: teacher and model need one vocabulary"
            )
            refuse_values(where, teacher_ids, is_outside, f", {problem}")
