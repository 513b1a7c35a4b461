"""The four aggregations inside ROLL's own unmodified code: every logit's gradient against float64 loops."""

import dataclasses
import functools

import pytest
import torch
from torch import Tensor

from tests import oracle
from tests.oracle import Objective

from . import logit_table, roll_step
from .logit_table import CUTS, LENGTHS, Outcomes, step_of
from .roll_step import Case, gradients
from .sources import find_roll

missing = find_roll()
pytestmark = pytest.mark.skipif(missing is not None, reason=str(missing))


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
    clip_c = roll_step.CLIP_C
    objective = logit_table.objective(case.aggregation, roll_step.DIVISOR, eps_clip_c=clip_c)

    def loss(logits: list[Tensor]) -> Tensor:
        if case.filtered:
            return filtered_loss(step, logits, objective)
        result = oracle.policy_loss(step, logits, objective)
        with_tokens = sum(1 for sample in step if sum(sample.loss_mask))
        # ROLL's mean of KL and entropy is over the samples that have a token.
        terms = logit_table.KL_COEF * result.kl_loss - logit_table.ENTROPY_COEF * result.entropy
        return result.pg_loss + terms * len(step) / with_tokens

    return logit_table.gradient(step, loss)


def filtered_loss(
    step: list[oracle.PlainSample], logits: list[Tensor], objective: Objective
) -> Tensor:
    """The policy loss where the token filter keeps what training and rollout engine agree on."""
    losses = []
    for sample, rows, infer in zip(step, logits, roll_step.rollout_log_probs(step), strict=True):
        of_sample = []
        for token, old in enumerate(sample.old_log_probs):
            position = sample.prompt_length + token
            log_prob, _ = oracle.log_prob_and_entropy(rows[position - 1], sample.tokens[position])
            ratio = oracle.probability_ratio(log_prob, old)
            loss = oracle.ppo_token_loss(ratio, sample.advantages[token], objective)
            of_sample.append(loss if abs(old - infer[token]) < 0.5 else 0.0 * loss)
        losses.append(torch.stack(of_sample))
    aggregation = objective.loss_aggregation, objective.loss_aggregation_divisor
    return oracle.aggregate(step, losses, *aggregation)


OUTCOMES = Outcomes(gradients, a_step(), cases)


@pytest.mark.parametrize("cut", CUTS)
def test_every_logits_gradient_and_none_of_mutants(cut):
    OUTCOMES.check(cut, expected, num_mutants=6)
