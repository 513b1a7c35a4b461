"""`--fused-lm-head` and `--fp32-lm-head` are honoured or refused, never ignored."""

import argparse
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_pg.config import PolicyLossConfig, add_policy_loss_args, validate_policy_loss_args
from megatron_pg.head import HeadOptions, LogitTransform, linear_token_loss
from megatron_pg.loss.from_logits import policy_loss_function
from megatron_pg.loss.metrics import MicroBatchMetrics, reduce_metrics
from megatron_pg.loss.micro_batch import MicroBatchLoss
from megatron_pg.loss.resolved import resolve
from megatron_pg.megatron import output_layer
from megatron_pg.megatron.fused_head import FusedHead
from megatron_pg.megatron.policy_step import PolicyStep
from megatron_pg.step.batch import PackedBatch, pack
from megatron_pg.step.sample import Sample
from megatron_pg.step.totals import step_totals
from tests.fast.refusals import assert_refused

step = functools.partial(PolicyStep, totals=step_totals([]), num_microbatches=1)


def validate(line: str, **found: Any) -> argparse.Namespace:
    args = add_policy_loss_args(argparse.ArgumentParser()).parse_args(line.split())
    vars(args).update(found)
    return validate_policy_loss_args(args)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"defer_embedding_wgrad_compute": True}, "--defer-embedding-wgrad-compute delays"),
        ({"gtp_weight_remat_size": 2}, "--tensor-parallel-num-weight-shards splits further"),
    ],
)
def test_what_takes_the_gradient_of_the_weight_from_the_layer_is_refused(setting, words) -> None:
    """At startup by the flags, and where there were none by the model's settings."""
    validate("", **setting)
    model, error = torch.nn.Module(), NotImplementedError
    model.config = SimpleNamespace(**setting)
    for flag in ["--fp32-lm-head", "--fused-lm-head"]:
        assert_refused(f"{flag} | {words}", validate, flag, error=error, **setting)
        config = PolicyLossConfig.from_args(validate(flag))
        assert_refused(f"{flag} | {words}", step, config, model=model, error=error)


@pytest.mark.parametrize("flag", ["--fp32-lm-head", "--fused-lm-head"])
def test_a_model_whose_output_layer_stays_what_it_is_is_named(flag: str) -> None:
    config = PolicyLossConfig.from_args(validate(flag))
    words = f"{flag} | give PolicyStep the model="
    assert_refused(words, step, config)
    model, error = torch.nn.Module(), NotImplementedError
    model.config = SimpleNamespace()
    words = f"but Module has none: drop {flag}"
    assert_refused(words, step, config, model=model, error=error)
    model.language_model = torch.nn.Module()
    model.language_model.output_layer = torch.nn.Linear(2, 3)
    words = "as the model's output_layer, but Module has Linear"
    assert_refused(words, step, config, model=[model], error=error)


def test_narrow_logits_are_refused() -> None:
    sample = Sample([1, 2, 3], 2, [1, 1], 1.0, old_log_probs=[-1.0, -1.0])
    batch, totals = pack([sample]), step_totals([sample])
    logits, config = torch.zeros(3, 4), PolicyLossConfig(fp32_lm_head=True)
    policy_loss_function(config, batch, logits, totals=totals)
    words, given = "they are torch.bfloat16. | set_fp32_lm_head(model)", (config, batch)
    assert_refused(words, policy_loss_function, *given, logits.bfloat16(), totals=totals)


def test_what_the_fused_head_cannot_do_is_refused() -> None:
    line = "--fused-lm-head --fp32-lm-head"
    config = PolicyLossConfig.from_args(validate(line))
    assert config.fused_lm_head and config.fp32_lm_head
    assert_refused("--use-mup", validate, line, use_mup=True, error=NotImplementedError)
    assert_refused("--qkv-format thd", validate, "--fused-lm-head --qkv-format bshd")


