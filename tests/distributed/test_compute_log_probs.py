"""Log-probs, entropy and hidden states of samples at every kind of sharding, against one process and the oracle's loops."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg import PolicyLossConfig, Sample, pack, plan_step
from megatron_pg.megatron import (
    ParallelGroups,
    PolicyStep,
    ScoredSamples,
    compute_hidden_states,
    compute_log_probs,
)
from megatron_pg.megatron.groups import unwrapped
from megatron_pg.megatron.schedule import run_micro_batches
from megatron_pg.step.agreement import OtherRankError
from tests import oracle
from tests.lanes import in_one_lane
from tests.oracle import Objective, PlainSample
from tests.random_steps import package_samples, random_sample

from .launch import run_ranks
from .models import ModelOptions, Sharding, build_model, initialize_groups
from .one_step import build, train_step
from .reference import logits_alone
from .steps import SHAPES, Run

DENSE = ModelOptions(dtype=torch.float64)
"""In float64, so that what is left of an error is the rounding of what is returned."""
EXPERTS = replace(DENSE, mixture_of_experts=True)
TIED = replace(DENSE, tied_embeddings=True)
DEEP = replace(DENSE, num_layers=4)
CASES = {
    "one process": (Sharding(), DENSE),
    "TP2+SP": (Sharding(tensor=2, sequence_parallel=True), DENSE),
    "CP2": (Sharding(context=2), DENSE),
    "PP2 tied": (Sharding(pipeline=2), TIED),
    "DP2": (Sharding(data=2), DENSE),
    "EP2 DP2": (Sharding(expert=2, data=2), EXPERTS),
    "PP2 VPP2 CP2": (Sharding(pipeline=2, virtual_pipeline=2, context=2), DEEP),
    "TP2+SP CP2": (Sharding(tensor=2, sequence_parallel=True, context=2), DENSE),
}


def samples_to_score() -> list[PlainSample]:
    """Ragged, tiny, masked and empty ones, and one as long as several others together, in no order of length."""
    rng = random.Random(14)
    longest = random_sample(rng, prompt_length=7, response_length=53)
    samples = [*SHAPES["ragged"], *SHAPES["short"][:8], longest]
    rng.shuffle(samples)
    assert {0, 1, 53} <= {sample.response_length for sample in samples}
    assert any(sum(sample.loss_mask) == 0 < sample.response_length for sample in samples)
    return samples


SAMPLES = samples_to_score()


@dataclass(frozen=True)
class Setting:
    """How the samples are scored, and which share of them each data-parallel rank has."""

    temperature: float
    budget: int
    fused: bool = False
    vocab_size: int | None = None
    shares: tuple[float, float] = (0.5, 0.5)

    def indices(self, data_rank: int, data_size: int) -> list[int]:
        """The samples of one of at most two data-parallel ranks."""
        everything = list(range(len(SAMPLES)))
        if data_size == 1:
            return everything
        cut = round(self.shares[0] * len(everything))
        return everything[:cut] if data_rank == 0 else everything[cut:]


SETTINGS = [
    Setting(1.0, budget=64),
    Setting(0.7, budget=4096, vocab_size=13, shares=(1.0, 0.0)),
    Setting(1.6, budget=100, fused=True, vocab_size=13, shares=(0.2, 0.8)),
    Setting(1.0, budget=64, fused=True, shares=(0.0, 1.0)),
]
Scores = list[tuple[Tensor, Tensor]]
"""Of each sample its log-probs and its entropy."""
Found = tuple[list[Scores], list[Tensor]]
"""Of every setting the scores; and of each sample the hidden states [response_length, hidden]."""


def oracle_scores(options: ModelOptions) -> Found:
    """Megatron's model in one process on each sample alone, and plain loops over its logits."""
    initialize_groups(Sharding())
    (model,) = build_model(Sharding(), options)
    entered: list[Tensor] = []
    layer = unwrapped(model).output_layer
    hook = layer.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0][:, 0]))
    with torch.no_grad():
        logits = [logits_alone(model, sample) for sample in SAMPLES]
    hook.remove()
    found = []
    for setting in SETTINGS:
        columns = [each[:, : setting.vocab_size] for each in logits]
        objective = Objective(rollout_temperature=setting.temperature)
        result = oracle.policy_loss(SAMPLES, columns, objective)
        found.append(list(zip(result.log_probs, result.entropies, strict=True)))
    hidden = [
        states[sample.prompt_length - 1 : len(sample.tokens) - 1]
        for sample, states in zip(SAMPLES, entered, strict=True)
    ]
    return found, hidden


