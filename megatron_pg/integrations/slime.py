"""All four aggregations inside slime as it is, by two of its flags.

    --rollout-data-postprocess-path megatron_pg.integrations.slime.prompt_mean
    --custom-megatron-init-path megatron_pg.integrations.slime.check

The first is called by every training process once a rollout, after the log-probs and advantages and before training, as
`f(args, rollout_id, rollout_data)` (slime/backends/megatron_utils/actor.py, `train_actor`). Its data iterator holds
`rollout_data` by reference, so what is put there is what the loss divides by.

The prompt group of a sample is `sample_indices // n_samples_per_prompt`, as slime's data source numbers samples, or the
whole number in the field of `rollout_data` that `loss_aggregation_group_key` names in `--custom-config-path`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from megatron_pg.integrations.rollout_mask_sums import TrainerStep, rollout_mask_sums
from megatron_pg.integrations.startup import Trainer, require
from megatron_pg.integrations.startup import check as check_of
from megatron_pg.loss.aggregation import Aggregation
from megatron_pg.megatron.trainer_globals import data_parallel_group
from megatron_pg.step.agreement import compute_and_gather
from megatron_pg.step.sample import as_integer
from megatron_pg.step.totals import BareSample

SLIME = Trainer(
    name="slime",
    hook="rollout_data_postprocess_path",
    proven_with="624b824",
    sources={
        "ray/rollout.py": {
            "RolloutManager._convert_samples_to_train_data": "805bfd6234634241",
            "RolloutManager._split_train_data_by_dp": "8b960f3e0b780cf2",
        },
        "observability/rollout_data_utils.py": {
            "tensorize_rollout_data_for_training": "f2aa80356e81253a"
        },
        "utils/data.py": {"process_rollout_data": "0fdf3586a12c5305"},
        "utils/dp_schedule.py": {"build_dp_schedule": "5bf31542ff527ef2"},
        "backends/megatron_utils/actor.py": {
            "MegatronTrainRayActor._get_rollout_data": "9a9d9f91a60e319b",
            "MegatronTrainRayActor.train_actor": "0ce4510458a0d59e",
        },
        "backends/megatron_utils/data.py": {
            "DataIterator.get_next": "21d8dbdafdab791f",
            "get_batch": "768c3e0e1877392d",
            "get_data_iterator": "298e9e127bf82e54",
        },
        "backends/megatron_utils/cp_utils.py": {
            "get_logits_and_tokens_offset_with_cp": "2f516a8236a28249",
            "get_sum_of_sample_mean": "98dc458ca7d1a641",
            "slice_with_cp": "a564430196b7a741",
        },
        "backends/megatron_utils/loss.py": {
            "policy_loss_function": "d848c0c6978b7209",
            "loss_function": "acbb074c6e053b9d",
        },
        "backends/megatron_utils/model.py": {"train_one_step": "00464098b1854b36"},
    },
)


def _postprocess(name: str, args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Overwrite `rollout_data["rollout_mask_sums"]`; the functions of this module are its partials.

    Every training process must call it; two exchanges over the data-parallel group. An error is raised on every rank.

    Raises:
        ValueError: see `require` and `rollout_mask_sums`; a sample without a prompt group; ranks with other divisors.
    """
    group = data_parallel_group()
    # The environment and the installed source may differ from node to node.
    (row, divisor), divisors = compute_and_gather(
        functools.partial(require, SLIME, name, args), lambda found: found[1], group
    )
    if len(set(divisors)) > 1:
        raise ValueError(
            f"{SLIME.path(name)}: the data-parallel ranks have the divisors {divisors}: give all nodes the same"
        )
    indices = _indices_of_steps(rollout_data)
    sums = rollout_mask_sums(
        row,
        divisor,
        functools.partial(_steps, row, args, rollout_data, indices),
        trainer="slime",
        data_parallel_group=group,
        allow_different_prompts=bool(getattr(args, "allow_different_prompts_in_group", False)),
    )
    masks = rollout_data["loss_masks"]
    ours = torch.empty(len(masks), dtype=torch.float64)
    for of_step, values in zip(indices, sums, strict=True):
        ours[of_step] = values
    rollout_data["rollout_mask_sums"] = ours.to(masks[0].device, torch.float32)


