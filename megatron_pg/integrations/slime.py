"""All four aggregations inside slime as it is, by two of its flags.

    --rollout-data-postprocess-path megatron_pg.integrations.slime.prompt_mean
    --custom-megatron-init-path megatron_pg.integrations.slime.check

Every training process calls the first once a rollout, before training, as `f(args, rollout_id, rollout_data)`
(slime/backends/megatron_utils/actor.py, `train_actor`). slime's data iterator holds `rollout_data` by reference, so the loss
divides by the values that the hook puts there.

The prompt group of a sample is `sample_indices // n_samples_per_prompt`, as slime's data source numbers samples, or the
whole number in the field of `rollout_data` that `loss_aggregation_group_key` names in `--custom-config-path`.
"""

import functools
import operator
from typing import Any

import torch

from megatron_pg.integrations.reducers import HOOKS
from megatron_pg.integrations.rollout_mask_sums import Rollout, rollout_mask_sums
from megatron_pg.integrations.trainer import PROVEN, Trainer
from megatron_pg.loss.aggregation import Aggregation
from megatron_pg.megatron.trainer_globals import data_parallel_group
from megatron_pg.step.agreement import compute_and_gather
from megatron_pg.step.sample import as_integer
from megatron_pg.step.totals import BareSample

SLIME = Trainer("slime", "rollout_data_postprocess_path", **PROVEN["slime"])
check = SLIME.check


def _postprocess(name: str, args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Overwrite `rollout_data["rollout_mask_sums"]`; every training process must call it. The hooks are its partials."""
    group = data_parallel_group()
    # The environment and the installed source may differ from node to node.
    (row, divisor), divisors = compute_and_gather(
        functools.partial(SLIME.require, name, args), operator.itemgetter(1), group
    )
    if len(set(divisors)) > 1:
        raise ValueError(
            f"{SLIME.path(name)}: the data-parallel ranks have the divisors {divisors}: give all nodes the same"
        )
    sums = rollout_mask_sums(
        row,
        divisor,
        functools.partial(_rollout, row, args, rollout_data),
        trainer="slime",
        data_parallel_group=group,
        allow_different_prompts=bool(getattr(args, "allow_different_prompts_in_group", False)),
    )
    rollout_data["rollout_mask_sums"] = sums.to(rollout_data["loss_masks"][0].device, torch.float32)


sample_mean, prompt_mean, token_mean, constant = (
    functools.partial(_postprocess, name) for name in HOOKS
)
"""The aggregations of policy loss, KL and entropy; `token_mean` counts samples without an active token too."""


def _rollout(row: Aggregation, args: Any, rollout_data: dict[str, Any]) -> Rollout:
    """Count this rank's samples. A step is `num_microbatches` micro-batches, in order."""
    active = torch.stack([mask.sum() for mask in rollout_data["loss_masks"]]).tolist()
    groups, prompts = [None] * len(active), [None] * len(active)
    if "group_index" in row.inputs:
        groups, prompts = _groups(args, rollout_data), _prompt_hashes(rollout_data)
    names = [f"sample {i}" for i in rollout_data.get("sample_indices", range(len(active)))]
    columns = active, groups, rollout_data["rollout_ids"], names, prompts
    micro_batches = iter(rollout_data["micro_batch_indices"])
    steps = [
        [index for _ in range(count) for index in next(micro_batches)]
        for count in rollout_data["num_microbatches"]
    ]
    samples = [BareSample(*facts) for facts in zip(*columns, strict=True)]
    return Rollout(samples, steps, rollout_data["global_batch_sizes"])


def _groups(args: Any, rollout_data: dict[str, Any]) -> list[Any]:
    """Find the prompt group of each sample."""
    key = getattr(args, "loss_aggregation_group_key", None)
    field, divisor = ("sample_indices", args.n_samples_per_prompt) if key is None else (key, 1)
    flag, groups = SLIME.path("prompt_mean"), []
    if field not in rollout_data:
        raise ValueError(
            f"{flag}: slime's rollout data has no field {field} to tell prompt groups by; it has "
            f"{', '.join(rollout_data)}. Name one with loss_aggregation_group_key in --custom-config-path"
        )
    for number, value in enumerate(rollout_data[field]):
        if (index := as_integer(value)) is None:
            raise ValueError(
                f"{flag}: {field} of sample {number} of this rank is {value!r}, expected a whole number "
                "that tells its prompt group; set Sample.index as slime's data source does, or name a field that has the "
                "group with loss_aggregation_group_key in --custom-config-path"
            )
        groups.append(index // divisor)
    return groups


def _prompt_hashes(rollout_data: dict[str, Any]) -> list[Any]:
    """Hash each sample's prompt tokens; one transfer brings them to the host."""
    lengths = zip(rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True)
    sizes = [total - response for total, response in lengths]
    prompts = [tokens[:size] for tokens, size in zip(rollout_data["tokens"], sizes, strict=True)]
    on_host = torch.split(torch.cat(prompts).cpu(), sizes)
    return [hash(tuple(prompt.tolist())) for prompt in on_host]
