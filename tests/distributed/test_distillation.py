"""A step of distillation: GPTModel, DDP and schedule, from logits and through the fused head,
against the unsharded model.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_pg import PackedBatch, PolicyLossConfig, Sample, pack
from megatron_pg.loss.resolved import GradientScope, resolve
from megatron_pg.megatron import ParallelGroups, policy_step
from tests import oracle
from tests.fast import distillation_oracle

from .compare import assert_equal, compare, gradient_tolerance
from .launch import run_ranks
from .models import ModelOptions, Sharding
from .one_step import Outcome, build, train_step
from .reference import Result, logits_alone, outcomes_alone
from .steps import VOCAB_SIZE, Run

TEACHER_HIDDEN, K, COEFFICIENT = 5, 4, 0.7
BETA = 0.3


@dataclass(frozen=True)
class DistillRun(Run):
    """A step whose loss is the divergence, or has it for a term."""

    teacher: str = "hidden"
    divergence: str = "reverse_kl"
    is_term: bool = False

    @property
    def config(self) -> PolicyLossConfig:
        return replace(
            super().config,
            **{"distill_coef": COEFFICIENT} if self.is_term else {"policy_loss": "distill"},
            distill_teacher=self.teacher,
            distill_divergence=self.divergence,
            distill_beta=BETA if self.divergence == "jsd" else 0.5,
        )


RUNS = [
    DistillRun("sample_mean", teacher="hidden", divergence="reverse_kl", temperature=0.8),
    DistillRun(
        "prompt_mean", "short", "empty", True, teacher="logits", divergence="jsd", is_term=True
    ),
    DistillRun("token_mean", "short", teacher="top_k", divergence="forward_kl"),
    DistillRun("constant", cut="empty", teacher="hidden", divergence="jsd", is_term=True),
]
DENSE = ModelOptions(dtype=torch.float64)
PER_TOKEN = replace(DENSE, calculate_per_token_loss=True)
CASES = {"CP2, per token": PER_TOKEN, "TP2": DENSE, "TP2+SP CP2": DENSE, "PP2": DENSE, "DP2": DENSE}


def teacher_weight() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(VOCAB_SIZE, TEACHER_HIDDEN, generator=generator, dtype=torch.float64)


def channels_of(tokens: Sequence[int], length: int, temperature: float) -> dict[str, Tensor]:
    """What the teacher says of the response tokens of a sample, by its tokens alone."""
    generator = torch.Generator().manual_seed(sum(t * 31**n for n, t in enumerate(tokens)) % 2**40)
    hidden = torch.randn(length, TEACHER_HIDDEN, generator=generator, dtype=torch.float64)
    logits = hidden @ teacher_weight().T
    log_q, ids = (logits / temperature).log_softmax(1).topk(K, dim=1)
    channels = {"teacher_hidden": hidden, "teacher_logits": logits}
    return {**channels, "teacher_ids": ids, "teacher_log_probs": log_q.float()}


def distillation_loss(model: Any, run: DistillRun) -> Result:
    samples, logits = run.samples, [logits_alone(model, sample) for sample in run.samples]
    result = oracle.policy_loss(samples, logits, run.objective)
    divergences = [divergences_of(run, *pair) for pair in zip(samples, logits, strict=True)]
    divisor = run.objective.loss_aggregation_divisor
    term = oracle.aggregate(samples, divergences, run.aggregation, divisor)
    others = result.loss if run.is_term else result.loss - result.pg_loss
    loss = others + (COEFFICIENT if run.is_term else 1.0) * term
    values = [divergence.detach() for divergence in divergences]
    return loss, {
        "loss": loss.item(),
        "pg_loss": (result.pg_loss if run.is_term else term).item(),
        "aggregation_checksum": 1.0,
        "teacher_divergence": oracle.document_mean(samples, values),
        **({"distill_loss": term.item()} if run.is_term else {}),
    }


def divergences_of(run: DistillRun, sample: oracle.PlainSample, logits: Tensor) -> Tensor:
    """Of each response token of a sample, in plain loops."""
    temperature = run.temperature
    channels = channels_of(sample.tokens, sample.response_length, temperature)
    found = []
    for token in range(sample.response_length):
        row = logits[sample.prompt_length + token - 1]
        log_p = distillation_oracle.log_softmax_of(list(row), temperature)
        if run.teacher == "top_k":
            ids, log_q = (channels[n][token].tolist() for n in ("teacher_ids", "teacher_log_probs"))
            found.append(distillation_oracle.over_top_k(run.divergence, BETA, log_p, ids, log_q))
        else:
            of_teacher = distillation_oracle.log_softmax_of(
                list(channels["teacher_logits"][token]), temperature
            )
            found.append(distillation_oracle.divergence(run.divergence, BETA, log_p, of_teacher))
    return oracle.stack(found)


def steps(
    sharding: Sharding, options: ModelOptions, head: str, late: bool = False
) -> list[Outcome | None]:
    if head == "one piece":
        # The losses of this file are sums over tokens: have them treated as if they were not.
        scope = GradientScope("micro_batch", False)
        policy_step.resolve = lambda config: replace(resolve(config), scope=scope)
    chunks = build(sharding, options)
    rank = ParallelGroups.from_model(chunks).tensor.rank()
    columns = VOCAB_SIZE // sharding.tensor
    weight = teacher_weight()[rank * columns : (rank + 1) * columns]

    def pack_with_teacher(run: DistillRun, samples: list[Sample], **keywords: Any) -> PackedBatch:
        taught = []
        for sample in samples:
            tokens, length = sample.tokens.tolist(), sample.response_length
            channels = channels_of(tokens, length, run.temperature)
            if late:  # mutant
                channels = {name: each.roll(1, 0) for name, each in channels.items()}
            taught.append(replace(sample, side_channels=channels))
        return pack(taught, **keywords)

    outcomes = []
    for run in RUNS:
        run = replace(run, fused_lm_head=head != "logits")
        teacher = {"pack_batch": partial(pack_with_teacher, run), "teacher_weight": weight}
        outcomes.append(train_step(chunks, sharding, run, **teacher))
    return outcomes


@pytest.fixture(scope="module")
def references() -> list[Outcome]:
    return run_ranks(outcomes_alone, 1, DENSE, RUNS, distillation_loss)[0]


@pytest.mark.parametrize(
    ("case", "head"), [*itertools.product(CASES, ("logits", "one pass")), ("TP2", "one piece")]
)
def test_gradients_and_metrics_equal_the_unsharded_reference(case, head, references) -> None:
    sharding, options = Sharding.named(case), CASES[case]
    found = run_ranks(steps, sharding.world_size, sharding, options, head)[0]
    for run, outcome, expected in zip(RUNS, found, references, strict=True):
        # Log-probs of the teacher's top k, and all reported values, are float32.
        tolerance = 1e-6 if run.teacher == "top_k" else gradient_tolerance(options)
        assert_equal([outcome], [expected], [run], tolerance)
        assert expected.metrics.keys() <= outcome.metrics.keys()


def test_mutant_a_late_teacher_would_be_seen(references) -> None:
    found = run_ranks(steps, 2, Sharding(context=2), DENSE, "logits", True)[0]
    for outcome, expected in zip(found, references, strict=True):
        assert not compare(outcome, expected, 1e-3).passed
