"""All four aggregations inside miles as it is (its Megatron backend), by two of its flags.

    --custom-convert-samples-to-train-data-path megatron_pg.integrations.miles.prompt_mean
    --custom-megatron-init-path megatron_pg.integrations.miles.check

The first replaces miles' conversion of a rollout's samples (miles/ray/rollout/train_data_conversion.py), as
`f(args, samples)` in the rollout manager, one process for all ranks: it calls theirs and overwrites `rollout_mask_sums`.
miles gives such a function neither its reward post-processing, which is loaded here by the flag that names it, nor the
rollout's metadata, which only features that are refused here need.

The prompt group of a sample is its `group_index`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

from megatron_pg.integrations.rollout_mask_sums import TrainerStep, rollout_mask_sums
from megatron_pg.integrations.startup import Trainer, require
from megatron_pg.integrations.startup import check as check_of
from megatron_pg.loss.aggregation import Aggregation
from megatron_pg.step.sample import as_integer
from megatron_pg.step.totals import BareSample


def _refusals(args: Any, row: Aggregation) -> Iterator[str]:
    """Yield features that change miles' conversion, cut of steps or scale."""
    on = functools.partial(getattr, args)
    if on("train_backend", "megatron") != "megatron":
        yield f"--train-backend {args.train_backend} does not read rollout_mask_sums: use --train-backend megatron"
    if on("use_dynamic_global_batch_size", False):
        yield "--use-dynamic-global-batch-size: miles does not tell a custom conversion the batch size; drop it"
    if on("multi_lora", False):
        yield "multi-LoRA normalizes each adapter by its own batch size, and needs metadata that a custom conversion is not given"
    if on("indep_dp", False) or on("delay_split_train_data_by_dp", False):
        yield "--indep-dp (fault-tolerant training) cuts the steps in each training process: drop it"
    if on("multimodal_keys", None):
        yield MULTIMODAL
    if on("true_on_policy_mode", False) and on("context_parallel_size", 1) > 1:
        yield "--true-on-policy-mode scales the loss in another way under context parallelism: use --context-parallel-size 1"
    whole = row.name == "sample_mean" or (
        row.name == "constant" and float(on("loss_aggregation_divisor", None) or 1).is_integer()
    )
    if on("object_store_backend", "ray") == "mooncake" and not whole:
        yield (
            "--object-store-backend mooncake carries rollout_mask_sums as whole numbers, and would cut the divisors off: "
            "use ray"
        )
    if row.name == "constant" and on("loss_aggregation_divisor", None) is None:
        yield (
            "the conversion runs in the rollout manager, where --train-env-vars do not arrive: give the divisor as "
            "loss_aggregation_divisor in the YAML of --custom-config-path"
        )


MULTIMODAL = "multimodal inputs let miles cut the steps in each training process, after the conversion: not possible"

MILES = Trainer(
    name="miles",
    hook="custom_convert_samples_to_train_data_path",
    refusals=_refusals,
    proven_with="31f1ca9",
    sources={
        "ray/rollout/train_data_conversion.py": {
            "convert_samples_to_train_data": "eb4bfaff90858ec4",
            "can_schedule_on_rollout_side": "a61148836dad2269",
            "split_train_data_by_dp_scheduled_raw": "e33d5d9973c570fe",
            "_package_shards": "7fa744cfa6276afe",
            "process_rollout_data_shard": "88fcc29a7d67e776",
        },
        "utils/dp_schedule.py": {"build_dp_schedule": "0ef3b82ad9225613"},
        "utils/object_store.py": {"RayObjectStore.put": "ec773a4fc8b16d03"},
        "backends/training_utils/data.py": {
            "get_rollout_data": "c504f29fe65c6992",
            "get_batch": "14c4efb306814fa2",
            "DataIterator.get_next": "94fd391acb44a4dd",
            "get_num_rollouts": "6ac8b57f26a68401",
            "get_data_iterator": "210bb32ba629de08",
        },
        "backends/training_utils/cp_utils.py": {
            "get_logits_and_tokens_offset_with_cp": "a50da1fac8397737",
            "_slice_loss_mask_for_local_cp": "0ac8ea188afaa151",
            "get_sum_of_sample_mean": "711f531b57f402a3",
            "slice_with_cp": "3866310b5937c15a",
        },
        "backends/training_utils/loss.py": {"loss_function": "1bbe4b23a1880543"},
        "backends/training_utils/loss_hub/losses.py": {"policy_loss_function": "83223b1b1c4ec3d4"},
        "backends/megatron_utils/actor.py": {
            "MegatronTrainRayActor.train_actor": "e6f7d70e61f5bc64"
        },
        "backends/megatron_utils/model.py": {"train_one_step": "2e987eecc176f439"},
    },
)


