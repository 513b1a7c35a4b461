"""All four aggregations inside unmodified slime, by two of its flags.

    --rollout-data-postprocess-path megatron_pg.integrations.slime.prompt_mean
    --custom-megatron-init-path megatron_pg.integrations.slime.check

Every training process calls the first function once per rollout, before training, as `f(args,
rollout_id, rollout_data)` (slime/backends/megatron_utils/actor.py, `train_actor`, since v0.2.4).
slime's data iterator references `rollout_data`, so its loss reads the divisors that the hook puts
there.

A sample's prompt group is `sample_indices // n_samples_per_prompt`, because slime's data source
numbers samples so, or the integer in the `rollout_data` field that `loss_aggregation_group_key`
names in `--custom-config-path`.
"""

import functools
from types import SimpleNamespace
from typing import Any

import torch

from megatron_pg.integrations.reducers import HOOKS
from megatron_pg.integrations.rollout_mask_sums import Rollout
from megatron_pg.integrations.trainer import Trainer, give_divisors, is_for_all_terms
from megatron_pg.integrations.verify import TrainerHooks
from megatron_pg.loss.aggregation import AGGREGATIONS, Aggregation
from megatron_pg.megatron.trainer_globals import data_parallel_group
from megatron_pg.step.sample import as_integer
from megatron_pg.step.totals import BareSample

Data = dict[str, Any]


def stubs(context_rank: int, context_size: int, data_size: int) -> Data:
    """Return Megatron's parallel state on one rank, for the loss of slime and its forks."""
    mpu = SimpleNamespace(
        get_context_parallel_rank=lambda: context_rank,
        get_context_parallel_world_size=lambda: context_size,
        get_data_parallel_world_size=lambda with_context_parallel=False: (
            data_size * (context_size if with_context_parallel else 1)
        ),
        get_tensor_model_parallel_group=lambda: None,
    )
    return {"mpu": mpu}


FOLDER = "slime.backends.megatron_utils"
SLIME = Trainer(
    "slime",
    "rollout_data_postprocess_path",
    TrainerHooks(f"{FOLDER}.loss:loss_function", f"{FOLDER}.data:DataIterator", stubs),
)
check = SLIME.check


def _postprocess(
    name: str, args: Any, rollout_id: int = 0, rollout_data: Data | None = None
) -> None:
    """Give the samples of `rollout_data` their divisors. Every training process must call it."""
    if rollout_data is None:
        raise ValueError(
            f"{SLIME.path(name)}: this slime version gives its hook no rollout data. Install "
            "v0.2.4 or later, or use --custom-pg-loss-reducer-function-path "
            "megatron_pg.integrations.constant"
        )
    group, row = data_parallel_group(), AGGREGATIONS[name]
    size = 1 if group is None else group.size()

    def rollout() -> Rollout:
        # The environment and the installed source may differ between nodes.
        _, divisor = SLIME.turn_on(name, args)
        return _rollout(row, divisor, args, rollout_data, size)

    sums = SLIME.divisors(row, rollout, args, group)
    give_divisors(sums, is_for_all_terms(args), rollout_data)


sample_mean, prompt_mean, token_mean, constant = (
    functools.partial(_postprocess, name) for name in HOOKS
)
"""The hooks, by aggregation of the policy loss."""


def _rollout(
    row: Aggregation, divisor: float | None, args: Any, data: Data, data_size: int
) -> Rollout:
    """Count this rank's samples."""
    active = torch.stack([mask.sum() for mask in data["loss_masks"]]).tolist()
    groups, prompts = [None] * len(active), [None] * len(active)
    if "group_index" in row.inputs:
        groups, prompts = _groups(args, data), _prompt_hashes(data)
    numbers = data.get("sample_indices", range(len(active)))
    names = [f"sample {number}" for number in numbers]
    # v0.3.0 calls rollouts groups. Before it, every sample is a rollout.
    rollouts: Any = data.get("rollout_ids", data.get("group_ids", numbers))
    samples = list(map(BareSample, active, groups, rollouts, names, prompts))
    return Rollout(samples, *_steps(args, data, data_size), divisor)


def _steps(args: Any, data: Data, data_size: int) -> tuple[list[list[int]], list[int]]:
    """Return each step's sample indices and number of rollouts, as slime splits them."""
    if "micro_batch_indices" in data:
        micro_batches = iter(data["micro_batch_indices"])
        counts = data["num_microbatches"]
        steps = [[i for _ in range(count) for i in next(micro_batches)] for count in counts]
        return steps, data["global_batch_sizes"]
    # Before v0.3.0, get_data_iterator splits a rank's samples in order.
    batch_size = data.get("dynamic_global_batch_size", args.global_batch_size)
    size = batch_size // data_size
    starts = range(0, len(data["loss_masks"]) // size * size, size)
    return [list(range(start, start + size)) for start in starts], [batch_size] * len(starts)


def _groups(args: Any, data: Data) -> list[Any]:
    """Find the prompt group of each sample."""
    key = getattr(args, "loss_aggregation_group_key", None)
    field, divisor = ("sample_indices", args.n_samples_per_prompt) if key is None else (key, 1)
    path, remedy = SLIME.path("prompt_mean"), "loss_aggregation_group_key in --custom-config-path"
    if field not in data:
        raise ValueError(
            f"{path}: slime's rollout data has no field {field} for prompt groups, only "
            f"{', '.join(data)}. Name one with {remedy}"
        )
    indices = [as_integer(value) for value in data[field]]
    if None in indices:
        sample = indices.index(None)
        raise ValueError(
            f"{path}: {field} of sample {sample} of this rank is {data[field][sample]!r}, expected "
            f"an integer: set Sample.index like slime's data source, or name a field with {remedy}"
        )
    return [index // divisor for index in indices if index is not None]


def _prompt_hashes(data: Data) -> list[Any]:
    """Hash each sample's prompt tokens, after one transfer to the host."""
    lengths = zip(data["total_lengths"], data["response_lengths"], strict=True)
    sizes = [total - response for total, response in lengths]
    prompts = [tokens[:size] for tokens, size in zip(data["tokens"], sizes, strict=True)]
    on_host = torch.split(torch.cat(prompts).cpu(), sizes)
    return [hash(tuple(prompt.tolist())) & (2**64 - 1) for prompt in on_host]  # unsigned
