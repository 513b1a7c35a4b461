"""`compute_log_probs`: the log-probs of samples under any model, forward only, at any sharding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pg.config import PolicyLossConfig
from megatron_pg.config.planning import OversizedSamples
from megatron_pg.head import linear_log_probs_and_entropy
from megatron_pg.loss.from_logits import log_probs_of_logits
from megatron_pg.megatron.fused_head import OutputRows
from megatron_pg.megatron.groups import ParallelGroups
from megatron_pg.megatron.output_layer import fp32_lm_head, take_output_processor
from megatron_pg.megatron.policy_step import MicroBatchHead, model_inputs
from megatron_pg.megatron.scale_contract import ScheduleOutput
from megatron_pg.megatron.scoring import report_scores, score_samples
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.sample import Sample


@dataclass(frozen=True, eq=False)
class ScoredSamples:
    """What a model says of samples, in their order."""

    log_probs: list[Tensor]
    """Of each sample the log-probs of its response tokens, [response_length] float32 on the host, in nats; 0 at masked
    tokens."""
    entropy: list[Tensor]
    """Of each sample the entropy of the distributions that its response tokens were drawn from, likewise."""


def compute_log_probs(
    model: Any,
    samples: Sequence[Sample],
    config: PolicyLossConfig,
    *,
    max_tokens_per_microbatch: int,
    oversized: OversizedSamples = "error",
    groups: ParallelGroups | None = None,
    vocab_size: int | None = None,
) -> ScoredSamples:
    """Log-probs and entropy of samples under a model: those of the old policy, or of the reference.

        old = compute_log_probs(model, samples, config, max_tokens_per_microbatch=16384).log_probs
        samples = [replace(sample, old_log_probs=values) for sample, values in zip(samples, old, strict=True)]

    Every rank of the model calls it, with all samples of its data-parallel rank, and outside of a step: after the
    optimizer's and before the next forward and backward. They are cut as `plan_step` cuts a step, with equally many
    micro-batches on every data-parallel rank, and scored as `PolicyStep` scores them under the same config: with the
    same budget and the same parameters the ratio of the next step is 1.

    The model runs under `torch.no_grad()` in eval mode, without dropout; every module gets its own mode back. No
    gradient, buffer of DDP or state of a random generator changes, and no activation is kept. It draws no random
    numbers, unless the model does in eval mode (`--moe-input-jitter-eps`).

    Args:
        model: on this rank's device, wrapped (DDP, Float16Module) or not, or the list of chunks of a virtual pipeline.
        samples: this data-parallel rank's, in any order; none at all is legal. Of each its tokens, response length,
            loss mask and kept sets are read; log-probs that it carries are not, and may be missing from some.
        config: the policy loss: temperature, fused head, precision of the logits, whether over the samples' kept sets.
        max_tokens_per_microbatch: see `plan_step`. There is no backward: it may be several times that of training.
        oversized: see `plan_step`.
        groups: the process groups; None takes the model's.
        vocab_size: the vocabulary without padding; None counts every column of the logits.

    Returns:
        The same on every tensor-, context- and pipeline-parallel rank of a data-parallel rank: two all-reduces of two
        numbers a response token, over context parallelism and over the pipeline, and one copy to the host.

    Raises:
        ValueError: on all data-parallel ranks, where one has it: the model is not on the rank's device; a sample, which
            is named, is longer than the budget, has a response token outside the vocabulary, or lacks the kept sets that
            `--replay-sampling-set` needs.
        NotImplementedError: `--fused-lm-head` or `--fp32-lm-head` with another output layer than `take_output_processor` or
            `set_fp32_lm_head` takes, or a `--cp-partition-mode` that the model's attention does not have.
    """
    if config.fused_lm_head:
        take_output_processor(model)
    with fp32_lm_head(model, config.changes_output_layer):
        scores = score_samples(
            model,
            samples,
            lambda groups, batch: _head(config, groups, vocab_size, batch),
            of_no_token=torch.empty(2, 0),
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            oversized=oversized,
            groups=groups,
            vocab_size=vocab_size,
            takes_sets=config.replay_sampling_set,
            cp_partition_mode=config.cp_partition_mode,
        )
    log_probs, entropy = ([each[row].clone() for each in scores] for row in range(2))
    return ScoredSamples(log_probs, entropy)


def _head(
    config: PolicyLossConfig, groups: ParallelGroups, vocab_size: int | None, batch: PackedBatch
) -> MicroBatchHead:
    """The head that reports `scores` [2, window] float32, log-probs and entropy, and has no loss."""
    inputs = model_inputs(batch)
    if not config.fused_lm_head:

        def report_of_logits(logits: Tensor) -> ScheduleOutput:
            found = log_probs_of_logits(
                config,
                batch,
                logits,
                tensor_parallel_group=groups.tensor,
                vocab_size=vocab_size,
                with_entropy=True,
            )
            return report_scores(torch.stack([each for each in found if each is not None]))

        return MicroBatchHead(report_of_logits, inputs, {})
    rows = OutputRows(config, batch, groups, vocab_size=vocab_size)

    def output_processor(hidden_states: Tensor, weight: Tensor) -> Tensor:
        factors = rows.factors(hidden_states, weight)
        found = linear_log_probs_and_entropy(*factors, rows.options, kept=rows.kept)
        return torch.stack([rows.in_window(each) for each in found])

    added = {"output_processor": output_processor}
    return MicroBatchHead(
        lambda output: report_scores(output.reshape(2, -1)), inputs | added, added
    )
