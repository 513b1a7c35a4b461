"""One ragged rollout of two optimizer steps, and its gradients in float64, in plain loops."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests import oracle
from tests.oracle import PlainSample
from tests.random_steps import VOCAB_SIZE, float32, random_sample

from .sources import TRAINERS

NUM_GROUPS, ROLLOUTS_PER_GROUP = 4, 4
ROLLOUTS_PER_STEP = 8
DIVISOR = 7.0
KL_COEF, ENTROPY_COEF = 0.05, 0.02
EPS_CLIP, EPS_CLIP_HIGH = 0.2, 0.28
SAMPLES_OF_ROLLOUT = {5: 3, 10: 2}
"""Rollouts that are several samples; the others are one each."""
VALUE_CLIP = 0.2
MASKED = (3, 9)
"""Rollouts without an active token."""


@dataclass(frozen=True)
class Case:
    """One run: an aggregation, how the ranks are laid out, and what was broken on purpose."""

    aggregation: str
    context: int = 1
    data: int = 1
    mutant: str = ""
    for_all_terms: bool = False

    def __str__(self) -> str:
        words = [self.aggregation, f"CP {self.context}", f"DP {self.data}", self.mutant]
        return ", ".join(filter(None, [*words, "all terms" if self.for_all_terms else ""]))


def has_rollouts() -> bool:
    """False for a checkout of slime before v0.3.0, in which every sample is a rollout."""
    file = TRAINERS / "slime/slime/ray/rollout.py"
    return not file.is_file() or "micro_batch_indices" in file.read_text()


def is_kept(token: int) -> bool:
    """The rejection of this test: which response tokens stay."""
    return token % 4 != 2


def samples() -> list[PlainSample]:
    """The samples of the rollout in order; `rollout_id` and `group_index` are set on all."""
    rng = random.Random(11)
    samples_of_rollout = SAMPLES_OF_ROLLOUT if has_rollouts() else {}
    made = []
    for rollout in range(NUM_GROUPS * ROLLOUTS_PER_GROUP):
        group = rollout // ROLLOUTS_PER_GROUP
        prompt = [(group + position) % VOCAB_SIZE for position in range(1 + group)]
        for _ in range(samples_of_rollout.get(rollout, 1)):
            sample = random_sample(
                rng,
                prompt_length=len(prompt),
                response_length=1 if rollout == 6 else rng.randint(2, 14),
                active_rate=0.0 if rollout in MASKED else 0.75,
                group_index=group,
                rollout_id=100 + rollout,
            )
            near = [float32(old + rng.uniform(-0.4, 0.4)) for old in sample.old_log_probs]
            tokens = prompt + sample.tokens[len(prompt) :]
            values = [float32(0.3 * advantage) for advantage in sample.advantages]
            returns = [float32(0.5 + reference) for reference in sample.ref_log_probs]
            more = {"rollout_log_probs": near, "old_values": values, "returns": returns}
            made.append(replace(sample, tokens=tokens, **more))
    return made


def logits(of: Sequence[PlainSample]) -> list[Tensor]:
    """A float32 leaf [total_length, vocabulary] for each sample."""
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(len(sample.tokens), VOCAB_SIZE, generator=generator).requires_grad_()
        for sample in of
    ]


def token_terms(sample: PlainSample, token: int, row: Tensor) -> dict[str, Tensor]:
    """What a trainer computes of a token, under the names of its reports; `pg_loss` with truncated
    importance sampling.
    """
    position = sample.prompt_length + token
    log_prob, entropy = oracle.log_prob_and_entropy(row, sample.tokens[position])
    old, near = sample.old_log_probs[token], sample.rollout_log_probs[token]
    advantage = sample.advantages[token]
    settings = oracle.Objective(eps_clip=EPS_CLIP, eps_clip_high=EPS_CLIP_HIGH)
    ratio = (log_prob - old).exp()
    pg_loss = oracle.ppo_token_loss(ratio, advantage, settings)
    importance = math.exp(old - near)
    value, old_value, target = row[0], sample.old_values[token], sample.returns[token]
    held = old_value + (value - old_value).clamp(-VALUE_CLIP, VALUE_CLIP)
    terms = {
        "pg_loss": pg_loss * min(max(importance, 0.0), 2.0),
        "pg_clipfrac": pg_loss > -ratio * advantage,
        "ppo_kl": old - log_prob,
        "entropy_loss": entropy,
        "kl_loss": oracle.kl_token_loss(log_prob, sample.ref_log_probs[token], "k3"),
        "train_rollout_logprob_abs_diff": abs(old - near),
        "train_rollout_kl": importance - 1 - (old - near),
        "ois": ratio,
        "tis": importance,
        "value_loss": torch.maximum((held - target) ** 2, (value - target) ** 2),
        "value_clipfrac": (value - old_value).abs() > VALUE_CLIP,
    }
    return {name: torch.as_tensor(term).double() for name, term in terms.items()}


UNREJECTED = ("ois", "tis", "value_loss", "value_clipfrac")
"""Terms that the rejection of this test leaves as they are."""
Steps = list[tuple[dict[str, float], dict[int, Tensor]]]
"""Of each optimizer step the reported numbers, and the gradient of the logits of each sample by its
number."""


def own_mean(step: Sequence[PlainSample], losses: list[Tensor], rejected: bool) -> Tensor:
    """The trainer's mean over rollouts; before v0.3.0 slime divides by the tokens that a rejection
    leaves.
    """
    if rejected and not has_rollouts():
        masks = [[m * is_kept(t) for t, m in enumerate(sample.loss_mask)] for sample in step]
        step = [replace(sample, loss_mask=mask) for sample, mask in zip(step, masks, strict=True)]
    return oracle.aggregate(step, losses, "sample_mean")


def reported(
    step: Sequence[PlainSample], leaves: Sequence[Tensor], case: Case
) -> dict[str, Tensor]:
    """Every number that a trainer reports of an optimizer step, in plain loops; `loss` is the
    objective.
    """
    tokens = [
        [
            token_terms(sample, t, leaf[sample.prompt_length - 1 + t])
            for t in range(sample.response_length)
        ]
        for sample, leaf in zip(step, leaves, strict=True)
    ]
    made = {}
    for name in tokens[0][0]:
        rejected = name not in UNREJECTED
        losses = [
            oracle.stack(
                [
                    terms[name] * float(is_kept(t) or not rejected)
                    for t, terms in enumerate(of_sample)
                ]
            )
            for of_sample in tokens
        ]
        is_critics = name.startswith("value")
        if name == "pg_loss" or case.for_all_terms and not is_critics:
            made[name] = oracle.aggregate(step, losses, case.aggregation, DIVISOR)
        else:
            made[name] = own_mean(step, losses, rejected)
    regularizers = KL_COEF * made["kl_loss"] - ENTROPY_COEF * made["entropy_loss"]
    return {"loss": made["pg_loss"] + regularizers, **made, "ess_ratio": ess_ratio(step, tokens)}


def ess_ratio(step: Sequence[PlainSample], tokens: list[list[dict[str, Tensor]]]) -> Tensor:
    """miles' effective sample size, over the active tokens of each sample, added up and divided by
    the rollouts.
    """
    total = 0.0
    for sample, of_sample in zip(step, tokens, strict=True):
        ratios = [float(t["ois"]) for t, m in zip(of_sample, sample.loss_mask, strict=True) if m]
        if ratios:
            total += sum(ratios) ** 2 / (len(ratios) * sum(ratio**2 for ratio in ratios))
    return torch.tensor(total / len(oracle.rollouts(step)), dtype=torch.float64)


def rollout_report() -> dict[str, float]:
    """The numbers of the whole rollout that a trainer reports before training: means over its
    rollouts.
    """
    everything, fields = (
        samples(),
        dict.fromkeys(("rollout_log_probs", "ref_log_probs", "advantages", "returns")),
    )
    names = {name: name for name in fields} | {"log_probs": "old_log_probs", "values": "old_values"}
    return {
        name: float(
            own_mean(
                everything, [torch.tensor(getattr(s, field)).double() for s in everything], False
            )
        )
        for name, field in names.items()
    }


def reference(case: Case) -> Steps:
    """Of each optimizer step the reported numbers, and the gradient of the logits of each sample by
    its number.
    """
    everything = samples()
    leaves = [leaf.detach().double().requires_grad_() for leaf in logits(everything)]
    steps = []
    for first in range(0, NUM_GROUPS * ROLLOUTS_PER_GROUP, ROLLOUTS_PER_STEP):
        ids = range(100 + first, 100 + first + ROLLOUTS_PER_STEP)
        members = [number for number, s in enumerate(everything) if s.rollout_id in ids]
        used = [leaves[number] for number in members]
        numbers = reported([everything[number] for number in members], used, case)
        gradients = torch.autograd.grad(
            numbers["loss"], used, allow_unused=True, materialize_grads=True
        )
        values = {name: number.item() for name, number in numbers.items()}
        steps.append((values, dict(zip(members, gradients, strict=True))))
    return steps


def largest_error(found: Steps, report: dict[str, float], case: Case) -> float:
    """max |found - reference| / max |reference| over the logits of every step, and of each reported
    number.
    """
    worst = 0.0
    for (values, gradients), (expected_values, expected) in zip(
        found, reference(case), strict=True
    ):
        assert gradients.keys() == expected.keys()
        largest = max(gradient.abs().max().item() for gradient in expected.values())
        for number, gradient in expected.items():
            worst = max(worst, (gradients[number] - gradient).abs().max().item() / largest)
        assert values.keys() <= expected_values.keys() and len(values) >= 9, values.keys()
        for name, value in values.items():
            worst = max(worst, _relative(value, expected_values[name]))
    if not case.for_all_terms:
        own = rollout_report()
        assert report.keys() >= own.keys()
        worst = max(worst, *(_relative(report[name], value) for name, value in own.items()))
    return worst


def _relative(found: float, expected: float) -> float:
    return abs(found - expected) / max(abs(expected), 0.1)
