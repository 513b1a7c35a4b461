"""The losses that Megatron adds to the policy's keep their intended gradient.

Those of the routers of a mixture of experts, in both loss modes and beside padding: the gradient of their mean over the
micro-batches of all data-parallel ranks, in per-token mode weighted by tokens, whatever the policy loss is divided by. That of
multi-token prediction on a Megatron-Core that scales it otherwise: the same gradient, or a refusal in words.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import gpt_model
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import multi_token_prediction
from torch import Tensor

from megatron_pg.config import versions
from megatron_pg.config.versions import derives_multi_token_labels
from megatron_pg.megatron import experts, policy_step
from megatron_pg.megatron.scale_contract import ScaleContract
from tests import oracle

from .cases import AHEAD
from .compare import assert_equal, compare
from .launch import run_ranks
from .models import (
    NUM_EXPERTS,
    ModelOptions,
    Sharding,
    build_model,
    gather_gradients,
    initialize_groups,
)
from .one_step import Outcome, build, run_schedule, run_steps, train_step
from .reference import expected_metrics, logits_of_pack, reference_steps
from .steps import Run

RUN = Run()
BALANCE, Z, TOPK = 0.5, 0.25, 3
OPTIONS = ModelOptions(
    mixture_of_experts=True, moe_aux_loss_coeff=BALANCE, moe_z_loss_coeff=Z, dtype=torch.float64
)


def losses_of_router(logits: Tensor) -> Tensor:
    """A router's losses of one micro-batch [tokens, experts], in plain loops: Switch Transformers' and ST-MoE's."""
    chosen, probs, z = [0.0] * NUM_EXPERTS, [torch.zeros(())] * NUM_EXPERTS, torch.zeros(())
    for row in logits:
        for expert in row.topk(TOPK).indices.tolist():
            chosen[expert] += 1 / (TOPK * len(logits))
        for expert, prob in enumerate(row.softmax(0)):
            probs[expert] = probs[expert] + prob / len(logits)
        z = z + row.logsumexp(0) ** 2 / len(logits)
    balance = sum(f * p for f, p in zip(chosen, probs, strict=True))
    return BALANCE * NUM_EXPERTS * balance + Z * z


def reference_step(data_size: int, per_token: bool, num_layers: int) -> Outcome:
    """One process: every micro-batch packed by itself without padding, the routers' losses averaged over them."""
    initialize_groups(Sharding())
    options = replace(OPTIONS, moe_aux_loss_coeff=0.0, moe_z_loss_coeff=None, num_layers=num_layers)
    (model,) = build_model(Sharding(), options)
    router_logits: list[Tensor] = []
    for module in model.modules():
        if hasattr(module, "apply_z_loss"):
            module.register_forward_hook(
                lambda router, inputs, _: router_logits.append(
                    inputs[0][:, 0].double() @ router.weight.double().T
                )
            )
    plain, logits, beside = RUN.samples, {}, torch.zeros((), dtype=torch.float64)
    # Interleaved pipelines fill up with an empty micro-batch, of which one token counts.
    multiple = 2 if num_layers > 2 else 1
    parts = [
        part for rank in range(data_size) for part in RUN.micro_batches(data_size, rank, multiple)
    ]
    all_tokens = sum(len(sample.tokens) for sample in plain)
    for part in parts:
        router_logits.clear()
        of_part = logits_of_pack(model, [plain[index] for index in part])
        logits |= dict(zip(part, of_part, strict=True))
        num_tokens = max(sum(map(len, of_part)), 1)
        weight = num_tokens / all_tokens if per_token else 1 / len(parts)
        beside = beside + weight * sum(map(losses_of_router, router_logits))
    result = oracle.policy_loss(plain, [logits[i] for i in range(len(plain))], RUN.objective)
    with model.no_sync():
        (result.loss + beside).backward()
    return Outcome(gather_gradients([model]) or {}, expected_metrics(RUN, result))


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
def reference(data_size: int, per_token: bool, num_layers: int = 2) -> Outcome:
    return run_ranks(reference_step, 1, data_size, per_token, num_layers)[0]


@pytest.mark.parametrize("per_token", [False, True], ids=["per_micro_batch", "per_token"])
@pytest.mark.parametrize("name", ["DP2", "CP2", "TP2+SP", "TP2+SP PP2", "CP2 EP2 DP2", "CP4"])
def test_losses_of_routers_are_means_over_tokens_without_padding(name, per_token) -> None:
    sharding = Sharding.named(name)
    if sharding.tensor > 1 and not versions.multiplies_by_ranks():
        pytest.skip(
            "gradients of experts differ between tensor-parallel ranks here, without such a loss too"
        )
    outcome = run_ranks(sharded_step, sharding.world_size, name, per_token)[0]
    # Megatron's routers round to float32.
    assert_equal([outcome], [reference(sharding.data, per_token)])


@pytest.mark.parametrize("per_token", [False, True], ids=["per_micro_batch", "per_token"])
def test_chunks_of_a_pipeline_leave_out_padding(per_token) -> None:
    options = replace(OPTIONS, num_layers=4)
    outcome = run_ranks(sharded_step, 4, "PP2 VPP2 CP2", per_token, nothing, options)[0]
    assert_equal([outcome], [reference(1, per_token, 4)])


