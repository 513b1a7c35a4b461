"""This package's loss inside Megatron GRPO of ms-swift, by a file for its `--external_plugins`:

    import swift.megatron.trainers as trainers
    from megatron_pg import PolicyLossConfig
    from megatron_pg.integrations.ms_swift import with_loss

    theirs, config = trainers.MegatronGRPOTrainer, PolicyLossConfig(loss_aggregation="prompt_mean")
    trainers.MegatronGRPOTrainer = with_loss(theirs, config)

The way of a loss through ms-swift (read in 4.6.0, `swift/megatron/trainers/grpo_trainer.py`):

1. `_generate_and_score_completions` makes the micro-batches of one or more optimizer steps. Advantages are over
   `num_generations` samples in a row of all processes' samples, which are the prompt groups here.
2. `forward_step` gathers log-probs `[samples, T]` over context parallelism, with gradient for the rank's own part alone;
   position p belongs to token p + 1, in the mask, advantages and other log-probs too.
3. `loss_func` returns a pair: Megatron multiplies by `CP / M` and averages gradients over DP * CP ranks.

So a share is multiplied by `M * DP`. Metrics stay theirs; `loss` is the objective.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.integrations import engine_loss
from megatron_pg.megatron.trainer_globals import data_parallel_group
from megatron_pg.step.agreement import gather
from megatron_pg.step.sample import Sample
from megatron_pg.step.totals import step_totals

FIELDS = {
    "advantages": "advantages",
    "old_per_token_logps": "old_log_probs",
    "ref_per_token_logps": "ref_log_probs",
    "rollout_per_token_logps": "rollout_log_probs",
}
"""Fields of `Sample` by the field of their GRPOBatch."""


def with_loss(trainer: type[Any], config: PolicyLossConfig) -> type[Any]:
    """Return a subclass of their `MegatronGRPOTrainer`; a ValueError names settings that differ, or a cut prompt group."""

    class Trainer(trainer):  # type: ignore[misc,valid-type]
        def _compute_advantages(self, samples: Any, *others: Any, **named: Any) -> Any:
            is_training = self.unwrapped_models[0].training
            self.per_prompt = self.num_generations if is_training else self.num_generations_eval
            first = self.process_index * len(samples)
            self.prompt_groups = [(first + n) // self.per_prompt for n in range(len(samples))]
            return super()._compute_advantages(samples, *others, **named)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            engine_loss.refuse_settings("ms-swift", self.args, settings_of(config), config)
            batches = super()._generate_and_score_completions(inputs)
            prompts = itertools.chain(*gather(self.prompt_groups, self._get_rollout_group()))
            group, count = data_parallel_group(), self.args.num_microbatches
            for step in (batches[at : at + count] for at in range(0, len(batches), count)):
                rows = [samples_of(data["grpo_batch"], prompts, self.args) for data in step]
                sizes = {"samples_per_group": self.per_prompt, "allow_different_prompts": True}
                totals = step_totals([*itertools.chain(*rows)], data_parallel_group=group, **sizes)
                for data, samples in zip(step, rows, strict=True):
                    data["grpo_batch"].megatron_pg = engine_loss.StepLoss(config, totals), samples
            return batches

        def loss_func(self, output_tensor: Tensor, data: dict[str, Any]) -> Any:
            with torch.no_grad():
                _, metrics = super().loss_func(output_tensor.detach(), data=data)
            loss, samples = data["grpo_batch"].megatron_pg
            share = loss(list(map(engine_loss.of_response, output_tensor, samples)), samples)
            share = share * self.args.num_microbatches * dist.get_world_size(data_parallel_group())
            return share, metrics | self._all_reduce_metric({"loss": share.detach().clone()})

    return Trainer


def samples_of(batch: Any, prompts: Iterator[int], args: Any) -> list[Sample]:
    """Make the samples of a GRPOBatch. It has no tokens, which are 0 here; its padding is masked."""
    responses = batch.completion_mask
    kept = responses & ~batch.truncated_mask[:, None] if args.overlong_filter else responses
    values = {"loss_mask": kept, **{ours: getattr(batch, name) for name, ours in FIELDS.items()}}
    fields = {ours: pad(value, (1, 0)) for ours, value in values.items() if value is not None}
    tokens = torch.zeros_like(fields["loss_mask"], dtype=torch.int64)
    starts = (responses.int().argmax(dim=1) + 1).tolist()
    widths = [tokens.shape[1]] * len(tokens)
    return engine_loss.samples_of_rows(tokens, starts, widths, fields, prompts)


def settings_of(config: PolicyLossConfig) -> dict[str, Any]:
    """Return their settings about the loss that agree with the config."""
    nothing = "delta off_policy_sequence_mask_delta rollout_importance_sampling_mode".split()
    return dict.fromkeys(nothing) | {
        **{"loss_type": "grpo", "importance_sampling_level": "token", "top_entropy_quantile": 1.0},
        **{"epsilon": config.eps_clip, "epsilon_high": config.eps_clip_high},
        **{"beta": config.kl_loss_coef, "calculate_per_token_loss": False},
    }
