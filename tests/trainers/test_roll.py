"""The four aggregations inside ROLL's own unmodified code: every logit's gradient against float64 loops."""

import dataclasses
import functools

import pytest
import torch
from torch import Tensor

from tests import oracle
from tests.oracle import Objective

from . import roll_step
from .logit_table import CUTS, LENGTHS, Outcomes, difference, logits_of, step_of
from .roll_step import Case, gradients
from .sources import find_roll

missing = find_roll()
pytestmark = pytest.mark.skipif(missing is not None, reason=str(missing))

TOLERANCE = 1e-6


def a_step() -> list[oracle.PlainSample]:
    samples = step_of(LENGTHS)
    numbers = torch.randn(len(samples), generator=torch.Generator().manual_seed(11)).tolist()
    return [
        dataclasses.replace(sample, advantages=[number] * sample.response_length)
        for sample, number in zip(samples, numbers, strict=True)
    ]


def cases(context: int) -> list[Case]:
    of = functools.partial(Case, context=context)
    return [
        *(of(mode) for mode in oracle.AGGREGATIONS),
        *(of(mode, with_terms=False, filtered=True) for mode in oracle.AGGREGATIONS),
        *(of(mode, breakage="divisor") for mode in oracle.AGGREGATIONS),
        *(of("prompt_mean", breakage=name) for name in ("length", "window")),
    ]


def expected(case: Case, step: list[oracle.PlainSample]) -> Tensor:
    """The gradient of every logit by plain loops in float64; a filter empties the numerator, not the divisor."""
    objective = Objective(
        loss_aggregation=case.aggregation,
        loss_aggregation_divisor=roll_step.DIVISOR if case.aggregation == "constant" else None,
        eps_clip=roll_step.CLIP,
        eps_clip_high=roll_step.CLIP_HIGH,
        eps_clip_c=roll_step.CLIP_C,
        kl_loss_type="low_var_kl",
    )
    table = logits_of(step).double().requires_grad_()
    logits = [table[sample.tokens] for sample in step]
    if case.filtered:
        loss = filtered_loss(step, logits, objective)
    else:
        result = oracle.policy_loss(step, logits, objective)
        with_tokens = sum(1 for sample in step if sum(sample.loss_mask))
        # ROLL's mean of KL and entropy is over the samples that have a token.
        terms = roll_step.KL_COEF * result.kl_loss - roll_step.ENTROPY_COEF * result.entropy
        loss = result.pg_loss + terms * len(step) / with_tokens
    loss.backward()
    assert table.grad is not None
    return table.grad


def filtered_loss(
    step: list[oracle.PlainSample], logits: list[Tensor], objective: Objective
) -> Tensor:
    """The policy loss where the token filter keeps what training and rollout engine agree on."""
    losses = []
    for sample, rows, infer in zip(step, logits, roll_step.rollout_log_probs(step), strict=True):
        of_sample = []
        for token in range(sample.response_length):
            position = sample.prompt_length + token
            log_prob, _ = oracle.log_prob_and_entropy(rows[position - 1], sample.tokens[position])
            ratio = oracle.probability_ratio(log_prob, sample.old_log_probs[token])
            loss = oracle.ppo_token_loss(ratio, sample.advantages[token], objective)
            kept = abs(sample.old_log_probs[token] - infer[token]) < 0.5
            of_sample.append(loss if kept else 0.0 * loss)
        losses.append(torch.stack(of_sample))
    aggregation = objective.loss_aggregation, objective.loss_aggregation_divisor
    return oracle.aggregate(step, losses, *aggregation)


OUTCOMES = Outcomes(gradients, a_step(), cases)


@pytest.mark.parametrize("cut", CUTS)
def test_every_logits_gradient(cut):
    sound = OUTCOMES.sound(cut)
    assert len(sound) == 8 * (1 if cut == "one" else 2)
    for case, found in sound:
        assert difference(found, expected(case, OUTCOMES.step)) <= TOLERANCE, case


@pytest.mark.parametrize("cut", CUTS)
def test_mutants_fail(cut):
    mutants = OUTCOMES.mutants(cut)
    assert len(mutants) == 6
    for case, found in mutants:
        assert difference(found, expected(case, OUTCOMES.step)) > 20 * TOLERANCE, case
