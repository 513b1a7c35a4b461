"""This package's loss inside NeMo-RL, in the launch script, after `setup()`.

    from megatron_pg.integrations.nemo_rl import train_with
    config = PolicyLossConfig(loss_aggregation="prompt_mean", ...)
    train_with(policy, config, num_generations_per_prompt)

How NeMo-RL uses a loss (read in commit 7ea279a):

1. `models/policy/lm_policy.py`, `Policy.train`, on the driver: `data` has the rows of one or more
steps, prompt by prompt. A list in it is split with the rows over ranks and micro-batches.
2. `models/megatron/train.py`, `LossPostProcessor`: calls the loss with log-probs gathered over
context parallelism, adds up, and multiplies by `M / CP**2`. One factor 1 / CP is for the gather,
because its backward sums over CP ranks.
3. `models/megatron/setup.py` turns `calculate_per_token_loss` on, and the result is a pair.
Megatron multiplies by `CP / M` and sums gradients over ranks, so nothing remains to undo.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.integrations.engine_loss import StepLoss
from megatron_pg.step.sample import Sample
from megatron_pg.step.totals import step_totals

KEY = "megatron_pg_samples"
"""The data's key for each row's optimizer step number and sample."""
FIELDS = {
    "advantages": "advantages",
    "prev_logprobs": "old_log_probs",
    "reference_policy_logprobs": "ref_log_probs",
    "generation_logprobs": "rollout_log_probs",
}
"""The fields of `Sample` by data key."""
CLIPS = "ratio_clip_min", "ratio_clip_max", "ratio_clip_c"


@dataclass(frozen=True)
class NemoRLLoss:
    """A NeMo-RL `LossFunction` on log-probs."""

    losses: Sequence[StepLoss]
    """The loss of each optimizer step in a call of `train`."""
    loss_type: Any
    input_type: Any

    def __call__(
        self, data: Any, global_valid_seqs: Any, global_valid_toks: Any, next_token_logprobs: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the share of the objective for the rows of `data`, and their part of the reported
        loss.
        """
        steps, samples = zip(*data[KEY], strict=True)
        rows = zip(next_token_logprobs, samples, strict=True)
        log_probs = [row[s.prompt_length - 1 : s.total_length - 1] for row, s in rows]
        loss = self.losses[steps[0]](log_probs, samples)
        return loss, {"loss": loss.item(), "num_valid_samples": len(samples)}


def samples_of(data: Any, num_generations_per_prompt: int) -> list[Sample]:
    """Make a sample from each row, in groups of consecutive rows. Filtered rows are fully
    masked.
    """
    responses = data["token_mask"].bool()
    fields = {ours: data[theirs] for theirs, ours in FIELDS.items() if theirs in data}
    fields["loss_mask"] = responses & data["sample_mask"].bool()[:, None]
    host = {field: values.cpu() for field, values in fields.items()}
    made, tokens = [], data["input_ids"].cpu()
    firsts = responses.int().argmax(dim=1).tolist()
    for row, length in enumerate(data["input_lengths"].tolist()):
        start = firsts[row] or length
        values: dict[str, Any] = {name: value[row, start:length] for name, value in host.items()}
        values |= {"group_index": row // num_generations_per_prompt, "name": f"row {row}"}
        made.append(Sample(tokens=tokens[row, :length], response_length=length - start, **values))
    return made


def refuse_settings(loss_fn: Any, wanted: Mapping[str, Any], config: PolicyLossConfig) -> None:
    """Raise ValueError for settings of NeMo-RL's loss that differ from `wanted`, or an entropy
    term.
    """
    if config.entropy_coef:
        raise ValueError(
            f"entropy_coef is {config.entropy_coef:g}, but NeMo-RL gives its loss no entropy: set 0"
        )
    # NeMo-RL versions have different settings.
    theirs = {name: getattr(loss_fn, name, value) for name, value in wanted.items()}
    wrong = [name for name, value in wanted.items() if theirs[name] != value]
    if wrong:
        their, our = (", ".join(f"{name} {of[name]}" for name in wrong) for of in (theirs, wanted))
        raise ValueError(f"NeMo-RL has {their}, and megatron_pg {our}: set the same in both")


def train_with(policy: Any, config: PolicyLossConfig, num_generations_per_prompt: int) -> None:
    """Replace `policy.train`. It raises ValueError for a bad row, or a wrong or split group."""
    train = policy.train
    clips = config.eps_clip, config.eps_clip_high or config.eps_clip, config.eps_clip_c
    wanted: dict[str, Any] = dict(zip(CLIPS, clips, strict=True))
    wanted |= {"force_on_policy_ratio": False, "reference_policy_kl_penalty": config.kl_loss_coef}
    wanted |= {} if config.use_tis else {"truncated_importance_sampling_type": None}

    def train_on_samples(data: Any, loss_fn: Any, *others: Any, **named: Any) -> Any:
        if loss_fn.input_type.value != "logprob":
            raise ValueError(f"NeMo-RL's loss_fn reads {loss_fn.input_type.value}, not log-probs")
        refuse_settings(loss_fn, wanted, config)
        samples = samples_of(data, num_generations_per_prompt)
        call = inspect.signature(train).bind(data, loss_fn, *others, **named)
        size = call.arguments.get("gbs") or policy.cfg["train_global_batch_size"]
        steps = [samples[at : at + size] for at in range(0, len(samples), size)]
        totals = [step_totals(step, samples_per_group=num_generations_per_prompt) for step in steps]
        losses = [StepLoss(config, of_step) for of_step in totals]
        data[KEY] = [(row // size, sample) for row, sample in enumerate(samples)]
        call.arguments["loss_fn"] = NemoRLLoss(losses, loss_fn.loss_type, loss_fn.input_type)
        try:
            return train(*call.args, **call.kwargs)
        finally:
            del data[KEY]

    policy.train = train_on_samples
