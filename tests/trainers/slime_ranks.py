"""slime's own way from a rollout's samples to a gradient: conversion, schedule, iterator, hook,
batch, loss.
"""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from megatron_pg.integrations.slime import SLIME
from megatron_pg.megatron import enable_cpu_runtime

from . import ranks, sources
from .logit_table import initialize
from .ranks import Args, MicroBatch, Outcome
from .rollout import Case, samples


def all_cases() -> dict[Case, Outcome]:
    enable_cpu_runtime()
    ranks.round_no_gradients()
    sources.use("slime")
    from slime.backends.megatron_utils import cp_utils, data

    sources.slime_on_cpu()
    try:
        from slime.observability.train_metric_utils import log_rollout_data
    except ImportError:  # where older commits have it
        log_rollout_data = data.log_rollout_data
    found = {}
    for case in ranks.cases_here():
        initialize(case.context)
        args = ranks.arguments(case, SLIME, rollout_data_transport="object-store")
        rollout_data = _rollout_data(case, args)
        ranks.fill_in(rollout_data, cp_utils.slice_log_prob_with_cp)
        # As train_actor: the iterator is made first, and the hook is called before training.
        named = {"args": args, "model": None, "rollout_data": rollout_data}
        iterators = ranks.by_name(data.get_data_iterator, **named)
        if isinstance(iterators, tuple):
            iterators, rollout_data["num_microbatches"] = iterators
        _hook(case, args, rollout_data)
        log = ranks.logged(log_rollout_data, args, rollout_data)
        steps = _steps(args, rollout_data, iterators[0])
        found[case] = ranks.run_steps(case, steps, cp_utils.slice_with_cp), log
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
    known = {field.name for field in dataclasses.fields(Sample)}
    theirs = []
    for number, sample in enumerate(samples()):
        fields = {"index": sample.rollout_id - 100, **ranks.sample_fields(number, sample)}
        if "rollout_id" not in known:  # v0.3.0
            fields["group_id"] = fields["rollout_id"]
        theirs.append(Sample(**{name: value for name, value in fields.items() if name in known}))
    data = manager._convert_samples_to_train_data(theirs)
    references = ranks.by_name(manager._split_train_data_by_dp, data, dp_size=case.data)
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

    counts = rollout_data["num_microbatches"]
    rollouts = rollout_data.get("global_batch_sizes")
    for step, count in enumerate(counts):
        batches = [
            data.get_batch(iterator, ranks.KEYS, 4, allgather_cp=False) for _ in range(count)
        ]
        sizes = [count] if rollouts is None else [count, rollouts[step]]
        yield [(b, partial(loss.loss_function, args, b, *sizes)) for b in batches]
