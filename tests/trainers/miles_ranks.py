"""miles' own way from a rollout's samples to a gradient: hook around its conversion, schedule,
store, batch, loss.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from megatron_pg.integrations.miles import MILES
from megatron_pg.megatron import enable_cpu_runtime

from . import ranks, sources
from .logit_table import initialize
from .ranks import Args, MicroBatch, Outcome
from .rollout import Case, samples


def all_cases() -> dict[Case, Outcome]:
    enable_cpu_runtime()
    ranks.round_no_gradients()
    from megatron.training.global_vars import set_args

    sources.use("miles")
    from miles.backends.megatron_utils.parallel import create_megatron_parallel_state
    from miles.backends.training_utils import cp_utils, log_utils, parallel
    from miles.utils import object_store
    from miles.utils.ft_utils.process_group_utils import GroupInfo

    object_store.init_instance(Args(object_store_backend="ray"))
    found = {}
    for case in ranks.cases_here():
        initialize(case.context)
        unused = ("use_dynamic_global_batch_size", "delay_split_train_data_by_dp")
        args = ranks.arguments(
            case,
            MILES,
            train_backend="megatron",
            object_store_backend="ray",
            **dict.fromkeys(unused, False),
        )
        set_args(args)
        alone = GroupInfo(rank=0, size=1, group=None)
        parallel.set_parallel_state(create_megatron_parallel_state(indep_dp=alone))
        rollout_data = _rollout_data(case, args)
        ranks.fill_in(rollout_data, cp_utils.slice_log_prob_with_cp)
        ranks.break_sums(case, rollout_data)
        log = ranks.logged(log_utils.log_rollout_data, args, rollout_data)
        steps = _steps(args, rollout_data)
        found[case] = ranks.run_steps(case, steps, cp_utils.slice_with_cp), log
    return found


def _rollout_data(case: Case, args: Args) -> dict[str, Any]:
    """This rank's data by the hook, and miles' schedule, split, object store and transport."""
    from miles.backends.training_utils import data
    from miles.ray.rollout import train_data_conversion as conversion
    from miles.utils.misc import load_function
    from miles.utils.types import Sample

    theirs = [
        Sample(index=number, **ranks.sample_fields(number, sample))
        for number, sample in enumerate(samples())
    ]
    hook, masks = ranks.start(case, args, MILES, load_function), [s.loss_mask for s in theirs]
    if case.mutant == "mean over length":
        for sample in theirs:
            sample.loss_mask = [1] * sample.response_length
    # As the rollout manager calls a custom conversion.
    train_data = conversion.convert_samples_to_train_data(
        args,
        theirs,
        metadata={},
        custom_convert_samples_to_train_data_func=hook,
        custom_reward_post_process_func=None,
    )
    if case.mutant == "mean over length":
        train_data["loss_masks"] = masks
    references = conversion.split_train_data_by_dp(args, train_data, ranks.parallel_sizes(case))
    rollout_data, _ = data.get_rollout_data(args, references)
    assert isinstance(rollout_data["rollout_mask_sums"], torch.Tensor)
    return dict(rollout_data)


def _steps(args: Args, rollout_data: dict[str, Any]) -> Iterator[list[MicroBatch]]:
    from miles.backends.training_utils import data, loss

    (iterator, *_), counts = data.get_data_iterator(args, None, rollout_data)
    rollouts = data.get_num_rollouts(args, rollout_data, len(counts))
    for count, num_rollouts in zip(counts, rollouts, strict=True):
        settings = {"apply_megatron_loss_scaling": True, "num_rollouts": num_rollouts}
        batches = [data.get_batch(iterator, ranks.KEYS, 4, args.qkv_format) for _ in range(count)]
        yield [(b, partial(loss.loss_function, args, b, count, **settings)) for b in batches]
