"""Routing replay: the gradient of a model whose routers take given experts, at every sharding, and
mutants of it.

The oracle (`reference.outputs_alone`) runs each sample alone in one process and routes in plain
loops.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_pg.config import versions
from megatron_pg.megatron import ParallelGroups, compute_log_probs, routing_replay
from megatron_pg.megatron.policy_step import MicroBatchHead, PolicyStep, model_inputs
from megatron_pg.step import batch as batches
from megatron_pg.step.batch import PackedBatch
from tests import oracle
from tests.random_steps import package_samples

from .compare import assert_equal, compare
from .launch import refusal, run_ranks
from .models import ModelOptions, Sharding, build_model
from .one_step import Outcome, build, train_step
from .reference import outputs_alone, reference_steps
from .steps import Run, ValueRun

pytestmark = pytest.mark.full

TOPK = 3
RUN = Run(regularized=True)
DENSE_BETWEEN = (0, 1, 1, 0)
OPTIONS = ModelOptions(mixture_of_experts=True, dtype=torch.float64, num_layers=4)


def reference_step(options: ModelOptions, layers: int) -> tuple[Outcome, list[Tensor]]:
    """One process, and plain loops in the place of the routers: the step and its log-probs."""
    run = replace(RUN, replay_layers=layers)
    (outcome,) = reference_steps(options, [run])
    (model,) = build_model(Sharding(), options)
    with torch.no_grad():
        logits, *_ = outputs_alone(model, options, run.samples)
    return outcome, oracle.policy_loss(run.samples, logits, run.objective).log_probs


def sharded_step(
    name: str, options: ModelOptions, layers: int, mutate: Callable[[], None] = lambda: None
) -> Any:
    mutate()
    run, sharding = replace(RUN, replay_layers=layers), Sharding.named(name)
    return train_step(build(sharding, options), sharding, run)


@functools.cache
def reference(options: ModelOptions, layers: int) -> tuple[Outcome, list[Tensor]]:
    whole = replace(options, recompute=None, calculate_per_token_loss=False)
    return run_ranks(reference_step, 1, whole, layers)[0]


SHARDINGS = [
    "one process",
    *("CP2", "CP4", "TP2+SP", "PP2", "PP2 VPP2", "DP2 EP2", "TP2+SP CP2", "CP2 EP2 DP2"),
]


def skip_if_experts_are_reduced_over_wrong_ranks(name: str) -> None:
    """Up to 0.18 gradients of experts differ between tensor-parallel ranks, without replay too
    (pull request 5916).
    """
    if "TP2" in name and not versions.multiplies_by_ranks():
        pytest.skip(
            "experts are reduced over the wrong ranks under tensor parallelism: before 0.19"
        )


@pytest.mark.parametrize("recompute", [None, "full", "moe"])
@pytest.mark.parametrize("name", SHARDINGS)
def test_routers_take_the_experts_of_the_engine(name, recompute) -> None:
    skip_if_experts_are_reduced_over_wrong_ranks(name)
    options = replace(OPTIONS, recompute=recompute)
    world_size = Sharding.named(name).world_size
    outcome = run_ranks(sharded_step, world_size, name, options, 4)[0]
    assert_equal([outcome], [reference(options, 4)[0]], tolerance=1e-12)


@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("name", ["PP2", "PP2 VPP2", "CP2"])
def test_layers_without_experts_between(name, layers) -> None:
    options = replace(OPTIONS, moe_layer_freq=DENSE_BETWEEN, recompute="full")
    world_size = Sharding.named(name).world_size
    outcome = run_ranks(sharded_step, world_size, name, options, layers)[0]
    assert_equal([outcome], [reference(options, layers)[0]], tolerance=1e-12)


@pytest.mark.skipif(not versions.has_hybrid_model(), reason="HybridModel: 0.18 and later")
@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("name", ["one process", "CP2", "TP2+SP", "PP2"])
def test_layers_of_a_hybrid_model(name, layers) -> None:
    skip_if_experts_are_reduced_over_wrong_ranks(name)
    options = replace(OPTIONS, hybrid=True)
    outcome = run_ranks(sharded_step, Sharding.named(name).world_size, name, options, layers)[0]
    assert_equal([outcome], [reference(options, layers)[0]], tolerance=1e-12)


@pytest.mark.skipif(
    not versions.derives_multi_token_labels(), reason="multi-token prediction: 0.19 and later"
)
@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("name", ["CP2", "PP2 VPP2"])
def test_routers_of_multi_token_prediction_choose_for_themselves(name, recompute) -> None:
    """Their layer lies behind those of the engine. Megatron computes its loss in float32."""
    options = replace(OPTIONS, mtp_num_layers=1, recompute=recompute)
    outcome = run_ranks(sharded_step, Sharding.named(name).world_size, name, options, 4)[0]
    assert_equal([outcome], [reference(options, 4)[0]])


def the_experts_of_the_token_before() -> None:
    right = batches.routed_experts_of_tokens
    batches.routed_experts_of_tokens = lambda *args: right(*args).roll(1, 0)


def the_experts_of_the_layer_before() -> None:
    right = routing_replay.Replay.__init__

    def wrong(replay: routing_replay.Replay, router: Any) -> None:
        right(replay, router)
        replay.layer = (replay.layer - 1) % router.config.num_layers

    routing_replay.Replay.__init__ = wrong


def an_own_choice_in_recomputation() -> None:
    routing_replay.Replay._next = lambda replay, in_backward: (
        None if in_backward else replay._experts
    )


def the_choice_of_the_router() -> None:
    routing_replay.Replay._next = lambda replay, in_backward: None


def the_tokens_of_the_first_tensor_rank() -> None:
    right = routing_replay._give_experts

    def wrong(groups: Any, replays: Any, chunk: Any, args: Any, keywords: dict[str, Any]) -> Any:
        whole = keywords["routed_experts"]
        if whole is not None:
            keywords["routed_experts"] = whole[: len(whole) // 2].repeat(2, 1, 1)
        return right(groups, replays, chunk, args, keywords)

    routing_replay._give_experts = wrong


def padding_with_a_choice() -> None:
    right = batches.routed_experts_of_tokens

    def wrong(parts: list[Tensor], indices: Tensor) -> Tensor:
        experts = right(parts, indices)
        experts[indices < 0] = torch.arange(TOPK, dtype=experts.dtype)
        return experts

    batches.routed_experts_of_tokens = wrong


@pytest.mark.parametrize(
    ("mutate", "name", "recompute"),
    [
        (the_experts_of_the_token_before, "one process", None),
        (the_experts_of_the_layer_before, "one process", None),
        (the_choice_of_the_router, "one process", None),
        (an_own_choice_in_recomputation, "one process", "full"),
        (an_own_choice_in_recomputation, "one process", "moe"),
        (the_tokens_of_the_first_tensor_rank, "TP2+SP", None),
    ],
)
def test_mutant_a_wrong_replay_is_caught(mutate, name, recompute) -> None:
    skip_if_experts_are_reduced_over_wrong_ranks(name)
    options = replace(OPTIONS, recompute=recompute)
    world_size = Sharding.named(name).world_size
    outcome = run_ranks(sharded_step, world_size, name, options, 4, mutate)[0]
    assert compare(outcome, reference(options, 4)[0]).gradient_error > 1e-3


def test_mutant_padding_with_a_choice_is_caught_by_the_agreement() -> None:
    outcome = run_ranks(sharded_step, 2, "CP2", OPTIONS, 4, padding_with_a_choice)[0]
    expected = reference(OPTIONS, 4)[0].metrics["router_agreement"]
    assert abs(outcome.metrics["router_agreement"] - expected) > 1e-4


def calls_without_experts() -> str:
    """What a loop of one's own hears that leaves the head's arguments out."""
    chunks = build(Sharding(), OPTIONS)

    def head(step: PolicyStep, batch: PackedBatch) -> MicroBatchHead:
        made = step.head(batch)
        return replace(made, model_inputs=model_inputs(batch))

    with pytest.raises(ValueError) as refused:
        train_step(chunks, Sharding(), replace(RUN, replay_layers=4), head=head)
    return str(refused.value)


def test_a_call_without_the_experts_is_refused() -> None:
    assert "add **head.model_arguments" in run_ranks(calls_without_experts, 1)[0]


def critic_steps() -> list[float]:
    """The loss of a critic that is a mixture itself, under the policy's config without replay and
    with it.
    """
    chunks = build(Sharding(), replace(OPTIONS, value_head=True))
    outcomes = [train_step(chunks, Sharding(), ValueRun(replay_layers=layers)) for layers in (0, 4)]
    return [outcome.metrics["value_loss"] for outcome in outcomes if outcome is not None]


def test_a_critic_routes_by_itself() -> None:
    without, with_replay = run_ranks(critic_steps, 1)[0]
    assert without == with_replay


def agreements() -> list[float]:
    """The metric of two steps with log-probs between them, and the experts that routers hold at the
    end.
    """
    chunks = build(Sharding(), replace(OPTIONS, recompute="full"))
    run, found = replace(RUN, replay_layers=4), []
    samples = package_samples(run.samples)
    for _ in range(2):
        outcome = train_step(chunks, Sharding(), run)
        compute_log_probs(chunks, samples, run.config, max_tokens_per_microbatch=64)
        found.append(outcome.metrics["router_agreement"] if outcome else 0.0)
    routers = [m for m in chunks[0].modules() if hasattr(m, "apply_z_loss")]
    replays = [router.router_replay for router in routers]
    return [*found, float(sum(len(r._waiting) + (r._experts is not None) for r in replays))]


def test_the_agreement_is_of_one_step_and_no_expert_stays() -> None:
    first, second, held = run_ranks(agreements, 1)[0]
    assert first == second == reference(OPTIONS, 4)[0].metrics["router_agreement"]
    assert held == 0.0


REFUSALS = {
    "--cuda-graph-impl transformer_engine": {"cuda_graph_impl": "transformer_engine"},
    "--overlap-moe-expert-parallel-comm": {"overlap_moe_expert_parallel_comm": True},
    "--moe-router-fusion": {"moe_router_fusion": True},
    "--moe-router-load-balancing-type sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "--moe-expert-capacity-factor 0.5": {"moe_expert_capacity_factor": 0.5},
    "requires a model with experts": {"num_moe_experts": None},
}


def refusals() -> list[str]:
    chunks, found = build(Sharding(), OPTIONS), []
    for settings in REFUSALS.values():
        config = vars(chunks[0].config)
        before = {name: config.get(name) for name in settings}
        config.update(settings)
        with pytest.raises((ValueError, NotImplementedError)) as refused:
            routing_replay.RoutingReplay(chunks, ParallelGroups.from_model(chunks))
        found.append(str(refused.value))
        config.update(before)
    return found


def test_routers_that_cannot_take_given_experts_are_refused() -> None:
    for words, message in zip(REFUSALS, run_ranks(refusals, 1)[0], strict=True):
        assert message.startswith("--replay-routing") and words in message


class RoutingOfOnesOwn(TopKRouter):  # type: ignore[misc]
    def routing(self, logits, padding_mask=None):
        logits = logits.flatten(0, 1)
        best = logits.topk(self.topk, dim=1).indices
        probs = torch.zeros_like(logits).scatter(1, best, logits.gather(1, best).softmax(1))
        return probs, probs > 0


class RouterOfOnesOwn(torch.nn.Module):
    """A router that is not Megatron's."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight, self.topk = router.weight, router.topk

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return RoutingOfOnesOwn.routing(self, hidden @ self.weight.T)  # type: ignore[arg-type]


