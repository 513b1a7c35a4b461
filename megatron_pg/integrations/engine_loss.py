"""One protocol for engines that hand log-probs to a loss function; each adapter beside this file is one engine's side of it.

    loss = StepLoss(config, step_totals(samples, data_parallel_group=group))    # once an optimizer step
    share = loss(log_probs, samples)                                            # for each call of the engine

The share of a call is in units of the objective: the sum of the shares over the calls of a step, on every data-parallel
rank, is the objective, whatever aggregation, objective and corrections the config has. So an adapter does two things:

1. It makes a `Sample` of each row that the engine trains on, before the step, and `step_totals` of all of them.
2. It multiplies the share by what the engine divides a loss by afterwards: its number of micro-batches, its data-parallel
   size where gradients are averaged, a count of tokens or rows of its own.

Under context parallelism the engine gathers the log-probs of whole responses, with gradient for each rank's own part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.loss.micro_batch import MicroBatchLoss
from megatron_pg.step.batch import pack
from megatron_pg.step.sample import Sample
from megatron_pg.step.totals import StepTotals


class EngineLoss(Protocol):
    """A loss on log-probs and samples, as `StepLoss` is one."""

    def __call__(
        self,
        log_probs: Sequence[Tensor],
        samples: Sequence[Sample],
        entropy: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Compute the share of these samples in the step's objective, 0-d, to be differentiated.

        The log-probs and the entropy are [response_length] of each sample, in nats, on one device.
        """


@dataclass(frozen=True)
class StepLoss:
    """The loss of one optimizer step: the settings, and the totals over all of its samples on every rank."""

    config: PolicyLossConfig
    totals: StepTotals

    def __call__(
        self,
        log_probs: Sequence[Tensor],
        samples: Sequence[Sample],
        entropy: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """See `EngineLoss`. No communication, and no host synchronisation.

        Raises:
            ValueError: log-probs that are not one per response token; an input of the loss that the samples lack.
        """
        for values in (log_probs, *([] if entropy is None else [entropy])):
            lengths = [len(value) for value in values]
            if lengths != [sample.response_length for sample in samples]:
                raise ValueError(
                    f"the engine gives {lengths} log-probs or entropies for {[sample.name for sample in samples]}, whose "
                    f"responses have {[sample.response_length for sample in samples]} tokens"
                )
        flat = torch.cat(list(log_probs))
        batch = pack(samples).to(flat.device)
        of_tokens = None if entropy is None else torch.cat(list(entropy))
        return MicroBatchLoss(self.config, batch, self.totals).loss(flat, of_tokens)


def sample_of_row(
    tokens: Tensor,
    prompt_length: int,
    mask: Tensor,
    fields: Mapping[str, Tensor],
    *,
    group_index: int | None,
    name: str,
) -> Sample:
    """Make the sample of a row of an engine's matrices, on the host.

    Args:
        tokens: [total_length] ids, without padding.
        mask: [total_length] of 0 and 1: the tokens that are trained on.
        fields: [total_length] values of each token, by the name of the field of `Sample`.
    """
    values: dict[str, Any] = {field: row[prompt_length:] for field, row in fields.items()}
    return Sample(
        tokens=tokens,
        response_length=len(tokens) - prompt_length,
        loss_mask=mask[prompt_length:],
        group_index=group_index,
        name=name,
        **values,
    )


def of_response(values: Tensor, sample: Sample) -> Tensor:
    """Cut the values of a sample's response tokens, [response_length], from those of its row.

    `values` has, at position p, that of token p + 1; padding may follow.
    """
    return values[sample.prompt_length - 1 : sample.total_length - 1]
