"""What one rank does around a trainer's own functions: the place of its logits, Megatron's loss
arithmetic, the sums.
"""

import contextlib
import inspect
import io
import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from torch import Tensor

from megatron_pg.integrations.divided_lengths import DividedLength
from megatron_pg.integrations.trainer import Trainer
from tests.oracle import PlainSample

from . import rollout
from .rollout import DIVISOR, VALUE_CLIP, Case, Steps, is_kept, samples

Outcome = tuple[Steps, dict[str, Any]]
"""What training gives on a rank, and what the trainer logs of the rollout: sums and counts by
name."""
MicroBatch = tuple[dict[str, Any], Callable[..., Any]]
"""A batch of the trainer's data iterator, and its own partial of the loss."""
Cut = Callable[..., Tensor]
"""A trainer's own function that cuts a tensor of a sequence over context parallelism."""
KEYS = (
    *("tokens", "total_lengths", "response_lengths", "loss_masks", "log_probs", "ref_log_probs"),
    *("advantages", "rollout_log_probs", "rollout_mask_sums", "rewards", "values", "returns"),
    "group_mask_sums",
)
"""What train_one_step fetches of this test's data, and the rewards, which are the samples' numbers
here."""


class Args(SimpleNamespace):
    """A trainer's arguments: what a case does not set is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def arguments(case: Case, trainer: Trainer, **others: Any) -> Args:
    unused = "rewards_normalization balance_data balance_by_flops calculate_per_token_loss".split()
    return Args(
        **dict.fromkeys(unused, False),
        **dict.fromkeys(("use_dynamic_batch_size", "use_kl_loss", "use_tis"), True),
        **{"advantage_estimator": "grpo", "loss_type": "policy_loss", "kl_loss_type": "k3"},
        qkv_format="thd",
        **{"log_probs_chunk_size": -1, "rollout_temperature": 1.0, "rollout_top_p": 1.0},
        **{"eps_clip": rollout.EPS_CLIP, "eps_clip_high": rollout.EPS_CLIP_HIGH},
        **{"kl_loss_coef": rollout.KL_COEF, "entropy_coef": rollout.ENTROPY_COEF},
        n_samples_per_prompt=rollout.ROLLOUTS_PER_GROUP,
        global_batch_size=rollout.ROLLOUTS_PER_STEP,
        loss_aggregation_divisor=DIVISOR if case.aggregation == "constant" else None,
        context_parallel_size=case.context,
        max_tokens_per_gpu=40 // case.context,
        custom_tis_function_path="tests.trainers.ranks.tis_with_rejection",
        regularizer_aggregation="loss" if case.for_all_terms else "sample_mean",
        value_clip=VALUE_CLIP,
        custom_megatron_init_path=f"megatron_pg.integrations.{trainer.name}.check",
        **others,
    )


def tis_with_rejection(
    args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **others
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """For the trainers' --custom-tis-function-path: clamped weights, and every fourth token
    rejected.
    """
    weights = (torch.cat(list(train_log_probs)) - torch.cat(list(rollout_log_probs))).exp()
    kept = [mask * torch.tensor([is_kept(t) for t in range(len(mask))]) for mask in loss_masks]
    return pg_loss * weights.clamp(0.0, 2.0), kept, {"tis": weights}


def round_no_gradients() -> None:
    """Megatron's fused cross-entropy, which trainers import when called, rounds its gradient to
    bfloat16 (0.19.2).
    """
    from megatron.core.fusions import fused_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    fused_cross_entropy.fused_vocab_parallel_cross_entropy = lambda logits, tokens, group: (
        vocab_parallel_cross_entropy(logits, tokens)
    )


def start(
    case: Case, args: Args, trainer: Trainer, load_function: Callable[[str], Any]
) -> Callable[..., Any]:
    """What a user's two flags do at start, through the trainer's own load_function: the check, and
    the hook.
    """
    path = f"megatron_pg.integrations.{trainer.name}"
    setattr(args, trainer.hook, f"{path}.{case.aggregation}")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        load_function(f"{path}.check")(args)
    said = f"megatron_pg: {case.aggregation} is on in {trainer.name}: 1/"
    assert printed.getvalue().startswith(said)
    return load_function(getattr(args, trainer.hook))


def parallel_sizes(case: Case) -> dict[str, int]:
    alone = {"vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    return {"dp_size": case.data, "cp_size": case.context, **alone}


def sample_fields(number: int, sample: PlainSample) -> dict[str, Any]:
    same = "rollout_id group_index tokens response_length loss_mask rollout_log_probs".split()
    return {name: getattr(sample, name) for name in same} | {"reward": float(number)}


def fill_in(rollout_data: dict[str, Any], cut: Cut) -> None:
    """Gives the data what the policies say and the advantages, as the trainer holds them on this
    rank.
    """
    chosen = [samples()[int(reward)] for reward in rollout_data["rewards"]]
    for field in ("old_log_probs", "ref_log_probs", "advantages", "old_values", "returns"):
        rollout_data[field.removeprefix("old_")] = [
            cut(torch.tensor(getattr(s, field)), len(s.tokens), s.response_length) for s in chosen
        ]


def break_sums(case: Case, rollout_data: dict[str, Any]) -> None:
    if case.mutant == "0.05 % off":
        lengths = rollout_data["response_lengths"]
        rollout_data["response_lengths"] = [DividedLength(n, n.divisor * 1.0005) for n in lengths]


def run_steps(case: Case, steps: Iterator[list[MicroBatch]], slice_with_cp: Cut) -> Steps:
    """Every micro-batch of this rank through the trainer's loss and Megatron's; sums over ranks are
    the caller's.

    Each rank's share of the gradients that Megatron's DDP averages over data and context
    parallelism is returned with that average taken: the shares add up to the gradient.
    """
    leaves = rollout.logits(samples())
    found = []
    for micro_batches in steps:
        reported: dict[str, float] = {}
        used = set()
        for batch, loss_func in micro_batches:
            numbers = [int(reward) for reward in batch["rewards"]]
            used.update(numbers)
            output = torch.cat([_rows(case, leaves[number], slice_with_cp) for number in numbers])
            padding = batch["tokens"].numel() - len(output)
            output = F.pad(output, (0, 0, 0, padding)).unsqueeze(0)
            values = _backward(case, output, loss_func, len(micro_batches))
            if not case.for_all_terms:
                values |= _critics(output, loss_func)
            for name, value in values.items():
                reported[name] = reported.get(name, 0.0) + value / rollout.ROLLOUTS_PER_STEP
        ranks = case.context * case.data
        gradients = {number: leaves[number].grad.double() / ranks for number in used}
        for leaf in leaves:
            leaf.grad = None
        found.append((reported, gradients))
    return found


def _critics(output: Tensor, loss_func: Callable[..., Any]) -> dict[str, float]:
    """What a critic on the same data reports; its values are the first logits."""
    args = Args(**{**vars(loss_func.args[0]), "loss_type": "value_loss"})
    *_, log = loss_func.func(args, *loss_func.args[1:], output[..., :1], **loss_func.keywords)
    return dict(zip(log["keys"], log["values"][1:].tolist(), strict=True))


def logged(
    log_rollout_data: Callable[..., None], args: Args, rollout_data: dict[str, Any]
) -> dict[str, Any]:
    """What the trainer's own function logs of the rollout on this rank, a sum and a count by
    name.
    """
    caught: dict[str, Any] = {}
    names = log_rollout_data.__globals__
    with mock.patch.dict(
        names, gather_log_data=lambda name, args, rollout_id, log: caught.update(log)
    ):
        log_rollout_data(0, args, {k: v for k, v in rollout_data.items() if v is not None})
    return {k: v if isinstance(v, tuple) else (v, 1) for k, v in caught.items()}


def by_name(function: Callable[..., Any], *arguments: Any, **known: Any) -> Any:
    """Call a trainer's function with those of the known arguments that it has at this commit."""
    names = inspect.signature(function).parameters
    return function(*arguments, **{name: value for name, value in known.items() if name in names})


