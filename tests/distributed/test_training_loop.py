"""A loop of one's own that forgets what Megatron's loop sets: refused before the first backward
pass, on every rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from megatron.core.distributed import finalize_model_grads

from megatron_pg.megatron.groups import unwrapped
from tests.step_loss import step_loss

from .compare import compare
from .launch import RankError, refusal, run_ranks
from .models import ModelOptions, Sharding, gather_gradients
from .one_step import Outcome, build, build_changed, run_schedule, train_step
from .reference import reference_steps
from .steps import Run, ValueRun

FINALIZE = "config.finalize_model_grads_func = megatron.core.distributed.finalize_model_grads"
PER_TOKEN = ModelOptions(calculate_per_token_loss=True)
OVERLAP = ModelOptions(overlap_grad_reduce=True)


@dataclass(frozen=True)
class Loop:
    """A loop that is right but for what it sets on the model's config."""

    sharding: Sharding = field(default_factory=Sharding)
    options: ModelOptions = field(default_factory=ModelOptions)
    config: dict[str, Any] = field(default_factory=lambda: {"finalize_model_grads_func": None})
    run: Run = field(default_factory=Run)


def changed(loop: Loop) -> list[Any]:
    chunks = build(loop.sharding, loop.options)
    for name, value in loop.config.items():
        setattr(chunks[0].config, name, value)
    return chunks


def outcome_or_refusal(loop: Loop) -> Outcome | str | None:
    """The outcome of a step on rank 0, or the refusal on this rank."""
    chunks = changed(loop)
    try:
        return train_step(chunks, loop.sharding, loop.run)
    except ValueError as error:
        return str(error)


RANKS = "each of the 2 data- and context-parallel ranks"
CRITIC = Loop(Sharding(context=2), ModelOptions(value_head=True), run=ValueRun())
BIASED = {"finalize_model_grads_func": None, "moe_router_enable_expert_bias": True}
COUNTING = ModelOptions(
    mixture_of_experts=True, moe_aux_loss_coeff=0.5, balancing="global_aux_loss"
)
NEEDS = {
    "CP": (Loop(Sharding(context=2)), RANKS),
    "DP": (Loop(Sharding(data=2)), RANKS),
    "a critic": (CRITIC, RANKS),
    "SP": (Loop(Sharding(tensor=2, sequence_parallel=True)), "gradients of norms"),
    "per token": (Loop(options=PER_TOKEN), "divides the gradients by the step's tokens"),
    "bias of experts": (Loop(config=BIASED), "moe_router_enable_expert_bias"),
    # A second equal step had another gradient of the routers, by 0.7 %.
    "tokens of experts": (Loop(options=COUNTING), "token counts of global_aux_loss"),
}


@pytest.mark.parametrize("name", NEEDS)
def test_gradients_that_nobody_finalizes_are_refused_on_every_rank(name: str) -> None:
    """At CP 2 ranks parted and the norm was another, 64 times too large in per-token mode, and the
    checksum was 1.
    """
    loop, words = NEEDS[name]
    for found in run_ranks(outcome_or_refusal, loop.sharding.world_size, loop):
        assert words in found and FINALIZE in found


def one_step(loop: Loop) -> None:
    train_step(changed(loop), loop.sharding, loop.run)


def test_stages_that_share_an_embedding_need_it_too() -> None:
    """The first stage refuses; the last waits for it."""
    loop = Loop(Sharding(pipeline=2), ModelOptions(tied_embeddings=True))
    with pytest.raises(RankError, match="a part of the embedding's gradient"):
        run_ranks(one_step, 2, loop)


@pytest.mark.parametrize(
    "sharding", [Sharding(), Sharding(tensor=2), Sharding(pipeline=2)], ids=str
)
def test_a_loop_that_needs_no_finalization_has_the_reference_gradients(sharding: Sharding) -> None:
    (expected,) = run_ranks(reference_steps, 1, ModelOptions(), [Run()])[0]
    found = run_ranks(outcome_or_refusal, sharding.world_size, Loop(sharding))[0]
    assert not isinstance(found, str), found
    assert compare(found, expected).passed


def do_nothing(*args: Any, **keywords: Any) -> None:
    """A function that the schedule calls in the place of Megatron's."""