def score(chunks: Any, setting: Setting, samples: Sequence[Sample]) -> ScoredSamples:
    return compute_log_probs(
        chunks,
        samples,
        PolicyLossConfig(rollout_temperature=setting.temperature, fused_lm_head=setting.fused),
        max_tokens_per_microbatch=setting.budget,
        vocab_size=setting.vocab_size,
    )


def scores_of_rank(sharding: Sharding, options: ModelOptions) -> tuple[int, Found]:
    """This rank's data-parallel rank, and what it gets."""
    chunks = build(sharding, options)
    groups = ParallelGroups.from_model(chunks)
    everything = package_samples(SAMPLES)
    everything[::2] = [replace(sample, old_log_probs=None) for sample in everything[::2]]
    found = []
    for setting in SETTINGS:
        mine = [everything[i] for i in setting.indices(groups.data_rank, groups.data_size)]
        scored = score(chunks, setting, mine)
        found.append(list(zip(scored.log_probs, scored.entropy, strict=True)))
    mine = [everything[i] for i in SETTINGS[0].indices(groups.data_rank, groups.data_size)]
    hidden = compute_hidden_states(chunks, mine, max_tokens_per_microbatch=100)
    return groups.data_rank, (found, hidden)


def largest_error(found: Scores, expected: Scores) -> float:
    """Over all numbers, relative to their size."""
    worst = 0.0
    for mine, theirs in zip(found, expected, strict=True):
        for value, reference in zip(mine, theirs, strict=True):
            assert value.shape == reference.shape
            assert value.dtype == torch.float32 and value.device.type == "cpu"
            error = (value.double() - reference).abs() / reference.abs().clamp(min=1e-3)
            worst = max([worst, *error.tolist()])
    return worst


FLOAT32 = 1.01 * 2.0**-24
"""The relative error of rounding to float32, and a little for what was rounded."""

Reference = dict[ModelOptions, Found]
"""By the model."""


def all_oracle_scores() -> Reference:
    return {options: oracle_scores(options) for options in (DENSE, EXPERTS, TIED, DEEP)}


@pytest.fixture(scope="module")
def references() -> Reference:
    return run_ranks(all_oracle_scores, 1)[0]


def errors(
    ranks: list[tuple[int, Found]], sharding: Sharding, options: ModelOptions, references: Reference
) -> tuple[list[float], float]:
    """The largest error of every setting, and that of hidden states, over all ranks."""
    expected, expected_hidden = references[options]
    worst = []
    for number, setting in enumerate(SETTINGS):
        worst.append(0.0)
        for data_rank, (found, _) in ranks:
            indices = setting.indices(data_rank, sharding.data)
            wanted = [expected[number][index] for index in indices]
            worst[-1] = max(worst[-1], largest_error(found[number], wanted))
    of_hidden = 0.0
    for data_rank, (_, hidden) in ranks:
        indices = SETTINGS[0].indices(data_rank, sharding.data)
        for index, states in zip(indices, hidden, strict=True):
            reference = expected_hidden[index]
            assert states.shape == reference.shape and states.dtype == torch.float64
            of_hidden = max([of_hidden, *(states - reference).abs().flatten().tolist()])
    return worst, of_hidden


@pytest.mark.parametrize("case", CASES)
def test_every_rank_gets_the_oracle_s_numbers_in_the_samples_order(
    case: str, references: Reference
) -> None:
    sharding, options = CASES[case]
    ranks = run_ranks(scores_of_rank, sharding.world_size, sharding, options)
    assert {data_rank for data_rank, _ in ranks} == set(range(sharding.data))
    found, of_hidden = errors(ranks, sharding, options, references)
    assert max(found) < FLOAT32, dict(zip(SETTINGS, found, strict=True))
    assert of_hidden < 1e-13  # of numbers around 1


def scores_in_the_order_of_the_plan(sharding: Sharding) -> tuple[int, Found]:
    """Mutant: what was scored first is taken for the first sample's."""
    from megatron_pg.megatron import scoring

    right = scoring._in_order

    def in_the_order_of_the_plan(plan: Any, samples: Any, values: Tensor) -> list[Tensor]:
        found = right(plan, samples, values)
        return [found[index] for indices in plan.microbatches for index in indices]

    scoring._in_order = in_the_order_of_the_plan
    return scores_of_rank(sharding, DENSE)


