"""Log-probs, entropy and hidden states of samples at every kind of sharding, against one process
and the oracle's loops.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
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
    scoring,
    set_fp32_lm_head,
)
from megatron_pg.megatron.groups import unwrapped
from megatron_pg.megatron.schedule import run_micro_batches
from megatron_pg.step.agreement import OtherRankError
from megatron_pg.step.token_window import TokenWindow
from tests import oracle
from tests.oracle import Objective, PlainSample
from tests.random_steps import package_samples, random_sample

from .launch import refusal, run_ranks
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
    **{name: DENSE for name in ("one process", "TP2+SP", "CP2", "DP2", "TP2+SP CP2")},
    **{"PP2 tied": TIED, "EP2 DP2": EXPERTS, "PP2 VPP2 CP2": DEEP},
}


def samples_to_score() -> list[PlainSample]:
    """Ragged, tiny, masked and empty ones, and one as long as several others together, in no order
    of length.
    """
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
    """How the samples are scored, and which share of them data-parallel rank 0 has."""

    temperature: float
    budget: int
    fused: bool = False
    fp32: bool = False
    vocab_size: int | None = None
    share: float = 0.5

    @property
    def config(self) -> PolicyLossConfig:
        head = {"fused_lm_head": self.fused, "fp32_lm_head": self.fp32}
        return PolicyLossConfig(rollout_temperature=self.temperature, **head)

    def indices(self, data_rank: int, data_size: int) -> range:
        """The samples of one of at most two data-parallel ranks."""
        if data_size == 1:
            return range(len(SAMPLES))
        cut = round(self.share * len(SAMPLES))
        return range(cut, len(SAMPLES)) if data_rank else range(cut)


SETTINGS = [
    Setting(1.0, budget=64),
    Setting(0.7, budget=4096, vocab_size=13, share=1.0),
    Setting(1.6, budget=100, fused=True, vocab_size=13, share=0.2),
    Setting(1.0, budget=64, fused=True, share=0.0),
]
Found = dict[tuple[str, int], list[Tensor]]
"""Log-probs and entropies by setting, and hidden states [response_length, hidden] under the first,
of each sample."""


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
    found: Found = {}
    for number, setting in enumerate(SETTINGS):
        columns = [of_sample[:, : setting.vocab_size] for of_sample in logits]
        objective = Objective(rollout_temperature=setting.temperature)
        result = oracle.policy_loss(SAMPLES, columns, objective)
        found["log-probs", number], found["entropy", number] = result.log_probs, result.entropies
    found["hidden", 0] = [
        states[sample.prompt_length - 1 : len(sample.tokens) - 1]
        for sample, states in zip(SAMPLES, entered, strict=True)
    ]
    return found


def score(chunks: Any, setting: Setting, samples: Sequence[Sample]) -> ScoredSamples:
    limits = {"max_tokens_per_microbatch": setting.budget, "vocab_size": setting.vocab_size}
    return compute_log_probs(chunks, samples, setting.config, **limits)


def scores_of_rank(sharding: Sharding, options: ModelOptions) -> tuple[int, Found]:
    """This rank's data-parallel rank, and what it gets."""
    chunks = build(sharding, options)
    groups = ParallelGroups.from_model(chunks)
    everything = package_samples(SAMPLES)
    everything[::2] = [replace(sample, old_log_probs=None) for sample in everything[::2]]
    found: Found = {}
    for number, setting in enumerate(SETTINGS):
        mine = [everything[i] for i in setting.indices(groups.data_rank, groups.data_size)]
        scored = score(chunks, setting, mine)
        found["log-probs", number], found["entropy", number] = scored.log_probs, scored.entropy
        if number == 0:
            states = compute_hidden_states(chunks, mine, max_tokens_per_microbatch=100)
            found["hidden", 0] = list(states)
    return groups.data_rank, found


FLOAT32 = 1.01 * 2.0**-24
"""The relative error of rounding to float32, and a little for what was rounded."""


def all_oracle_scores() -> dict[ModelOptions, Found]:
    return {options: oracle_scores(options) for options in (DENSE, EXPERTS, TIED, DEEP)}


@pytest.fixture(scope="module")
def references() -> dict[ModelOptions, Found]:
    return run_ranks(all_oracle_scores, 1)[0]


def errors(
    ranks: list[tuple[int, Found]], sharding: Sharding, references: Found
) -> dict[tuple[str, int], float]:
    """The largest error over all ranks: relative, but of hidden states, which are numbers around
    1.
    """
    worst = dict.fromkeys(references, 0.0)
    for data_rank, found in ranks:
        assert found.keys() == references.keys()
        for (name, number), values in found.items():
            indices = SETTINGS[number].indices(data_rank, sharding.data)
            for index, value in zip(indices, values, strict=True):
                reference, is_hidden = references[name, number][index], name == "hidden"
                assert value.dtype == (torch.float64 if is_hidden else torch.float32)
                assert value.shape == reference.shape and value.device.type == "cpu"
                size = 1.0 if is_hidden else reference.abs().clamp(min=1e-3)
                error = ((value.double() - reference).abs() / size).flatten()
                worst[name, number] = max([worst[name, number], *error.tolist()])
    return worst


