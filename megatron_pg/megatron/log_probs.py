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
from megatron_pg.megatron.output_layer import OutputProcessor, fp32_lm_head, take_output_processor
from megatron_pg.megatron.scoring import score_samples
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.sample import Sample


@dataclass(frozen=True, eq=False)
class ScoredSamples:
    """Log-probs and entropy of samples under a model, in the samples' order."""

    log_probs: list[Tensor]
    """Per sample the log-probs of its response tokens, [response_length] float32 on the host, in nats; 0 at masked tokens."""
    entropy: list[Tensor]
    """Per sample the entropy of the distributions that its response tokens were drawn from, likewise."""


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
    """Compute log-probs and entropy of samples under a model, such as the old policy or the reference.

        old = compute_log_probs(model, samples, config, max_tokens_per_microbatch=16384).log_probs
        samples = [replace(sample, old_log_probs=values) for sample, values in zip(samples, old, strict=True)]

    Every rank of the model calls it with all samples of its data-parallel rank, outside of a step: after the optimizer's
    step and before the next forward and backward. Samples are packed as `plan_step` packs a step, with equally many
    micro-batches on every data-parallel rank, and scored as `PolicyStep` scores them under the same config: with the
    same budget and the same parameters the ratio of the next step is 1.

    The model runs under `torch.no_grad()` in eval mode, without dropout; every module gets its own mode back. No
    gradient, buffer of DDP or state of a random generator changes, and no activation is kept. The model draws no random
    numbers, unless it does in eval mode (`--moe-input-jitter-eps`).

    Args:
        model: on this rank's device, wrapped (DDP, Float16Module) or not, or the list of chunks of a virtual pipeline.
        samples: this data-parallel rank's, in any order; none at all is legal. Their tokens, response lengths, loss masks
            and kept sets are read; log-probs are not, and may be missing from some samples.
        config: the policy loss: temperature, fused head, precision of the logits, whether over the samples' kept sets.
        max_tokens_per_microbatch: see `plan_step`. Without a backward pass it may be several times that of training.
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
    model_groups = ParallelGroups.from_model(model) if groups is None else groups

    def read_logits(batch: PackedBatch, logits: Tensor) -> Tensor:
        scores = log_probs_of_logits(
            config,
            batch,
            logits,
            tensor_parallel_group=model_groups.tensor,
            vocab_size=vocab_size,
            with_entropy=True,
        )
        return torch.stack([score for score in scores if score is not None])

    def fused_scores(batch: PackedBatch) -> OutputProcessor:
        rows = OutputRows(config, batch, model_groups, vocab_size=vocab_size)

        def output_processor(hidden_states: Tensor, weight: Tensor) -> Tensor:
            factors = rows.factors(hidden_states, weight)
            scores = linear_log_probs_and_entropy(*factors, rows.options, kept=rows.kept)
            return torch.stack([rows.in_window(score) for score in scores])

        return output_processor

    if config.fused_lm_head:
        take_output_processor(model)
    with fp32_lm_head(model, config.changes_output_layer):
        scores = score_samples(
            model,
            samples,
            (lambda _, output: output.reshape(2, -1)) if config.fused_lm_head else read_logits,
            empty_scores=torch.empty(2, 0),
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            oversized=oversized,
            groups=model_groups,
            vocab_size=vocab_size,
            takes_sets=config.replay_sampling_set,
            cp_partition_mode=config.cp_partition_mode,
            output_processor=fused_scores if config.fused_lm_head else None,
        )
    log_probs, entropy = ([score[row].clone() for score in scores] for row in range(2))
    return ScoredSamples(log_probs, entropy)
