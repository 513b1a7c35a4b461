"""The proof at startup: a trainer that computes the aggregation is accepted, and each mutant is refused with the numbers."""

import types
from typing import Any

import pytest
import torch

from megatron_pg.integrations import divided_lengths, proof, trainer
from megatron_pg.integrations.divided_lengths import DividedLength, policy_loss_reducer
from megatron_pg.integrations.proof import Door
from megatron_pg.integrations.reducers import HOOKS
from megatron_pg.integrations.slime import stand_ins
from megatron_pg.loss.aggregation import AGGREGATIONS
from tests.fast import tiny_trainer
from tests.fast.refusals import assert_refused, refusal

TINY = trainer.Trainer(
    "tests",
    "hook",
    Door(
        f"{tiny_trainer.__name__}:loss_function", f"{tiny_trainer.__name__}:DataIterator", stand_ins
    ),
)


@pytest.fixture(autouse=True)
def no_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "PROVEN", set())
    monkeypatch.setattr(divided_lengths, "PROVEN", proof.PROVEN)
    pytest.importorskip("megatron.core")


def prove(
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
        TINY.prove(AGGREGATIONS[aggregation], divisor, args)


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
    prove(aggregation, regularizers, sizes, **CORRECTIONS[correction])
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


def unreported(args, batch, values):
    values, batch, log = CORRECTED(args, batch, values)
    return values, batch, {"another": log["tis"]}


SCALE, OWN_MEAN, REDUCED = tiny_trainer.scale, tiny_trainer.own_mean, tiny_trainer.reduced
CORRECTED = tiny_trainer.corrected
MUTANTS = {
    "a scale off by 0.05 %": ("scale", of_loss(lambda loss: loss * 1.0005), "the gradient of logit"),
    "no context parallelism in the scale": ("scale", lambda loss, m, n: loss * m / n, "expected"),
    "a reducer that is not called": ("reduced", from_reducer, "the gradient of logit"),
    "metrics by the reducer": ("own_mean", by_reducer, "the gradient of logit"),
    "lengths that are copied": ("reduced", bare, "response length of sample 0 of a micro-batch has no divisor"),
    "a setting that is unknown": ("scale", of_loss(lambda loss: loss.unknown), "cannot be run on tiny samples: AttributeError"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_trainer_that_computes_something_else_is_refused(name, monkeypatch):
    target, mutant, words = MUTANTS[name]
    monkeypatch.setattr(tiny_trainer, target, mutant)
    sizes = (2, 2) if "parallelism" in name else (1, 1)
    message = refusal(prove, "prompt_mean", "sample_mean", sizes)
    assert words in message and "docs/migrating.md" in message
    assert message.startswith(
        "--hook megatron_pg.integrations.tests.prompt_mean: the installed tests"
    )


def test_a_mean_over_the_tokens_that_a_correction_keeps_is_the_trainers_own(monkeypatch):
    """As slime before v0.3.0 has it for KL, entropy and metrics."""

    def by_kept(batch, values):
        sums = [mask.sum() for mask in batch["loss_masks"]]
        return OWN_MEAN({**batch, "rollout_mask_sums": sums}, values)

    monkeypatch.setattr(tiny_trainer, "own_mean", by_kept)
    prove("prompt_mean", **CORRECTIONS["custom"])


@pytest.mark.parametrize(
    ("correction", "mutant", "words"),
    [
        ("custom", with_all_tokens, "the gradient of logit"),
        ("custom", uncorrected, "the gradient of logit"),
        ("own", uncorrected, "the gradient of logit"),
        ("own", unreported, "the metric tis is not reported, and loss"),
    ],
)
def test_another_correction_is_refused_in_a_run_that_has_one(
    correction, mutant, words, monkeypatch
):
    monkeypatch.setattr(tiny_trainer, "corrected", mutant)
    assert_refused(words, prove, "prompt_mean", **CORRECTIONS[correction])


def test_a_metric_that_is_weighted_is_refused(monkeypatch):
    """With the gradient right: the report alone differs."""

    def own_mean(batch, values):
        return OWN_MEAN(batch, values) * (1.0 if values.requires_grad else 0.5)

    monkeypatch.setattr(tiny_trainer, "own_mean", own_mean)
    assert_refused("the metric pg_clipfrac is | expected", prove, "constant")


def test_once_a_process(monkeypatch):
    prove("token_mean")
    monkeypatch.setattr(tiny_trainer, "scale", of_loss(lambda loss: loss * 2))
    prove("token_mean")  # an edit of the checkout does not stop a run half-way
    assert_refused("the gradient", prove, "prompt_mean")


def test_where_the_trainer_is_not_installed(monkeypatch):
    absent = trainer.Trainer("no_such_trainer", "hook", TINY.door)
    args = types.SimpleNamespace()
    words = "no_such_trainer cannot be imported here"
    assert_refused(words, absent.prove, AGGREGATIONS["token_mean"], None, args)


def test_the_reducer_divides_by_what_the_lengths_carry():
    masks = [torch.tensor([1, 0, 1]), torch.tensor([1, 1])]
    lengths = [DividedLength(3, 0.5), DividedLength(2, 4.0)]
    words = "nothing has proven in this process | <trainer>.check"
    assert_refused(words, policy_loss_reducer, [5, 3], lengths, masks)
    proof.PROVEN.add(("slime",))
    reduce = policy_loss_reducer([5, 3], lengths, masks)
    assert reduce(torch.tensor([1.0, 9.0, 2.0, 3.0, 5.0])).item() == 3 / 0.5 + 8 / 4
    assert_refused(
        "sample 1 of a micro-batch has no divisor",
        policy_loss_reducer,
        [5, 3],
        [lengths[0], 2],
        masks,
    )
    assert_refused("--calculate-per-token-loss", policy_loss_reducer, [5, 3], lengths, masks, True)