@pytest.mark.parametrize("case", CASES)
def test_every_rank_gets_the_oracle_s_numbers_in_the_samples_order(case, references) -> None:
    sharding, options = Sharding.named(case), CASES[case]
    ranks = run_ranks(scores_of_rank, sharding.world_size, sharding, options)
    assert {data_rank for data_rank, _ in ranks} == set(range(sharding.data))
    for key, error in errors(ranks, sharding, references[options]).items():
        assert error < (1e-13 if key == ("hidden", 0) else FLOAT32), key


def in_the_order_of_the_plan() -> None:
    """Mutant: what was scored first is taken for the first sample's."""
    right = scoring._in_order

    def wrong(plan: Any, samples: Any, values: Tensor) -> list[Tensor]:
        found = right(plan, samples, values)
        return [found[index] for indices in plan.microbatches for index in indices]

    scoring._in_order = wrong


def of_own_window() -> None:
    """Mutant: nothing is gathered over context parallelism."""
    scoring.dist = SimpleNamespace(**vars(dist))
    scoring.dist.all_reduce = lambda *arguments, **keywords: None


def without_the_zigzag() -> None:
    """Mutant: a rank's tokens are taken to follow each other, from its first one on."""

    def in_a_row(window: TokenWindow, values: Tensor) -> Tensor:
        whole = values.new_zeros(*values.shape[:-1], sum(window.response_lengths))
        first = 0 if window.cp_rank == 0 else whole.shape[-1] - len(window)
        whole[..., first : first + len(window)] = values
        return whole

    TokenWindow.in_responses = in_a_row


def wrong_scores(mutant: Any, sharding: Sharding) -> tuple[int, Found]:
    mutant()
    return scores_of_rank(sharding, DENSE)


@pytest.mark.parametrize("mutant", [in_the_order_of_the_plan, of_own_window, without_the_zigzag])
def test_mutant_a_wrong_order_or_gather_would_be_seen(mutant, references) -> None:
    """By wrong shapes, or wrong numbers under every setting."""
    sharding = Sharding() if mutant is in_the_order_of_the_plan else Sharding(context=2)
    ranks = run_ranks(wrong_scores, sharding.world_size, mutant, sharding)
    try:
        found = errors(ranks, sharding, references[DENSE])
    except AssertionError:
        return
    assert min(found.values()) > 1e-3


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
    torch.testing.assert_close(after, before, rtol=0, atol=0, check_device=False)


def step_around_scoring(sharding: Sharding, options: ModelOptions, fused: bool) -> float:
    """A training step before and after; every rank asserts. Returns the KL of the step that starts
    from the scores.
    """
    chunks = build(sharding, options)
    setting = Setting(0.7, budget=64, fused=fused)
    samples = package_samples(SAMPLES)
    before = train_step(chunks, sharding, Run())
    wanted = score(chunks, setting, samples)
    layers = [module for module in chunks[-1].modules() if hasattr(module, "hidden_dropout")]
    for layer in layers:
        layer.hidden_dropout = 0.5  # a step would draw numbers for it
    varying = replace(setting.config, allow_varying_log_probs=True)
    chunks[0].module.decoder.layers[0].eval()
    states = state_of(chunks)
    for model in (chunks, [unwrapped(chunk) for chunk in chunks]):
        whole = model if len(chunks) > 1 else model[0]
        scored = compute_log_probs(whole, samples, varying, max_tokens_per_microbatch=64)
        assert_equal(wanted.log_probs, scored.log_probs)
        assert_equal(wanted.entropy, scored.entropy)
        after = state_of(chunks)
        assert after.pop("config") == states["config"]
        assert_equal({name: states[name] for name in after}, after)
    for chunk in chunks:
        chunk.train()
    for layer in layers:
        layer.hidden_dropout = 0.0
    after = train_step(chunks, sharding, Run())
    if before is not None and after is not None:
        assert_equal(before.gradients, after.gradients)
        assert before.metrics == after.metrics
    return kl_of_first_step(chunks, sharding, setting, setting)


