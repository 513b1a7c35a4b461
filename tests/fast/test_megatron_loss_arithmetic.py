"""The scale contract and `PolicyStep` without Megatron. Their gradients: `test_cut_invariance`."""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_pg as pg
from megatron_pg import PolicyLossConfig, pack
from megatron_pg.config import versions
from megatron_pg.megatron import PolicyStep, multi_token
from megatron_pg.megatron.scale_contract import ScaleContract, scale_contract
from tests import oracle
from tests.cut_policy_loss import CutLoss, Job, aggregated, package_config, rank_losses
from tests.cut_steps import CUTS
from tests.fast.refusals import assert_refused
from tests.oracle import Objective
from tests.random_steps import package_samples, random_logits, random_step, uneven_totals
from tests.step_loss import step_loss


def objective_of(aggregation: str) -> Objective:
    """With KL and entropy terms, whose outer count is not that of the policy gradient."""
    return aggregated(Objective(kl_loss_coef=0.2, entropy_coef=0.1), aggregation)


@pytest.mark.parametrize("per_token", (False, True))
def test_values_that_the_schedule_can_use(per_token: bool) -> None:
    """n is a 0-d int32 tensor: a float fails in its accumulator, a Python int in torch.clamp."""
    step = random_step(seed=42)
    totals = uneven_totals(package_samples(step))
    config, cut = package_config(Objective()), CUTS["whole"](len(step))
    (result,) = rank_losses(config, step, random_logits(step), cut)
    output = CutLoss().returned(Job(per_token, 1, 1), totals, result)
    assert len(output) == (3 if per_token else 2) and output[0].shape == ()
    if per_token:
        assert output[1].dtype == torch.int32 and output[1].shape == ()
        accumulator = torch.zeros((), dtype=torch.int)
        accumulator += torch.clamp(output[1], min=1)
    # The schedule rescales the returned loss in place; neither the metrics nor s may follow.
    reported, loss = {name: pair.clone() for name, pair in output[-1].items()}, result.loss.clone()
    with torch.no_grad():
        output[0].mul_(1000)
    assert all(torch.equal(output[-1][name], pair) for name, pair in reported.items())
    assert torch.equal(result.loss, loss)


def moe_contract(**changes: object) -> ScaleContract:
    """The contract of a model with a mixture-of-experts auxiliary loss, in per-token mode."""
    model_config = SimpleNamespace(num_moe_experts=4, moe_aux_loss_coeff=0.01, mtp_num_layers=None)
    step = random_step(seed=44)
    totals = replace(uneven_totals(package_samples(step)), num_tokens=100)
    settings = {"model_config": model_config, "totals": totals, "calculate_per_token_loss": True}
    settings |= {"data_parallel_size": 2, "context_parallel_size": 1, "num_microbatches": 2}
    settings |= changes
    return scale_contract(settings.pop("model_config"), settings.pop("totals"), **settings)


def num_tokens(contract: ScaleContract) -> int:
    """n of a micro-batch of 32 tokens on this rank, 8 of them active."""
    return int(contract.apply(torch.ones(()), {}, 8, 32)[1])  # type: ignore[arg-type]


