"""The verification at startup that the installed slime, miles or verl computes an aggregation.

Four tiny samples run through the trainer's functions on the CPU in a fraction of a second. Any
version that computes the aggregation is accepted, and a difference raises an error with both
numbers. For slime and miles, stubs make a log-prob equal to the logit and the entropy to the sum of
the logits, and replace the parallel state, so nothing communicates.
"""

import contextlib
import inspect
import math
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from megatron_pg.step.token_window import TokenWindow

Data = dict[str, Any]
Hook = Callable[[Data], None]
Sizes = tuple[int, int]  # context- and data-parallel
Weights = tuple[Sequence[float], Sequence[float]]
"""Each sample's token weight in the policy loss, and in KL, entropy and every metric."""
verified: set[tuple[Any, ...]] = set()
"""The keys verified in this process, so that editing a checkout does not stop a run later."""
OWN_DIVISORS = ("rollout_mask_sums", "group_mask_sums")
"""The trainers' names of a sample's divisor: in slime and miles, and in slime v0.3.0."""
MASKS = ((1, 1, 0), (1, 1), (1, 0, 1, 1, 1), (1,))
PROMPT_LENGTHS, GROUPS = (2, 2, 1, 3), (0, 0, 1, 1)
MICRO_BATCHES = [[0, 1], [2, 3]]
VOCABULARY, SHIFT, KL, ENTROPY = 5, 0.1, 0.3, 0.1
GRADIENTS = [f"the gradient of tiny sample {index}" for index in range(len(MASKS))]
OFF = """allgather_cp calculate_per_token_loss get_mismatch_metrics recompute_loss_function
    skip_actor_forward_only true_on_policy_mode use_dynamic_global_batch_size use_opd use_opsm
    use_rollout_logprobs use_unbiased_kl""".split()
SETTINGS = dict.fromkeys(OFF, False) | {
    **{"loss_type": "policy_loss", "advantage_estimator": "grpo", "qkv_format": "thd"},
    **{"eps_clip": 0.2, "eps_clip_high": 0.2, "eps_clip_c": None, "dump_details": None},
    **{"tis_clip_low": 0.8, "tis_clip": 1.2, "global_batch_size": len(MASKS)},
    **{"use_kl_loss": True, "kl_loss_coef": KL, "kl_loss_type": "k2"},
    **{"entropy_coef": ENTROPY, "observe_training_entropy": True},
    **{"rollout_temperature": 1.0, "rollout_top_p": 1.0, "log_probs_chunk_size": -1},
}
"""The verified settings of slime and miles: PPO with KL and entropy terms."""


@dataclass(frozen=True)
class TrainerHooks:
    """The functions of slime or miles that are verified, as `module:name`."""

    loss_function: str
    data_iterator: str
    stubs: Callable[[int, int, int], Mapping[str, Any]]
    """A function of context-parallel rank and size and data-parallel size that returns values for
    global names of the trainer's modules."""


def require(key: tuple[Any, ...], find: Callable[[], str | None], claim: str, remedy: str) -> None:
    """Raise ValueError with the difference that `find` returns, once per process and key."""
    if key in verified:
        return
    try:
        with torch.enable_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
            wrong = find()
    except Exception as error:  # a trainer's code may raise anything
        wrong = f"it fails on tiny samples: {type(error).__name__}: {error}"
    if wrong is not None:
        install = "Install a version that docs/migrating.md lists as exact"
        raise ValueError(f"{claim}{wrong}. {install}, or {remedy}")
    verified.add(key)


def difference(found: Data, expected: Data, tolerance: float = 1e-5) -> str | None:
    """Return the first difference, or None. The tolerance is relative to the largest number."""
    for name, right in expected.items():
        errors = (found[name] - right).abs().flatten()
        worst = int(errors.argmax())
        if not errors[worst] <= tolerance * right.abs().max():
            both = (values.flatten()[worst].item() for values in (found[name], right))
            return "{} is {:.6g}, expected {:.6g}".format(name, *both)
    return None


def numbers(*shape: int, seed: int) -> Tensor:
    """Return float32 numbers between -1 and 1 without a random generator."""
    places = torch.arange(math.prod(shape), dtype=torch.float64)
    return (places * 1.7 + 0.9 * seed + 0.3).sin().float().reshape(shape)