@pytest.mark.parametrize("per_token", [False, True], ids=["per_micro_batch", "per_token"])
def test_a_loss_by_sequence_is_of_the_whole_pack(per_token) -> None:
    """Megatron takes a pack for one sequence: `seq_aux_loss` is `aux_loss` there."""
    options = replace(OPTIONS, balancing="seq_aux_loss")
    outcome = run_ranks(sharded_step, 2, "CP2", per_token, nothing, options)[0]
    assert_equal([outcome], [reference(1, per_token)])


def padding_is_counted() -> None:
    policy_step.padding_mask = lambda batch: torch.zeros_like(batch.tokens, dtype=torch.bool)[None]


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


MUTANTS = [
    (padding_is_counted, False),
    (padding_is_counted, True),
    (a_mean_of_the_ranks_means, False),
    (a_mean_of_the_ranks_means, True),
    (active_tokens_alone, True),
]
if versions.multiplies_by_ranks():
    MUTANTS.append((a_factor_of_the_ranks, True))


@pytest.mark.parametrize(("mutate", "per_token"), MUTANTS)
def test_a_wrong_loss_of_routers_is_caught(mutate, per_token) -> None:
    outcome = run_ranks(sharded_step, 2, "CP2", per_token, mutate)[0]
    assert compare(outcome, reference(1, per_token)).gradient_error > 1e-3


def counted_by_the_bias(name: str) -> list[list[float]]:
    """The tokens of each expert that this rank's routers have counted in a step for their bias."""
    options = replace(OPTIONS, expert_bias=True, moe_aux_loss_coeff=0.0, moe_z_loss_coeff=None)
    chunks = build(Sharding.named(name), options)
    chunks[0].config.finalize_model_grads_func = lambda *_, **__: None  # it begins the count anew
    run_schedule(chunks, Sharding.named(name), RUN)
    modules = [module for module in chunks[0].modules() if hasattr(module, "apply_z_loss")]
    return [module.local_tokens_per_expert.tolist() for module in modules]


def test_the_bias_of_experts_counts_no_padding() -> None:
    whole = run_ranks(counted_by_the_bias, 1, "")[0]
    assert [sum(layer) for layer in whole] == [TOPK * sum(len(s.tokens) for s in RUN.samples)] * 2
    parts = torch.tensor(run_ranks(counted_by_the_bias, 2, "CP2"))
    assert parts.sum(0).tolist() == whole


needs_multi_token = pytest.mark.skipif(
    not derives_multi_token_labels(), reason="multi-token prediction without labels: 0.19 and later"
)
AHEAD_RUN = Run(regularized=True)


def scaled_in_the_schedule(factor: float) -> None:
    """As pull request 3959 of NVIDIA/Megatron-LM has it: the schedule's scale carries the factor."""
    right, scaler = schedules.forward_step_calc_loss, multi_token_prediction.MTPLossAutoScaler

    def wrong(*args: Any, **keywords: Any) -> Any:
        result = right(*args, **keywords)
        scaler.set_loss_scale(scaler.main_loss_backward_scale * factor)
        return result

    schedules.forward_step_calc_loss = wrong


def scaled_in_the_loss(factor: float) -> None:
    """As pull request 7498 says that it does: the loss itself, outside of per-token mode."""
    right = multi_token_prediction.process_mtp_loss

    def wrong(*args: Any, config: Any, **keywords: Any) -> Any:
        if not config.calculate_per_token_loss:
            scale = config.mtp_loss_scaling_factor * factor
            config = replace(config, mtp_loss_scaling_factor=scale)
        return right(*args, config=config, **keywords)

    gpt_model.process_mtp_loss = multi_token_prediction.process_mtp_loss = wrong


def other_arguments(factor: float) -> None:
    """A Megatron-Core that cannot be measured."""
    right = schedules.forward_step_calc_loss
    schedules.forward_step_calc_loss = lambda *args, of_another_name=None: right(*args)


def second_step(change: Any, factor: float, sharding: Sharding) -> Outcome | str | None:
    """The outcome on rank 0 of the step that is not measured, or what was refused on this rank."""
    change(factor)
    try:
        return run_steps(sharding, AHEAD, [AHEAD_RUN, AHEAD_RUN])[1]
    except NotImplementedError as error:
        return str(error)


@needs_multi_token
@pytest.mark.parametrize("name", ["CP2", "PP2 CP2", "TP2 CP2"])
@pytest.mark.parametrize(
    ("change", "factor"),
    [(scaled_in_the_schedule, 2.0), (scaled_in_the_loss, 2.0), (scaled_in_the_loss, 1.0)],
    ids=["the schedule's", "the loss's", "as in 0.19"],
)
def test_the_gradient_is_the_same_where_megatron_multiplies_by_cp(change, factor, name) -> None:
    sharding = Sharding.named(name)
    expected = run_ranks(reference_steps, 1, AHEAD.unsharded, [AHEAD_RUN])[0]
    found = run_ranks(second_step, sharding.world_size, change, factor, sharding)[0]
    assert_equal([found], expected)


@needs_multi_token
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (scaled_in_the_schedule, "it multiplies by 3.0, and not by 1 or 2"),
        (other_arguments, "unexpected keyword"),
    ],
)
def test_another_factor_is_refused_on_every_rank(change, words) -> None:
    for found in run_ranks(second_step, 2, change, 3.0, Sharding(context=2)):
        assert found.startswith("--mtp-num-layers with --context-parallel-size 2")
        assert words in found
