"""The loss of a whole step under any settings of `PolicyLossConfig`, from logits: dense, unsharded,
in float64.

The formulas are those of `tests.oracle` (log-probs, aggregation) and `tests.fast.objectives_oracle`
(objectives, divergences, corrections); here they are put together. Settings are read by the names
of their flags, from any object. No code of `megatron_pg` takes part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import oracle
from .fast import objectives_oracle
from .fast.objectives_oracle import Correction, Sequence1
from .metric_loops import Token
from .oracle import PlainSample, Step


@dataclass
class DenseLoss:
    """The loss to differentiate, the terms that are reported, and what metrics are made of."""

    loss: Tensor
    terms: dict[str, Tensor]
    tokens: list[Token]
    """Every active token of the step."""


@dataclass
class Scored:
    """A sample with the log-probs, entropies and masses of kept sets of its response tokens."""

    sequence: Sequence1
    entropies: Tensor
    masses: Tensor


def scored(sample: PlainSample, logits: Tensor, temperature: float, replays_sets: bool) -> Scored:
    rows = []
    for token, keep in enumerate(sample.loss_mask):
        row = logits[sample.prompt_length + token - 1]
        kept = sample.kept_tokens[token] if replays_sets and sample.kept_tokens else []
        target = sample.tokens[sample.prompt_length + token]
        zero = torch.zeros((), dtype=torch.float64)
        values = (zero, zero, zero)
        if keep:
            pair = oracle.log_prob_and_entropy(row, target, temperature, kept)
            values = (*pair, oracle.kept_mass(row, temperature, kept))
        rows.append(values)
    log_probs, entropies, masses = (oracle.stack([row[i] for row in rows]) for i in range(3))
    given = {f"{name}_log_probs": getattr(sample, f"{name}_log_probs") for name in GIVEN}
    sequence = Sequence1(
        log_probs, sample.loss_mask, sample.advantages, turn_ids=sample.turn_ids, **given
    )
    return Scored(sequence, entropies, masses)


GIVEN = ("old", "ref", "rollout")
"""The policies whose log-probs a sample brings."""


def correction_of(settings: Any) -> Correction:
    kind = settings.tis_level if settings.use_tis else None
    if settings.custom_tis_function_path:
        kind = None  # a user's function takes its place
    elif settings.use_tis and settings.tis_mode == "mask":
        kind = "mask" if kind == "token" else f"{kind}_mask"

    def bounds(level: str) -> tuple[float, float] | None:
        low_and_high = (getattr(settings, f"{level}_rejection_{end}") for end in ("low", "high"))
        low, high = low_and_high
        return (low, high) if getattr(settings, f"use_{level}_rejection") else None

    return Correction(
        kind,
        settings.tis_clip_low,
        settings.tis_clip,
        geometric=bounds("geometric"),
        sequence=bounds("sequence"),
        opsm_delta=settings.opsm_delta if settings.use_opsm else None,
        anchor=settings.ratio_anchor,
        by_turn=settings.sequence_unit == "turn",
    )


def clip_range(settings: Any) -> tuple[float, float]:
    high = settings.eps_clip if settings.eps_clip_high is None else settings.eps_clip_high
    return 1 - settings.eps_clip, 1 + high


def objective_of(sequence: Sequence1, settings: Any) -> list[Tensor]:
    low, high = clip_range(settings)
    name, deltas = settings.policy_loss, (settings.dppo_delta, settings.dppo_delta_high)
    return objectives_oracle.objective(
        name,
        sequence,
        low=low,
        high=high,
        dual=settings.eps_clip_c,
        cispo_lower_bound=settings.cispo_lower_bound,
        taus=(settings.sapo_tau_pos, settings.sapo_tau_neg),
        deltas=None if None in deltas else deltas,
        gammas=(
            *(settings.vespo_k_pos, settings.vespo_lambda_pos),
            *(settings.vespo_k_neg, settings.vespo_lambda_neg),
        ),
        anchor=settings.ratio_anchor,
        by_turn=settings.sequence_unit == "turn",
    )


def kl_of(sequence: Sequence1, settings: Any) -> list[Tensor]:
    return objectives_oracle.kl(
        sequence,
        settings.kl_loss_type,
        unbiased=settings.use_unbiased_kl,
        gradient_of_k2=settings.kl_loss_gradient == "k2",
        anchor=settings.ratio_anchor,
    )


def correct(sequence: Sequence1, settings: Any) -> tuple[list[Tensor], list[int]]:
    """The corrected losses, and the mask that is left."""
    losses = objective_of(sequence, settings)
    losses, mask = objectives_oracle.correct(sequence, losses, correction_of(settings))
    if settings.custom_tis_function_path:  # `tests.settings.half_of_likely_tokens`
        likely = [int(value > -1.5) for value in sequence.log_probs]
        losses = [x / 2 if keep else 0.0 * x for x, keep in zip(losses, likely, strict=True)]
        mask = [keep * other for keep, other in zip(mask, likely, strict=True)]
    return losses, mask


def outer_count(samples: Step, aggregation: str, denominator: str) -> float:
    if aggregation != "token_mean":
        return oracle.outer_count(samples, aggregation)
    count = oracle.counted(samples, range(len(samples)), denominator)
    return count if count > 0 else 1


def dense_loss(step: Step, logits: Sequence[Tensor], settings: Any) -> DenseLoss:
    """The loss of a step from the logits [total_length, vocabulary] of every sample."""
    temperature, replays_sets = settings.rollout_temperature, settings.replay_sampling_set
    scores = [scored(s, x, temperature, replays_sets) for s, x in zip(step, logits, strict=True)]
    sequences = [score.sequence for score in scores]
    made = [correct(sequence, settings) for sequence in sequences]
    mode, divisor = settings.loss_aggregation, settings.loss_aggregation_divisor
    counting = settings.loss_weight_denominator

    def aggregate(samples: Step, losses: Sequence[Sequence[Tensor]], aggregation: str) -> Tensor:
        values = oracle.weighted(samples, [oracle.stack(list(each)) for each in losses])
        return oracle.aggregate(samples, values, aggregation, divisor, counting)

    # KL and entropy are of the tokens that were active before any rejection, whatever divides the
    # policy loss.
    counted: Step = step
    if settings.rejection_denominator == "accepted":
        pairs = zip(step, made, strict=True)
        counted = [replace(sample, loss_mask=mask) for sample, (_, mask) in pairs]
    of_terms = mode if settings.regularizer_aggregation == "loss" else "sample_mean"
    zero = torch.zeros((), dtype=torch.float64)
    pg_loss = aggregate(counted, [losses for losses, _ in made], mode) if step else zero
    terms, penalty = {"pg_loss": pg_loss}, zero
    if settings.kl_loss_coef:
        terms["kl_loss"] = aggregate(step, [kl_of(s, settings) for s in sequences], of_terms)
        penalty = penalty + settings.kl_loss_coef * terms["kl_loss"]
    if settings.entropy_coef:
        terms["entropy_loss"] = aggregate(step, [score.entropies for score in scores], of_terms)
        penalty = penalty - settings.entropy_coef * terms["entropy_loss"]
    loss = terms["loss"] = pg_loss + penalty
    own, before = (outer_count(samples, mode, counting) for samples in (counted, step))
    if settings.grad_divisor:
        is_whole = settings.regularizer_aggregation == "loss"
        factor = before if is_whole else settings.grad_divisor
        loss = (pg_loss * own + penalty * factor) / settings.grad_divisor
    if settings.divide_gradient_twice:
        loss = loss / own
    return DenseLoss(loss, terms, tokens_of(step, scores, settings))


def tokens_of(step: Step, scores: Sequence[Scored], settings: Any) -> list[Token]:
    documents = {i: d for d, members in enumerate(oracle.rollouts(step)) for i in members}
    low, high = clip_range(settings)
    found = []
    for index, (sample, score) in enumerate(zip(step, scores, strict=True)):
        s = score.sequence
        for t in s.active():
            ref, rollout = s.ref_log_probs, s.rollout_log_probs
            found.append(
                Token(
                    document=documents[index],
                    log_prob=s.log_probs[t].item(),
                    old=s.old_log_probs[t],
                    ref=ref[t],
                    rollout=rollout[t],
                    advantage=s.advantages[t],
                    version=sample.policy_version or 0,
                    entropy=score.entropies[t].item(),
                    set_size=len(sample.kept_tokens[t]) if sample.kept_tokens else 0,
                    set_mass=score.masses[t].item(),
                    kl_type=settings.kl_loss_type,
                    clip_range=(low, high),
                )
            )
    return found