def token_weights(aggregation: str, divisor: float | None) -> list[float]:
    """Return each sample's weight per active token, from the definitions."""
    tokens = [sum(mask) for mask in MASKS]
    in_group = {g: sum(n for h, n in zip(GROUPS, tokens, strict=True) if h == g) for g in GROUPS}
    return {
        "sample_mean": [1 / (len(MASKS) * n) for n in tokens],
        "prompt_mean": [1 / (len(in_group) * in_group[group]) for group in GROUPS],
        "token_mean": [1 / sum(tokens)] * len(MASKS),
        "constant": [1 / (len(MASKS) * (divisor or 1.0))] * len(MASKS),
    }[aggregation]


def correction_of(args: Any) -> str:
    """Return a run's rollout correction: none, the trainer's own, or a custom function."""
    if not (getattr(args, "use_tis", False) or getattr(args, "get_mismatch_metrics", False)):
        return "none"
    return "own" if getattr(args, "custom_tis_function_path", None) is None else "custom"


def loss_difference(
    hooks: TrainerHooks, args: Any, weights: Weights, hook: Hook, reducer: Any, sizes: Sizes
) -> str | None:
    """Return the difference between slime's or miles' loss and the definitions, or None.

    `hook` changes the rollout data. `reducer` is a custom reducer that has an argument `place`.
    """
    kind = correction_of(args)
    settings = vars(args) | SETTINGS | {"use_tis": kind != "none"}
    settings["custom_pg_loss_reducer_function_path"] = reducer and "reducer"
    settings["custom_tis_function_path"] = "correction" if kind == "custom" else None
    samples = [_fields(index) for index in range(len(MASKS))]
    leaves = [sample["logits"] for sample in samples]
    loss_function = pkgutil.resolve_name(hooks.loss_function)
    found: Data = {}
    for cp_rank in range(sizes[0]):
        placed = reducer and partial(reducer, place=(cp_rank, sizes[0]))
        functions = {"correction": _correct, "reducer": placed}
        stubs: Data = {"load_function": functions.get, "calculate_log_probs_and_entropy": _scores}
        stubs |= hooks.stubs(cp_rank, *sizes)
        with _stubbed(hooks.loss_function.partition(".")[0], stubs):
            for batch, rows in _micro_batches(hooks, samples, hook, cp_rank, sizes[0]):
                given = {"args": SimpleNamespace(**settings), "batch": batch}
                loss, log = _scaled_loss(loss_function, given, rows, sizes)
                shares = torch.autograd.grad(loss, leaves, retain_graph=True)
                parts = dict(zip(log["keys"], log["values"][1:] / len(MASKS), strict=True))
                parts |= dict(zip(GRADIENTS, shares, strict=True))
                found = {name: found.get(name, 0) + part for name, part in parts.items()}
    return difference(found, _expected(samples, leaves, weights, kind))


def _fields(index: int) -> Data:
    """Return a sample's fields in the trainer's format, and its logits [total, vocabulary]."""
    first, mask = PROMPT_LENGTHS[index], torch.tensor(MASKS[index])
    logits = numbers(first + len(mask), VOCABULARY, seed=index)
    tokens = torch.arange(len(logits)) * (index + 2) % VOCABULARY
    log_probs = logits[first - 1 : -1].gather(1, tokens[first:, None])[:, 0]
    return {
        "logits": logits.requires_grad_(),
        **{"tokens": tokens, "unconcat_tokens": tokens, "loss_masks": mask},
        **{"total_lengths": len(tokens), "response_lengths": len(mask)},
        "log_probs": log_probs - SHIFT,
        "rollout_log_probs": log_probs - 2 * SHIFT,
        "ref_log_probs": log_probs - numbers(len(mask), seed=10 + index),
        "advantages": numbers(len(mask), seed=20 + index),
        **dict.fromkeys(OWN_DIVISORS, mask.sum().float()),
    }


def _expected(samples: list[Data], leaves: list[Tensor], weights: Weights, kind: str) -> Data:
    """Compute gradients and metrics from the definitions, in float64."""
    metrics: Data = {}
    factor = 1.0 if kind == "none" else math.exp(SHIFT)
    for first, sample, policy, own in zip(PROMPT_LENGTHS, samples, *weights, strict=True):
        mask, old = sample["loss_masks"], sample["log_probs"]
        active = _kept(mask) if kind == "custom" else mask
        logits = sample["logits"][first - 1 : -1].double()
        log_probs = logits.gather(1, sample["tokens"][first:, None])[:, 0]
        terms = {
            "pg_loss": -policy * factor * sample["advantages"] * (log_probs - old).exp(),
            "ppo_kl": own * (old - log_probs),
            "entropy_loss": own * logits.sum(1),
            "kl_loss": own * (log_probs - sample["ref_log_probs"]) ** 2 / 2,
        }
        for name, term in terms.items():
            metrics[name] = metrics.get(name, 0) + (active * term).sum()
    loss = metrics["pg_loss"] + KL * metrics["kl_loss"] - ENTROPY * metrics["entropy_loss"]
    gradients = zip(GRADIENTS, torch.autograd.grad(loss, leaves), strict=True)
    return dict(gradients) | {"loss": loss} | metrics


