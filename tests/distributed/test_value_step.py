"""A critic on real Megatron: what a wrong head or step would show, its values at a sharding, its metrics, whitening."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg import CriticConfig, Sample, gae, pack, plan_step, whiten
from megatron_pg.critic import ValueStep, add_value_head, value_head
from megatron_pg.critic import compute_values as values_of
from megatron_pg.megatron import PolicyStep
from megatron_pg.megatron.groups import unwrapped
from tests.random_steps import package_samples

from .compare import compare
from .launch import run_ranks
from .models import ModelOptions, Sharding, build_model, initialize_groups
from .one_step import Outcome, build, run_schedule, train_step
from .reference import reference_steps, values_alone
from .steps import Run, ValueRun

SHARDING = Sharding(tensor=2, sequence_parallel=True, context=2)
CRITIC = ModelOptions(value_head=True, dtype=torch.float64)
RUN = ValueRun("prompt_mean")
TRUNCATED = [index % 3 == 0 for index in range(len(RUN.samples))]


def reference() -> tuple[Outcome, list[list[float]]]:
    """The step of one process, and the value after every token of every sample."""
    (outcome,) = reference_steps(CRITIC, [RUN])
    (model,) = build_model(Sharding(), CRITIC)
    with torch.no_grad():
        return outcome, [values_alone(model, sample).tolist() for sample in RUN.samples]


def without_mark(chunks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's gradients are not summed over the ranks that share the tokens."""
    head = unwrapped(chunks[-1]).output_layer
    for parameter in head.parameters():
        monkeypatch.setattr(parameter, "sequence_parallel", False)


