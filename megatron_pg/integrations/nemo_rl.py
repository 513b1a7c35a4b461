"""This package's loss inside NeMo-RL: its policy trains on `StepLoss`, in the launch script, after `setup()`.

    from megatron_pg.integrations.nemo_rl import train_with

    train_with(policy, PolicyLossConfig(loss_aggregation="prompt_mean", ...), num_generations_per_prompt)

The way of a loss through NeMo-RL (read in commit 7ea279a):

1. `models/policy/lm_policy.py`, `Policy.train`, on the driver: `data` has the rows of one or more optimizer steps, in the
   order of the prompts, `train_global_batch_size` rows a step. `shard_by_batch_size` deals rows to data-parallel ranks and
   micro-batches; a list in the data travels with its rows.
2. `models/megatron/train.py`, `LossPostProcessor`: calls `loss_fn(next_token_logprobs, data, global_valid_seqs,
   global_valid_toks)`, by sequence under sequence packing, else by micro-batch, with log-probs gathered over context
   parallelism, and adds the results up. It multiplies by `M / CP**2`.
3. `models/megatron/setup.py` turns `calculate_per_token_loss` on, and the result is a pair: Megatron multiplies by `CP / M`
   and sums gradients over DP and CP ranks. The other 1 / CP is for the gather, whose backward sums over CP ranks.

So the gradient of a step is the sum of what the loss returns over rows: its share, with nothing to undo. Their two counts,
`global_valid_seqs` and `global_valid_toks`, are not read. `loss_fn` of the configuration gives its type alone; its settings
(clip, KL, importance weights) are those of `PolicyLossConfig` instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.integrations.engine_loss import EngineLoss, StepLoss, of_response, sample_of_row
from megatron_pg.step.sample import Sample
from megatron_pg.step.totals import step_totals

KEY = "megatron_pg_samples"
"""Key of the data: for each row the number of its optimizer step, and its sample."""
FIELDS: Mapping[str, str] = {
    "advantages": "advantages",
    "prev_logprobs": "old_log_probs",
    "reference_policy_logprobs": "ref_log_probs",
    "generation_logprobs": "rollout_log_probs",
}
"""Fields of `Sample` by the key of their data."""


@dataclass(frozen=True)
class NemoRLLoss:
    """A `LossFunction` of NeMo-RL on log-probs."""

    losses: Sequence[EngineLoss]
    """The loss of each optimizer step of a call of `train`."""
    loss_type: Any
    input_type: Any

    def __call__(
        self, data: Any, global_valid_seqs: Any, global_valid_toks: Any, next_token_logprobs: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the share of the rows of `data`, and their part of the reported loss as a number, as theirs do."""
        steps, samples = zip(*data[KEY], strict=True)
        log_probs = map(of_response, next_token_logprobs, samples)
        loss = self.losses[steps[0]](list(log_probs), samples)
        return loss, {"loss": loss.item(), "num_valid_samples": len(samples)}


def samples_of_rows(data: Any, num_generations_per_prompt: int) -> list[Sample]:
    """Make the sample of each row; the rows of one prompt follow each other. A row that is filtered out is fully masked."""
    responses = data["token_mask"].cpu().bool()
    mask = responses & data["sample_mask"].cpu().bool()[:, None]
    fields = {ours: data[theirs].cpu() for theirs, ours in FIELDS.items() if theirs in data}
    return [
        sample_of_row(
            data["input_ids"][row, :length].cpu(),
            int(responses[row].int().argmax()) or length,
            mask[row, :length],
            {field: values[row, :length] for field, values in fields.items()},
            group_index=row // num_generations_per_prompt,
            name=f"row {row}",
        )
        for row, length in enumerate(data["input_lengths"].tolist())
    ]


def train_with(policy: Any, config: PolicyLossConfig, num_generations_per_prompt: int) -> None:
    """Replace `policy.train`, so that it trains on this package's loss.

    A ValueError of a later step names a row whose values no loss can use, a prompt group of different prompts, which
    another order of rows makes, or an optimizer step that cuts a group.
    """
    train = policy.train

    def train_on_samples(data: Any, loss_fn: Any, *others: Any, **named: Any) -> Any:
        if loss_fn.input_type.value != "logprob":
            raise ValueError(
                f"megatron_pg.integrations.nemo_rl: loss_fn reads {loss_fn.input_type.value}, expected a loss on log-probs "
                "such as ClippedPGLossFn"
            )
        samples = samples_of_rows(data, num_generations_per_prompt)
        size = named.get("gbs") or policy.cfg["train_global_batch_size"]
        starts = range(0, len(samples), size)
        totals = [
            step_totals(samples[at : at + size], samples_per_group=num_generations_per_prompt)
            for at in starts
        ]
        data[KEY] = [(row // size, sample) for row, sample in enumerate(samples)]
        losses = [StepLoss(config, count) for count in totals]
        loss = NemoRLLoss(losses, loss_fn.loss_type, loss_fn.input_type)
        return train(data, loss, *others, **named)

    policy.train = train_on_samples