def _backward(
    case: Case, output: Tensor, loss_func: Callable[..., Any], num_microbatches: int
) -> dict[str, float]:
    """Megatron's own arithmetic and backward; what the trainer reports of this micro-batch."""
    config = SimpleNamespace(calculate_per_token_loss=False, timers=None)
    store: list[dict[str, Any]] = []
    loss, _ = forward_step_calc_loss(
        None, output, loss_func, config, None, False, num_microbatches, store, case.context, True
    )
    loss.backward()
    return dict(zip(store[0]["keys"], store[0]["values"][1:].tolist(), strict=True))


def _rows(case: Case, leaf: Tensor, slice_with_cp: Cut) -> Tensor:
    """The logits of one sample that this rank computes, by the trainer's own cut, or in a mutant's
    order.
    """
    if case.mutant != "window in another order":
        return slice_with_cp(leaf, 0)
    half = math.ceil(len(leaf) / (2 * case.context)) * 2
    padded = F.pad(leaf, (0, 0, 0, half * case.context - len(leaf)))
    rank = parallel_state.get_context_parallel_rank()
    return padded[rank * half : (rank + 1) * half]


def sum_over_ranks(ranks: Sequence[Outcome]) -> tuple[Steps, dict[str, float]]:
    total: Steps = []
    for step in zip(*(steps for steps, _ in ranks), strict=True):
        gradients: dict[int, Tensor] = {}
        for _, shares in step:
            for number, gradient in shares.items():
                gradients[number] = gradients.get(number, 0) + gradient
        values = {name: sum(reported[name] for reported, _ in step) for name in step[0][0]}
        total.append((values, gradients))
    logs = [log for _, log in ranks]
    report = {
        name: sum(log[name][0] for log in logs) / sum(log[name][1] for log in logs)
        for name in logs[0]
    }
    return total, report


CASES = [
    Case(aggregation, context, data)
    for context, data in ((1, 1), (2, 1), (1, 2))
    for aggregation in ("prompt_mean", "token_mean", "constant", "sample_mean")
]
CASES += [
    Case(case.aggregation, for_all_terms=True) for case in CASES[:3] if rollout.has_rollouts()
]
MISTAKES = {"0.05 % off": 1, "mean over length": 1, "window in another order": 2}
MUTANTS = [Case("prompt_mean", context, 1, name) for name, context in MISTAKES.items()]


def cases_here() -> list[Case]:
    """The cases of as many ranks as there are."""
    world_size = dist.get_world_size()
    return [case for case in CASES + MUTANTS if case.context * case.data == world_size]
