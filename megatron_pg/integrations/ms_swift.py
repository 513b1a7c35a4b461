"""This package's loss inside Megatron GRPO of ms-swift, by a file for its `--external_plugins`:

    import swift.megatron.trainers as trainers

    from megatron_pg import PolicyLossConfig
    from megatron_pg.integrations.ms_swift import with_loss

    config = PolicyLossConfig(loss_aggregation="prompt_mean")
    trainers.MegatronGRPOTrainer = with_loss(trainers.MegatronGRPOTrainer, config)

The way of a loss through ms-swift (read in 4.6.0, `swift/megatron/trainers/grpo_trainer.py`):

1. `_generate_and_score_completions` makes the micro-batches of one or more optimizer steps. Advantages are over
   `num_generations` samples in a row of all processes' samples, which are the prompt groups here.
2. `forward_step` gathers log-probs over context parallelism, with gradient for the rank's own part alone, as `[samples, T]`;
   position p has the log-prob of token p + 1, and so have the mask, advantages and other log-probs of the batch.
3. `loss_func` returns a pair: Megatron multiplies by `CP / M`, M the micro-batches of a rank, and averages gradients over
   DP * CP ranks. So a share is multiplied by `M * DP`.

Their `grpo` and `dr_grpo` are means of micro-batches, averaged. Metrics stay theirs; `loss` is the objective.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.integrations.engine_loss import StepLoss, of_response, sample_of_row
from megatron_pg.megatron.trainer_globals import data_parallel_group
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
    """Return a subclass of their `MegatronGRPOTrainer` that trains on `StepLoss`.

    A ValueError before the first step names their settings that the config lacks, or a prompt that the step cuts.
    """

    class Trainer(trainer):  # type: ignore[misc]
        def _compute_advantages(self, samples: Any, *others: Any, **named: Any) -> Any:
            first = self.process_index * len(samples)
            self.megatron_pg_prompts = [(first + n) // self.num_generations for n in range(len(samples))]
            return super()._compute_advantages(samples, *others, **named)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            refuse_other_settings(self.args, config)
            batches = super()._generate_and_score_completions(inputs)
            by_process: list[Any] = [None] * dist.get_world_size(self._get_rollout_group())
            dist.all_gather_object(by_process, self.megatron_pg_prompts, group=self._get_rollout_group())
            prompts = iter(sum(by_process, []))
            group, size = data_parallel_group(), self.args.num_microbatches
            for step in (batches[at : at + size] for at in range(0, len(batches), size)):
                rows = [samples_of(data["grpo_batch"], prompts, self.args) for data in step]
                totals = step_totals(
                    sum(rows, []),
                    data_parallel_group=group,
                    samples_per_group=self.num_generations,
                    allow_different_prompts=True,
                )
                for data, samples in zip(step, rows, strict=True):
                    data["grpo_batch"].megatron_pg = StepLoss(config, totals), samples
            return batches

        def loss_func(self, output_tensor: Tensor, data: dict[str, Any]) -> Any:
            with torch.no_grad():
                _, metrics = super().loss_func(output_tensor.detach(), data=data)
            loss, samples = data["grpo_batch"].megatron_pg
            share = loss(list(map(of_response, output_tensor, samples)), samples)
            share = share * self.args.num_microbatches * dist.get_world_size(data_parallel_group())
            return share, metrics | self._all_reduce_metric({"loss": share.detach().clone()})

    return Trainer


def samples_of(batch: Any, prompts: Iterator[int], args: Any) -> list[Sample]:
    """Make the samples of a GRPOBatch on the host. It has no tokens, which are 0 here; its padding is masked."""
    responses = batch.completion_mask.cpu()
    mask = responses & ~batch.truncated_mask.cpu()[:, None] if args.overlong_filter else responses
    values = {ours: getattr(batch, theirs) for theirs, ours in FIELDS.items()}
    of_next = {ours: v.cpu() for ours, v in {"mask": mask, **values}.items() if v is not None}
    shifted = {ours: torch.nn.functional.pad(value, (1, 0)) for ours, value in of_next.items()}
    masks = shifted.pop("mask")
    return [
        sample_of_row(
            torch.zeros(len(row), dtype=torch.int64),
            int(responses[number].int().argmax()) + 1,
            row,
            {field: value[number] for field, value in shifted.items()},
            group_index=next(prompts),
            name=f"row {number}",
        )
        for number, row in enumerate(masks)
    ]


def refuse_other_settings(args: Any, config: PolicyLossConfig) -> None:
    """Refuse, by name, settings of theirs about the loss that the config does not have."""
    wanted = {
        **{"loss_type": "grpo", "importance_sampling_level": "token", "delta": None},
        **{"top_entropy_quantile": 1.0, "off_policy_sequence_mask_delta": None},
        **{"rollout_importance_sampling_mode": None, "calculate_per_token_loss": False},
        **{"epsilon": config.eps_clip, "beta": config.kl_loss_coef},
        "epsilon_high": config.eps_clip_high,
    }
    if config.eps_clip_high is None and args.epsilon_high == args.epsilon:
        del wanted["epsilon_high"]
    wrong = [name for name, value in wanted.items() if getattr(args, name) != value]
    if wrong:
        raise ValueError(
            f"ms-swift has {', '.join(f'{name} {getattr(args, name)}' for name in wrong)}, and megatron_pg, which computes the "
            f"loss, {', '.join(f'{name} {wanted[name]}' for name in wrong)}: set the same in both"
        )
