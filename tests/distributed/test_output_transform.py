"""Output layers that compute more than their product, in place of which the fused and the float32
head compute.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear

from megatron_pg import PolicyLossConfig, pack
from megatron_pg.integrations.fused_head import OutputFactors, leave_out_logits
from megatron_pg.megatron import compute_hidden_states, compute_log_probs
from megatron_pg.megatron.fused_head import FusedHead
from megatron_pg.megatron.policy_step import model_inputs
from tests.random_steps import package_samples

from .compare import compare, gradient_tolerance
from .launch import refusal, run_ranks
from .models import ModelOptions, Sharding
from .one_step import Outcome, build, build_changed, fused_heads, train_step
from .steps import Run

DENSE = ModelOptions(dtype=torch.float64)
RUN = Run("sample_mean", cut="uniform", regularized=True)
(FUSED,) = fused_heads(5)


class Scaled(ColumnParallelLinear):
    """Of the shape of Granite's output layer in Megatron-Bridge."""

    def forward(self, *args, **kwargs):
        output, bias = super().forward(*args, **kwargs)
        return output * 0.3, bias


class Capped(ColumnParallelLinear):
    """Of the shape of Gemma 2's; a cap that untrained logits reach."""

    def forward(self, *args, **kwargs):
        output, bias = super().forward(*args, **kwargs)
        return 0.5 * torch.tanh(output / 0.5), bias


class ScaledAndCapped(Scaled):
    def forward(self, *args, **kwargs):
        output, bias = super().forward(*args, **kwargs)
        return torch.tanh(output / 0.5) * 0.5, bias


class Shifted(ColumnParallelLinear):
    def forward(self, *args, **kwargs):
        output, bias = super().forward(*args, **kwargs)
        return output + 0.125, bias


class Negative(ColumnParallelLinear):
    def forward(self, *args, **kwargs):
        output, bias = super().forward(*args, **kwargs)
        return -output, bias


class Adapted(ColumnParallelLinear):
    """A LoRA adapter, whose second factor begins with zeros."""

    def forward(self, input_, *args, **kwargs):
        output, bias = super().forward(input_, *args, **kwargs)
        return output + input_ @ self.down @ self.up, bias


class OwnProduct(ColumnParallelLinear):
    def forward(self, input_, weight=None, runtime_gather_output=None):
        return input_ @ (self.weight if weight is None else weight).T, None


class OtherProduct(ColumnParallelLinear):
    def _forward_impl(self, input, weight, *args, **kwargs):
        return 2 * super()._forward_impl(input, weight, *args, **kwargs)


def become(kind: type, layer: Any) -> None:
    layer.__class__ = kind
    if kind is Adapted:
        rows, columns = layer.weight.shape
        options = {"dtype": layer.weight.dtype}
        layer.down = torch.nn.Parameter(torch.ones(columns, 2, **options))
        layer.up = torch.nn.Parameter(torch.zeros(2, rows, **options))


def scaled_by_its_instance(layer: Any) -> None:
    inner = layer.forward
    layer.forward = lambda *args, **keywords: (inner(*args, **keywords)[0] * 0.3, None)


def frozen_adapter(layer: Any) -> None:
    become(Adapted, layer)
    with torch.no_grad():
        layer.up.fill_(0.01)
    layer.down.requires_grad_(False)
    layer.up.requires_grad_(False)


SUPPORTED: dict[str, Callable[[Any], None]] = {
    "nothing": lambda layer: None,
    "a subclass that scales": functools.partial(become, Scaled),
    "a subclass that caps": functools.partial(become, Capped),
    "a subclass that scales and caps": functools.partial(become, ScaledAndCapped),
    "an instance that scales": scaled_by_its_instance,
    "a hook that looks": lambda layer: layer.register_forward_hook(lambda *_: None) and None,
    "a hook before that scales": lambda layer: (
        layer.register_forward_pre_hook(lambda _, args: (args[0] * 0.3, *args[1:])) and None
    ),
}
REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "a shift": (
        functools.partial(become, Shifted),
        "Shifted gives 0.125 for a product of",
    ),
    "a negative scale": (functools.partial(become, Negative), "with a positive scale, but Negative "
                                                              "multiplies by -1"),
    "a new adapter": (
        functools.partial(become, Adapted),
        "the logits of Adapted also depend on up",
    ),
    "a frozen adapter": (frozen_adapter, "Adapted gives "),
    "a product of its own": (
        functools.partial(become, OwnProduct),
        "the forward of OwnProduct does not call it",
    ),
    "a hook that scales": (
        lambda layer: layer.register_forward_hook(
            lambda _, __, out: (out[0] * 0.3, out[1])
        ) and None,
        "GPTModel or a hook changes them",
    ),
}  # fmt: skip


def outcomes(sharding: Sharding, options: ModelOptions) -> list[tuple[Outcome | None, ...]]:
    """The step with the model's logits, and through the fused head."""
    found = []
    for change in SUPPORTED.values():
        chunks = build(sharding, options)
        for chunk in chunks:
            if hasattr(chunk.module, "output_layer"):
                change(chunk.module.output_layer)
        plain = train_step(chunks, sharding, RUN)
        found.append((plain, train_step(chunks, sharding, RUN, head=FUSED)))
    return found


