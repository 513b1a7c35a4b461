"""The run of a step's micro-batches through Megatron's schedule."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_pg.megatron.policy_step import MicroBatchHead
from megatron_pg.step.batch import PackedBatch


def run_micro_batches(
    head: Callable[[PackedBatch], MicroBatchHead],
    batches: Sequence[PackedBatch],
    chunks: Sequence[Any],
    *,
    forward_only: bool = False,
) -> list[Mapping[str, Tensor]]:
    """Run forward and backward of one step. Every rank calls it. Gradients stay in DDP's buffers.

    Args:
        head: `PolicyStep.head`, or a function that returns a `MicroBatchHead`.
        batches: this rank's micro-batches of the step, on the model's device.
        chunks: the model under DDP, more than one chunk in a virtual pipeline.

    Returns:
        The argument of `PolicyStep.metrics`: each micro-batch's numbers on the last pipeline stage,
        nothing on earlier stages.
    """

    def forward_step(iterator: Iterator[PackedBatch], model: Any) -> tuple[Tensor, Any]:
        micro_batch = head(next(iterator))
        return model(**micro_batch.model_inputs), micro_batch.loss_func

    output: list[Mapping[str, Tensor]] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(batches),
        # With variable_seq_lengths, pipeline stages exchange the lengths. Otherwise all are equal.
        seq_length=max(batch.window.num_tokens for batch in batches),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return output
