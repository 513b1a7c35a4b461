"""slime's own way from a rollout's samples to a gradient: conversion, schedule, iterator, hook, batch, loss."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from megatron_pg.integrations.slime import SLIME
from megatron_pg.megatron import enable_cpu_runtime

from . import ranks, sources
from .ranks import Args, MicroBatch, Steps
from .rollout import Case, samples


def all_cases() -> dict[Case, Steps]:
    enable_cpu_runtime()
    sources.use("slime")
    from slime.backends.megatron_utils import cp_utils, data
    from slime.utils import accelerator

    class Cpu(accelerator.Accelerator):
        name = device_type = "cpu"

        is_available = staticmethod(lambda: True)
        device = current_device = staticmethod(lambda index=None: torch.device("cpu"))

    Cpu.__abstractmethods__ = frozenset()
    accelerator.set_accelerator(Cpu())
    found = {}
    for case in ranks.cases_here():
        ranks.initialize(case)
        args = ranks.arguments(case, SLIME, rollout_data_transport="object-store")
        rollout_data = _rollout_data(case, args)
        ranks.fill_in(rollout_data, cp_utils.slice_log_prob_with_cp)
        # As train_actor: the iterator is made first, and the hook is called before training.
        iterators = data.get_data_iterator(rollout_data)
        _hook(case, args, rollout_data)
        steps = _steps(args, rollout_data, iterators[0])
        found[case] = ranks.run_steps(case, steps, cp_utils.slice_with_cp)
    return found


def _rollout_data(case: Case, args: Args) -> dict[str, Any]:
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor
    from slime.ray.rollout import RolloutManager
    from slime.utils.types import Sample

    # Wrapped where ray is installed.
    metadata = getattr(RolloutManager, "__ray_metadata__", None)
    manager = object.__new__(RolloutManager if metadata is None else metadata.modified_class)
    manager.args = args
    manager.custom_convert_samples_to_train_data_func = None
    manager.custom_reward_post_process_func = None
    manager.train_parallel_config = ranks.parallel_sizes(case)
    theirs = [
        Sample(index=sample.rollout_id - 100, **ranks.sample_fields(number, sample))
        for number, sample in enumerate(samples())
    ]
    references = manager._split_train_data_by_dp(manager._convert_samples_to_train_data(theirs))
    worker = object.__new__(MegatronTrainRayActor)
    worker.args = args
    return worker._get_rollout_data(references)


def _hook(case: Case, args: Args, rollout_data: dict[str, Any]) -> None:
    """By the import path that a user gives, through slime's own load_function."""
    from slime.utils.misc import load_function

    hook, masks = ranks.start(case, args, SLIME, load_function), rollout_data["loss_masks"]
    if case.mutant == "mean over length":
        rollout_data["loss_masks"] = [torch.ones_like(mask) for mask in masks]
    hook(args, 0, rollout_data)
    rollout_data["loss_masks"] = masks
    ranks.break_sums(case, rollout_data)


def _steps(args: Args, rollout_data: dict[str, Any], iterator: Any) -> Iterator[list[MicroBatch]]:
    from slime.backends.megatron_utils import data, loss

    counts = rollout_data["num_microbatches"], rollout_data["global_batch_sizes"]
    for count, rollouts in zip(*counts, strict=True):
        batches = [data.get_batch(iterator, ranks.KEYS, 4, False) for _ in range(count)]
        yield [(b, partial(loss.loss_function, args, b, count, rollouts)) for b in batches]
