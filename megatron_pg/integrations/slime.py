"""All four aggregations inside slime as it is, by two of its flags.

    --rollout-data-postprocess-path megatron_pg.integrations.slime.prompt_mean
    --custom-megatron-init-path megatron_pg.integrations.slime.check

Every training process calls the first once a rollout, before training, as `f(args, rollout_id, rollout_data)`
(slime/backends/megatron_utils/actor.py, `train_actor`; since v0.2.4). slime's data iterator holds `rollout_data` by
reference, so its loss meets the divisors that the hook puts there (`megatron_pg.integrations.divided_lengths`).

The prompt group of a sample is `sample_indices // n_samples_per_prompt`, as slime's data source numbers samples, or the
whole number in the field of `rollout_data` that `loss_aggregation_group_key` names in `--custom-config-path`.
"""

import functools
import operator
import types
from typing import Any

import torch

from megatron_pg.integrations.proof import Door, Place
from megatron_pg.integrations.reducers import HOOKS
from megatron_pg.integrations.rollout_mask_sums import Rollout
from megatron_pg.integrations.trainer import Trainer, give_divisors, is_for_all_terms
from megatron_pg.loss.aggregation import Aggregation
from megatron_pg.megatron.trainer_globals import data_parallel_group
from megatron_pg.step.agreement import compute_and_gather
from megatron_pg.step.sample import as_integer
from megatron_pg.step.totals import BareSample


def stand_ins(place: Place) -> dict[str, Any]:
    """Return Megatron's parallel state on one rank, as the loss of slime and its forks asks for it."""

    def data_parallel_size(with_context_parallel: bool = False) -> int:
        return place.data_size * (place.context_size if with_context_parallel else 1)

    state = {
        "get_context_parallel_rank": lambda: place.context_rank,
        "get_context_parallel_world_size": lambda: place.context_size,
        "get_data_parallel_world_size": data_parallel_size,
        "get_tensor_model_parallel_group": lambda: None,
    }
    return {"mpu": types.SimpleNamespace(**state)}


SLIME = Trainer(
    "slime",
    "rollout_data_postprocess_path",
    Door(
        "slime.backends.megatron_utils.loss:loss_function",
        "slime.backends.megatron_utils.data:DataIterator",
        stand_ins,
    ),
)
check = SLIME.check


def _postprocess(
    name: str, args: Any, rollout_id: int = 0, rollout_data: dict[str, Any] | None = None
) -> None:
    """Give the samples of `rollout_data` their divisors; every training process must call it. The hooks are its partials."""
    if rollout_data is None:
        raise ValueError(
            f"{SLIME.path(name)}: this slime hands its hook no rollout data (before v0.2.4): install v0.2.4 or later, or take "
            "--custom-pg-loss-reducer-function-path megatron_pg.integrations.constant in place of the hook"
        )
    group = data_parallel_group()
    # The environment and the installed source may differ from node to node.
    chosen, divisors = compute_and_gather(
        functools.partial(SLIME.turn_on, name, args), operator.itemgetter(1), group
    )
    if len(set(divisors)) > 1:
        raise ValueError(
            f"{SLIME.path(name)}: the data-parallel ranks have the divisors {divisors}: give all nodes the same"
        )
    size = 1 if group is None else group.size()
    rollout = functools.partial(_rollout, chosen[0], args, rollout_data, size)
    sums = SLIME.divisors(chosen, rollout, args, group)
    give_divisors(sums, is_for_all_terms(args), rollout_data)


sample_mean, prompt_mean, token_mean, constant = (
    functools.partial(_postprocess, name) for name in HOOKS
)
"""The aggregations of the policy loss; `token_mean` counts samples without an active token too."""


def _rollout(row: Aggregation, args: Any, rollout_data: dict[str, Any], data_size: int) -> Rollout:
    """Count this rank's samples."""
    active = torch.stack([mask.sum() for mask in rollout_data["loss_masks"]]).tolist()
    groups, prompts = [None] * len(active), [None] * len(active)
    if "group_index" in row.inputs:
        groups, prompts = _groups(args, rollout_data), _prompt_hashes(rollout_data)
    numbers = rollout_data.get("sample_indices", range(len(active)))
    names = [f"sample {number}" for number in numbers]
    # v0.3.0 calls rollouts groups; before it every sample is a rollout.
    rollouts = rollout_data.get("rollout_ids", rollout_data.get("group_ids", numbers))
    columns = active, groups, rollouts, names, prompts
    samples = [BareSample(*facts) for facts in zip(*columns, strict=True)]
    return Rollout(samples, *_steps(args, rollout_data, data_size))


def _steps(
    args: Any, rollout_data: dict[str, Any], data_size: int
) -> tuple[list[list[int]], list[int]]:
    """Return the indices of each step's samples and the step's rollouts, as slime cuts them."""
    if "micro_batch_indices" in rollout_data:
        micro_batches = iter(rollout_data["micro_batch_indices"])
        counts = rollout_data["num_microbatches"]
        steps = [[i for _ in range(count) for i in next(micro_batches)] for count in counts]
        return steps, rollout_data["global_batch_sizes"]
    # Before v0.3.0 get_data_iterator cuts the samples of a rank in their order.
    batch_size = rollout_data.get("dynamic_global_batch_size", args.global_batch_size)
    size = batch_size // data_size
    starts = range(0, len(rollout_data["loss_masks"]) // size * size, size)
    return [list(range(start, start + size)) for start in starts], [batch_size] * len(starts)


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
    # Without a sign, as hashes of prompts are here.
    return [hash(tuple(prompt.tolist())) & (2**64 - 1) for prompt in on_host]