def finalize_afterwards(loop: Loop) -> Any:
    chunks = changed(loop)
    step, output = run_schedule(chunks, loop.sharding, loop.run)
    finalize_model_grads(chunks)
    metrics, gradients = step.metrics(output), gather_gradients(chunks)
    return None if gradients is None else Outcome(gradients, metrics)


def test_a_loop_that_finalizes_by_itself_says_so_with_a_function_of_its_own() -> None:
    (expected,) = run_ranks(reference_steps, 1, ModelOptions(), [Run()])[0]
    loop = Loop(Sharding(context=2), config={"finalize_model_grads_func": do_nothing})
    comparison = compare(run_ranks(finalize_afterwards, 2, loop)[0], expected)
    assert comparison.passed, comparison


def score(loop: Loop) -> dict[str, float]:
    chunks = changed(loop)
    with torch.no_grad():
        step, output = run_schedule(chunks, loop.sharding, loop.run, forward_only=True)
    metrics: dict[str, float] = step.metrics(output)
    return metrics


def test_an_evaluation_needs_none_of_it() -> None:
    for metrics in run_ranks(score, 2, Loop(Sharding(context=2))):
        assert metrics["aggregation_checksum"] == 1.0


def unwrapped_loop(loop: Loop) -> str:
    chunks = [unwrapped(chunk) for chunk in changed(loop)]
    return refusal(ValueError, run_schedule, chunks, loop.sharding, loop.run)


def test_a_model_without_ddp_is_told_to_be_wrapped() -> None:
    for found in run_ranks(unwrapped_loop, 2, Loop(Sharding(context=2))):
        assert FINALIZE in found and "wrap the model in Megatron's DDP" in found


TO_PER_TOKEN = Loop(Sharding(context=2), config={"calculate_per_token_loss": True})
FROM_PER_TOKEN = Loop(Sharding(context=2), PER_TOKEN, {"calculate_per_token_loss": False})
OTHER = "but DDP was built with the opposite: gradients would be 2 times too"
FORGOTTEN = {
    "config.no_sync_func = model.no_sync": Loop(Sharding(data=2), OVERLAP, {"no_sync_func": None}),
    "config.grad_scale_func = optimizer.scale_loss": Loop(config={"fp16": True}),
    f"calculate_per_token_loss=True {OTHER} small": TO_PER_TOKEN,
    f"calculate_per_token_loss=False {OTHER} large": FROM_PER_TOKEN,
    "context_parallel_size=1, but its context-parallel group has 2 ranks": Loop(
        Sharding(context=2), config={"context_parallel_size": 1}
    ),
}


@pytest.mark.parametrize("words", FORGOTTEN)
def test_what_else_a_loop_forgets_is_refused(words: str) -> None:
    loop = FORGOTTEN[words]
    for found in run_ranks(outcome_or_refusal, loop.sharding.world_size, loop):
        assert words in found


def add_after_wrapping(chunk: Any) -> None:
    unwrapped(chunk).decoder.register_parameter("late", torch.nn.Parameter(torch.ones(1)))


def freeze_after_wrapping(chunk: Any) -> None:
    """As full recomputation loses the gradient behind a frozen embedding."""
    chunk.requires_grad_(False)


def nothing(_: Any) -> None:
    pass


def freeze(model: Any) -> None:
    model.requires_grad_(False)


UNTRAINED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "added": (nothing, add_after_wrapping, "decoder.late became trainable after the model was"),
    "added to a frozen model": (freeze, add_after_wrapping, "decoder.late became trainable after"),
    "frozen": (nothing, freeze_after_wrapping, "the loss has no gradient"),
}
"""Changes before and after DDP, and the words."""


def refusal_of_untrained(name: str) -> str:
    before, after, _ = UNTRAINED[name]
    loop = Loop()
    chunks = build_changed(loop.sharding, loop.options, before)
    after(chunks[0])
    return refusal(ValueError, run_schedule, chunks, loop.sharding, loop.run)


@pytest.mark.parametrize("name", UNTRAINED)
def test_parameters_that_would_not_be_trained_are_refused(name: str) -> None:
    (found,) = run_ranks(refusal_of_untrained, 1, name)
    assert UNTRAINED[name][2] in found


def words_without_zeroing(loop: Loop, **added: Any) -> str:
    """What the second step hears that does not zero the gradients of the first."""
    chunks = build(loop.sharding, loop.options)
    for _ in range(2):
        train_step(chunks, loop.sharding, loop.run)
    return refusal(ValueError, run_schedule, chunks, loop.sharding, loop.run, **added)


