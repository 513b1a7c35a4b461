"""`--rejection-denominator accepted` where old log-probs are those of the trained forward pass: the
step's gradients are multiplied by its tokens over its accepted tokens once, after the last
micro-batch.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_pg import PolicyLossConfig
from megatron_pg.megatron import PolicyStep, compute_log_probs
from megatron_pg.megatron.training_loop import AcceptedCount
from tests import oracle
from tests.oracle import PlainSample
from tests.random_steps import package_samples

from .compare import assert_equal, compare
from .launch import RankError, run_ranks
from .models import ModelOptions, Sharding
from .one_step import Outcome, build, run_schedule, train_step
from .reference import Result, logits_alone, outcomes_alone
from .steps import Run

LOW, HIGH = 0.8, 1.3
KINDS: dict[str, dict[str, Any]] = {
    "token": {"use_tis": True, "tis_mode": "mask", "tis_clip_low": LOW, "tis_clip": HIGH},
    "sequence": {
        "use_geometric_rejection": True,
        "geometric_rejection_low": LOW,
        "geometric_rejection_high": HIGH,
    },
}
CURRENT_VERSION = 4


@dataclass(frozen=True)
class AcceptedRun(Run):
    """A step that is divided by what a rejection leaves; of all samples, of those on one
    data-parallel rank, or of none.
    """

    kind: str = "token"
    accepts: str = "some"
    old: str = "given"

    @property
    def config(self) -> PolicyLossConfig:
        settings = {**KINDS[self.kind], "rejection_denominator": "accepted"}
        return replace(super().config, old_log_probs=self.old, **settings)

    @property
    def samples(self) -> list[PlainSample]:
        """The step, whose rollouts are single samples under the sample mean."""
        changed = []
        for index, sample in enumerate(super().samples):
            is_far = self.accepts == "none" or (self.accepts == "every other" and index % 2 == 1)
            shift = 5.0 if is_far else (index % 3) / 5
            engine = [
                -2.85 - shift - 0.1 * (token % 5) * (self.kind == "token")
                for token in range(sample.response_length)
            ]
            rollout = None if self.aggregation == "sample_mean" else sample.rollout_id
            changed.append(replace(sample, rollout_log_probs=engine, rollout_id=rollout))
        return changed


RUNS = [
    AcceptedRun("token_mean"),
    AcceptedRun("token_mean", "short", "empty", kind="sequence"),
    AcceptedRun("token_mean", cut="ragged", accepts="every other"),
    AcceptedRun("token_mean", accepts="none"),
    AcceptedRun("constant", cut="empty"),
    AcceptedRun("sample_mean", kind="sequence"),
]
DENSE = ModelOptions(dtype=torch.float64)
PER_TOKEN = replace(DENSE, calculate_per_token_loss=True)
CASES = {
    "CP2": DENSE,
    "CP2, per token": PER_TOKEN,
    "DP2": replace(DENSE, distributed_optimizer=True),
    "DP2, per token": replace(PER_TOKEN, overlap_grad_reduce=True),
    "TP2+SP CP2": DENSE,
    "PP2 VPP2": replace(DENSE, num_layers=4),
}


def steps(
    sharding: Sharding, options: ModelOptions, is_fused: bool, is_mutant: bool = False
) -> list[list[Outcome | None]]:
    """Each run in one pass, in two, and the same in one pass with interpolated log-probs of the
    newest version.
    """
    if is_mutant:
        AcceptedCount.watch = lambda *_: None  # type: ignore[method-assign]
    chunks = build(sharding, options)
    finalize = chunks[0].config.finalize_model_grads_func
    found = []
    for run in RUNS:
        run = replace(run, fused_lm_head=is_fused)
        samples = [replace(sample, policy_version=CURRENT_VERSION) for sample in run.samples]
        scored = compute_log_probs(
            chunks, package_samples(samples), run.config, max_tokens_per_microbatch=400
        )
        pairs = zip(samples, scored.log_probs, strict=True)
        with_old = [replace(sample, old_log_probs=old.tolist()) for sample, old in pairs]
        without = [replace(sample, old_log_probs=None) for sample in samples]
        found.append(
            [
                train_step(chunks, sharding, replace(run, old="current"), samples=without),
                train_step(chunks, sharding, run, samples=with_old),
                train_step(
                    chunks,
                    sharding,
                    replace(run, old="interpolated"),
                    samples=without,
                    policy_version=CURRENT_VERSION,
                ),
            ]
        )
        assert chunks[0].config.finalize_model_grads_func is finalize
    return found


def accepted_loss(model: Any, run: AcceptedRun) -> Result:
    """-A w r over the accepted tokens, r = 1 with the gradient of log p, in plain loops."""
    losses, kept_samples = [], []
    for sample in run.samples:
        logits = logits_alone(model, sample)
        log_probs = []
        for token in range(sample.response_length):
            position = sample.prompt_length + token
            log_p, _ = oracle.log_prob_and_entropy(logits[position - 1], sample.tokens[position])
            log_probs.append(log_p)
        mask, weights = accepted(sample, [value.item() for value in log_probs], run.kind)
        values: list[Tensor] = [
            -sample.advantages[t] * weights[t] * (log_p - log_p.detach()).exp()
            for t, log_p in enumerate(log_probs)
        ]
        losses.append(oracle.stack(values))
        kept_samples.append(replace(sample, loss_mask=mask))
    divisor = run.objective.loss_aggregation_divisor
    loss = oracle.aggregate(kept_samples, losses, run.aggregation, divisor)
    loss = loss + 0.0 * torch.cat(losses).sum()  # of the graph, if no token is accepted
    return loss, {"loss": loss.item(), "pg_loss": loss.item(), "aggregation_checksum": 1.0}


def accepted(
    sample: PlainSample, log_probs: list[float], kind: str
) -> tuple[list[int], list[float]]:
    """The mask of the accepted tokens, and the weight of each."""
    pairs = zip(log_probs, sample.rollout_log_probs, strict=True)
    differences = [new - engine for new, engine in pairs]
    if kind == "token":
        weights = [math.exp(d) for d in differences]
        near = zip(sample.loss_mask, weights, strict=True)
        return [int(m and LOW <= w <= HIGH) for m, w in near], weights
    active = [d for d, m in zip(differences, sample.loss_mask, strict=True) if m]
    mean = math.exp(sum(active) / max(len(active), 1))
    is_kept = LOW <= mean <= HIGH
    return [int(m and is_kept) for m in sample.loss_mask], [1.0] * len(differences)


@pytest.fixture(scope="module")
def references() -> dict[int, list[Outcome]]:
    return {
        layers: run_ranks(
            outcomes_alone, 1, replace(DENSE, num_layers=layers), RUNS, accepted_loss
        )[0]
        for layers in (2, 4)
    }


FUSED = ("CP2", "DP2, per token", "PP2 VPP2")


@pytest.mark.parametrize(
    ("case", "is_fused"), [*((case, False) for case in CASES), *((case, True) for case in FUSED)]
)
def test_one_pass_is_two_and_equals_the_unsharded_reference(case, is_fused, references) -> None:
    sharding, options = Sharding.named(case), CASES[case]
    found = run_ranks(steps, sharding.world_size, sharding, options, is_fused)[0]
    for run, outcomes, expected in zip(RUNS, found, references[options.num_layers], strict=True):
        for name, outcome in zip(("one pass", "two", "interpolated"), outcomes, strict=True):
            # Given log-probs are float32; the engine's too.
            assert_equal([outcome], [expected], [f"{name}: {run}"], 1e-6)
        if run.accepts == "none":
            assert all(not gradient.any() for gradient in outcomes[0].gradients.values())


def test_the_runs_reject_some_tokens_and_keep_some(references) -> None:
    losses = [outcome.metrics["loss"] for outcome in references[2]]
    assert [loss != 0.0 for loss in losses] == [run.accepts != "none" for run in RUNS]
    for run in RUNS:
        kept = [accepted(s, [-2.8] * s.response_length, run.kind)[0] for s in run.samples]
        count, total = sum(map(sum, kept)), sum(sum(s.loss_mask) for s in run.samples)
        assert 0 < count < 0.8 * total if run.accepts != "none" else count == 0


def test_a_mutant_that_forgets_the_factor_is_seen(references) -> None:
    found = run_ranks(steps, 2, Sharding(data=2), PER_TOKEN, False, True)[0]
    for run, (one, two, _), expected in zip(RUNS, found, references[2], strict=True):
        is_scaled = run.aggregation == "token_mean" and run.accepts != "none"
        assert compare(one, expected).passed != is_scaled
        assert compare(two, expected).passed


MOE = ModelOptions(mixture_of_experts=True, moe_aux_loss_coeff=0.1)
ONE = AcceptedRun("token_mean", old="current")
REFUSED: dict[str, tuple[ModelOptions, AcceptedRun, dict[str, Any], str]] = {
    "router loss": (MOE, ONE, {}, "--moe-aux-loss-coeff or --moe-z-loss-coeff adds a term"),
    "more tokens ahead": (
        *(ModelOptions(mtp_num_layers=1), ONE, {}),
        "--mtp-num-layers adds a term",
    ),
    "accumulation": (
        *(DENSE, ONE, {"accumulate_gradients": True}),
        "accumulate_gradients=True adds a term",
    ),
    "rollouts of several samples": (
        *(DENSE, AcceptedRun("sample_mean", kind="sequence", old="current"), {}),
        "the step has 20 samples of 15 rollouts",
    ),
}


def refused(options: ModelOptions, run: AcceptedRun, keywords: dict[str, Any]) -> None:
    chunks = build(Sharding(), options)
    samples = [replace(s, old_log_probs=None) for s in run.samples]
    if run.aggregation == "sample_mean":
        pairs = zip(samples, Run.samples.fget(run), strict=True)  # type: ignore[attr-defined]
        samples = [replace(sample, rollout_id=own.rollout_id) for sample, own in pairs]
    run_schedule(chunks, Sharding(), run, samples=samples, **keywords)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_factor_does_not_divide_is_refused(name: str) -> None:
    options, run, keywords, words = REFUSED[name]
    with pytest.raises(RankError) as error:
        run_ranks(refused, 1, options, run, keywords)
    assert words in str(error.value)


def loop_of_their_own() -> list[str]:
    """What is said if nothing finalizes the gradients, and if a step has two of these counts."""
    chunks, said, of_step = build(Sharding(), DENSE), [], {}
    samples = [replace(sample, old_log_probs=None) for sample in ONE.samples]

    def step_for_each(step: PolicyStep, batch: Any) -> Any:
        of_step.update(totals=step.totals, num_microbatches=step.num_microbatches)
        return PolicyStep(step.config, model=chunks, **of_step).head(batch)

    try:
        run_schedule(chunks, Sharding(), ONE, step_for_each, samples=samples)
    except ValueError as error:
        said.append(str(error))
    chunks[0].zero_grad_buffer()
    # A step that did not end leaves nothing behind.
    outcome = train_step(chunks, Sharding(), ONE, samples=samples)
    again = train_step(chunks, Sharding(), ONE, samples=[replace(s) for s in samples])
    assert compare(again, outcome, 1e-12).passed
    for model in (None, chunks[0].module):
        try:
            PolicyStep(ONE.config, model=model, **of_step)
        except ValueError as error:
            said.append(str(error))
    chunks[0].zero_grad_buffer()
    AcceptedCount.put_in = lambda self, config: None  # type: ignore[method-assign]
    step, output = run_schedule(chunks, Sharding(), ONE, samples=[replace(s) for s in samples])
    try:
        step.metrics(output)
    except ValueError as error:
        said.append(str(error))
    return said


def test_a_loop_that_does_not_scale_is_refused() -> None:
    two_counts, *not_wrapped, not_finalized = run_ranks(loop_of_their_own, 1)[0]
    assert len(not_wrapped) == 2 and all("wrap the model in" in text for text in not_wrapped)
    assert "Build one PolicyStep per step" in two_counts
    assert "nothing has called the model config's finalize_model_grads_func" in not_finalized
