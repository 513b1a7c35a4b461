"""This package's loss as the `loss_fn` of Megatron-Lite's runtime.

    totals = step_totals(samples, data_parallel_group=data_parallel_group)    # all samples of this rank's step
    batches = [PackedBatch(..., extras={SAMPLES: part}) for part in parts]
    unpack = functools.partial(protocol.unpack_forward_output, model)
    sizes = {"num_microbatches": len(batches), "data_parallel_size": data_parallel_group.size()}
    runtime.forward_backward(handle, iter(batches), loss_fn=lite_loss(config, totals, unpack, **sizes), ...)

The way of a loss through Megatron-Lite (read in Megatron-LM 515fe3a, `experimental/lite/megatron/lite`):

1. A batch is packed without padding, and its labels are the next tokens: position t of `log_probs` belongs to token t + 1.
   `unpack_forward_output` of a model's protocol gathers them over context parallelism, sequence by sequence.
2. `primitive/train_step.py`, `run_microbatch_loop`: calls `loss_fn(model_output, batch)`, with a `LossContext` as a third
   argument where the data has one, and runs backward from `loss / M`.
3. `primitive/optimizers/megatron_wrap.py`: Megatron's DDP averages gradients over data parallelism.

So a share is multiplied by `M * DP`, as Megatron-Lite's own engine for verl does (`loss_scale`).
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.integrations.engine_loss import StepLoss, of_response
from megatron_pg.step.totals import StepTotals

SAMPLES = "megatron_pg_samples"
"""Key of `PackedBatch.extras`: the samples of the batch, in its order."""
LossFn = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def lite_loss(
    config: PolicyLossConfig,
    totals: StepTotals,
    unpack: Callable[[Any, Tensor], Any],
    *,
    num_microbatches: int,
    data_parallel_size: int,
) -> LossFn:
    """Make the loss of one optimizer step; a new one for each step.

    Args:
        unpack: `(batch, output) -> nested tensor` with a row of [total_length] for each sequence.
        num_microbatches: those of this rank, as `forward_backward` gets them.
        data_parallel_size: ranks that gradients are averaged over, without context parallelism.
    """
    loss = StepLoss(config, totals)

    def loss_fn(
        model_output: dict[str, Tensor], batch: Any, context: Any = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        samples, names = batch.extras[SAMPLES], ["log_probs"] + ["entropy"] * config.needs_entropy
        if lacking := [name for name in names if name not in model_output]:
            raise ValueError(
                f"Megatron-Lite's model returned no {lacking[0]}: give it labels, and return_log_probs=True in a LossContext"
            )
        rows = [unpack(batch, model_output[name]).unbind() for name in names]
        log_probs, *entropy = (list(map(of_response, values, samples)) for values in rows)
        share = loss(log_probs, samples, *entropy)
        metrics = {"loss": share.detach().clone()}
        return share * num_microbatches * data_parallel_size, metrics

    return loss_fn