def own_routing(layer: Any) -> None:
    layer.mlp.router.__class__ = RoutingOfOnesOwn


def own_router(layer: Any) -> None:
    layer.mlp.router = RouterOfOnesOwn(layer.mlp.router)


def words_of_own_routers() -> list[str]:
    """What a step, and scoring, hear of routers that do not replay; each is the last layer's."""
    run, said = replace(RUN, replay_layers=4), []
    samples, budget = package_samples(run.samples), {"max_tokens_per_microbatch": 4096}
    for change in (own_routing, own_router):
        chunks = build(Sharding(), OPTIONS)
        change(chunks[0].module.decoder.layers[3])
        said.append(refusal(NotImplementedError, train_step, chunks, Sharding(), run))
        scoring = chunks, samples, run.config
        said.append(refusal(NotImplementedError, compute_log_probs, *scoring, **budget))
    return said


def test_routers_that_do_not_take_the_experts_are_refused() -> None:
    """Gradients were those of the routers' own choice, and `router_agreement` was missing."""
    *routings, one, other = run_ranks(words_of_own_routers, 1)[0]
    for words in routings:
        assert "the router of layer 3 ignored the given experts" in words
    for words in (one, other):
        assert "layers [0, 1, 2, 3] of" in words and "is in layers [0, 1, 2]" in words


def scores(name: str) -> list[Tensor]:
    """The log-probs of the samples under a model of four layers, of a step that is not trained
    on.
    """
    chunks = build(Sharding.named(name), OPTIONS)
    run = replace(RUN, replay_layers=4)
    samples = package_samples(run.samples)
    return compute_log_probs(chunks, samples, run.config, max_tokens_per_microbatch=64).log_probs


@pytest.mark.parametrize("name", ["one process", "CP2", "TP2+SP", "PP2 VPP2"])
def test_log_probs_are_those_of_the_given_experts(name) -> None:
    found = run_ranks(scores, Sharding.named(name).world_size, name)[0]
    for values, expected, sample in zip(found, reference(OPTIONS, 4)[1], RUN.samples, strict=True):
        mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
        torch.testing.assert_close(values[mask], expected[mask].float(), rtol=1e-6, atol=0)
