"""One protocol for engines that give a loss function log-probs; `docs/custom.md` has an adapter.

    loss = StepLoss(config, step_totals(samples, data_parallel_group=group))  # once per step
    share = loss(log_probs, samples)  # for each call of the engine

The sum of the shares over the calls of a step, on every data-parallel rank, is the objective. So an
adapter does two things:

1. It makes a `Sample` of each row that the engine trains on, before the step, and the totals.
2. It multiplies the share by what the engine divides a loss by afterwards: its number of
   micro-batches, its data-parallel size if gradients are averaged, a count of tokens or rows.

Under context parallelism the engine gathers the log-probs of whole responses, with gradient for
each rank's own part.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.loss.micro_batch import MicroBatchLoss
from megatron_pg.loss.resolved import resolve
from megatron_pg.step.batch import pack
from megatron_pg.step.sample import Sample
from megatron_pg.step.totals import StepTotals


@dataclass(frozen=True)
class StepLoss:
    """The loss of one optimizer step: settings, and totals over all samples on every rank."""

    config: PolicyLossConfig
    totals: StepTotals

    def __post_init__(self) -> None:
        # Metrics are the engine's.
        vars(self)["config"] = dataclasses.replace(self.config, pg_metrics="none")

    def __call__(
        self,
        log_probs: Sequence[Tensor],
        samples: Sequence[Sample],
        entropy: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Compute the share of these samples in the step's objective, 0-d, to be differentiated.

        The log-probs and the entropy are [response_length] of each sample, in nats, on one device.
        There is no communication and no host synchronization. A ValueError says that there is not
        one per response token, or what the samples lack.
        """
        expected = [sample.response_length for sample in samples]
        for values in (log_probs, *([] if entropy is None else [entropy])):
            if (lengths := [len(value) for value in values]) != expected:
                names = [sample.name for sample in samples]
                raise ValueError(
                    f"the engine gives {lengths} log-probs or entropies for {names}, whose "
                    f"responses have {expected} tokens"
                )
        flat = torch.cat(list(log_probs))
        batch = pack(samples).to(flat.device)
        of_tokens = None if entropy is None else torch.cat(list(entropy))
        return MicroBatchLoss(resolve(self.config), batch, self.totals).loss(flat, of_tokens)