def scores_of_own_window(sharding: Sharding) -> tuple[int, Found]:
    """Mutant: nothing is gathered over context parallelism."""
    from megatron_pg.megatron import scoring

    scoring.dist = SimpleNamespace(
        all_reduce=lambda *arguments, **keywords: None,
        get_backend=dist.get_backend,
        get_world_size=dist.get_world_size,
    )
    return scores_of_rank(sharding, DENSE)


def scores_without_the_zigzag(sharding: Sharding) -> tuple[int, Found]:
    """Mutant: a rank's tokens are taken to follow each other, from its first one on."""
    from megatron_pg.step.token_window import TokenWindow

    def in_a_row(window: TokenWindow, values: Tensor) -> Tensor:
        whole = values.new_zeros(*values.shape[:-1], sum(window.response_lengths))
        first = 0 if window.cp_rank == 0 else whole.shape[-1] - len(window)
        whole[..., first : first + len(window)] = values
        return whole

    TokenWindow.in_responses = in_a_row  # type: ignore[method-assign]
    return scores_of_rank(sharding, DENSE)


def assert_seen(ranks: Any, sharding: Sharding, references: Reference) -> None:
    """Wrong shapes, or wrong numbers under every setting."""
    try:
        found, of_hidden = errors(ranks, sharding, DENSE, references)
    except AssertionError:
        return
    assert min(*found, of_hidden) > 1e-3


@in_one_lane
def test_another_order_would_be_seen(references: Reference) -> None:
    ranks = run_ranks(scores_in_the_order_of_the_plan, 1, Sharding())
    assert_seen(ranks, Sharding(), references)


@in_one_lane
@pytest.mark.parametrize("mutant", [scores_of_own_window, scores_without_the_zigzag])
def test_a_wrong_gather_would_be_seen(mutant: Any, references: Reference) -> None:
    sharding = Sharding(context=2)
    assert_seen(run_ranks(mutant, 2, sharding), sharding, references)


