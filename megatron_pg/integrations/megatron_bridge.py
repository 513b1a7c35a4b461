"""This package's loss as the `LossFn` of the training engine that Megatron-Bridge plans.

    totals = step_totals(samples, data_parallel_group=group)           # all samples of this rank's step
    loss_fn = datum_loss(config, totals, datums, samples, group)       # for each call of the engine
    engine.forward_backward(datums, loss_fn)

No code of that engine exists (Megatron-Bridge 067f987). Its plan is NVIDIA-NeMo/Megatron-Bridge's issue 4515:

1. `LossFn = Callable[[ModelOutput, Sequence[Datum]], Sequence[Tensor]]` gets the original datums. `logprobs` and `entropy` of
   a `ModelOutput` are lists with a tensor of each datum of this data-parallel rank.
2. The engine weighs tokens, divides by a denominator over the data ranks, and undoes micro-batches and parallelism.

What the plan leaves open is as in the engine that ran this contract (NeMo-Automodel 8ba3aef, `components/training/engine.py`):
a tensor is [T] of its datum, position t scores token t + 1, and the engine computes `sum(weights * tensor) / W`, with
`loss_fn_inputs["weights"]`, [T], and W their sum over ranks. So the adapter spreads a share over the tokens of a call, times
W over the weights of the call.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.integrations.engine_loss import StepLoss, of_response
from megatron_pg.step.agreement import compute_and_gather
from megatron_pg.step.sample import Sample
from megatron_pg.step.totals import StepTotals

LossFn = Callable[[Any, Sequence[Any]], Sequence[Tensor]]


def datum_loss(
    config: PolicyLossConfig,
    totals: StepTotals,
    datums: Sequence[Any],
    samples: Sequence[Sample],
    data_parallel_group: dist.ProcessGroup | None = None,
) -> LossFn:
    """Make the loss of one call of the engine; every rank of the data-parallel group calls it.

    Args:
        totals: those of the optimizer step, which may have several calls.
        datums: this rank's datums of the call.
        samples: the sample of each datum, with the same tokens.

    Raises:
        ValueError: a datum without weights, or with all of them 0, whose sample has active tokens. From the loss: log-probs
            that are absent or too few, and datums that are not the original ones.
    """
    loss = StepLoss(config, totals)

    def weigh() -> list[float]:
        weights = []
        for datum, sample in zip(datums, samples, strict=True):
            given = datum.loss_fn_inputs.get("weights")
            weights.append(0.0 if given is None else float(given.double().sum()))
            if not weights[-1] and sample.num_active_tokens:
                raise ValueError(
                    f"{sample.name}: the datum's loss_fn_inputs have no weights, or all of them are 0, so the engine would "
                    "leave it out: give it weights with 1 on the response"
                )
        return weights

    weights, sums = compute_and_gather(weigh, math.fsum, data_parallel_group)
    rows = {id(row[0]): row for row in zip(datums, samples, weights, strict=True)}

    def loss_fn(model_output: Any, batch: Sequence[Any]) -> list[Tensor]:
        if any(id(datum) not in rows for datum in batch):
            raise ValueError("the engine gives datum_loss other datums than it was made with")
        names = ["logprobs"] + ["entropy"] * config.needs_entropy
        outputs = [getattr(model_output, name) for name in names]
        if any(output is None for output in outputs):
            raise ValueError(f"the engine's ModelOutput lacks {' or '.join(names)}")
        _, held, held_weights = zip(*(rows[id(datum)] for datum in batch), strict=True)
        log_probs, *entropy = (list(map(of_response, output, held)) for output in outputs)
        weight = sum(held_weights)
        # Without weight there are no active tokens, and the share is 0.
        spread = loss(log_probs, held, *entropy) * (sum(sums) / (weight or 1.0))
        return [spread.expand(len(values)) for values in outputs[0]]

    return loss_fn