def with_summed_gradient(chunks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward adds up what every tensor-parallel rank computes alike."""
    right = value_head.gather_from_sequence_parallel_region
    monkeypatch.setattr(
        value_head,
        "gather_from_sequence_parallel_region",
        lambda values, tensor_parallel_output_grad, group: right(values, True, group=group),
    )


def one_token_late(chunks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The value is read after its token and not before it."""
    head = unwrapped(chunks[-1]).output_layer
    right = head.forward

    def wrong(*arguments: Any, **keywords: Any) -> tuple[Tensor, None]:
        values, _ = right(*arguments, **keywords)
        return values.roll(-1, 0), None

    monkeypatch.setattr(head, "forward", wrong)


def without_factor(chunks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss goes to the schedule as it is."""
    monkeypatch.setattr(
        "megatron_pg.megatron.scale_contract.ScaleContract.apply",
        lambda self, loss, metrics, *_: (loss + 0.0, metrics),
    )


MUTANTS = (without_mark, with_summed_gradient, one_token_late, without_factor)


def on_a_rank() -> dict[str, Any]:
    """The right step, the wrong ones, values, and the metrics of policy and critic together."""
    chunks = build(SHARDING, CRITIC)
    found: dict[str, Any] = {"right": train_step(chunks, SHARDING, RUN)}
    for mutant in MUTANTS:
        with pytest.MonkeyPatch.context() as monkeypatch:
            mutant(chunks, monkeypatch)
            try:
                found[mutant.__name__] = train_step(chunks, SHARDING, RUN)
            except AssertionError as error:  # replicas differ
                found[mutant.__name__] = str(error)
    samples = package_samples(RUN.samples)
    found["values"] = values_of(
        chunks, samples, max_tokens_per_microbatch=64, is_truncated=TRUNCATED
    )
    policy = build_model(SHARDING, ModelOptions(dtype=torch.float64))
    policy[0].config.finalize_model_grads_func = chunks[0].config.finalize_model_grads_func
    value_step, value_output = run_schedule(chunks, SHARDING, RUN)
    policy_step, output = run_schedule(policy, SHARDING, Run("prompt_mean"))
    assert isinstance(policy_step, PolicyStep) and isinstance(value_step, ValueStep)
    apart = {**policy_step.metrics(output), **value_step.metrics(value_output)}
    calls: list[Any] = []
    right = dist.all_reduce
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            dist,
            "all_reduce",
            lambda *a, **k: (calls.append(k.get("op", dist.ReduceOp.SUM)), right(*a, **k))[1],
        )
        together = policy_step.metrics(output, critic=value_step.report(value_output))
    found |= {"apart": apart, "together": together, "all_reduces": [str(op) for op in calls]}
    return found


@pytest.fixture(scope="module")
def expected() -> tuple[Outcome, list[list[float]]]:
    outcome: tuple[Outcome, list[list[float]]] = run_ranks(reference, 1)[0]
    return outcome


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(on_a_rank, SHARDING.world_size)


def test_the_right_step_passes(found: list[dict[str, Any]], expected: Any) -> None:
    comparison = compare(found[0]["right"], expected[0], 1e-12)
    assert comparison.passed, str(comparison)


@pytest.mark.parametrize("mutant", [mutant.__name__ for mutant in MUTANTS])
def test_a_wrong_one_is_seen(mutant: str, found: list[dict[str, Any]], expected: Any) -> None:
    wrong = found[0][mutant]
    assert isinstance(wrong, str) or not compare(wrong, expected[0], 1e-12).passed


def test_values_at_a_sharding_are_those_of_one_process(
    found: list[dict[str, Any]], expected: Any
) -> None:
    for rank in found:
        scored = rank["values"]
        for sample, values, alone in zip(RUN.samples, scored.values, expected[1], strict=True):
            # The value before a token is read where its logits are; the last one is behind the response.
            before = alone[sample.prompt_length - 1 : -1]
            assert values.tolist() == pytest.approx(before, rel=1e-6, abs=1e-6)
        bootstrap = [alone[-1] * cut for alone, cut in zip(expected[1], TRUNCATED, strict=True)]
        assert scored.bootstrap_values.tolist() == pytest.approx(bootstrap, rel=1e-6, abs=1e-6)
        assert len({round(value, 6) for value in bootstrap}) > 3


def test_policy_and_critic_share_one_sum_and_one_maximum(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["together"] == rank["apart"] == found[0]["together"]
        assert [op.rsplit(".")[-1] for op in rank["all_reduces"]] == ["SUM", "MAX"]


# --------------------------------------------------------------------------------------------------
# Whitening over data-parallel ranks
# --------------------------------------------------------------------------------------------------

REWARDS = [[0.0, 1.0], [0.5], [0.0, 0.0, -1.0], [2.0]]


def whitened(rank_alone: bool) -> list[list[float]]:
    """This rank's half of the responses, whitened over both ranks or, wrongly, over its own."""
    mine = REWARDS[dist.get_rank() :: 2]
    masks = [[1] * len(each) for each in mine]
    advantages = gae(mine, [[0.0] * len(each) for each in mine], masks, 0.5, 1.0).advantages
    group = None if rank_alone else dist.group.WORLD
    return [each.tolist() for each in whiten(advantages, masks, data_parallel_group=group)]


@pytest.mark.parametrize("rank_alone", [False, True])
def test_whitening_is_over_the_step(rank_alone: bool) -> None:
    masks = [[1] * len(each) for each in REWARDS]
    estimates = gae(REWARDS, [[0.0] * len(each) for each in REWARDS], masks, 0.5, 1.0)
    whole = [each.tolist() for each in whiten(estimates.advantages, masks)]
    halves = run_ranks(whitened, 2, rank_alone)
    together = [halves[index % 2][index // 2] for index in range(len(REWARDS))]
    errors = [
        abs(a - b)
        for found, right in zip(together, whole, strict=True)
        for a, b in zip(found, right, strict=True)
    ]
    assert (max(errors) < 1e-6) != rank_alone


# --------------------------------------------------------------------------------------------------
# Refusals
# --------------------------------------------------------------------------------------------------


def refusals() -> list[str]:
    initialize_groups(Sharding())
    (wrapped,) = build_model(Sharding(), ModelOptions())
    bare = unwrapped(wrapped)
    predicting = dataclasses.replace(bare.config)
    predicting.mtp_num_layers = 1
    messages = []

    def attempt(function: Any, *arguments: Any, **keywords: Any) -> None:
        with pytest.raises(ValueError) as error:
            function(*arguments, **keywords)
        messages.append(str(error.value))

    attempt(add_value_head, wrapped)
    config, bare.config = bare.config, predicting
    attempt(add_value_head, bare)
    bare.config = config
    sample = Sample([1, 2, 3], 2, [1, 1], name="turn 7")
    attempt(values_of, wrapped, [sample], max_tokens_per_microbatch=8, is_truncated=[])
    attempt(values_of, wrapped, [sample], max_tokens_per_microbatch=8)
    attempt(ValueStep, Run().config, CriticConfig(), model=wrapped)
    plan = plan_step([sample], max_tokens_per_microbatch=8)
    attempt(ValueStep(Run().config, CriticConfig(), plan, model=wrapped).head, pack([sample]))
    return messages


def test_refusals_say_what_to_do() -> None:
    wrapped, predicting, flags, logits, plan, values = run_ranks(refusals, 1)[0]
    assert "add the value head before it is wrapped" in wrapped
    assert "--mtp-num-layers" in predicting
    assert "is_truncated has 0 flags for 1 samples" in flags
    assert "expected one value a token, from a model with add_value_head(model)" in logits
    assert "pass the plan that plan_step()" in plan
    assert "turn 7 has no old_values" in values