def state_of(chunks: list) -> dict[str, Any]:
    """What scoring must leave alone."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    parameters = [parameter for module in modules for parameter in module.parameters(recurse=False)]
    return {
        "modes": [module.training for module in modules],
        "parameters": [parameter.detach().clone() for parameter in parameters],
        "gradients": [parameter.main_grad.clone() for parameter in parameters],
        "grad": [parameter.grad is None for parameter in parameters],
        "buffers": [b.grad_data.clone() for chunk in chunks for b in chunk.buffers],
        "added": [parameter.grad_added_to_main_grad for parameter in parameters],
        "config": dict(vars(chunks[0].config)),
        "random": torch.get_rng_state(),
        "grad_enabled": torch.is_grad_enabled(),
    }


def assert_equal(before: Any, after: Any) -> None:
    if isinstance(before, Tensor):
        assert torch.equal(before, after)
    elif isinstance(before, list):
        for one, other in zip(before, after, strict=True):
            assert_equal(one, other)
    else:
        assert before == after


def step_around_scoring(sharding: Sharding, options: ModelOptions, fused: bool) -> float:
    """A training step before and after; every rank asserts. Returns the KL of the step that starts from the scores."""
    chunks = build(sharding, options)
    setting = Setting(0.7, budget=64, fused=fused)
    samples = package_samples(SAMPLES)
    before = train_step(chunks, sharding, Run())
    wanted = score(chunks, setting, samples)
    for module in chunks[-1].modules():
        if hasattr(module, "hidden_dropout"):
            module.hidden_dropout = 0.5  # of a layer that a step would draw numbers for
    chunks[0].module.decoder.layers[0].eval()
    states = state_of(chunks)
    for model in (chunks, [unwrapped(chunk) for chunk in chunks]):
        scored = score(model if len(chunks) > 1 else model[0], setting, samples)
        assert_equal(wanted.log_probs, scored.log_probs)
        assert_equal(wanted.entropy, scored.entropy)
        for name, value in state_of(chunks).items():
            assert_equal(states[name], value)
    for chunk in chunks:
        chunk.train()
        for module in chunk.modules():
            if hasattr(module, "hidden_dropout"):
                module.hidden_dropout = 0.0
    after = train_step(chunks, sharding, Run())
    if before is not None and after is not None:
        assert before.gradients.keys() == after.gradients.keys()
        for name, gradient in before.gradients.items():
            assert torch.equal(gradient, after.gradients[name]), name
        assert before.metrics == after.metrics
    return divergence_of_first_step(chunks, sharding, setting, samples, wanted)


def divergence_of_first_step(
    chunks: list, sharding: Sharding, setting: Setting, samples: list[Sample], scored: ScoredSamples
) -> float:
    """`kl_new_old` of a step with these old log-probs: 0 where every ratio is 1, to the last bit."""
    groups = ParallelGroups.from_model(chunks)
    samples = [
        replace(sample, old_log_probs=old, rollout_id=None)
        for sample, old in zip(samples, scored.log_probs, strict=True)
    ]
    place = {
        "cp_size": groups.context_size,
        "pad_to_multiple": groups.context_size * groups.tensor_size
        if sharding.sequence_parallel
        else 1,
    }
    plan = plan_step(
        samples,
        max_tokens_per_microbatch=setting.budget,
        data_parallel_group=groups.data,
        microbatch_group_size=sharding.pipeline if sharding.virtual_pipeline else 1,
        **place,
    )
    batches = [
        pack([samples[index] for index in indices], cp_rank=groups.context_rank, **place)
        for indices in plan.microbatches
    ]
    config = PolicyLossConfig(rollout_temperature=setting.temperature, fused_lm_head=setting.fused)
    step = PolicyStep(config, plan, model=chunks)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    return step.metrics(run_micro_batches(step.head, batches, chunks))["kl_new_old"]


@pytest.mark.parametrize(
    ("sharding", "options", "fused"),
    [
        (Sharding(tensor=2, sequence_parallel=True, context=2), ModelOptions(), True),
        (
            Sharding(pipeline=2, virtual_pipeline=2),
            ModelOptions(calculate_per_token_loss=True, num_layers=4),
            False,
        ),
        (
            Sharding(data=2),
            ModelOptions(distributed_optimizer=True, overlap_grad_reduce=True),
            False,
        ),
    ],
    ids=["TP2+SP CP2, fused", "PP2 VPP2, per token", "DP2, distributed optimizer, overlapped"],
)
def test_training_does_not_notice(sharding: Sharding, options: ModelOptions, fused: bool) -> None:
    for found in run_ranks(step_around_scoring, sharding.world_size, sharding, options, fused):
        assert found == 0.0


def refusals(sharding: Sharding) -> list[str]:
    """What each mistake of data-parallel rank 1 is told on this rank."""
    chunks = build(sharding, ModelOptions())
    rank = ParallelGroups.from_model(chunks).data_rank
    fine = Sample([1, 2, 3], 2, [1, 1])
    wrong: list[Any] = [
        Sample(range(9), 4, [1] * 4, name="the long one"),
        Sample([1, 2, 99], 1, [0], name="the foreign one"),
        {"tokens": [1, 2, 3]},
    ]

    def message_of(model: Any, samples: Any) -> str:
        try:
            compute_log_probs(model, samples, PolicyLossConfig(), max_tokens_per_microbatch=8)
        except (ValueError, OtherRankError, AttributeError) as error:
            return str(error)
        return "taken"

    messages = [message_of(chunks, [fine, each] if rank == 1 else [fine]) for each in wrong]
    away = [unwrapped(chunk).to_empty(device="meta") for chunk in chunks]
    messages.append(message_of(away, [fine]))
    biased = build(sharding, ModelOptions(output_bias=True))
    with pytest.raises(NotImplementedError) as refusal:
        compute_hidden_states(biased, [fine], max_tokens_per_microbatch=8)
    return [*messages, str(refusal.value)]


def test_mistakes_are_told_on_every_rank_before_anything_runs() -> None:
    first, second = run_ranks(refusals, 2, Sharding(data=2))
    parts = [
        "the long one takes 9 tokens with padding, more than --max-tokens-per-microbatch leaves it (8)",
        "the foreign one: response token id 99 is outside the vocabulary of 16",
        "'dict' object has no attribute 'tokens'",
    ]
    for own, told, part in zip(second, first, parts, strict=False):
        assert own.startswith(part)
        assert told.startswith("data-parallel rank 1: ") and part in told
    for rank in (first, second):
        assert rank[3].startswith("the model's parameters are on meta and this rank works on cpu")
        assert rank[4].startswith("compute_hidden_states of a model whose output layer has a bias")


def entropy_of_nothing() -> tuple[int, int]:
    """Of a rank without samples, alone in its data-parallel group."""
    chunks = build(Sharding(), ModelOptions())
    scored = compute_log_probs(chunks, [], PolicyLossConfig(), max_tokens_per_microbatch=8)
    return len(scored.log_probs), len(scored.entropy)


def test_no_samples_at_all() -> None:
    assert run_ranks(entropy_of_nothing, 1) == [(0, 0)]
