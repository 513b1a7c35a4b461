"""This package's loss inside vime, slime's fork for vLLM, by three of its flags and a line of its YAML:

    --rollout-data-postprocess-path megatron_pg.integrations.vime.prepare
    --loss-type custom_loss --custom-loss-function-path megatron_pg.integrations.vime.loss
    megatron_pg: {loss_aggregation: prompt_mean}      # in --custom-config-path: the fields of PolicyLossConfig

The way of a loss through vime (read in CalvinXKY/vime 1a13bb8, a fork of vllm-project/vime):

1. `backends/megatron_utils/actor.py` calls the first function once a rollout, on every rank. `data.DataIterator` hands on the
   tensors of `rollout_data` themselves, so a token tensor carries its sample and loss.
2. `backends/megatron_utils/loss.py`, `loss_function`: calls the second, and returns `loss * M / N * DP * CP`, with N the
   rollouts of the step. Megatron's schedule and DDP make the sum of `loss / N` over calls and ranks of it.

So a share is multiplied by N. vime cuts log-probs for context parallelism before the first call: it is refused here.
"""

from typing import Any

from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.integrations.engine_loss import StepLoss, refuse_settings
from megatron_pg.megatron.trainer_globals import context_parallel_place, data_parallel_group
from megatron_pg.step.sample import Sample
from megatron_pg.step.totals import step_totals
from megatron_pg.step.values import host_tensor

FIELDS = {
    "loss_masks": "loss_mask",
    "advantages": "advantages",
    "log_probs": "old_log_probs",
    "ref_log_probs": "ref_log_probs",
    "rollout_log_probs": "rollout_log_probs",
    "rollout_ids": "rollout_id",
}
"""Fields of `Sample` by the field of vime's rollout data."""


def prepare(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Make the samples and totals of each step of a rollout; every rank calls it. A ValueError names a setting that differs."""
    config = PolicyLossConfig(**getattr(args, "megatron_pg", {}))
    alike = "eps_clip eps_clip_c entropy_coef use_tis use_opsm".split()
    alike += ["kl_loss_coef", "kl_loss_type", "use_unbiased_kl"] * (config.kl_loss_coef > 0)
    alike += ["tis_clip", "tis_clip_low"] * config.use_tis + ["opsm_delta"] * config.use_opsm
    wanted: dict[str, Any] = {name: getattr(config, name) for name in alike}
    wanted |= {"loss_type": "custom_loss", "calculate_per_token_loss": False}
    wanted |= {"eps_clip_high": config.eps_clip_high or config.eps_clip}
    wanted |= {"use_kl_loss": config.kl_loss_coef > 0, "custom_tis_function_path": None}
    wanted["use_rollout_logprobs"] = config.ratio_anchor == "rollout"
    if config.policy_loss != "gspo" and args.advantage_estimator == "gspo":
        wanted["advantage_estimator"] = "grpo"
    refuse_settings("vime", args, wanted, config, has_entropy=True)
    if context_parallel_place()[1] > 1:
        raise ValueError(
            "megatron_pg.integrations.vime.prepare under --context-parallel-size above 1, where vime has cut the log-probs: "
            "take --custom-pg-loss-reducer-function-path megatron_pg.integrations.constant, or another of its kind"
        )
    group = data_parallel_group()
    fields = {ours: rollout_data[name] for name, ours in FIELDS.items() if name in rollout_data}
    values: Any = {field: [host_tensor(v).cpu() for v in row] for field, row in fields.items()}
    samples = [
        Sample(
            tokens=tokens.cpu(),
            response_length=rollout_data["response_lengths"][number],
            group_index=rollout_data["sample_indices"][number] // args.n_samples_per_prompt,
            name=f"sample {rollout_data['sample_indices'][number]}",
            **{field: row[number] for field, row in values.items()},
        )
        for number, tokens in enumerate(rollout_data["tokens"])
    ]
    batches = iter(rollout_data["micro_batch_indices"])
    size = args.n_samples_per_prompt if config.loss_aggregation == "prompt_mean" else None
    steps = zip(rollout_data["num_microbatches"], rollout_data["global_batch_sizes"], strict=True)
    for count, rollouts in steps:
        members = [number for _ in range(count) for number in next(batches)]
        held = [samples[number] for number in members]
        totals = step_totals(held, data_parallel_group=group, samples_per_group=size)
        for number in members:
            carried = StepLoss(config, totals), samples[number], rollouts
            rollout_data["tokens"][number].megatron_pg = carried


def loss(
    args: Any, batch: Any, logits: Tensor, sum_of_sample_mean: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of a micro-batch as vime calls a custom loss."""
    from vime.backends.megatron_utils.loss import get_log_probs_and_entropy

    losses, samples, rollouts = zip(*(t.megatron_pg for t in batch["unconcat_tokens"]), strict=True)
    needs_entropy = losses[0].config.needs_entropy
    fields = {"max_seq_lens": batch.get("max_seq_lens"), "with_entropy": needs_entropy}
    for name in ("unconcat_tokens", "total_lengths", "response_lengths"):
        fields[name] = batch[name]
    _, made = get_log_probs_and_entropy(logits, args=args, **fields)
    entropy = made["entropy"] if needs_entropy else None
    share = losses[0](made["log_probs"], samples, entropy) * rollouts[0]
    return share, {"loss": share.detach().clone()}
