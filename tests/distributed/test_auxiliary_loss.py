"""The losses that Megatron adds to the policy's for the routers of a mixture of experts keep their
intended gradient.

In both loss modes and beside padding: the gradient of their mean over the micro-batches of all
data-parallel ranks, in per-token mode weighted by tokens, whatever the policy loss is divided by.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor

from megatron_pg.config import versions
from megatron_pg.megatron import ParallelGroups, experts, policy_step
from megatron_pg.megatron.groups import unwrapped
from megatron_pg.megatron.scale_contract import ScaleContract

from .compare import assert_equal, compare
from .launch import refusal, run_ranks
from .models import ModelOptions, Sharding
from .one_step import Outcome, build, run_schedule, train_step
from .router_losses import step_with_losses_of_routers
from .steps import NUM_EXPERTS, TOPK, Run

RUN = Run()
OPTIONS = ModelOptions(
    mixture_of_experts=True, moe_aux_loss_coeff=0.5, moe_z_loss_coeff=0.25, dtype=torch.float64
)


def nothing() -> None: ...


def sharded_step(
    name: str,
    per_token: bool,
    mutate: Callable[[], None] = nothing,
    options: ModelOptions = OPTIONS,
) -> Any:
    mutate()
    options = replace(options, calculate_per_token_loss=per_token)
    return train_step(build(Sharding.named(name), options), Sharding.named(name), RUN)


@functools.cache
def reference(
    data_size: int, per_token: bool, options: ModelOptions = OPTIONS
) -> tuple[Outcome, dict[str, float]]:
    options = replace(options, calculate_per_token_loss=per_token)
    # Interleaved pipelines fill up with an empty micro-batch.
    multiple = 2 if options.num_layers > 2 else 1
    return run_ranks(step_with_losses_of_routers, 1, options, RUN, data_size, multiple)[0]


both_modes = pytest.mark.parametrize(
    "per_token", [False, True], ids=["per_micro_batch", "per_token"]
)
BEFORE_0_19 = not versions.multiplies_by_ranks()


@both_modes
@pytest.mark.parametrize(
    "name", ["DP2", "CP2", "TP2+SP", "TP2+SP ETP2", "TP2+SP PP2", "CP2 EP2 DP2", "CP4"]
)
def test_losses_of_routers_are_means_over_tokens_without_padding(name, per_token) -> None:
    sharding = Sharding.named(name)
    if sharding.tensor > sharding.expert_tensor and BEFORE_0_19:
        pytest.skip(
            "gradients of experts differ between tensor-parallel ranks here, without such a loss "
            "too"
        )
    outcome = run_ranks(sharded_step, sharding.world_size, name, per_token)[0]
    # Megatron's routers round to float32.
    assert_equal([outcome], [reference(sharding.data, per_token)[0]])


GLOBAL = replace(OPTIONS, balancing="global_aux_loss")
LIST = replace(
    OPTIONS,
    balancing=("aux_loss", "seq_aux_loss", "global_aux_loss"),
    moe_aux_loss_coeff=(0.2, 0.1, 0.4),
)


@both_modes
@pytest.mark.parametrize(
    ("name", "options"),
    [
        # Megatron takes a pack for one sequence: `seq_aux_loss` is `aux_loss` there.
        ("CP2", replace(OPTIONS, balancing="seq_aux_loss")),
        ("PP2 VPP2 CP2", replace(OPTIONS, num_layers=4)),
        pytest.param(
            "TP2+SP ETP2",
            replace(OPTIONS, hybrid=True),
            marks=pytest.mark.skipif(not versions.has_hybrid_model(), reason="HybridModel: 0.18"),
        ),
        ("one process", GLOBAL),
        ("DP2", GLOBAL),
        ("TP2+SP ETP2", GLOBAL),
        ("PP2 CP2 DP2", replace(GLOBAL, recompute="full")),
        ("CP2 EP2 DP2", LIST),
    ],
)
def test_other_losses_of_routers(name, options, per_token) -> None:
    sharding = Sharding.named(name)
    outcome = run_ranks(sharded_step, sharding.world_size, name, per_token, nothing, options)[0]
    data_size = sharding.data
    assert_equal([outcome], [reference(data_size, per_token, replace(options, recompute=None))[0]])


class ForwardOfOnesOwn(GPTModel):  # type: ignore[misc]
    """A model whose forward hands on what it knows, as those around a language model do."""

    def forward(self, input_ids, position_ids, attention_mask, packed_seq_params=None):
        places = input_ids, position_ids, attention_mask
        return super().forward(*places, packed_seq_params=packed_seq_params)


def step_of_ones_own_forward(name: str, options: ModelOptions) -> Any:
    sharding = Sharding.named(name)
    chunks = build(sharding, options)
    for chunk in chunks:
        unwrapped(chunk).__class__ = ForwardOfOnesOwn
    return train_step(chunks, sharding, RUN)


@both_modes
@pytest.mark.parametrize("name", ["CP2", "TP2+SP PP2"])
def test_routers_under_a_forward_of_ones_own_count_no_padding(name, per_token) -> None:
    """Padding was counted outside of per-token mode, which was refused."""
    sharding, options = Sharding.named(name), replace(OPTIONS, calculate_per_token_loss=per_token)
    if sharding.tensor > sharding.expert_tensor and BEFORE_0_19:
        pytest.skip("gradients of experts differ between tensor-parallel ranks")
    outcome = run_ranks(step_of_ones_own_forward, sharding.world_size, name, options)[0]
    assert_equal([outcome], [reference(sharding.data, per_token)[0]])


class LayersOfOnesOwn(TransformerBlock):  # type: ignore[misc]
    def forward(self, hidden_states, attention_mask, packed_seq_params=None, **others):
        return super().forward(
            hidden_states, attention_mask, packed_seq_params=packed_seq_params, **others
        )


class BiasOfOnesOwn(TopKRouter):  # type: ignore[misc]
    def _apply_expert_bias(self, routing_map, padding_mask=None):
        self.local_tokens_per_expert += 1


def refusals_of_models() -> list[str]:
    """Of layers that take no mask, and of routers built in the other mode; a bias of one's own is
    left alone.
    """
    layers = build(Sharding(context=2), OPTIONS)
    unwrapped(layers[0]).decoder.__class__ = LayersOfOnesOwn
    groups = ParallelGroups.from_model(layers)
    said = [refusal(NotImplementedError, experts.take_padding_mask, layers, groups)]
    late = build(Sharding(), OPTIONS)
    late[0].config.calculate_per_token_loss = True
    groups = ParallelGroups.from_model(late)
    said.append(refusal(ValueError, experts.take_padding_mask, late, groups))
    biased = build(Sharding(), replace(OPTIONS, expert_bias=True))
    routers = [m for m in biased[0].modules() if hasattr(m, "apply_z_loss")]
    for router in routers:
        router.__class__ = BiasOfOnesOwn
    assert experts.take_padding_mask(biased, groups)
    routers[0]._apply_expert_bias(None)
    assert routers[0].local_tokens_per_expert.tolist() == [1.0] * NUM_EXPERTS
    return said


def test_models_whose_routers_would_count_wrongly_are_refused() -> None:
    """The router of the second had 0.009 of its gradient."""
    layers, late = run_ranks(refusals_of_models, 2)[0]
    assert "a router loss or bias requires layers with padding_mask=" in layers
    assert "calculate_per_token_loss=True, but its routers were built with False" in late


def padding_is_counted() -> None:
    policy_step.padding_mask = lambda batch: torch.zeros_like(batch.tokens, dtype=torch.bool)[None]


def an_empty_micro_batch_has_a_token() -> None:
    right = policy_step.padding_mask

    def padding_mask(batch):
        mask = right(batch)
        mask[0, 0] &= bool(batch.samples) or batch.window.cp_rank > 0
        return mask

    policy_step.padding_mask = padding_mask


def a_mean_of_the_ranks_means() -> None:
    def apply_z_loss(router, *args, **keywords):
        return type(router).apply_z_loss(router, *args, **keywords)

    experts._weighted_z_loss = apply_z_loss


def a_factor_of_the_ranks() -> None:
    experts._scale_of_a_rank = lambda *_: torch.ones(1)


def active_tokens_alone() -> None:
    right = ScaleContract.apply

    def apply(self, loss, metrics, num_active_tokens, num_tokens):
        self = replace(self, factor=self.factor * num_active_tokens / num_tokens)
        return right(self, loss, metrics, num_active_tokens, num_active_tokens)

    ScaleContract.apply = apply


def tokens_of_the_last_micro_batch() -> None:
    def apply_global_loss(router, *args, **keywords):
        return type(router)._apply_global_aux_loss(router, *args, **keywords)

    experts._global_loss = apply_global_loss


def a_sum_averaged_over_ranks() -> None:
    experts._coefficient = lambda router, kind: type(router).get_aux_loss_coeff(router, kind)


MUTANTS = [
    (padding_is_counted, False, "CP2", OPTIONS),
    (padding_is_counted, True, "CP2", OPTIONS),
    (an_empty_micro_batch_has_a_token, False, "PP2 VPP2 CP2", replace(OPTIONS, num_layers=4)),
    (an_empty_micro_batch_has_a_token, True, "PP2 VPP2 CP2", replace(OPTIONS, num_layers=4)),
    (a_mean_of_the_ranks_means, False, "CP2", OPTIONS),
    (a_mean_of_the_ranks_means, True, "CP2", OPTIONS),
    (active_tokens_alone, True, "CP2", OPTIONS),
    (tokens_of_the_last_micro_batch, False, "one process", GLOBAL),
    (a_sum_averaged_over_ranks, False, "DP2", GLOBAL),
]
if versions.multiplies_by_ranks():
    MUTANTS.append((a_factor_of_the_ranks, True, "CP2", OPTIONS))


@pytest.mark.parametrize(("mutate", "per_token", "name", "options"), MUTANTS)
def test_mutant_a_wrong_loss_of_routers_is_caught(mutate, per_token, name, options) -> None:
    sharding = Sharding.named(name)
    outcome = run_ranks(sharded_step, sharding.world_size, name, per_token, mutate, options)[0]
    expected = reference(sharding.data, per_token, options)[0]
    assert compare(outcome, expected).gradient_error > 1e-3


class Writer:
    """A SummaryWriter that keeps the last value of each name."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def add_scalar(self, name: str, value: Tensor, _: int) -> None:
        self.values[name] = float(value)


NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Megatron's names of the losses in its report."""


def reported_losses(name: str, per_token: bool) -> dict[str, float]:
    sharded_step(name, per_token, options=LIST)
    writer, micro_batches = Writer(), len(RUN.micro_batches(1, 0, 1))
    moe_utils.track_moe_metrics(
        loss_scale=1 / micro_batches, iteration=1, writer=writer, num_layers=LIST.num_layers
    )
    return writer.values


@both_modes
def test_the_report_of_megatron_has_the_means_over_micro_batches(per_token) -> None:
    """Not weighted by tokens, in per-token mode neither. The z loss is left out: it is reported by
    rank.
    """
    found = run_ranks(reported_losses, 4, "CP2 DP2", per_token)[0]
    for kind, expected in reference(2, per_token, LIST)[1].items():
        if kind in NAMES:
            assert found[NAMES[kind]] == pytest.approx(expected, rel=1e-6)


def bias_of_experts(name: str) -> list[tuple[list[float], list[float]]]:
    """By router the tokens of each expert that this rank has counted in a step, and the bias
    after it.
    """
    options = replace(OPTIONS, expert_bias=True, moe_aux_loss_coeff=0.0, moe_z_loss_coeff=None)
    chunks = build(Sharding.named(name), options)
    routers = [module for module in chunks[0].modules() if hasattr(module, "apply_z_loss")]
    counts = []

    def finalize(*args: Any, **keywords: Any) -> None:
        # It begins the count anew.
        counts.extend(router.local_tokens_per_expert.tolist() for router in routers)
        finalize_model_grads(*args, **keywords)

    chunks[0].config.finalize_model_grads_func = finalize
    run_schedule(chunks, Sharding.named(name), RUN)
    return list(zip(counts, [router.expert_bias.tolist() for router in routers], strict=True))


