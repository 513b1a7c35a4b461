"""`compute_hidden_states`: what enters a model's output layer, of samples, forward only, at any sharding: a teacher's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_pg.config.planning import OversizedSamples
from megatron_pg.config.policy_loss import CpPartitionMode
from megatron_pg.megatron.groups import ParallelGroups
from megatron_pg.megatron.output_layer import without_output_layer
from megatron_pg.megatron.policy_step import MicroBatchHead, model_inputs
from megatron_pg.megatron.scale_contract import ScheduleOutput
from megatron_pg.megatron.scoring import report_scores, score_samples
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.sample import Sample


def compute_hidden_states(
    model: Any,
    samples: Sequence[Sample],
    *,
    max_tokens_per_microbatch: int,
    oversized: OversizedSamples = "error",
    groups: ParallelGroups | None = None,
    cp_partition_mode: CpPartitionMode = "zigzag",
) -> list[Tensor]:
    """Hidden states that predict the samples' response tokens: the side channel `teacher_hidden` of `--distill-teacher hidden`.

        states = compute_hidden_states(teacher, samples, max_tokens_per_microbatch=16384)
        samples = [
            replace(sample, side_channels={**sample.side_channels, "teacher_hidden": each})
            for sample, each in zip(samples, states, strict=True)
        ]

    Called as `compute_log_probs` is, by the same ranks, and it leaves the model as that does. The logits are not made: they
    are the product of these states with the model's output weight.

    Args:
        model: the teacher, wrapped or not, or the list of chunks of a virtual pipeline; of any size, in the groups of the
            student or others with the same data-parallel ranks.
        samples: as for `compute_log_probs`.
        max_tokens_per_microbatch: as for `compute_log_probs`.
        oversized: as for `compute_log_probs`.
        groups: as for `compute_log_probs`.
        cp_partition_mode: that of the model's attention.

    Returns:
        Of each sample `[response_length, hidden]` on the host, in the dtype of the model's parameters; the same on every
        tensor-, context- and pipeline-parallel rank. Until all samples are through, those of all lie on the device.

    Raises:
        ValueError: what `compute_log_probs` raises.
        NotImplementedError: the output layer is not Megatron's `ColumnParallelLinear`, or has a bias.
    """
    chunk = model[0] if isinstance(model, (list, tuple)) else model
    of_no_token = torch.empty(chunk.config.hidden_size, 0, dtype=chunk.config.params_dtype)
    with without_output_layer(model):
        states = score_samples(
            model,
            samples,
            _head,
            of_no_token=of_no_token,
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            oversized=oversized,
            groups=groups,
            vocab_size=None,
            cp_partition_mode=cp_partition_mode,
        )
    return [each.T.contiguous() for each in states]


def _head(groups: ParallelGroups, batch: PackedBatch) -> MicroBatchHead:
    """The head that reports `scores` [hidden, window], and has no loss."""

    def report(output: Tensor) -> ScheduleOutput:
        return report_scores(output[0, batch.logit_rows].T)

    return MicroBatchHead(report, model_inputs(batch), {})