def _convert(name: str, args: Any, samples: list[Any]) -> dict[str, Any]:
    """Make the train data of miles and overwrite `rollout_mask_sums`; the functions of this module are its partials.

    Raises:
        ValueError: see `require` and `rollout_mask_sums`; a sample without `group_index` under `prompt_mean`.
    """
    row, divisor = require(MILES, name, args)
    conversion = importlib.import_module("miles.ray.rollout.train_data_conversion")
    load_function = importlib.import_module("miles.utils.misc").load_function
    data: dict[str, Any] = conversion.convert_samples_to_train_data(
        args,
        samples,
        metadata={},
        custom_convert_samples_to_train_data_func=None,
        custom_reward_post_process_func=load_function(
            getattr(args, "custom_reward_post_process_path", None)
        ),
    )
    if "multimodal_train_inputs" in data:
        raise ValueError(f"{MILES.path(name)}: {MULTIMODAL}")
    steps = _indices_of_steps(data["rollout_ids"], args.global_batch_size)
    sums = rollout_mask_sums(
        row,
        divisor,
        functools.partial(_steps, row, samples, data, steps),
        trainer="miles",
        allow_different_prompts=bool(getattr(args, "allow_different_prompts_in_group", False)),
    )
    for of_step, values in zip(steps, sums, strict=True):
        for index, value in zip(of_step, values.tolist(), strict=True):
            data["rollout_mask_sums"][index] = value
    return data


prompt_mean = functools.partial(_convert, "prompt_mean")
"""The prompt mean (DAPO's paper, ScaleRL), of policy loss, KL and entropy."""

token_mean = functools.partial(_convert, "token_mean")
"""The token mean over the whole step, without `--calculate-per-token-loss`, samples without an active token included."""

constant = functools.partial(_convert, "constant")
"""Dr.GRPO's constant; L by `loss_aggregation_divisor` in `--custom-config-path`."""

sample_mean = functools.partial(_convert, "sample_mean")
"""The sample mean: what miles has without any flag."""


def check(args: Any) -> None:
    """Refuse inexact settings before the model is loaded, and say what is on (`--custom-megatron-init-path`).

    Called by miles in every training process; no communication. Rank 0 prints one line.

    Raises:
        ValueError: settings that exclude each other, no or two divisors, an unknown version of miles; nothing is on.
    """
    check_of(MILES, args)


def _indices_of_steps(rollout_ids: list[int], global_batch_size: int) -> list[list[int]]:
    """Cut the samples into optimizer steps: `global_batch_size` rollouts each, in the order of their first sample.

    As miles/utils/dp_schedule.py, `build_dp_schedule`. The rest is one more step of fewer rollouts, which miles trains on
    (`--allow-partial-train-step`) or drops: its divisors are right for the one and unused in the other.
    """
    of_rollout: dict[int, list[int]] = {}
    for index, rollout in enumerate(rollout_ids):
        of_rollout.setdefault(rollout, []).append(index)
    rollouts = list(of_rollout.values())
    return [
        [index for of_one in rollouts[first : first + global_batch_size] for index in of_one]
        for first in range(0, len(rollouts), global_batch_size)
    ]


def _steps(
    row: Aggregation, samples: list[Any], data: dict[str, Any], steps: list[list[int]]
) -> list[TrainerStep]:
    """Count the samples of each step."""
    counted = []
    for index, (sample, mask) in enumerate(zip(samples, data["loss_masks"], strict=True)):
        group, prompt = None, None
        if "group_index" in row.inputs:
            if (group := as_integer(sample.group_index)) is None:
                raise ValueError(
                    f"{MILES.path('prompt_mean')}: group_index of sample {index} (index {sample.index}) is "
                    f"{sample.group_index!r}, expected the number of its prompt group: set Sample.group_index as miles' data source does"
                )
            prompt = hash(tuple(sample.tokens[: len(sample.tokens) - sample.response_length]))
        name = f"sample {sample.index}"
        counted.append(BareSample(sum(mask), group, data["rollout_ids"][index], name, prompt))
    return [
        TrainerStep([counted[i] for i in of_step], len({data["rollout_ids"][i] for i in of_step}))
        for of_step in steps
    ]
