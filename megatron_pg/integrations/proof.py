"""A proof at startup that a trainer's own loss, as it is installed, computes an aggregation with this package's hooks.

Four tiny samples go through the trainer's data iterator, loss function and Megatron's scaling of the loss, on the CPU, in a
fraction of a second. The gradient of every logit and the reported metrics are compared with plain loops in float64. No
version is known beforehand: source that computes the aggregation is accepted, and other source is refused with the numbers.

The trainer's functions run as copies whose global names are copies too, in which its parallel state is a stand-in and the
log-probs come from plain logits. So there is no communication, and no state of the trainer's process changes.
"""

import importlib
import inspect
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_pg.integrations.function_copies import copier

TOLERANCE = 1e-5
"""Largest accepted difference, as a part of the largest number compared; the trainers compute in float32."""
PROVEN: set[tuple[Any, ...]] = set()
"""Proofs of this process. They are made once: an edit of the checkout is not to stop a run half-way."""
VOCABULARY = 5
REDUCER_PATH, CORRECTION_PATH = "megatron_pg.reducer", "megatron_pg.correction"
"""The import paths of the custom reducer and of a custom rollout correction in the settings of the proof."""
SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("eps_clip", "eps_clip_high"), 0.2),
    **{"kl_loss_coef": 0.3, "kl_loss_type": "k2", "entropy_coef": 0.1, "log_probs_chunk_size": -1},
    **{"advantage_estimator": "grpo", "loss_type": "policy_loss", "qkv_format": "thd"},
    **dict.fromkeys(("rollout_temperature", "rollout_top_p"), 1.0),
    **dict.fromkeys(("use_kl_loss", "observe_training_entropy"), True),
    **dict.fromkeys(("dump_details", "eps_clip_c"), None),
    **{"tis_clip": 1.2, "tis_clip_low": 0.8},
    **dict.fromkeys(
        "allgather_cp calculate_per_token_loss recompute_loss_function skip_actor_forward_only "
        "true_on_policy_mode use_dynamic_global_batch_size use_opd use_opsm use_rollout_logprobs use_unbiased_kl".split(),
        False,
    ),
}
"""Settings of the loss that is proven: PPO with a KL and an entropy term."""
Correction = Literal["none", "own", "custom"]
"""The rollout correction of a run: the trainer's own TIS, or a function by import path, for which the proof's stands in."""


class TinySample(NamedTuple):
    """A sample of the proof."""

    prompt_length: int
    mask: Sequence[int]
    group: int


SAMPLES = (
    TinySample(2, (1, 1, 0), 0),
    TinySample(2, (1, 1), 0),
    TinySample(1, (1, 0, 1, 1, 1), 1),
    TinySample(3, (1,), 1),
)
MICRO_BATCHES = ((0, 1), (2, 3))


class Place(NamedTuple):
    """A rank: its place in the context-parallel group, and the sizes of that and of the data-parallel group."""

    context_rank: int
    context_size: int
    data_size: int


Weights = tuple[Sequence[float], Sequence[float]]
"""The weight of a token of each sample in the policy loss, and in its KL and entropy terms and every metric."""


@dataclass(frozen=True)
class Door:
    """The functions of a trainer that the proof goes through."""

    loss_function: str  # module:name
    data_iterator: str
    stand_ins: Callable[[Place], Mapping[str, Any]]
    """Global names of the trainer's modules, by name."""


def token_weights(aggregation: str, divisor: float | None) -> list[float]:
    """Return what an active token of each sample weighs, from the definitions of the four aggregations."""
    tokens = [sum(sample.mask) for sample in SAMPLES]
    group_tokens = [
        sum(n for n, other in zip(tokens, SAMPLES, strict=True) if other.group == sample.group)
        for sample in SAMPLES
    ]
    num_groups = len({sample.group for sample in SAMPLES})
    return {
        "sample_mean": [1 / (len(SAMPLES) * n) for n in tokens],
        "prompt_mean": [1 / (num_groups * n) for n in group_tokens],
        "token_mean": [1 / sum(tokens)] * len(SAMPLES),
        "constant": [1 / (len(SAMPLES) * (divisor or 1.0))] * len(SAMPLES),
    }[aggregation]


def correction_of(args: Any) -> Correction:
    """Return the rollout correction of a run of slime or miles."""
    flags = ("use_tis", "get_mismatch_metrics")
    if not any(getattr(args, flag, False) for flag in flags):
        return "none"
    return "own" if getattr(args, "custom_tis_function_path", None) is None else "custom"


