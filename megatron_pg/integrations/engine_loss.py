"""A protocol for engines that give a loss function log-probs. `docs/custom.md` has an adapter.

    loss = StepLoss(config, step_totals(samples, data_parallel_group=group))  # once per step
    share = loss(log_probs, samples)  # for each call of the engine

The shares of a step's calls on all data-parallel ranks add up to the objective. So an adapter does
two things:

1. Before the step, it makes a `Sample` from each row that the engine trains on, and the totals.
2. It multiplies the share by the engine's later divisors: number of micro-batches, data-parallel
size if gradients are averaged, a count of tokens or rows.

Under context parallelism, the engine gathers whole responses' log-probs, with gradient for each
rank's part.
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
    policy_version: int | None = None
    """See `PolicyStep`."""

    def __post_init__(self) -> None:
        # The engine computes metrics.
        vars(self)["config"] = dataclasses.replace(self.config, pg_metrics="none")
        resolve(self.config).normalization.require(self.totals)

    def __call__(
        self,
        log_probs: Sequence[Tensor],
        samples: Sequence[Sample],
        entropy: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Compute these samples' share of the step's objective, 0-d and differentiable.

        Log-probs and entropy are [response_length] per sample, in nats, on one device. There is no
        communication or host synchronization. Raises ValueError unless there is one value per
        response token, or if samples lack a field.
        """
        expected = [sample.response_length for sample in samples]
        for values in (log_probs, *([] if entropy is None else [entropy])):
            if (lengths := [len(value) for value in values]) != expected:
                names = [sample.name for sample in samples]
                raise ValueError(
                    f"the engine gives {lengths} log-probs or entropies for {names}, but their "
                    f"responses have {expected} tokens"
                )
        flat = torch.cat(list(log_probs))
        batch = pack(samples).to(flat.device)
        of_tokens = None if entropy is None else torch.cat(list(entropy))
        version = self.policy_version
        loss = MicroBatchLoss(resolve(self.config), batch, self.totals, policy_version=version)
        return loss.loss(flat, of_tokens)