def kl_of_first_step(chunks: list, sharding: Sharding, scored: Setting, trained: Setting) -> float:
    """`kl_new_old` of a step from its own scores: 0 where every ratio is 1, to the last bit.

    The step is begun before: scoring leaves its output layer alone.
    """
    groups = ParallelGroups.from_model(chunks)
    samples = [replace(sample, rollout_id=None) for sample in package_samples(SAMPLES)]
    multiple = groups.context_size * groups.tensor_size if sharding.sequence_parallel else 1
    place = {"cp_size": groups.context_size, "pad_to_multiple": multiple}
    plan = plan_step(
        samples,
        max_tokens_per_microbatch=trained.budget,
        data_parallel_group=groups.data,
        microbatch_group_size=sharding.pipeline if sharding.virtual_pipeline else 1,
        **place,
    )
    step = PolicyStep(trained.config, plan, model=chunks)
    pairs = zip(samples, score(chunks, scored, samples).log_probs, strict=True)
    samples = [replace(sample, old_log_probs=values) for sample, values in pairs]
    batches = [
        pack([samples[index] for index in indices], cp_rank=groups.context_rank, **place)
        for indices in plan.microbatches
    ]
    for chunk in chunks:
        chunk.zero_grad_buffer()
    kl = step.metrics(run_micro_batches(step.head, batches, chunks))["kl_new_old"]
    if trained.fp32 or scored.fp32:
        assert set_fp32_lm_head(chunks, False) == trained.fp32
    return kl


OVERLAPPED = {"distributed_optimizer": True, "overlap_grad_reduce": True}


@pytest.mark.parametrize(
    ("name", "options", "fused"),
    [
        ("TP2+SP CP2", ModelOptions(), True),
        ("PP2 VPP2", ModelOptions(calculate_per_token_loss=True, num_layers=4), False),
        ("DP2", ModelOptions(**OVERLAPPED), False),
    ],
    ids=["TP2+SP CP2, fused", "PP2 VPP2, per token", "DP2, distributed optimizer, overlapped"],
)
def test_training_does_not_notice(name, options, fused) -> None:
    sharding = Sharding.named(name)
    found = run_ranks(step_around_scoring, sharding.world_size, sharding, options, fused)
    assert found == [0.0] * sharding.world_size


def kl_in_bfloat16(scored_in_float32: bool, trained_in_float32: bool) -> float:
    sharding = Sharding(tensor=2, sequence_parallel=True)
    chunks = build(sharding, ModelOptions(dtype=torch.bfloat16, output_bias=True))
    settings = (Setting(1.0, 128, fp32=fp32) for fp32 in (scored_in_float32, trained_in_float32))
    return kl_of_first_step(chunks, sharding, *settings)


@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize("trained", [True, False])
def test_scoring_and_training_agree_where_their_flags_do(scored, trained) -> None:
    for kl in run_ranks(kl_in_bfloat16, 2, scored, trained):
        assert (kl == 0.0) == (scored == trained)


def scores_under_a_default_dtype(sharding: Sharding) -> None:
    """A trainer has set it to its model's: every rank asserts."""
    chunks, samples = build(sharding, ModelOptions()), package_samples(SAMPLES)
    for setting in (Setting(0.7, budget=64), Setting(0.7, budget=64, fused=True)):
        expected = score(chunks, setting, samples)
        torch.set_default_dtype(torch.bfloat16)
        found = score(chunks, setting, samples)
        torch.set_default_dtype(torch.float32)
        assert_equal(vars(expected), vars(found))


def test_a_default_dtype_rounds_no_log_prob() -> None:
    run_ranks(scores_under_a_default_dtype, 2, Sharding(context=2))


def refusals(sharding: Sharding) -> list[str]:
    """What each mistake of data-parallel rank 1 is told on this rank; no samples at all are
    none.
    """
    chunks = build(sharding, ModelOptions())
    rank = ParallelGroups.from_model(chunks).data_rank
    fine, budget = Sample([1, 2, 3], 2, [1, 1]), {"max_tokens_per_microbatch": 8}
    nothing = compute_log_probs(chunks, [], PolicyLossConfig(), **budget)
    assert len(nothing.log_probs) == len(nothing.entropy) == 0
    wrong: list[Any] = [
        Sample(range(9), 4, [1] * 4, name="the long one"),
        Sample([1, 2, 99], 1, [0], name="the foreign one"),
        {"tokens": [1, 2, 3]},
    ]
    away = [unwrapped(chunk).to_empty(device="meta") for chunk in build(sharding, ModelOptions())]
    errors = (ValueError, OtherRankError, AttributeError)
    refused = partial(refusal, errors, compute_log_probs, config=PolicyLossConfig(), **budget)
    return [*(refused(chunks, [fine, *[sample] * rank]) for sample in wrong), refused(away, [fine])]


def test_mistakes_are_told_on_every_rank_before_anything_runs() -> None:
    first, second = run_ranks(refusals, 2, Sharding(data=2))
    parts = [
        "the long one takes 9 tokens with padding, more than --max-tokens-per-microbatch allows "
        "(8)",
        "the foreign one: response token id 99 is outside the vocabulary of 16",
        "'dict' object has no attribute 'tokens'",
    ]
    for own, told, part in zip(second, first, parts, strict=False):
        assert own.startswith(part)
        assert told.startswith("data-parallel rank 1: ") and part in told
    for rank in (first, second):
        assert rank[3].startswith("the model's parameters are on meta but this rank works on cpu")