@pytest.mark.parametrize("name", ["CP2", "TP2+SP ETP2"])
def test_the_bias_of_experts_counts_no_padding(name) -> None:
    whole, parts = run_ranks(bias_of_experts, 1, "")[0], run_ranks(bias_of_experts, 2, name)
    for layer, (counts, bias) in enumerate(whole):
        assert sum(counts) == TOPK * sum(len(sample.tokens) for sample in RUN.samples)
        assert [
            sum(both) for both in zip(*(part[layer][0] for part in parts), strict=True)
        ] == counts
        mean = sum(counts) / NUM_EXPERTS
        expected = [1e-3 * ((count < mean) - (count > mean)) for count in counts]
        assert any(expected)
        for found in (bias, *(part[layer][1] for part in parts)):
            assert found == pytest.approx(expected, rel=1e-6)


def refusal_of_quantiles() -> str:
    chunks = build(Sharding(), OPTIONS)
    chunks[0].config.moe_router_load_balancing_type = "quantile_balancing"
    groups = ParallelGroups.from_model(chunks)
    return refusal(NotImplementedError, experts.take_padding_mask, chunks, groups)


def test_routers_whose_quantiles_count_padding_are_refused() -> None:
    (refused,) = run_ranks(refusal_of_quantiles, 1)
    assert refused.startswith("--moe-router-load-balancing-type quantile_balancing")