@pytest.mark.parametrize("mtp_num_layers", [0, 2])
def test_the_gradient_of_multi_token_prediction_is_not_lost(mtp_num_layers: int) -> None:
    """It uses the same weight, and without fused addition DDP's hook has to add it to what the head
    has added.
    """
    weight = torch.ones(8, 4, requires_grad=True)
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(8, 4), False
    targets = torch.tensor([1, 5])

    def total(log_probs: torch.Tensor, *others: Any) -> torch.Tensor:
        return log_probs.sum()

    def processor(hidden: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
        return linear_token_loss(hidden[:, 0], weight, targets, total, defer=True)[0]

    layer = torch.nn.Identity()
    layer._forward_impl = None
    output_layer._transforms[layer] = LogitTransform()
    processed = output_layer._Processed(processor, layer, ("", ""), mtp_num_layers)
    arguments = {"weight": weight, "tp_group": None}
    arguments |= {"sequence_parallel": False, "allreduce_dgrad": False}
    hidden = torch.ones(2, 1, 4)
    for _ in range(mtp_num_layers):
        assert layer(hidden) is hidden
    loss = processed.product(input=hidden, **arguments).sum()
    loss.backward(retain_graph=True)
    of_the_head = weight.main_grad.clone()
    weight.main_grad, weight.grad = torch.zeros(8, 4), None
    (loss + (3 * weight).sum()).backward()
    # DistributedDataParallel's hook (megatron-core, distributed_data_parallel.py).
    if not weight.grad_added_to_main_grad or getattr(weight, "zero_out_wgrad", False):
        weight.main_grad.add_(weight.grad)
    # The mutant: a model that does not say it has such layers.
    of_prediction = 3.0 if mtp_num_layers else 0.0
    torch.testing.assert_close(weight.main_grad, of_the_head + of_prediction)


def micro_batch(samples: list[Sample]) -> tuple[PackedBatch, torch.Tensor, torch.Tensor]:
    """A micro-batch, and random hidden states and weights of an output layer, float64."""
    batch, generator = pack(samples), torch.Generator().manual_seed(3)
    hidden = torch.randn(len(batch.tokens), 1, 4, generator=generator).double().requires_grad_()
    weight = torch.randn(8, 4, generator=generator).double().requires_grad_()
    return batch, hidden, weight


def fused_head(config: PolicyLossConfig, batch: PackedBatch, chunk_tokens: int | None) -> FusedHead:
    loss = MicroBatchLoss(resolve(config), batch, step_totals(batch.samples))
    options = HeadOptions(chunk_tokens=chunk_tokens, with_entropy=config.needs_entropy)
    return FusedHead(loss, options)


@pytest.mark.parametrize("chunk_tokens", [1, 3, None])
@pytest.mark.parametrize("pg_metrics", ["none", "basic", "with_entropy"])
@pytest.mark.parametrize("policy_loss", ["ppo", "gspo"])
def test_metrics_are_filled_in_by_backward(chunk_tokens, pg_metrics, policy_loss) -> None:
    """In place, the extremes and the tokens of a NaN loss with them; under no_grad they are there
    at once.
    """
    samples = [
        Sample([1, 2, 3, 4], 3, [1, 0, 1], [1.0, 2.0, -1.0], old_log_probs=[-1.0, -2.0, -3.0]),
        Sample([5, 6, 7], 2, [1, 1], [0.5, 0.0], old_log_probs=[-2.0, -2.0]),
    ]
    settings = {"policy_loss": policy_loss, "pg_metrics": pg_metrics}
    config = PolicyLossConfig(**settings, check_aggregation=True)
    batch, hidden, weight = micro_batch(samples)
    logits, totals = torch.nn.functional.linear(hidden[:, 0], weight), step_totals(samples)
    expected_loss, expected = policy_loss_function(config, batch, logits, totals=totals)

    def run() -> tuple[torch.Tensor, MicroBatchMetrics]:
        fused = fused_head(config, batch, chunk_tokens)
        loss, metrics = fused.loss(fused.output_processor(hidden, weight))
        assert metrics.keys() == expected.keys()
        return loss, metrics

    def check(loss: torch.Tensor, taken: dict[str, torch.Tensor], metrics: Any) -> None:
        torch.testing.assert_close(loss, expected_loss)
        for found in (taken, metrics):
            torch.testing.assert_close(dict(found), dict(expected))
        torch.testing.assert_close(metrics.maxima, expected.maxima)
        assert (metrics.is_nan is None) == (pg_metrics == "none")

    loss, metrics = run()
    taken = dict(metrics)
    assert loss.isnan() and all(pair.isnan().all() for pair in taken.values())
    with pytest.raises(RuntimeError, match="checksum is nan"):
        reduce_metrics(config, [metrics], contributes=True, device="cpu")
    gradients = torch.autograd.grad(loss, (hidden, weight))
    check(loss.detach(), taken, metrics)
    wanted = torch.autograd.grad(expected_loss, (hidden, weight))
    torch.testing.assert_close(gradients, wanted, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        loss, metrics = run()
    check(loss, metrics, metrics)


def of_all_tokens(config: object, batch: object, log_probs: torch.Tensor) -> torch.Tensor:
    """A loss of a user's in which every token's gradient depends on every other's log-prob."""
    return log_probs * log_probs.sum()


@pytest.mark.parametrize("chunk_tokens", [1, 2, None])
def test_a_loss_of_all_tokens_through_the_fused_head_equals_plain_logits(chunk_tokens) -> None:
    """Other settings: `CutFused` of `test_cut_invariance`."""
    samples = [
        Sample([1, 2, 3, 4, 2], 4, [1] * 4, [1.0, -2.0, 0.0, 0.5], [-1.0, -2.0, -2.5, -1.5]),
        Sample([5, 6, 7], 2, [1] * 2, [1.0, -2.0], [-2.0, -1.5]),
    ]
    config = PolicyLossConfig(custom_policy_loss_path=f"{__name__}.of_all_tokens")
    batch, hidden, weight = micro_batch(samples)
    logits = torch.nn.functional.linear(hidden[:, 0], weight)
    expected, _ = policy_loss_function(config, batch, logits, totals=step_totals(samples))
    gradients = torch.autograd.grad(expected, (hidden, weight))
    fused = fused_head(config, batch, chunk_tokens)
    loss, _ = fused.loss(fused.output_processor(hidden, weight))
    found = torch.autograd.grad(loss, (hidden, weight))
    torch.testing.assert_close(loss.detach(), expected.detach())
    torch.testing.assert_close(found, gradients, rtol=1e-5, atol=1e-7)