@pytest.mark.parametrize("run", [Run(), ValueRun()], ids=["policy", "critic"])
def test_gradients_of_the_step_before_are_refused(run: Run) -> None:
    """The third step had 3 times the gradient, and the checksum was 1."""
    loop = Loop(options=ModelOptions(value_head=isinstance(run, ValueRun)), run=run)
    (words,) = run_ranks(words_without_zeroing, 1, loop)
    assert words.startswith(
        "zero_grad_buffer() of the model was not called after the previous step"
    )
    assert "PolicyStep(accumulate_gradients=True)" in words


def words_of_a_second_epoch(loop: Loop) -> str:
    """What a second step over the same plan hears, whose totals are the same object."""
    chunks = build(loop.sharding, loop.options)
    step, _ = run_schedule(chunks, loop.sharding, loop.run)
    plan = {"totals": step.totals}
    return refusal(ValueError, run_schedule, chunks, loop.sharding, loop.run, **plan)


def test_gradients_of_the_epoch_before_are_refused() -> None:
    (words,) = run_ranks(words_of_a_second_epoch, 1, Loop())
    assert words.startswith(
        "zero_grad_buffer() of the model was not called after the previous step"
    )


def step_of_many_policy_steps(loop: Loop) -> tuple[Outcome | None, str]:
    """Of two steps, with a `PolicyStep` for each micro-batch, the second; then a longer one's
    words.
    """
    chunks = build(loop.sharding, loop.options)
    for _ in range(2):
        outcome = train_step(chunks, loop.sharding, loop.run, step_loss)
    longer = replace(loop.run, cut="ragged")
    return outcome, refusal(ValueError, run_schedule, chunks, loop.sharding, longer)


def test_a_policy_step_for_each_micro_batch_is_one_step() -> None:
    """The second rank's last step has one micro-batch more, which tells it from the step before."""
    (expected,) = run_ranks(reference_steps, 1, ModelOptions(), [Run()])[0]
    ranks = run_ranks(step_of_many_policy_steps, 2, Loop(Sharding(data=2)))
    comparison = compare(ranks[0][0], expected)
    assert comparison.passed, comparison
    for _, words in ranks:
        assert words.startswith("zero_grad_buffer() of the model was not called")


SUM = [Run(), Run("token_mean")]


def accumulated(loop: Loop) -> Any:
    """The gradients of two steps, of which the last finalizes both."""
    chunks = changed(loop)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    run_schedule(chunks, loop.sharding, SUM[0])
    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    step, output = run_schedule(chunks, loop.sharding, SUM[1], accumulate_gradients=True)
    metrics, gradients = step.metrics(output), gather_gradients(chunks)
    return None if gradients is None else Outcome(gradients, metrics)


NOT_YET = {"finalize_model_grads_func": do_nothing}


@pytest.mark.parametrize(
    "loop",
    [
        Loop(Sharding(data=2), ModelOptions(distributed_optimizer=True), NOT_YET),
        Loop(Sharding(tensor=2, sequence_parallel=True), config=NOT_YET),
    ],
    ids=["distributed optimizer", "sequence parallelism"],
)
def test_accumulation_by_name_has_the_sum_of_both_gradients(loop: Loop) -> None:
    first, second = run_ranks(reference_steps, 1, ModelOptions(), SUM)[0]
    names = first.gradients
    whole = {name: first.gradients[name] + second.gradients[name] for name in names}
    comparison = compare(run_ranks(accumulated, 2, loop)[0], Outcome(whole, second.metrics))
    assert comparison.passed, comparison


def accumulating_words(loop: Loop) -> str:
    return words_without_zeroing(loop, accumulate_gradients=True)


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (Loop(Sharding(data=2), ModelOptions(distributed_optimizer=True)), RANKS),
        (Loop(Sharding(tensor=2, sequence_parallel=True)), "gradients of norms"),
        (Loop(options=PER_TOKEN), "divided by this step's tokens"),
    ],
    ids=["distributed optimizer", "sequence parallelism", "per token"],
)
def test_gradients_that_would_be_reduced_twice_are_refused(loop: Loop, words: str) -> None:
    """Two equal steps had 1.7 times the gradient, 3 times that of norms, and 1.02 times."""
    for found in run_ranks(accumulating_words, loop.sharding.world_size, loop):
        assert found.startswith("accumulate_gradients=True") and words in found