def _kept(mask: Tensor) -> Tensor:
    """Reject samples of one token, for which slime before v0.3.0 computes the same divisor."""
    return mask * (len(mask) > 1)


def _correct(args: Any, *, pg_loss: Tensor, loss_masks: Sequence[Tensor], **others: Any) -> Any:
    """Correct the policy loss like a custom function."""
    return pg_loss * math.exp(SHIFT), list(map(_kept, loss_masks)), {}


def _scores(logits: Tensor, tokens: Tensor, tp_group: Any, *, with_entropy: bool, **_: Any) -> Any:
    """Return log-probs [tokens, 1] and entropy [tokens] that are linear in the logits."""
    return logits.gather(-1, tokens[:, None]), logits.sum(-1) if with_entropy else None


@contextlib.contextmanager
def _stubbed(package: str, stubs: Mapping[str, Any]) -> Iterator[None]:
    """Replace global names in a package's modules, and run its compiled functions eagerly."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for path, module in list(sys.modules.items()):
            names = vars(module) if path.startswith(f"{package}.") else {}
            for name in stubs.keys() & names.keys():
                stack.callback(names.__setitem__, name, names[name])
                names[name] = stubs[name]
        yield


def _micro_batches(
    hooks: TrainerHooks, samples: list[Data], hook: Hook, cp_rank: int, cp_size: int
) -> Iterator[tuple[Data, Tensor]]:
    """Yield a rank's batches from the trainer's iterator, with logits [1, tokens, vocabulary]."""
    data: Data = {key: [sample[key] for sample in samples] for key in samples[0]}
    lengths = data["total_lengths"], data["response_lengths"]
    window = TokenWindow.build(*lengths, cp_rank=cp_rank, cp_size=cp_size)
    num_scored = window.window_segment_ids.bincount(minlength=len(MASKS)).tolist()
    for key in ("log_probs", "ref_log_probs", "rollout_log_probs", "advantages"):
        data[key] = torch.split(torch.cat(data[key])[window.response_indices], num_scored)
    data |= {key: torch.stack(data[key]) for key in OWN_DIVISORS}
    padded = pad(pad_sequence(data.pop("logits"), True), (0, 0, 0, 2 * cp_size))
    num_rows = window.segment_ids.bincount().tolist()
    rows_by_sample = torch.split(padded[window.segment_ids, window.position_ids], num_rows)
    iterator = pkgutil.resolve_name(hooks.data_iterator)
    batches = iterator(rollout_data=data, micro_batch_indices=MICRO_BATCHES)
    hook(data)
    for indices in MICRO_BATCHES:
        batch = batches.get_next(list(data))
        yield {**batch, "max_seq_lens": None}, torch.cat([rows_by_sample[i] for i in indices])[None]


def _scaled_loss(function: Callable[..., Any], given: Data, rows: Tensor, sizes: Sizes) -> Any:
    """Call the trainer's loss like Megatron's schedule and DDP, and return the loss and the
    report.
    """
    schedules = "megatron.core.pipeline_parallel.schedules"
    scaled = pkgutil.resolve_name(f"{schedules}:forward_step_calc_loss")
    given |= dict.fromkeys(("step_global_batch_size", "num_rollouts"), len(MASKS))
    given |= {"num_microbatches": len(MICRO_BATCHES), "apply_megatron_loss_scaling": True}
    names = inspect.signature(function).parameters
    bound = partial(function, **{name: given[name] for name in names if name in given})
    config = SimpleNamespace(calculate_per_token_loss=False, timers=None)
    reports: list[Data] = []
    others = config, None, False, len(MICRO_BATCHES), reports, sizes[0], True
    loss, _ = scaled(None, rows, lambda output: bound(logits=output), *others)
    return loss / math.prod(sizes), reports[0]
