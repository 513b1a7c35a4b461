"""A step with score centering: GPTModel, DDP and schedule, from logits and through the fused head,
against plain loops over the unsharded model.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_pg import PackedBatch, PolicyLossConfig, Sample, pack
from tests import oracle
from tests.fast import centering_oracle

from .compare import assert_equal, compare
from .launch import run_ranks
from .models import ModelOptions, Sharding
from .one_step import Outcome, build, train_step
from .reference import Result, logits_alone, outcomes_alone
from .steps import VOCAB_SIZE, Run

LOW, HIGH = 0.6, 1.5


@dataclass(frozen=True)
class CenteredRun(Run):
    """A step of REINFORCE with centering, and with weights against the engine's mismatch."""

    weights: str = "none"

    @property
    def config(self) -> PolicyLossConfig:
        config = replace(super().config, policy_loss="reinforce", score_centering=True)
        if self.weights == "none":
            return config
        mode = {"clip": "truncate", "mask": "mask"}[self.weights]
        return replace(config, use_tis=True, tis_mode=mode, tis_clip=HIGH, tis_clip_low=LOW)


RUNS = [
    CenteredRun("sample_mean", temperature=0.8),
    CenteredRun("prompt_mean", "short", "empty", True, weights="clip"),
    CenteredRun("token_mean", "short", weights="mask"),
    CenteredRun("constant", cut="empty", weights="clip"),
]
OVER_SETS = [
    CenteredRun("token_mean", kept=True),
    CenteredRun("prompt_mean", kept=True, weights="mask"),
]
DENSE = ModelOptions(dtype=torch.float64)
PER_TOKEN = replace(DENSE, calculate_per_token_loss=True)
CASES = {
    "CP2, per token": PER_TOKEN,
    "CP4": DENSE,
    "TP2": DENSE,
    "TP2+SP CP2": DENSE,
    "PP2": DENSE,
    "DP2": DENSE,
}


def head_of(tokens: Sequence[int], token: int, kept: Sequence[int]) -> dict[int, float]:
    """The engine's head at a response token, by the sample's tokens alone: of a distribution over
    the vocabulary or the kept set; three to six ids, the sampled one among them or not.
    """
    seed = sum(t * 31**n for n, t in enumerate(tokens)) % 2**40 + token
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(VOCAB_SIZE, generator=generator, dtype=torch.float64)
    if kept:
        logits[[v not in kept for v in range(VOCAB_SIZE)]] = -math.inf
    log_q = (logits / 2).log_softmax(0)
    values, ids = log_q.topk(min(3 + token % 4, len(kept) or VOCAB_SIZE))
    return dict(zip(ids.tolist(), values.float().double().tolist(), strict=True))


def rollout_log_prob(tokens: Sequence[int], token: int, old: float) -> float:
    if old == 0.0:  # the only token of its set
        return 0.0
    shift = ((7 * token + sum(tokens)) % 11 - 5) / 8
    return float(torch.tensor(min(old + shift, 0.0), dtype=torch.float32))


def heads_of(sample: Any, kept: Any) -> list[dict[int, float]]:
    sets = [[]] * sample.response_length if kept is None else kept
    return [head_of(list(sample.tokens), token, ids) for token, ids in enumerate(sets)]


def centered_loss(model: Any, run: CenteredRun) -> Result:
    samples, logits = run.samples, [logits_alone(model, sample) for sample in run.samples]
    others = oracle.policy_loss(samples, logits, run.objective)
    losses = [losses_of(run, *pair) for pair in zip(samples, logits, strict=True)]
    divisor = run.objective.loss_aggregation_divisor
    term = oracle.aggregate(samples, losses, run.aggregation, divisor)
    loss = others.loss - others.pg_loss + term
    return loss, {"loss": loss.item(), "pg_loss": term.item(), "aggregation_checksum": 1.0}


def losses_of(run: CenteredRun, sample: oracle.PlainSample, logits: Tensor) -> Tensor:
    """-weight A log p + A C of each response token of a sample, in plain loops."""
    found = []
    heads = heads_of(sample, sample.kept_tokens)
    for token in range(sample.response_length):
        row = logits[sample.prompt_length + token - 1].double() / run.temperature
        kept = sample.kept_tokens[token] if sample.kept_tokens is not None else []
        if kept:
            is_dropped = torch.tensor([v not in kept for v in range(VOCAB_SIZE)])
            row = row.masked_fill(is_dropped, -math.inf)
        log_p = row - row.exp().sum().log()
        old, advantage = sample.old_log_probs[token], sample.advantages[token]
        ratio = math.exp(old - rollout_log_prob(sample.tokens, token, old))
        weight = {"none": 1.0, "clip": min(max(ratio, LOW), HIGH)}.get(
            run.weights, ratio if LOW <= ratio <= HIGH else 0.0
        )
        center = centering_oracle.centering(list(log_p), heads[token], run.weights, LOW, HIGH)
        target = sample.tokens[sample.prompt_length + token]
        found.append(advantage * (center - weight * log_p[target]))
    return oracle.stack(found)


def steps(
    sharding: Sharding, options: ModelOptions, runs: list[CenteredRun], is_late: bool = False
) -> list[Outcome | None]:
    chunks = build(sharding, options)

    def pack_with_head(samples: list[Sample], **keywords: Any) -> PackedBatch:
        changed = []
        for sample in samples:
            kept = sample.kept_tokens
            sets = None if kept is None else [kept.row(t).tolist() for t in range(len(kept))]
            tokens = sample.tokens.tolist()
            plain = replace(sample, tokens=tokens)
            heads = [
                head_of(tokens, t, [] if sets is None else sets[t])
                for t in range(plain.response_length)
            ]
            heads = heads[-1:] + heads[:-1] if is_late else heads  # mutant
            old = sample.old_log_probs.tolist()
            changed.append(
                replace(
                    sample,
                    sampler_top_k=([list(h) for h in heads], [list(h.values()) for h in heads]),
                    rollout_log_probs=[rollout_log_prob(tokens, t, x) for t, x in enumerate(old)],
                )
            )
        return pack(changed, **keywords)

    return [train_step(chunks, sharding, run, pack_batch=pack_with_head) for run in runs]


@pytest.fixture(scope="module")
def references() -> list[Outcome]:
    return run_ranks(outcomes_alone, 1, DENSE, [*RUNS, *OVER_SETS], centered_loss)[0]


@pytest.mark.parametrize(("case", "is_fused"), itertools.product(CASES, (False, True)))
def test_gradients_and_metrics_equal_the_unsharded_reference(case, is_fused, references) -> None:
    sharding = Sharding.named(case)
    runs = [replace(run, fused_lm_head=is_fused) for run in (*RUNS, *OVER_SETS)]
    found = run_ranks(steps, sharding.world_size, sharding, CASES[case], runs)[0]
    for run, outcome, expected in zip(runs, found, references, strict=True):
        # The engine's log-probs are float32.
        assert_equal([outcome], [expected], [run], 1e-6)


def test_a_late_head_would_be_seen(references) -> None:
    found = run_ranks(steps, 2, Sharding(context=2), DENSE, RUNS, True)[0]
    for outcome, expected in zip(found, references, strict=False):
        assert not compare(outcome, expected, 1e-3).passed