@pytest.mark.parametrize("case", ["one process", "TP2+SP", "CP2"])
def test_the_fused_head_computes_what_the_layer_computes(case) -> None:
    sharding = Sharding() if case == "one process" else Sharding.named(case)
    pairs = run_ranks(outcomes, sharding.world_size, sharding, DENSE)[0]
    plain = pairs[0][0]
    for name, (expected, found) in zip(SUPPORTED, pairs, strict=True):
        comparison = compare(found, expected, gradient_tolerance(DENSE))
        assert comparison.passed, f"{name}: {comparison}"
        has_transform = "scales" in name or "caps" in name
        assert has_transform != compare(plain, expected, gradient_tolerance(DENSE)).passed, name


def outcomes_without_transforms() -> list[tuple[Outcome | None, ...]]:
    """Mutant: the head takes the product for the logits."""
    right = FusedHead.output_processor
    FusedHead.output_processor = lambda self, hidden, weight, transform: right(self, hidden, weight)
    return outcomes(Sharding(), DENSE)


def test_mutant_a_transform_left_out_would_be_seen() -> None:
    pairs = run_ranks(outcomes_without_transforms, 1)[0]
    for name, (expected, found) in zip(SUPPORTED, pairs, strict=True):
        has_transform = ("scales" in name or "caps" in name) and "before" not in name
        passed = compare(found, expected, gradient_tolerance(DENSE)).passed
        assert passed != has_transform, name


def refusals(options: ModelOptions) -> dict[str, tuple[str, str, bool]]:
    """By case what a step and a scoring say, and whether the model still computes as before."""
    said = {}
    for name, (change, _) in REFUSED.items():
        chunks = build_changed(Sharding(), options, lambda model: change(model.output_layer))  # noqa: B023
        config = PolicyLossConfig(fused_lm_head=True)
        samples = package_samples(RUN.samples)
        score = functools.partial(compute_log_probs, chunks, samples, max_tokens_per_microbatch=64)
        plain = replace(config, fused_lm_head=False)
        before = score(config=plain).log_probs
        texts = (
            refusal(NotImplementedError, train_step, chunks, Sharding(), RUN, head=FUSED),
            refusal(NotImplementedError, score, config=config),
        )
        after = score(config=plain).log_probs
        same = all(map(torch.equal, before, after))
        said[name] = (*texts, same)
    return said


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_more_than_a_scale_and_a_cap_is_refused(dtype) -> None:
    (found,) = run_ranks(refusals, 1, ModelOptions(dtype=dtype))
    for name, (_, reason) in REFUSED.items():
        of_step, of_scoring, is_same = found[name]
        for text in (of_step, of_scoring):
            assert text.startswith("--fused-lm-head") and text.endswith(": drop the flag"), text
            assert reason in text, f"{name}: {text}"
        assert is_same, name


def noted_scores() -> list[tuple[str, float]]:
    """The hook of slime, miles and verl: log-probs by the factors, against those of the layer's own
    logits.
    """
    found = []
    for name, change in SUPPORTED.items():
        chunks = build(Sharding(), DENSE)
        change(chunks[0].module.output_layer)
        batch = pack(package_samples(RUN.samples))
        with torch.no_grad():
            logits = chunks[0](**model_inputs(batch))[0].double()
            expected = (logits / 0.7).log_softmax(1).gather(1, batch.tokens[:, None])[:, 0]
            leave_out_logits(chunks, "the flag")
            factors = OutputFactors.noted(chunks[0](**model_inputs(batch)), "the flag")
            log_probs, _ = factors.scores(None, batch.tokens, 0.7)
        found.append((name, float((log_probs - expected).abs().max())))
    return found


def test_the_factors_of_other_trainers_have_the_transform() -> None:
    for name, error in run_ranks(noted_scores, 1)[0]:
        assert error < 1e-10, name


def other_users() -> list[str]:
    """What a teacher with a scale says, and the float32 head of a product that is none."""
    samples = package_samples(RUN.samples)
    teacher = build(Sharding(), DENSE)
    become(Scaled, teacher[0].module.output_layer)
    states = functools.partial(compute_hidden_states, teacher, samples)
    policy = build(Sharding(), DENSE)
    become(OtherProduct, policy[0].module.output_layer)
    score = functools.partial(
        compute_log_probs, policy, samples, PolicyLossConfig(fp32_lm_head=True)
    )
    return [
        refusal(NotImplementedError, states, max_tokens_per_microbatch=64),
        refusal(NotImplementedError, score, max_tokens_per_microbatch=64),
    ]  # fmt: skip


def test_teachers_and_the_float32_head_compare_too() -> None:
    ((of_teacher, of_product),) = run_ranks(other_users, 1)
    assert "found LogitTransform(scale=0.3, softcap=None): give the teacher by" in of_teacher
    assert of_product.startswith("--fp32-lm-head requires") and "OtherProduct gives" in of_product
