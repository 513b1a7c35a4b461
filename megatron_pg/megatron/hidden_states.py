"""`compute_hidden_states`: the inputs of a model's output layer for samples, forward only, such as a teacher's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_pg.config.planning import OversizedSamples
from megatron_pg.config.policy_loss import CpPartitionMode
from megatron_pg.megatron.groups import ParallelGroups, chunks_of
from megatron_pg.megatron.output_layer import without_output_layer
from megatron_pg.megatron.scoring import score_samples
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
    """Compute the hidden states that predict response tokens: `teacher_hidden` of `--distill-teacher hidden`.

        states = compute_hidden_states(teacher, samples, max_tokens_per_microbatch=16384)
        samples = [
            replace(sample, side_channels={**sample.side_channels, "teacher_hidden": hidden})
            for sample, hidden in zip(samples, states, strict=True)
        ]

    The same ranks call it as `compute_log_probs`, and it leaves the model as that function does. It makes no logits: they
    are the product of these states and the model's output weight.

    Args:
        model: the teacher, wrapped or not, or the list of chunks of a virtual pipeline; of any size, in the groups of the
            student or others with the same data-parallel ranks.
        samples: as for `compute_log_probs`.
        max_tokens_per_microbatch: as for `compute_log_probs`.
        oversized: as for `compute_log_probs`.
        groups: as for `compute_log_probs`.
        cp_partition_mode: the mode of the model's attention.

    Returns:
        Per sample `[response_length, hidden]` on the host, in the dtype of the model's parameters; the same on every
        tensor-, context- and pipeline-parallel rank. Until the last sample is through, the device holds the states of all.

    Raises:
        ValueError: as for `compute_log_probs`.
        NotImplementedError: the output layer is not Megatron's `ColumnParallelLinear`, or has a bias.
    """
    config = chunks_of(model)[0].config
    with without_output_layer(model):
        states = score_samples(
            model,
            samples,
            lambda batch, output: output[0, batch.logit_rows].T,
            empty_scores=torch.empty(config.hidden_size, 0, dtype=config.params_dtype),
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            oversized=oversized,
            groups=groups,
            cp_partition_mode=cp_partition_mode,
        )
    return [state.T.contiguous() for state in states]
