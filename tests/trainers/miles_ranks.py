"""miles' own way from a rollout's samples to a gradient: hook around its conversion, schedule, store, batch, loss."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from megatron_pg.integrations import miles as integration
from megatron_pg.megatron import enable_cpu_runtime

from . import ranks, sources
from .ranks import Args, MicroBatch, Steps
from .rollout import Case, samples

MODULES = (
    "ray.rollout.train_data_conversion",
    "backends.megatron_utils.parallel",
    "backends.training_utils.parallel",
    "backends.training_utils.data",
    "backends.training_utils.cp_utils",
    "backends.training_utils.loss",
    "utils.object_store",
    "utils.types",
    "utils.ft_utils.process_group_utils",
)


def all_cases() -> dict[Case, Steps]:
    enable_cpu_runtime()
    from megatron.core.fusions import fused_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    from megatron.training.global_vars import set_args

    # Megatron's fused one, which miles imports when called, rounds its gradient to bfloat16 (0.19.2).
    fused_cross_entropy.fused_vocab_parallel_cross_entropy = lambda logits, tokens, group: (
        vocab_parallel_cross_entropy(logits, tokens)
    )
    modules = sources.use("miles", MODULES)
    conversion, megatron_parallel, parallel, data, cp_utils, loss, store, types, groups = modules
    store.init_instance(Args(object_store_backend="ray"))
    found = {}
    for case in ranks.cases_here():
        ranks.initialize(case)
        args = ranks.arguments(
            case,
            megatron_pg_proven_source=ranks.proven("miles", integration.MILES.sources),
            train_backend="megatron",
            qkv_format="thd",
            object_store_backend="ray",
            use_dynamic_global_batch_size=False,
            delay_split_train_data_by_dp=False,
        )
        set_args(args)
        alone = groups.GroupInfo(rank=0, size=1, group=None)
        parallel.set_parallel_state(
            megatron_parallel.create_megatron_parallel_state(indep_dp=alone)
        )
        rollout_data = _rollout_data(case, args, conversion, data, types)
        ranks.fill_in(rollout_data, cp_utils.slice_log_prob_with_cp)
        sums = rollout_data["rollout_mask_sums"]
        rollout_data["rollout_mask_sums"] = ranks.broken_sums(case, sums)
        steps = _steps(args, rollout_data, data, loss)
        found[case] = ranks.run_steps(case, steps, cp_utils.slice_with_cp)
    return found


def _rollout_data(case: Case, args: Args, conversion: Any, data: Any, types: Any) -> dict[str, Any]:
    """This rank's data by the hook, and miles' schedule, split, object store and transport."""
    from miles.utils.misc import load_function

    theirs = [
        types.Sample(index=number, **ranks.sample_fields(number, sample))
        for number, sample in enumerate(samples())
    ]
    hook = ranks.start(
        case, args, "miles", "custom_convert_samples_to_train_data_path", load_function
    )
    if case.mutant == "mean over length":
        masks = [sample.loss_mask for sample in theirs]
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


def _steps(
    args: Args, rollout_data: dict[str, Any], data: Any, loss: Any
) -> Iterator[list[MicroBatch]]:
    iterators, counts = data.get_data_iterator(args, None, rollout_data)
    rollouts = data.get_num_rollouts(args, rollout_data, len(counts))
    for count, num_rollouts in zip(counts, rollouts, strict=True):
        batches = [
            data.get_batch(iterators[0], ranks.KEYS, 4, args.qkv_format) for _ in range(count)
        ]
        settings = {"apply_megatron_loss_scaling": True, "num_rollouts": num_rollouts}
        losses = [partial(loss.loss_function, args, batch, count, **settings) for batch in batches]
        yield list(map(MicroBatch, batches, losses))
