"""A trainer that computes the aggregation is verified, and each mutant is refused with numbers."""

import types
from functools import partial
from typing import Any

import pytest
import torch

from megatron_pg.integrations import divided_lengths, trainer, verify
from megatron_pg.integrations.divided_lengths import DividedLength, policy_loss_reducer
from megatron_pg.integrations.reducers import HOOKS
from megatron_pg.integrations.slime import stubs
from megatron_pg.loss.aggregation import AGGREGATIONS
from tests.fast import tiny_trainer
from tests.fast.refusals import assert_refused, assert_words, refusal

TINY = trainer.Trainer(
    "tests",
    "hook",
    verify.TrainerHooks(
        f"{tiny_trainer.__name__}:loss_function", f"{tiny_trainer.__name__}:DataIterator", stubs
    ),
)


@pytest.fixture(autouse=True)
def no_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "verified", set())
    monkeypatch.setattr(divided_lengths, "verified", verify.verified)
    pytest.importorskip("megatron.core")


def run(
    aggregation: str,
    regularizers: str = "sample_mean",
    sizes: tuple[int, int] = (1, 1),
    **settings: Any,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "context_parallel_place", lambda: (0, sizes[0]))
        group = types.SimpleNamespace(size=lambda: sizes[1])
        patch.setattr(trainer, "data_parallel_group", lambda: group)
        divisor = 3.0 if aggregation == "constant" else None
        args = types.SimpleNamespace(regularizer_aggregation=regularizers, **settings)
        TINY.verify(AGGREGATIONS[aggregation], divisor, args)


CORRECTIONS = {
    "none": {},
    "own": {"use_tis": True, "custom_tis_function_path": None},
    "custom": {"get_mismatch_metrics": True, "custom_tis_function_path": "my.own"},
}


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("sizes", [(1, 1), (2, 4), (4, 1)])
@pytest.mark.parametrize("regularizers", ["sample_mean", "loss"])
@pytest.mark.parametrize("aggregation", HOOKS)
def test_an_exact_trainer_is_accepted(aggregation, regularizers, sizes, correction):
    state = torch.get_rng_state()
    names = dict(vars(tiny_trainer))
    run(aggregation, regularizers, sizes, **CORRECTIONS[correction])
    assert torch.equal(torch.get_rng_state(), state)
    assert vars(tiny_trainer) == names and not vars(tiny_trainer.mpu)


def of_loss(change):
    return lambda loss, *arguments: change(SCALE(loss, *arguments))


def from_reducer(args, batch, values):
    """The trainer calls no custom reducer, as slime before v0.2.2."""
    return OWN_MEAN(batch, values)


def by_reducer(batch, values):
    """Metrics and KL by the reducer too."""
    return policy_loss_reducer(
        batch["total_lengths"], batch["response_lengths"], batch["loss_masks"], place=(0, 1)
    )(values)


def bare(args, batch, values):
    """The lengths are copied on the way."""
    return REDUCED(
        args, {**batch, "response_lengths": [int(n) for n in batch["response_lengths"]]}, values
    )


def with_all_tokens(args, batch, values):
    """The correction's rejected tokens stay."""
    values, _, log = CORRECTED(args, batch, values)
    return values, batch, log


def uncorrected(args, batch, values):
    return values, *CORRECTED(args, batch, values)[1:]


def half_of_kl(batch, values):
    is_kl = bool(((values + verify.SHIFT).abs() < 1e-5).all())
    return OWN_MEAN(batch, values) * (0.5 if is_kl else 1.0)