EXPERTS = {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.01}
MTP = SimpleNamespace(num_moe_experts=None, mtp_num_layers=1)
NO_COEFFICIENT = SimpleNamespace(num_moe_experts=4, moe_aux_loss_coeff=0.0, mtp_num_layers=None)
MODELS = [
    # (settings of the model, whether it has an auxiliary loss)
    ({"num_moe_experts": 4, "moe_aux_loss_coeff": 0.01}, True),
    ({"num_moe_experts": 4, "moe_aux_loss_coeff": [0.0, 0.1], "mtp_num_layers": None}, True),
    ({**EXPERTS, "moe_router_load_balancing_type": ["seq_aux_loss", "none"]}, True),
    ({**EXPERTS, "moe_router_load_balancing_type": "none"}, False),
    ({**EXPERTS, "moe_router_load_balancing_type": "sinkhorn"}, False),
    ({"num_moe_experts": 4, "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 1e-3}, True),
    ({"num_moe_experts": None, "mtp_num_layers": None}, False),
    (vars(NO_COEFFICIENT), False),
    ({"num_moe_experts": 4}, False),
]


@pytest.mark.parametrize(("settings", "has_auxiliary_loss"), MODELS)
def test_auxiliary_losses_count_all_tokens(settings, has_auxiliary_loss: bool) -> None:
    """By active tokens Megatron gave 4 times the router's gradient with 8 of 32 tokens active."""
    totals = replace(uneven_totals(package_samples(random_step(seed=44))), num_tokens=100)
    contract = moe_contract(model_config=SimpleNamespace(**settings), totals=totals)
    expected = (32, 100) if has_auxiliary_loss else (8, totals.num_active_tokens)
    assert (num_tokens(contract), contract.factor) == expected


def test_auxiliary_loss_needs_the_steps_tokens() -> None:
    totals = uneven_totals(package_samples(random_step(seed=44)))
    assert_refused("num_tokens", moe_contract, totals=totals)
    assert moe_contract(totals=totals, calculate_per_token_loss=False).factor == 4


def test_multi_token_prediction_is_refused_in_per_token_mode(monkeypatch) -> None:
    monkeypatch.setattr(versions, "megatron_core_version", lambda: (0, 19, 0))
    with pytest.raises(NotImplementedError, match=r"(?s)per-token-loss.*mtp-num-layers.*14/12"):
        moe_contract(model_config=MTP)
    assert moe_contract(model_config=MTP, calculate_per_token_loss=False).factor == 4
    # Without labels an older one has no such loss.
    monkeypatch.setattr(versions, "megatron_core_version", lambda: (0, 18, 2))
    assert num_tokens(moe_contract(model_config=MTP)) == 8


@pytest.mark.parametrize("device", ("cpu", "meta"))
@pytest.mark.parametrize("scaled_by", ("nothing", "optimizer", "trainer"))
def test_multi_token_scale_stays_on_the_models_device(device, scaled_by, monkeypatch) -> None:
    """An optimizer's loss scale is a tensor of one element there (`_scale_one`, optimizer.py of
    0.19.2).
    """
    monkeypatch.setattr(multi_token, "derives_multi_token_labels", lambda: True)
    loss_scale = torch.full((1,), 8.0, device=device)
    config = SimpleNamespace(mtp_num_layers=1, mtp_grad_scale_func=None, grad_scale_func=None)
    if scaled_by != "nothing":
        config.grad_scale_func = lambda loss: loss_scale * loss
    if scaled_by == "trainer":
        config.mtp_grad_scale_func = lambda: loss_scale / 2
    model = torch.nn.Linear(2, 2, device=device)
    model.config = config
    for factor in (3.0, 6.0):  # the second step's takes the place of the first's
        assert multi_token.scale_multi_token_loss(model, factor)
    found = config.mtp_grad_scale_func()
    assert found.device.type == device and found.numel() == 1
    if device == "cpu":
        assert float(found) == {"nothing": 6.0, "optimizer": 48.0, "trainer": 24.0}[scaled_by]


@pytest.mark.parametrize("num_microbatches", (0, -1))
def test_impossible_micro_batch_counts_are_refused(num_microbatches: int) -> None:
    assert_refused("num_microbatches", moe_contract, num_microbatches=num_microbatches)


@dataclass(frozen=True)
class Groups:
    """The sizes and ranks of `ParallelGroups`, without processes."""

    data_size: int = 1
    context_size: int = 1
    context_rank: int = 0
    tensor: None = None
    context: None = None


def policy_step(config: PolicyLossConfig, samples: list[pg.Sample], **keywords: Any) -> PolicyStep:
    """A step of one micro-batch, unless `keywords` say otherwise."""
    totals = uneven_totals(samples)
    given = {"totals": totals, "num_microbatches": 1, "groups": Groups()} | keywords
    return PolicyStep(config, **given)


def chunks(per_token: bool) -> list[SimpleNamespace]:
    """Two virtual-pipeline chunks, of which the first is asked, wrapped or not."""
    first = SimpleNamespace(calculate_per_token_loss=per_token)
    second = SimpleNamespace(calculate_per_token_loss=not per_token)
    return [SimpleNamespace(config=first), SimpleNamespace(config=second)]


@pytest.mark.parametrize("has_model", (False, True))
@pytest.mark.parametrize("per_token", (False, True))
def test_a_micro_batch_has_the_contract_of_its_groups(per_token: bool, has_model: bool) -> None:
    """The model's mode counts, and the config's where there is no model."""
    samples = package_samples(random_step(seed=45))
    totals = uneven_totals(samples)
    config = PolicyLossConfig(calculate_per_token_loss=per_token != has_model)
    model = chunks(per_token) if has_model else None
    for cp_rank in range(2):
        batch = pack(samples, cp_rank=cp_rank, cp_size=2)
        assert batch.num_active_tokens < batch.window.local_tokens < batch.window.num_tokens
        groups = Groups(3, 2, cp_rank)
        step = policy_step(config, samples, num_microbatches=5, model=model, groups=groups)
        assert step.share == pytest.approx(1 / (3 * 2 * 5), rel=1e-12)
        assert step.scale.calculate_per_token_loss == per_token
        assert step.scale.factor == (totals.num_active_tokens if per_token else 3 * 5)
        if per_token:
            _, n, _ = step.scale.apply(
                torch.ones(()), {}, batch.num_active_tokens, batch.window.local_tokens
            )
            assert n == int(batch.loss_mask.sum())


def test_a_model_that_takes_no_padding_mask_is_refused_in_per_token_mode() -> None:
    samples = package_samples(random_step(seed=45))
    config = {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.01, "calculate_per_token_loss": True}
    model = SimpleNamespace(config=SimpleNamespace(**config), forward=lambda input_ids: None)
    totals = replace(uneven_totals(samples), num_tokens=1000)
    with pytest.raises(NotImplementedError, match=r"(?s)per-token-loss.*with padding_mask=.*0\.16"):
        policy_step(PolicyLossConfig(), samples, totals=totals, model=model, groups=Groups())


@pytest.mark.parametrize("packed_for", ((0, 1), (1, 2), (0, 4)))
def test_a_micro_batch_of_another_context_parallel_rank_is_refused(packed_for) -> None:
    samples = package_samples(random_step(seed=45))
    batch = pack(samples, cp_rank=packed_for[0], cp_size=packed_for[1])
    step = policy_step(PolicyLossConfig(), samples, groups=Groups(context_size=2))
    with pytest.raises(ValueError, match=f"rank {packed_for[0]} of {packed_for[1]}, but this "):
        step.head(batch)


@pytest.mark.parametrize("per_token", (False, True))
def test_a_step_takes_a_divisor_of_its_own(per_token: bool) -> None:
    """One config, two steps, each differentiated over the square of its own number of rollouts;
    also beside padding columns.
    """
    config = package_config(objective_of("sample_mean"), calculate_per_token_loss=per_token)
    for seed, num_samples in ((46, 9), (47, 5)):
        step = random_step(seed=seed, num_samples=num_samples)
        samples, logits = package_samples(step), random_logits(step)
        totals, batch = uneven_totals(samples), pack(samples)
        count = len(oracle.rollouts(step))
        job = {"num_microbatches": 2, "groups": Groups(data_size=2)}
        job["vocab_size"] = logits[0].shape[1]
        loss_func = step_loss(config, batch, totals, **job, grad_divisor=float(count**2))
        padded = torch.nn.functional.pad(torch.cat(logits).detach(), (0, 3), value=50.0)
        loss, *rest, metrics = loss_func(padded[None])
        assert len(rest) == per_token
        expected = oracle.policy_loss(step, logits, objective_of("sample_mean"))
        factor = totals.num_active_tokens if per_token else 2 * 2
        wanted = expected.pg_loss / count + (expected.loss - expected.pg_loss)
        torch.testing.assert_close(loss, wanted * factor, rtol=1e-11, atol=0)
        assert metrics["pg_loss"].tolist() == [pytest.approx(expected.pg_loss.item()), 1 / 4]
        for wrong in (0.0, math.nan):
            with pytest.raises(ValueError, match="grad_divisor must be a finite number > 0"):
                step_loss(config, batch, totals, **job, grad_divisor=wrong)


@pytest.mark.parametrize(("tokens", "positions", "words"), [
    (9, 6, "long has token id 9, but the model's embedding has 9 rows"),
    (10, 5, "long has position 5, but the model's embedding has 5 rows"),
])  # fmt: skip
def test_what_the_model_has_no_row_for_is_refused_by_sample(tokens, positions, words) -> None:
    """Before the model runs: a GPU would say that some index is out of bounds, of no sample."""
    tokens_of = {"short": [1, 2], "long": [9, 2, 3, 4, 5, 6]}
    samples = [pg.Sample(row, 1, [1], 1.0, [-1.0], name=name) for name, row in tokens_of.items()]

    def head(tokens: int, positions: int) -> None:
        tables = [SimpleNamespace(num_embeddings=size) for size in (tokens, positions)]
        embedding = SimpleNamespace(word_embeddings=tables[0], position_embeddings=tables[1])
        embedding.add_position_embedding = True
        config = SimpleNamespace(calculate_per_token_loss=False)
        model = SimpleNamespace(config=config, embedding=embedding)
        policy_step(PolicyLossConfig(), samples, model=model).head(pack(samples))

    head(10, 6)
    with pytest.raises(ValueError, match=words):
        head(tokens, positions)


def test_stages_that_exchange_tensors_of_one_length_refuse_a_plan_of_several() -> None:
    samples = [pg.Sample([1] * n, 1, [1], 1.0, [-1.0]) for n in (5, 9)]
    config = SimpleNamespace(calculate_per_token_loss=False, variable_seq_lengths=False)
    config.pipeline_model_parallel_size = 2

    def step(max_tokens: int) -> PolicyStep:
        plan = pg.plan_step(samples, max_tokens_per_microbatch=max_tokens)
        model, groups = SimpleNamespace(config=config), Groups()
        return PolicyStep(PolicyLossConfig(), plan, model=model, groups=groups)  # type: ignore[arg-type]

    step(14)  # one micro-batch
    message = r"2 lengths \(5 to 9 tokens\): set variable_seq_lengths=True"
    with pytest.raises(ValueError, match=message):
        step(9)
    config.variable_seq_lengths = True
    step(9)