def require(key: tuple[Any, ...], find: Callable[[], str | None], claim: str, remedy: str) -> None:
    """Raise a ValueError with the difference that `find` returns, or with its error; once a process for each key."""
    if key in PROVEN:
        return
    try:
        wrong = find()
    except Exception as error:  # a trainer's code may raise anything at all
        wrong = f"it cannot be run on tiny samples: {type(error).__name__}: {error}"
    if wrong is not None:
        raise ValueError(
            f"{claim}{wrong}. Install a version that docs/migrating.md lists as exact, or {remedy}"
        )
    PROVEN.add(key)


def prove(
    door: Door,
    args: Any,
    weights: Weights,
    hook: Callable[[dict[str, Any]], None],
    reducer: Callable[..., Any] | None,
    sizes: tuple[int, int],
) -> str | None:
    """Return the first difference between the trainer's loss and the loops, in words; None where they agree.

    `args` are the trainer's, of which `SETTINGS` are replaced; a run with a rollout correction is proven with one. `hook`
    changes the rollout data, and `reducer` is a custom reducer that takes its `place`, or None. `sizes` are those of context
    and data parallelism. Errors are the trainer's.
    """
    logits = [
        numbers(len(sample.mask) + sample.prompt_length, VOCABULARY, seed=i)
        for i, sample in enumerate(SAMPLES)
    ]
    with torch.enable_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        leaves = [leaf.double().requires_grad_() for leaf in logits]
        correction = correction_of(args)
        # Before v0.3.0 slime divides KL, entropy and metrics by the tokens that a correction keeps.
        by_kept = [False, True] if correction == "custom" else [False]
        expected = [_expected(leaves, weights, correction, is_kept) for is_kept in by_kept]
        found = _found(door, args, [leaf.requires_grad_() for leaf in logits], hook, reducer, sizes)
    differences = [_difference(found, outcome) for outcome in expected]
    return None if None in differences else differences[0]


def imported(path: str) -> Any:
    """Import the name at `module:name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def numbers(*shape: int, seed: int) -> Tensor:
    """Return numbers between -1 and 1 that no random generator is asked for, float32."""
    places = torch.arange(math.prod(shape), dtype=torch.float64, device="cpu")
    return (places * 1.7 + 0.9 * seed + 0.3).sin().float().reshape(shape)


def _fields(index: int) -> dict[str, Any]:
    """Return a sample's fields as a trainer holds them; per-token tensors are [response_length]."""
    sample = SAMPLES[index]
    length, total = len(sample.mask), len(sample.mask) + sample.prompt_length
    tokens = torch.arange(total, device="cpu") * (index + 2) % VOCABULARY
    own = torch.tensor(sum(sample.mask), dtype=torch.float32, device="cpu")
    return {
        "tokens": tokens,
        "unconcat_tokens": tokens,
        "total_lengths": total,
        "response_lengths": length,
        "loss_masks": torch.tensor(sample.mask, device="cpu"),
        "log_probs": numbers(length, seed=10 + index) / 2 - 1.5,
        "ref_log_probs": numbers(length, seed=20 + index) / 2 - 1.5,
        "rollout_log_probs": numbers(length, seed=30 + index) / 2 - 1.5,
        "advantages": numbers(length, seed=40 + index),
        **dict.fromkeys(OWN_DIVISORS, own),
    }


OWN_DIVISORS = ("rollout_mask_sums", "group_mask_sums")
"""Names of a trainer's own divisor of each sample: that of slime and miles, and that of slime v0.3.0."""
Outcome = tuple[list[Tensor], dict[str, float]]
"""The gradient of each sample's logits, [total_length, vocabulary], and the reported numbers."""


def _expected(
    leaves: list[Tensor], weights: Weights, correction: Correction, divides_by_kept: bool
) -> Outcome:
    """Compute the gradient and the reported numbers in plain loops over tokens, in float64.

    A token that the correction rejects is left out of every term but the correction's own, and out of the divisor of KL,
    entropy and metrics if `divides_by_kept`.
    """
    policy_weights, regularizer_weights = weights
    report: dict[str, Any] = {}
    for index, sample in enumerate(SAMPLES):
        fields = _fields(index)
        tokens = [token for token, active in enumerate(sample.mask) if active]
        own = regularizer_weights[index]
        kept_own = own * len(tokens) / sum(map(_is_kept, tokens)) if divides_by_kept else own
        by_name = {"pg_loss": policy_weights[index], "ois": own, "tis": own}
        for token in tokens:
            position = sample.prompt_length + token
            row, target = leaves[index][position - 1], int(fields["tokens"][position])
            names = "log_probs", "ref_log_probs", "advantages", "rollout_log_probs"
            old, reference, advantage, rollout = (float(fields[name][token]) for name in names)
            terms = _token(row, target, old, reference, advantage)
            if correction != "none":
                tis = math.exp(old - rollout)
                held = min(max(tis, SETTINGS["tis_clip_low"]), SETTINGS["tis_clip"])
                of_correction = {"ois": terms["ratio"], "tis": row.new_tensor(tis)}
                is_kept = correction == "own" or _is_kept(token)
                terms = {name: term * is_kept for name, term in terms.items()}
                terms |= {"pg_loss": terms["pg_loss"] * held, **of_correction}
            del terms["ratio"]
            for name, term in terms.items():
                report[name] = report.get(name, 0.0) + by_name.get(name, kept_own) * term
    entropy = SETTINGS["entropy_coef"] * report["entropy_loss"]
    report["loss"] = report["pg_loss"] + SETTINGS["kl_loss_coef"] * report["kl_loss"] - entropy
    gradients = torch.autograd.grad(report["loss"], leaves)
    return list(gradients), {name: term.item() for name, term in report.items()}


