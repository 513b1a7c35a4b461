"""All four aggregations inside unmodified miles (Megatron backend), by two of its flags.

    --custom-convert-samples-to-train-data-path megatron_pg.integrations.miles.prompt_mean
    --custom-megatron-init-path megatron_pg.integrations.miles.check

The first flag replaces miles' conversion of a rollout's samples
(miles/ray/rollout/train_data_conversion.py). miles calls it as `f(args, samples)` in the rollout
manager, one process for all ranks. It calls miles' conversion and gives each response length its
sample's divisor, which reaches the training processes. There `check` verifies miles' loss and lets
it read the divisors. Features that need the rollout's metadata, which miles does not pass on, are
refused. A sample's prompt group is its `group_index`.
"""

import functools
import importlib
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any

from megatron_pg.integrations.divided_lengths import divided_lengths
from megatron_pg.integrations.reducers import HOOKS
from megatron_pg.integrations.rollout_mask_sums import Rollout
from megatron_pg.integrations.trainer import REDUCER, Trainer, is_for_all_terms
from megatron_pg.integrations.verify import TrainerHooks
from megatron_pg.loss.aggregation import Aggregation
from megatron_pg.step.sample import as_integer
from megatron_pg.step.totals import BareSample

MULTIMODAL = "multimodal inputs let miles split the steps after the conversion: not supported"
REFUSED = {
    "use_dynamic_global_batch_size": "--use-dynamic-global-batch-size does not reach a custom "
    "conversion: remove it",
    "multi_lora": "multi-LoRA normalizes each adapter by its own batch size: not supported",
    **dict.fromkeys(
        ("indep_dp", "delay_split_train_data_by_dp"),
        "--indep-dp splits the steps in each training process: remove it",
    ),
    "multimodal_keys": MULTIMODAL,
}


def _refusals(args: Any, row: Aggregation) -> Iterator[str]:
    """Yield features that change miles' conversion, split of steps or scale."""
    on, for_all_terms = functools.partial(getattr, args), is_for_all_terms(args)
    yield from {text: None for name, text in REFUSED.items() if on(name, None)}
    if on("train_backend", "megatron") != "megatron":
        backend = f"--train-backend {args.train_backend}"
        yield f"{backend} does not read rollout_mask_sums: use --train-backend megatron"
    if on("true_on_policy_mode", False) and on("context_parallel_size", 1) > 1:
        yield "--true-on-policy-mode requires --context-parallel-size 1: its scale differs"
    divisor, is_constant = on("loss_aggregation_divisor", None), row.name == "constant"
    is_whole = is_constant and for_all_terms and float(divisor or 1).is_integer()
    if on("object_store_backend", "ray") == "mooncake" and not is_whole:
        yield (
            "--object-store-backend mooncake transfers only plain integers and would lose the "
            "divisors: use ray"
        )
    if for_all_terms and (on("use_critic", False) or on("advantage_estimator", "") == "ppo"):
        yield (
            "regularizer_aggregation: loss with a critic: its value loss reads the same sums. Set "
            "regularizer_aggregation: sample_mean"
        )
    init, reducer = (
        on("custom_megatron_init_path", 0),
        on("custom_pg_loss_reducer_function_path", 0),
    )
    checks = f"{__name__}.check", "megatron_pg.integrations.fused_head.miles"
    if not for_all_terms and init not in checks and reducer != REDUCER:
        yield (
            "nothing lets the training processes read the divisors: add "
            f"--custom-megatron-init-path {checks[0]}, or, if your own init function calls it, "
            f"--custom-pg-loss-reducer-function-path {REDUCER}"
        )
    if is_constant and divisor is None:
        yield (
            "the conversion runs in the rollout manager, which does not get --train-env-vars: set "
            "loss_aggregation_divisor in the YAML of --custom-config-path"
        )


def _stubs(context_rank: int, context_size: int, data_size: int) -> dict[str, Any]:
    """Return miles' parallel state on one rank, and zero for the only metric that communicates."""
    state = SimpleNamespace(
        cp=SimpleNamespace(rank=context_rank, size=context_size, group=None),
        tp=SimpleNamespace(rank=0, size=1, group=None),
        intra_dp=SimpleNamespace(rank=0, size=data_size, group=None),
        intra_dp_cp=SimpleNamespace(rank=context_rank, size=data_size * context_size, group=None),
        is_ulysses_cp=False,
    )
    return {
        "get_parallel_state": lambda: state,
        "compute_ess_ratio_contribution": lambda ppo_kl, **unused: ppo_kl.new_zeros(()),
    }


FOLDER = "miles.backends.training_utils"
MILES = Trainer(
    "miles",
    "custom_convert_samples_to_train_data_path",
    TrainerHooks(f"{FOLDER}.loss:loss_function", f"{FOLDER}.data:DataIterator", _stubs),
    _refusals,
)
check = MILES.check


def _convert(name: str, args: Any, samples: list[Any]) -> dict[str, Any]:
    """Make miles' training data with the samples' divisors."""
    row, divisor = MILES.require(name, args)
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
    if (count := len(set(data["rollout_ids"]))) < args.global_batch_size:
        raise ValueError(
            f"{MILES.path(name)}: {count} rollouts are fewer than --global-batch-size "
            f"{args.global_batch_size}: reduce it, or filter fewer rollouts"
        )
    rollout = _rollout(row, args.global_batch_size, samples, data)._replace(divisor=divisor)
    divisors = MILES.divisors(row, lambda: rollout, args)
    if is_for_all_terms(args):
        data["rollout_mask_sums"] = divisors.tolist()
    else:
        data["response_lengths"] = divided_lengths(data["response_lengths"], divisors)
    return data


sample_mean, prompt_mean, token_mean, constant = (
    functools.partial(_convert, name) for name in HOOKS
)
"""The hooks, by aggregation of the policy loss."""


def _rollout(row: Aggregation, batch_size: int, samples: list[Any], data: Any) -> Rollout:
    """Count the samples. A step has `batch_size` rollouts, in the order of their first samples.

    miles/utils/dp_schedule.py (`build_dp_schedule`) splits them like this. The rest is a step with
    fewer rollouts, which miles trains on (`--allow-partial-train-step`) or drops.
    """
    counted, indices_by_rollout = [], defaultdict(list)
    facts = zip(samples, data["loss_masks"], data["rollout_ids"], strict=True)
    for index, (sample, mask, rollout) in enumerate(facts):
        group, prompt = None, None
        if "group_index" in row.inputs:
            if (group := as_integer(sample.group_index)) is None:
                raise ValueError(
                    f"{MILES.path('prompt_mean')}: group_index of sample {index} (index "
                    f"{sample.index}) is {sample.group_index!r}: set the number of its prompt group"
                )
            length = len(sample.tokens) - sample.response_length
            prompt = hash(tuple(sample.tokens[:length])) & (2**64 - 1)
        counted.append(BareSample(sum(mask), group, rollout, f"sample {sample.index}", prompt))
        indices_by_rollout[rollout].append(index)
    rollouts = list(indices_by_rollout.values())
    steps = [rollouts[first : first + batch_size] for first in range(0, len(rollouts), batch_size)]
    return Rollout(counted, [[*chain(*step)] for step in steps], [len(step) for step in steps])