SCALE, OWN_MEAN, REDUCED = tiny_trainer.scale, tiny_trainer.own_mean, tiny_trainer.reduced
CORRECTED = tiny_trainer.corrected
GRADIENT = "the gradient of tiny sample"
# case: (function of the trainer, its mutant, words of the refusal, the run)
MUTANTS: dict[str, tuple[str, Any, str, dict[str, Any]]] = {
    "a scale off by 0.05 %": ("scale", of_loss(lambda loss: loss * 1.0005), GRADIENT, {}),
    "no context parallelism in the scale": (
        "scale", lambda loss, m, n: loss * m / n, "expected", {"sizes": (2, 2)}
    ),
    "a reducer that is not called": ("reduced", from_reducer, GRADIENT, {}),
    "metrics by the reducer": ("own_mean", by_reducer, GRADIENT, {}),
    "lengths that are copied": (
        "reduced", bare, "response length of sample 0 of a micro-batch has no divisor", {}
    ),
    "a setting that is unknown": (
        "scale", of_loss(lambda loss: loss.unknown),
        "fails on tiny samples: AttributeError", {},
    ),
    "a correction without its mask": (
        "corrected", with_all_tokens, GRADIENT, CORRECTIONS["custom"]
    ),
    "no custom correction": ("corrected", uncorrected, GRADIENT, CORRECTIONS["custom"]),
    "no correction of its own": ("corrected", uncorrected, GRADIENT, CORRECTIONS["own"]),
    # With the gradient right: only the report of `old - log_probs` differs.
    "a metric that is weighted": ("own_mean", half_of_kl, "ppo_kl is | expected", {}),
}  # fmt: skip


@pytest.mark.parametrize("case", MUTANTS)
def test_a_trainer_that_computes_something_else_is_refused(case, monkeypatch):
    target, mutant, words, settings = MUTANTS[case]
    monkeypatch.setattr(tiny_trainer, target, mutant)
    message = refusal(run, "prompt_mean", **settings)
    assert_words(f"{words} | docs/migrating.md", message)
    assert message.startswith(
        "--hook megatron_pg.integrations.tests.prompt_mean: the installed tests"
    )


def test_a_mean_over_the_tokens_that_a_correction_keeps_is_the_trainers_own(monkeypatch):
    """As slime before v0.3.0 has it for KL, entropy and metrics."""

    def by_kept(batch, values):
        sums = [mask.sum() for mask in batch["loss_masks"]]
        return OWN_MEAN({**batch, "rollout_mask_sums": sums}, values)

    monkeypatch.setattr(tiny_trainer, "own_mean", by_kept)
    run("prompt_mean", **CORRECTIONS["custom"])


def test_once_a_process(monkeypatch):
    run("token_mean")
    monkeypatch.setattr(tiny_trainer, "scale", of_loss(lambda loss: loss * 2))
    run("token_mean")  # an edit of the checkout does not stop a run half-way
    assert_refused("the gradient", run, "prompt_mean")


ABSENT = trainer.Trainer("no_such_trainer", "hook", TINY.hooks)
MASKS = [torch.tensor([1, 0, 1]), torch.tensor([1, 1])]
LENGTHS = [DividedLength(3, 0.5), DividedLength(2, 4.0)]
# case: (call, words of the refusal)
REFUSED = {
    "a trainer that is not installed": (
        partial(ABSENT.verify, AGGREGATIONS["token_mean"], None, types.SimpleNamespace()),
        "no_such_trainer cannot be imported",
    ),
    "a trainer that is not verified": (
        partial(policy_loss_reducer, [5, 3], LENGTHS, MASKS),
        "was not verified in this process | <trainer>.check",
    ),
    "a length that is copied": (
        partial(policy_loss_reducer, [5, 3], [LENGTHS[0], 2], MASKS),
        "sample 1 of a micro-batch has no divisor",
    ),
    "per token": (
        partial(policy_loss_reducer, [5, 3], LENGTHS, MASKS, True), "--calculate-per-token-loss"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_calls_are_refused(case):
    call, words = REFUSED[case]
    assert_refused(words, call)


def test_the_reducer_divides_by_what_the_lengths_carry():
    verify.verified.add(("slime",))
    reduce = policy_loss_reducer([5, 3], LENGTHS, MASKS)
    assert reduce(torch.tensor([1.0, 9.0, 2.0, 3.0, 5.0])).item() == 3 / 0.5 + 8 / 4
