"""Models whose log-probs vary at the same weights: measured, and refused by name before a step."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import nn

from megatron_pg import CriticConfig, PolicyLossConfig
from megatron_pg.check import model as builder
from megatron_pg.critic.value_step import ValueStep
from megatron_pg.megatron import PolicyStep
from megatron_pg.megatron.groups import unwrapped
from tests.random_steps import package_samples, uneven_totals

from .launch import refusal, run_ranks
from .models import ModelOptions, Sharding, check_options, initialize_groups, transformer_config
from .one_step import build, build_changed
from .steps import NUM_EXPERTS, TOPK
from .test_compute_log_probs import SAMPLES, Setting, kl_of_first_step, score

Change = Callable[[Any], object]
DENSE = ModelOptions(dtype=torch.float64)
EXPERTS = replace(DENSE, mixture_of_experts=True)
SCORED, TRAINED = 4096, 64
"""Tokens of a micro-batch in scoring and in training."""


@dataclass(frozen=True)
class Allowed(Setting):
    """A setting under which log-probs may vary."""

    @property
    def config(self) -> PolicyLossConfig:
        return replace(super().config, allow_varying_log_probs=True)


class Adapter(nn.Module):
    """A wrapped layer: its output, and a term of it through another module."""

    def __init__(self, layer: Any, term: nn.Module) -> None:
        super().__init__()
        self.to_wrap, self.term = layer, term

    def forward(self, hidden: Any, *args: Any, **keywords: Any) -> Any:
        output, bias = self.to_wrap(hidden, *args, **keywords)
        return output + self.term(output.flatten(0, 1)).view_as(output), bias


def wrapped_with(term: nn.Module) -> Change:
    def change(model: Any) -> None:
        layer = model.decoder.layers[1]
        layer.mlp = Adapter(layer.mlp, term.to(torch.float64))

    return change


def settings(**values: Any) -> Change:
    return lambda model: vars(model.config).update(values)


def layers_drop(model: Any) -> None:
    for layer in model.decoder.layers:
        layer.hidden_dropout = 0.1


def routers_balance(model: Any) -> None:
    settings(moe_router_load_balancing_type="sinkhorn")(model)
    for layer in model.decoder.layers:
        layer.mlp.router.routing_type = "sinkhorn"


def recipes_differ(model: Any) -> None:
    for layer, scored in zip(model.decoder.layers, (None, "bf16"), strict=True):
        recipes = SimpleNamespace(training_recipe="mxfp8", evaluation_recipe=scored)
        layer.mlp.te_quant_params = recipes


ROUTER = "decoder.layers.0.mlp.router (TopKRouter) has moe"
VARYING: dict[str, tuple[ModelOptions, Change]] = {
    "decoder.layers.0 (TransformerLayer) has hidden_dropout=0.1": (DENSE, layers_drop),
    "mlp.term (Dropout) has dropout=0.05": (DENSE, wrapped_with(nn.Dropout(0.05))),
    "mlp.term (BatchNorm1d) has track_running_stats=True": (
        DENSE,
        wrapped_with(nn.BatchNorm1d(32)),
    ),
    f"{ROUTER}_input_jitter_eps=0.1": (EXPERTS, settings(moe_input_jitter_eps=0.1)),
    f"{ROUTER}_router_force_load_balancing=True": (
        EXPERTS,
        settings(moe_router_force_load_balancing=True),
    ),
    f"{ROUTER}_expert_capacity_factor=1.0": (EXPERTS, settings(moe_expert_capacity_factor=1.0)),
    f"{ROUTER}_router_load_balancing_type=sinkhorn": (EXPERTS, routers_balance),
}
"""What a user is told, and the model that it is true of."""
OF_GPUS: dict[str, Change] = {
    "decoder.layers.1.mlp (MLP) has te_quant_params.evaluation_recipe=bf16": recipes_differ,
    "the model (GPTModel) has fp8_recipe=delayed": settings(fp8="hybrid", fp8_recipe="delayed"),
}
STEADY: list[tuple[ModelOptions, Change]] = [
    (DENSE, settings(hidden_dropout=0.1)),  # no module has it
    (DENSE, wrapped_with(nn.Sequential(nn.Dropout(0.1), nn.BatchNorm1d(32)).eval())),
    (DENSE, wrapped_with(nn.InstanceNorm1d(32))),
    (EXPERTS, settings(moe_expert_capacity_factor=NUM_EXPERTS / TOPK)),
    (replace(EXPERTS, expert_bias=True), settings()),
    (replace(EXPERTS, moe_aux_loss_coeff=0.5, moe_z_loss_coeff=0.25), settings()),
]


def refusals(chunks: Any) -> list[str]:
    """The words of the policy's step, the critic's, and of scoring."""
    samples = [replace(sample, rollout_id=None) for sample in package_samples(SAMPLES)]
    named = {"totals": uneven_totals(samples), "num_microbatches": 1, "model": chunks}
    config = PolicyLossConfig()
    return [
        refusal(ValueError, PolicyStep, config, **named),
        refusal(ValueError, ValueStep, config, CriticConfig(), **named),
        refusal(ValueError, score, chunks, Setting(1.0, SCORED), samples),
    ]


def of_varying_models() -> list[tuple[list[str], float]]:
    """What is said of each model, and the KL of its first step from its own scores."""
    found = []
    for options, change in VARYING.values():
        chunks = build_changed(Sharding(), options, change)
        torch.manual_seed(1)
        said = refusals(chunks)
        scored, trained = Allowed(1.0, SCORED), Allowed(1.0, TRAINED)
        found.append((said, kl_of_first_step(chunks, Sharding(), scored, trained)))
    return found


def test_a_model_whose_log_probs_vary_is_refused_by_name() -> None:
    for words, (said, kl) in zip(VARYING, run_ranks(of_varying_models, 1)[0], strict=True):
        assert kl > 1e-9, words
        for message in said:
            assert words in message and "or add --allow-varying-log-probs" in message


def of_steady_models() -> list[float]:
    found = []
    for options, change in STEADY:
        chunks = build_changed(Sharding(), options, change)
        scored, trained = Setting(1.0, SCORED), Setting(1.0, TRAINED)
        found.append(kl_of_first_step(chunks, Sharding(), scored, trained))
    return found


def test_what_leaves_log_probs_alone_is_allowed() -> None:
    """Different micro-batches round differently: in float64 the log-probs are equal as float32."""
    assert max(run_ranks(of_steady_models, 1)[0]) < 1e-13


def of_models_of_gpus() -> list[list[str]]:
    found = []
    for change in OF_GPUS.values():
        chunks = build(Sharding(), DENSE)
        change(unwrapped(chunks[0]))
        found.append(refusals(chunks))
    return found


def test_quantization_that_varies_is_refused_by_name() -> None:
    for words, said in zip(OF_GPUS, run_ranks(of_models_of_gpus, 1)[0], strict=True):
        assert all(words in message for message in said)


def of_the_default() -> list[str]:
    """A model whose config leaves Megatron's default of one dropout."""
    initialize_groups(Sharding())
    default = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1).hidden_dropout
    config = replace(transformer_config(Sharding(), DENSE), hidden_dropout=default)
    cut = check_options(Sharding(), DENSE)
    return refusals(builder.build_model(cut, config, vocab_size=16, max_sequence_length=256))


def test_the_default_dropout_of_megatron_is_refused() -> None:
    for message in run_ranks(of_the_default, 1)[0]:
        assert "embedding.embedding_dropout (Dropout) has dropout=0.1" in message
        assert "decoder.layers.0 (TransformerLayer) has hidden_dropout=0.1" in message
