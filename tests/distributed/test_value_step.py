"""A critic on real Megatron: what a wrong head or step would show, its values at a sharding, its
metrics, whitening.
"""

import dataclasses
import functools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_pg import CriticConfig, Sample, gae, pack, plan_step, whiten
from megatron_pg.critic import ValueStep, add_value_head, value_head
from megatron_pg.critic import compute_values as values_of
from megatron_pg.megatron import PolicyStep
from megatron_pg.megatron.groups import unwrapped
from megatron_pg.megatron.scale_contract import ScaleContract
from tests.random_steps import package_samples

from .compare import assert_equal, compare
from .launch import refusal, run_ranks
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


def without_mark(chunks: list[Any], patch: pytest.MonkeyPatch) -> None:
    """The head's gradients are not summed over the ranks that share the tokens."""
    for parameter in unwrapped(chunks[-1]).output_layer.parameters():
        patch.setattr(parameter, "sequence_parallel", False)


def with_summed_gradient(chunks: list[Any], patch: pytest.MonkeyPatch) -> None:
    """Backward adds up what every tensor-parallel rank computes alike."""
    name = "gather_from_sequence_parallel_region"
    right, changed = getattr(value_head, name), {"tensor_parallel_output_grad": True}
    patch.setattr(value_head, name, lambda values, **keywords: right(values, **keywords | changed))


def one_token_late(chunks: list[Any], patch: pytest.MonkeyPatch) -> None:
    """The value is read after its token and not before it."""
    head = unwrapped(chunks[-1]).output_layer
    right = head.forward
    patch.setattr(head, "forward", lambda *inputs, **_: (right(*inputs)[0].roll(-1, 0), None))


def without_factor(chunks: list[Any], patch: pytest.MonkeyPatch) -> None:
    """The loss goes to the schedule as it is."""
    patch.setattr(ScaleContract, "apply", lambda self, loss, metrics, *_: (loss + 0.0, metrics))


MUTANTS = (without_mark, with_summed_gradient, one_token_late, without_factor)


def on_a_rank() -> dict[str, Any]:
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
    for chunk in chunks:
        chunk.zero_grad_buffer()
    value_step, value_output = run_schedule(chunks, SHARDING, RUN)
    policy_step, output = run_schedule(policy, SHARDING, Run("prompt_mean"))
    assert isinstance(policy_step, PolicyStep) and isinstance(value_step, ValueStep)
    apart = {**policy_step.metrics(output), **value_step.metrics(value_output)}
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reductions:
        together = policy_step.metrics(output, critic=value_step.report(value_output))
    ops = [call.kwargs.get("op", dist.ReduceOp.SUM) for call in reductions.call_args_list]
    return {**found, "apart": apart, "together": together, "all_reduces": list(map(str, ops))}


@pytest.fixture(scope="module")
def expected() -> tuple[Outcome, list[list[float]]]:
    return run_ranks(reference, 1)[0]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(on_a_rank, SHARDING.world_size)


def test_the_right_step_passes(found, expected) -> None:
    assert_equal([found[0]["right"]], [expected[0]], tolerance=1e-12)


@pytest.mark.parametrize("mutant", [mutant.__name__ for mutant in MUTANTS])
def test_mutant_a_wrong_one_is_seen(mutant, found, expected) -> None:
    wrong = found[0][mutant]
    assert isinstance(wrong, str) or not compare(wrong, expected[0], 1e-12).passed


def test_values_at_a_sharding_are_those_of_one_process(found, expected) -> None:
    for rank in found:
        scored = rank["values"]
        for sample, values, alone in zip(RUN.samples, scored.values, expected[1], strict=True):
            # The value before a token is read where its logits are; the last one is behind the
            # response.
            before = alone[sample.prompt_length - 1 : -1]
            assert values.tolist() == pytest.approx(before, rel=1e-6, abs=1e-6)
        bootstrap = [alone[-1] * cut for alone, cut in zip(expected[1], TRUNCATED, strict=True)]
        assert scored.bootstrap_values.tolist() == pytest.approx(bootstrap, rel=1e-6, abs=1e-6)
        assert len({round(value, 6) for value in bootstrap}) > 3


def test_policy_and_critic_share_one_sum_and_one_maximum(found) -> None:
    for rank in found:
        assert rank["together"] == rank["apart"] == found[0]["together"]
        assert [op.rsplit(".")[-1] for op in rank["all_reduces"]] == ["SUM", "MAX"]


REWARDS = [[0.0, 1.0], [0.5], [0.0, 0.0, -1.0], [2.0]]


def whitened(rank_alone: bool = False) -> list[list[float]]:
    """This rank's share of the responses, whitened over all ranks or, wrongly, over its own."""
    mine = REWARDS[dist.get_rank() :: dist.get_world_size()]
    masks, values = [[1] * len(row) for row in mine], [[0.0] * len(row) for row in mine]
    advantages = gae(mine, values, masks, 0.5, 1.0).advantages
    group = None if rank_alone else dist.group.WORLD
    return [row.tolist() for row in whiten(advantages, masks, data_parallel_group=group)]


@pytest.mark.parametrize("rank_alone", [False, True])
def test_whitening_is_over_the_step(rank_alone) -> None:
    (whole,) = run_ranks(whitened, 1)
    first, second = run_ranks(whitened, 2, rank_alone)
    together = [*first[0], *second[0], *first[1], *second[1]]
    expected = [value for row in whole for value in row]
    assert (together == pytest.approx(expected, rel=0, abs=1e-6)) != rank_alone


def refusals() -> list[str]:
    initialize_groups(Sharding())
    (wrapped,) = build_model(Sharding(), ModelOptions())
    bare = unwrapped(wrapped)
    sample, budget = Sample([1, 2, 3], 2, [1, 1], name="turn 7"), {"max_tokens_per_microbatch": 8}
    predicting = dataclasses.replace(bare.config)
    predicting.mtp_num_layers = 1
    refused = functools.partial(refusal, ValueError)
    messages = [refused(add_value_head, wrapped)]
    with mock.patch.object(bare, "config", predicting):
        messages.append(refused(add_value_head, bare))
    plan = plan_step([sample], **budget)
    distilled = dataclasses.replace(Run().config, distill_coef=0.1, distill_teacher="hidden")
    ValueStep(distilled, CriticConfig(), plan, model=wrapped)  # only the policy has a teacher
    step = ValueStep(Run().config, CriticConfig(), plan, model=wrapped)
    return [
        *messages,
        refused(values_of, wrapped, [sample], **budget, is_truncated=[]),
        refused(values_of, wrapped, [sample], **budget),
        refused(ValueStep, Run().config, CriticConfig(), model=wrapped),
        refused(step.head, pack([sample])),
    ]


def test_refusals_say_what_to_do() -> None:
    wrapped, predicting, flags, logits, plan, values = run_ranks(refusals, 1)[0]
    assert "Add the value head before you wrap the model" in wrapped
    assert "--mtp-num-layers" in predicting
    assert "is_truncated has 0 flags for 1 samples" in flags
    assert "expected one value per token. Use add_value_head(model)" in logits
    assert "pass the plan that plan_step()" in plan
    assert "turn 7 has no old_values" in values