def _token(
    row: Tensor, target: int, old: float, reference: float, advantage: float
) -> dict[str, Tensor]:
    """Compute the PPO loss of one token, and what the trainers report of it, under their names."""
    log_probabilities = row - row.exp().sum().log()
    log_prob = log_probabilities[target]
    ratio = (log_prob - old).exp()
    clipped = ratio.clamp(1 - SETTINGS["eps_clip"], 1 + SETTINGS["eps_clip_high"])
    return {
        "ratio": ratio,
        "pg_loss": torch.maximum(-ratio * advantage, -clipped * advantage),
        "pg_clipfrac": (-clipped * advantage > -ratio * advantage).double(),
        "ppo_kl": old - log_prob,
        "entropy_loss": -(log_probabilities.exp() * log_probabilities).sum(),
        "kl_loss": (log_prob - reference) ** 2 / 2,
    }


def _is_kept(token: int) -> bool:
    """Return False for the response tokens that the proof's own correction rejects."""
    return token % 4 != 1


def _correct(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    **others: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Correct the policy loss as a run's own function for `--custom-tis-function-path` may: weights, and rejected tokens."""
    tis = (torch.cat(list(train_log_probs)) - torch.cat(list(rollout_log_probs))).exp()
    kept = [mask * mask.new_tensor([_is_kept(t) for t in range(len(mask))]) for mask in loss_masks]
    return pg_loss * tis.clamp(args.tis_clip_low, args.tis_clip), kept, {"tis": tis}


def _found(
    door: Door,
    args: Any,
    leaves: list[Tensor],
    hook: Callable[[dict[str, Any]], None],
    reducer: Callable[..., Any] | None,
    sizes: tuple[int, int],
) -> Outcome:
    """Compute both by the trainer's own functions, one context-parallel rank after another."""
    settings = vars(args) | SETTINGS | {"global_batch_size": len(SAMPLES)}
    settings["custom_pg_loss_reducer_function_path"] = None if reducer is None else REDUCER_PATH
    for flag in ("use_tis", "get_mismatch_metrics"):
        settings.setdefault(flag, False)
    is_custom = correction_of(args) == "custom"
    settings["custom_tis_function_path"] = CORRECTION_PATH if is_custom else None
    gradients = [torch.zeros_like(leaf) for leaf in leaves]
    metrics: dict[str, float] = {}
    for rank in range(sizes[0]):
        place = Place(rank, *sizes)
        functions: dict[str, Any] = {CORRECTION_PATH: _correct}
        if reducer is not None:
            functions[REDUCER_PATH] = partial(reducer, place=place[:2])
        load: Any = functions.__getitem__
        stand_ins = {"load_function": load, "calculate_log_probs_and_entropy": _log_probs}
        package = door.loss_function.partition(".")[0]
        copied = copier(package, {**stand_ins, **door.stand_ins(place)})
        loss_function = copied(imported(door.loss_function))
        for batch, rows in _micro_batches(imported(door.data_iterator), leaves, hook, place):
            given = {"args": types.SimpleNamespace(**settings), "batch": batch}
            loss, log = _scaled_loss(loss_function, given, rows, place)
            shares = torch.autograd.grad(loss, leaves, allow_unused=True)
            for total, share in zip(gradients, shares, strict=True):
                if share is not None:
                    total += share / (place.context_size * place.data_size)
            for key, value in zip(log["keys"], log["values"][1:].tolist(), strict=True):
                metrics[key] = metrics.get(key, 0.0) + value / len(SAMPLES)
    return gradients, metrics


def _micro_batches(
    data_iterator: Any, leaves: list[Tensor], hook: Callable[[dict[str, Any]], None], place: Place
) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Yield the batches of the trainer's iterator on one rank, with this rank's logits, [1, tokens, vocabulary]."""
    fields = [_fields(index) for index in range(len(SAMPLES))]
    data: dict[str, Any] = {key: [sample[key] for sample in fields] for key in fields[0]}
    for key in ("log_probs", "ref_log_probs", "rollout_log_probs", "advantages"):
        windows = [_window(i, place) for i in range(len(SAMPLES))]
        data[key] = [values[window] for values, window in zip(data[key], windows, strict=True)]
    data |= {key: torch.stack(data[key]) for key in OWN_DIVISORS}
    iterator = data_iterator(
        rollout_data=data, micro_batch_indices=[list(indices) for indices in MICRO_BATCHES]
    )
    hook(data)
    for indices in MICRO_BATCHES:
        padding = (0, 0, 0, 2 * place.context_size)
        rows = [torch.nn.functional.pad(leaves[i], padding)[_positions(i, place)] for i in indices]
        batch = iterator.get_next(list(data))
        yield {**batch, "max_seq_lens": None}, torch.cat(rows).unsqueeze(0)


def _positions(index: int, place: Place) -> list[int]:
    """Return the positions of a sample's tokens on a rank, padding included: parts r and 2c - 1 - r of 2c."""
    total = len(SAMPLES[index].mask) + SAMPLES[index].prompt_length
    if place.context_size == 1:
        return list(range(total))
    size = -(-total // (2 * place.context_size))
    parts = (place.context_rank, 2 * place.context_size - 1 - place.context_rank)
    return [part * size + offset for part in parts for offset in range(size)]


def _window(index: int, place: Place) -> list[int]:
    """Return the response tokens of a sample that a rank scores: the logit at a position is that of the next token."""
    first, length = SAMPLES[index].prompt_length - 1, len(SAMPLES[index].mask)
    return [p - first for p in _positions(index, place) if 0 <= p - first < length]


def _log_probs(
    logits: Tensor, tokens: Tensor, tp_group: Any, with_entropy: bool = False, **unused: Any
) -> tuple[Tensor, Tensor | None]:
    """Stand in for the log-probs and entropy of a tensor-parallel vocabulary, [tokens, 1] and [tokens]."""
    log_probabilities = torch.log_softmax(logits, dim=-1)
    entropy = -(log_probabilities.exp() * log_probabilities).sum(dim=-1)
    return log_probabilities.gather(-1, tokens[:, None]), entropy if with_entropy else None


def _scaled_loss(
    loss_function: Callable[..., Any], given: dict[str, Any], rows: Tensor, place: Place
) -> tuple[Tensor, dict[str, Any]]:
    """Call the trainer's loss as Megatron's schedule does; return the loss that is differentiated, and its report."""
    schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    known = {
        **given,
        **dict.fromkeys(("step_global_batch_size", "num_rollouts"), len(SAMPLES)),
        **{"num_microbatches": len(MICRO_BATCHES), "apply_megatron_loss_scaling": True},
    }
    names = inspect.signature(loss_function).parameters
    bound = partial(loss_function, **{name: known[name] for name in names if name in known})
    config = types.SimpleNamespace(calculate_per_token_loss=False, timers=None)
    store: list[dict[str, Any]] = []
    loss, _ = schedules.forward_step_calc_loss(
        None, rows, lambda output: bound(logits=output), config, None, False, len(MICRO_BATCHES), store,
        place.context_size, True,
    )  # fmt: skip
    return loss, store[0]


def _difference(found: Outcome, expected: Outcome) -> str | None:
    """Say where the two differ the most: a gradient before a metric."""
    largest = max(float(gradient.abs().max()) for gradient in expected[0])
    errors = [
        (mine.double() - right).abs() for mine, right in zip(found[0], expected[0], strict=True)
    ]
    worst = max(range(len(errors)), key=lambda i: float(errors[i].max()))
    if not float(errors[worst].max()) <= TOLERANCE * largest:
        place = divmod(int(errors[worst].argmax()), VOCABULARY)
        right, mine = float(expected[0][worst][place]), float(found[0][worst][place])
        return f"the gradient of logit {list(place)} of tiny sample {worst} is {mine:.6g}, expected {right:.6g}"
    for name, right in expected[1].items():
        if name not in found[1]:
            return f"the metric {name} is not reported, and {', '.join(found[1])} are"
        mine = found[1][name]
        if not abs(mine - right) <= TOLERANCE * max(1.0, abs(right)):
            return f"the metric {name} is {mine:.6g}, expected {right:.6g}"
    return None
