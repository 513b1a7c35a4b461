"""One protocol for engines that hand log-probs to a loss function; each adapter beside this file is one engine's side of it.

    loss = StepLoss(config, step_totals(samples, data_parallel_group=group))    # once an optimizer step
    share = loss(log_probs, samples)                                            # for each call of the engine

The sum of the shares over the calls of a step, on every data-parallel rank, is the objective. So an adapter does two things:

1. It makes a `Sample` of each row that the engine trains on, before the step, and `step_totals` of all of them.
2. It multiplies the share by what the engine divides a loss by afterwards: its number of micro-batches, its data-parallel
   size where gradients are averaged, a count of tokens or rows of its own.

Under context parallelism the engine gathers the log-probs of whole responses, with gradient for each rank's own part.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.loss.micro_batch import MicroBatchLoss
from megatron_pg.step.batch import pack
from megatron_pg.step.sample import Sample
from megatron_pg.step.totals import StepTotals


@dataclass(frozen=True)
class StepLoss:
    """The loss of one optimizer step: the settings, and the totals over all of its samples on every rank."""

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

        The log-probs and the entropy are [response_length] of each sample, in nats, on one device. No communication, and no
        host synchronisation. A ValueError says that they are not one per response token, or what the samples lack.
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


def samples_of_rows(
    tokens: Tensor,
    starts: Sequence[int],
    lengths: Sequence[int],
    fields: Mapping[str, Tensor],
    groups: Iterable[int],
) -> list[Sample]:
    """Make the samples of an engine's rows, on the host.

    Args:
        tokens: [rows, width] ids.
        starts: the column of each row's first response token.
        lengths: the tokens of each row, without padding.
        fields: [rows, width] values of each token, on any device, by the name of the field of `Sample`.
        groups: the prompt group of each row.
    """
    host = {field: values.cpu() for field, values in fields.items()}
    made, ids = [], tokens.cpu()
    for row, (start, length, group) in enumerate(zip(starts, lengths, groups, strict=False)):
        values: dict[str, Any] = {field: value[row, start:length] for field, value in host.items()}
        names = {"response_length": length - start, "group_index": group, "name": f"row {row}"}
        made.append(Sample(tokens=ids[row, :length], **names, **values))  # type: ignore[arg-type]
    return made


def of_response(values: Tensor, sample: Sample) -> Tensor:
    """Cut the values of a sample's response tokens, [response_length], from those of its row.

    `values` has, at position p, that of token p + 1; padding may follow.
    """
    return values[sample.prompt_length - 1 : sample.total_length - 1]


def refuse_settings(
    engine: str,
    args: Any,
    wanted: Mapping[str, Any],
    config: PolicyLossConfig,
    has_entropy: bool = False,
) -> None:
    """Raise a ValueError that names settings of the engine about the loss that differ from the config's, or an entropy term."""
    if config.entropy_coef and not has_entropy:
        raise ValueError(
            f"entropy_coef is {config.entropy_coef:g}, and {engine} hands its loss no entropy: set it to 0"
        )
    # Versions of an engine differ in the settings that they have.
    theirs = {name: getattr(args, name, value) for name, value in wanted.items()}
    wrong = [name for name, value in wanted.items() if theirs[name] != value]
    if wrong:
        their, our = (", ".join(f"{name} {of[name]}" for name in wrong) for of in (theirs, wanted))
        raise ValueError(
            f"{engine} has {their}, and megatron_pg, which computes the loss, {our}: set the same in both"
        )
