"""All four aggregations inside miles as it is (its Megatron backend), by two of its flags.

    --custom-convert-samples-to-train-data-path megatron_pg.integrations.miles.prompt_mean
    --custom-megatron-init-path megatron_pg.integrations.miles.check

The first replaces miles' conversion of a rollout's samples (miles/ray/rollout/train_data_conversion.py). miles calls it
as `f(args, samples)` in the rollout manager, one process for all ranks. It calls theirs and gives each response length
its sample's divisor, which travels to the training processes (`megatron_pg.integrations.divided_lengths`); there `check`
proves miles' loss and lets it read the divisors. Features that need the rollout's metadata, which miles does not hand on,
are refused. The prompt group of a sample is its `group_index`.
"""

import functools
import importlib
import types
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from typing import Any

from megatron_pg.integrations.divided_lengths import divided_lengths
from megatron_pg.integrations.proof import Door, Place
from megatron_pg.integrations.reducers import HOOKS
from megatron_pg.integrations.rollout_mask_sums import Rollout
from megatron_pg.integrations.trainer import REDUCER, Trainer, is_for_all_terms
from megatron_pg.loss.aggregation import Aggregation
from megatron_pg.step.sample import as_integer
from megatron_pg.step.totals import BareSample

MULTIMODAL = "multimodal inputs let miles cut the steps in each training process, after the conversion: not possible"


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
    divisor, is_constant = on("loss_aggregation_divisor", None), row.name == "constant"
    is_whole = is_constant and is_for_all_terms(args) and float(divisor or 1).is_integer()
    if on("object_store_backend", "ray") == "mooncake" and not is_whole:
        yield (
            "--object-store-backend mooncake carries lengths and rollout_mask_sums as plain whole numbers, and would cut the divisors "
            "off: use ray; sample_mean needs no hook, and constant has --custom-pg-loss-reducer-function-path "
            "megatron_pg.integrations.constant"
        )
    if is_for_all_terms(args) and (
        on("use_critic", False) or on("advantage_estimator", "") == "ppo"
    ):
        yield (
            "regularizer_aggregation: loss with a critic: its value loss reads the same rollout_mask_sums, and would be "
            "aggregated so too; set regularizer_aggregation: sample_mean"
        )
    paths = on("custom_megatron_init_path", None), on("custom_pg_loss_reducer_function_path", None)
    checks = f"{__name__}.check", "megatron_pg.integrations.fused_head.miles"
    if not is_for_all_terms(args) and paths[0] not in checks and REDUCER != paths[1]:
        yield (
            f"nothing lets the training processes read the divisors: add --custom-megatron-init-path {__name__}.check, or, with "
            f"an init function of your own that calls it, --custom-pg-loss-reducer-function-path {REDUCER}"
        )
    if is_constant and divisor is None:
        yield (
            "the conversion runs in the rollout manager, where --train-env-vars do not arrive: give the divisor as "
            "loss_aggregation_divisor in the YAML of --custom-config-path"
        )


def _stand_ins(place: Place) -> dict[str, Any]:
    """Return miles' parallel state on one rank, and the one metric of its loss that communicates, as zero."""

    def group(rank: int, size: int) -> Any:
        return types.SimpleNamespace(rank=rank, size=size, group=None)

    state = types.SimpleNamespace(
        cp=group(place.context_rank, place.context_size),
        tp=group(0, 1),
        intra_dp=group(0, place.data_size),
        intra_dp_cp=group(place.context_rank, place.data_size * place.context_size),
        is_ulysses_cp=False,
    )
    return {
        "get_parallel_state": lambda: state,
        "compute_ess_ratio_contribution": lambda ppo_kl, **unused: ppo_kl.new_zeros(()),
    }


MILES = Trainer(
    "miles",
    "custom_convert_samples_to_train_data_path",
    Door(
        "miles.backends.training_utils.loss:loss_function",
        "miles.backends.training_utils.data:DataIterator",
        _stand_ins,
    ),
    _refusals,
)
check = MILES.check


def _convert(name: str, args: Any, samples: list[Any]) -> dict[str, Any]:
    """Make miles' train data and give its samples their divisors. The hooks of this module are its partials."""
    chosen = MILES.require(name, args)
    conversion = importlib.import_module("miles.ray.rollout.train_data_conversion")
    load_function = importlib.import_module("miles.utils.misc").load_function
    post_process = load_function(getattr(args, "custom_reward_post_process_path", None))
    data: dict[str, Any] = conversion.convert_samples_to_train_data(
        args,
        samples,
        metadata={},
        custom_convert_samples_to_train_data_func=None,
        custom_reward_post_process_func=post_process,
    )
    if "multimodal_train_inputs" in data:
        raise ValueError(f"{MILES.path(name)}: {MULTIMODAL}")
    if (count := len(set(data["rollout_ids"]))) < args.global_batch_size:
        raise ValueError(
            f"{MILES.path(name)}: {count} rollouts are fewer than --global-batch-size {args.global_batch_size}. miles would cut "
            "them into steps by samples, and N and prompt groups with them: make --global-batch-size at most "
            "--rollout-batch-size times --n-samples-per-prompt, and filter no more rollouts than leave a whole step"
        )
    rollout = functools.partial(_rollout, chosen[0], args.global_batch_size, samples, data)
    divisors = MILES.divisors(chosen, rollout, args)
    if is_for_all_terms(args):
        data["rollout_mask_sums"] = divisors.tolist()
    else:
        data["response_lengths"] = divided_lengths(data["response_lengths"], divisors)
    return data


sample_mean, prompt_mean, token_mean, constant = (
    functools.partial(_convert, name) for name in HOOKS
)
"""The aggregations of the policy loss; `token_mean` counts samples without an active token too."""


def _rollout(
    row: Aggregation, batch_size: int, samples: list[Any], data: dict[str, Any]
) -> Rollout:
    """Count the samples. A step is `batch_size` rollouts, in the order of their first samples.

    `build_dp_schedule` of miles/utils/dp_schedule.py cuts them so. The rest is one more step of fewer rollouts, which miles
    trains on (`--allow-partial-train-step`) or drops.
    """
    counted, indices_by_rollout = [], defaultdict(list)
    facts = zip(samples, data["loss_masks"], data["rollout_ids"], strict=True)
    for index, (sample, mask, rollout) in enumerate(facts):
        group, prompt = None, None
        if "group_index" in row.inputs:
            if (group := as_integer(sample.group_index)) is None:
                raise ValueError(
                    f"{MILES.path('prompt_mean')}: group_index of sample {index} (index {sample.index}) is "
                    f"{sample.group_index!r}, expected the number of its prompt group: set Sample.group_index as miles' data source does"
                )
            length = len(sample.tokens) - sample.response_length
            prompt = hash(tuple(sample.tokens[:length])) & (2**64 - 1)
        counted.append(BareSample(sum(mask), group, rollout, f"sample {sample.index}", prompt))
        indices_by_rollout[rollout].append(index)
    rollouts = list(indices_by_rollout.values())
    steps = [rollouts[first : first + batch_size] for first in range(0, len(rollouts), batch_size)]
    return Rollout(counted, [[*chain(*step)] for step in steps], [len(step) for step in steps])