prompt_mean = functools.partial(_postprocess, "prompt_mean")
"""The prompt mean (DAPO's paper, ScaleRL), of policy loss, KL and entropy."""

token_mean = functools.partial(_postprocess, "token_mean")
"""The token mean over the whole step, without `--calculate-per-token-loss`, samples without an active token included."""

constant = functools.partial(_postprocess, "constant")
"""Dr.GRPO's constant; L by `loss_aggregation_divisor` in `--custom-config-path` or by the environment variable."""

sample_mean = functools.partial(_postprocess, "sample_mean")
"""The sample mean: what slime has without any flag."""


def check(args: Any) -> None:
    """Refuse inexact settings before the model is loaded, and say what is on (`--custom-megatron-init-path`).

    Called by slime in every training process; no communication. Rank 0 prints one line.

    Raises:
        ValueError: settings that exclude each other, no or two divisors, an unknown version of slime; nothing is on.
    """
    check_of(SLIME, args)


def _indices_of_steps(rollout_data: dict[str, Any]) -> list[list[int]]:
    """Cut the samples of this rank into optimizer steps: its micro-batches in order, `num_microbatches` of them a step."""
    micro_batches = iter(rollout_data["micro_batch_indices"])
    return [
        [index for _ in range(count) for index in next(micro_batches)]
        for count in rollout_data["num_microbatches"]
    ]


def _steps(
    row: Aggregation, args: Any, rollout_data: dict[str, Any], indices: list[list[int]]
) -> list[TrainerStep]:
    """Count this rank's samples of each step."""
    active = torch.stack([mask.sum() for mask in rollout_data["loss_masks"]]).tolist()
    needs_groups = "group_index" in row.inputs
    groups = _groups(args, rollout_data) if needs_groups else [None] * len(active)
    prompts = _prompt_hashes(rollout_data) if needs_groups else [None] * len(active)
    samples = [
        BareSample(count, group, rollout, f"sample {index}", prompt)
        for count, group, rollout, index, prompt in zip(
            active,
            groups,
            rollout_data["rollout_ids"],
            rollout_data.get("sample_indices", range(len(active))),
            prompts,
            strict=True,
        )
    ]
    return [
        TrainerStep([samples[i] for i in of_step], num_rollouts)
        for of_step, num_rollouts in zip(indices, rollout_data["global_batch_sizes"], strict=True)
    ]


def _groups(args: Any, rollout_data: dict[str, Any]) -> list[int]:
    """Find the prompt group of each sample."""
    key = getattr(args, "loss_aggregation_group_key", None)
    field, divisor = ("sample_indices", args.n_samples_per_prompt) if key is None else (key, 1)
    if field not in rollout_data:
        raise ValueError(
            f"{SLIME.path('prompt_mean')}: slime's rollout data has no field {field} to tell prompt groups by; it has "
            f"{', '.join(rollout_data)}. Name one with loss_aggregation_group_key in --custom-config-path"
        )
    groups = []
    for number, value in enumerate(rollout_data[field]):
        if (index := as_integer(value)) is None:
            raise ValueError(
                f"{SLIME.path('prompt_mean')}: {field} of sample {number} of this rank is {value!r}, expected a whole number "
                "that tells its prompt group; set Sample.index as slime's data source does, or name a field that has the "
                "group with loss_aggregation_group_key in --custom-config-path"
            )
        groups.append(index // divisor)
    return groups


def _prompt_hashes(rollout_data: dict[str, Any]) -> list[int]:
    """Hash each sample's prompt tokens; one transfer brings them to the host."""
    prompts = [
        tokens[: total - response]
        for tokens, total, response in zip(
            rollout_data["tokens"],
            rollout_data["total_lengths"],
            rollout_data["response_lengths"],
            strict=True,
        )
    ]
    on_host = torch.split(torch.cat(prompts).cpu(), [len(prompt) for prompt in prompts])
    return [hash(tuple(prompt.tolist())) for prompt in on_host]
