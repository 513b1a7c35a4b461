"""The executable specification: what the package must compute, written to be read.

Dense, unsharded, float64, plain Python loops, autograd for every gradient. It shares no code with
`megatron_pg` and must stay that way: a test that compares the package with itself proves nothing.
Slow is fine here; clever is not. The token layout has its own file, `tests.token_layout`.

Words: a *sample* is one prompt and its response; a *rollout* is one or more samples that count as
one; a *prompt group* is all rollouts of one prompt; a *step* is all samples of one optimizer step.
Per-token quantities are lists with one entry per sample, each a vector over its response tokens.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

PerToken = Sequence[Tensor]
"""One float64 vector [response_length] for each sample of the step."""


@dataclass(frozen=True)
class PlainSample:
    """One sample as plain lists. Response vectors have one entry per response token."""

    tokens: list[int]
    response_length: int
    loss_mask: list[int]
    advantages: list[float]
    old_log_probs: list[float]
    ref_log_probs: list[float] | None = None
    rollout_log_probs: list[float] | None = None
    group_index: int | None = None
    rollout_id: int | None = None
    loss_weights: list[float] | None = None
    old_values: list[float] | None = None
    returns: list[float] | None = None
    kept_tokens: list[list[int]] | None = None
    turn_ids: list[int] | None = None
    policy_version: int | None = None
    routed_experts: list[list[list[int]]] | None = None
    """[layers][total_length][k] ids of the experts that the engine chose, -1 for none."""

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.response_length


Step = Sequence[PlainSample]

# Aggregation


def rollouts(samples: Step) -> list[list[int]]:
    """Sample indices by rollout; a sample without `rollout_id` is a rollout of its own."""
    members: dict[Hashable, list[int]] = {}
    for index, sample in enumerate(samples):
        key = ("alone", index) if sample.rollout_id is None else ("shared", sample.rollout_id)
        members.setdefault(key, []).append(index)
    return list(members.values())


def prompt_groups(samples: Step) -> list[list[int]]:
    """Sample indices by prompt group; every sample must name its group."""
    members: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        assert sample.group_index is not None, f"sample {index} has no group_index"
        members.setdefault(sample.group_index, []).append(index)
    return list(members.values())


def active_tokens(samples: Step, members: Sequence[int]) -> int:
    return sum(sum(samples[index].loss_mask) for index in members)


def counted(samples: Step, members: Sequence[int], denominator: str) -> float:
    """What a denominator counts of these samples: their active tokens, or the sum of the loss
    weights of those.
    """
    if denominator == "mask":
        return active_tokens(samples, members)
    total = 0.0
    for index in members:
        sample = samples[index]
        for token, keep in enumerate(sample.loss_mask):
            if keep:
                total += 1.0 if sample.loss_weights is None else sample.loss_weights[token]
    return total


def masked_sum(samples: Step, losses: PerToken, members: Sequence[int]) -> Tensor:
    """Sum of the losses that the mask keeps; the others are never touched."""
    total = torch.zeros((), dtype=torch.float64)
    for index in members:
        for token, keep in enumerate(samples[index].loss_mask):
            if keep:
                total = total + losses[index][token]
    return total


def mean_of_token_means(
    samples: Step, losses: PerToken, units: list[list[int]], denominator: str = "mask"
) -> Tensor:
    """Mean over the units of the token mean inside each; a unit without active tokens adds 0."""
    total = torch.zeros((), dtype=torch.float64)
    for members in units:
        count = counted(samples, members, denominator)
        total = total + masked_sum(samples, losses, members) / (count if count > 0 else 1)
    return total / len(units)


def sample_mean(samples: Step, losses: PerToken, denominator: str = "mask") -> Tensor:
    """GRPO: mean over rollouts of the token mean of each."""
    return mean_of_token_means(samples, losses, rollouts(samples), denominator)


def prompt_mean(samples: Step, losses: PerToken, denominator: str = "mask") -> Tensor:
    """ScaleRL's prompt average: mean over prompt groups of the token mean of each."""
    return mean_of_token_means(samples, losses, prompt_groups(samples), denominator)


def token_mean(samples: Step, losses: PerToken, denominator: str = "mask") -> Tensor:
    everything = range(len(samples))
    count = counted(samples, everything, denominator)
    return masked_sum(samples, losses, everything) / (count if count > 0 else 1)


def constant(samples: Step, losses: PerToken, divisor: float) -> Tensor:
    """Dr.GRPO (arXiv:2503.20783, eq. 2): sum of tokens over (number of rollouts * divisor)."""
    everything = range(len(samples))
    return masked_sum(samples, losses, everything) / (len(rollouts(samples)) * divisor)


AGGREGATIONS = ("sample_mean", "prompt_mean", "token_mean", "constant")


def aggregate(
    samples: Step,
    losses: PerToken,
    aggregation: str,
    divisor: float | None = None,
    denominator: str = "mask",
) -> Tensor:
    means = {"sample_mean": sample_mean, "prompt_mean": prompt_mean, "token_mean": token_mean}
    if aggregation in means:
        return means[aggregation](samples, losses, denominator)
    assert aggregation == "constant" and divisor is not None
    return constant(samples, losses, divisor)


def weighted(samples: Step, losses: PerToken) -> PerToken:
    result = []
    for sample, sample_losses in zip(samples, losses, strict=True):
        weights = [1.0] * sample.response_length
        if sample.loss_weights is not None:
            pairs = zip(sample.loss_weights, sample.loss_mask, strict=True)
            weights = [weight if keep else 0.0 for weight, keep in pairs]
        result.append(sample_losses * torch.tensor(weights, dtype=torch.float64))
    return result


def outer_count(samples: Step, aggregation: str) -> int:
    """What the inner sum of the step is divided by: N, P, max(T, 1) or N."""
    if aggregation == "prompt_mean":
        return len(prompt_groups(samples))
    if aggregation == "token_mean":
        return max(active_tokens(samples, range(len(samples))), 1)
    return len(rollouts(samples))


# Log-probabilities and the policy objective


@dataclass(frozen=True)
class Objective:
    """Settings of the loss, under the names of the flags."""

    loss_aggregation: str = "sample_mean"
    loss_aggregation_divisor: float | None = None
    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    eps_clip_c: float | None = None
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k3"
    use_unbiased_kl: bool = False
    entropy_coef: float = 0.0
    regularizer_aggregation: str = "sample_mean"
    loss_weight_denominator: str = "mask"
    rollout_temperature: float = 1.0


def log_prob_and_entropy(
    logits: Tensor, target: int, temperature: float = 1.0, kept: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Log-probability of `target` and entropy of softmax(logits / temperature); logits [vocab].

    Renormalised to the kept ids, if there are any.
    """
    scaled = logits.double() / temperature
    if kept:
        is_dropped = torch.tensor([id not in kept for id in range(len(logits))])
        scaled = scaled.masked_fill(is_dropped, -torch.inf)
    log_probs = torch.log_softmax(scaled, dim=-1)
    entropy = torch.zeros((), dtype=torch.float64)
    for log_prob in log_probs:
        if log_prob > -torch.inf:  # p log p -> 0 as p -> 0
            entropy = entropy - log_prob.exp() * log_prob
    return log_probs[target], entropy


def kept_mass(logits: Tensor, temperature: float, kept: Sequence[int]) -> Tensor:
    """Probability of the kept ids under softmax(logits / temperature); 1 where all were kept."""
    probabilities = torch.softmax(logits.detach().double() / temperature, dim=-1)
    return torch.stack([probabilities[id] for id in kept or range(len(logits))]).sum()


def probability_ratio(log_prob: Tensor, old_log_prob: float) -> Tensor:
    """exp(log_prob - old_log_prob), the exponent held in [-20, 20] with zero gradient outside."""
    return (log_prob - old_log_prob).clamp(-20.0, 20.0).exp()


def clip_range(objective: Objective) -> tuple[float, float]:
    """The lowest and the highest ratio that PPO does not clip."""
    high = objective.eps_clip if objective.eps_clip_high is None else objective.eps_clip_high
    return 1.0 - objective.eps_clip, 1.0 + high


def ppo_token_loss(ratio: Tensor, advantage: float, objective: Objective) -> Tensor:
    """PPO's clipped loss of one token, with asymmetric and with dual clip."""
    lowest, highest = clip_range(objective)
    clipped_ratio = ratio
    if not lowest <= ratio <= highest:
        clipped_ratio = torch.tensor(lowest if ratio < lowest else highest, dtype=torch.float64)
    unclipped, clipped = -ratio * advantage, -clipped_ratio * advantage
    loss = unclipped if unclipped >= clipped else clipped
    if objective.eps_clip_c is not None and advantage < 0:
        bound = torch.tensor(-objective.eps_clip_c * advantage, dtype=torch.float64)
        loss = loss if loss <= bound else bound
    return loss


def kl_token_loss(
    log_prob: Tensor, ref_log_prob: float, kind: str, weight: Tensor | float = 1.0
) -> Tensor:
    """Schulman's estimators (joschu.net/blog/kl-approx.html) of KL(policy || reference), times a
    weight.
    """
    difference = log_prob - ref_log_prob
    if kind == "k1":
        return weight * difference
    if kind == "k2":
        return weight * difference**2 / 2
    k3 = weight * ((-difference).exp() - 1 + difference)
    return k3.clamp(-10.0, 10.0) if kind == "low_var_kl" else k3


@dataclass
class PolicyLoss:
    """The objective of a step and what it was made of, [response_length] of each sample."""

    loss: Tensor
    pg_loss: Tensor
    kl_loss: Tensor | None = None
    entropy: Tensor | None = None
    log_probs: list[Tensor] = field(default_factory=list)
    ratios: list[Tensor] = field(default_factory=list)
    entropies: list[Tensor] = field(default_factory=list)
    kept_masses: list[Tensor] = field(default_factory=list)


def stack(values: list[Tensor]) -> Tensor:
    return torch.stack(values) if values else torch.zeros(0, dtype=torch.float64)


def policy_loss(samples: Step, logits: Sequence[Tensor], objective: Objective) -> PolicyLoss:
    """The loss of a step from the logits of every sample, [total_length, vocab] each.

    The logits at position p predict the token at p + 1. Masked tokens are skipped, whatever they
    hold: their entries in the result are zero.
    """
    zero = torch.zeros((), dtype=torch.float64)
    result = PolicyLoss(loss=zero, pg_loss=zero)
    pg_losses, kl_losses = [], []
    for sample, sample_logits in zip(samples, logits, strict=True):
        rows = []
        for token in range(sample.response_length):
            log_prob, entropy, ratio, pg_token, kl_token, mass = zero, zero, zero, zero, zero, zero
            if sample.loss_mask[token]:
                position = sample.prompt_length + token
                row, temperature = sample_logits[position - 1], objective.rollout_temperature
                kept = sample.kept_tokens[token] if sample.kept_tokens is not None else []
                log_prob, entropy = log_prob_and_entropy(
                    row, sample.tokens[position], temperature, kept
                )
                mass = kept_mass(row, temperature, kept)
                ratio = probability_ratio(log_prob, sample.old_log_probs[token])
                pg_token = ppo_token_loss(ratio, sample.advantages[token], objective)
                if sample.ref_log_probs is not None:
                    weight = ratio if objective.use_unbiased_kl else 1.0
                    ref_log_prob = sample.ref_log_probs[token]
                    kl_token = kl_token_loss(log_prob, ref_log_prob, objective.kl_loss_type, weight)
            rows.append((pg_token, kl_token, log_prob, ratio, entropy, mass))
        columns = (pg_losses, kl_losses, result.log_probs, result.ratios, result.entropies)
        for index, column in enumerate((*columns, result.kept_masses)):
            column.append(stack([row[index] for row in rows]))

    def by(aggregation: str, losses: PerToken) -> Tensor:
        divisor, denominator = objective.loss_aggregation_divisor, objective.loss_weight_denominator
        return aggregate(samples, weighted(samples, losses), aggregation, divisor, denominator)

    terms = objective.regularizer_aggregation
    terms = objective.loss_aggregation if terms == "loss" else terms
    result.pg_loss = by(objective.loss_aggregation, pg_losses)
    result.kl_loss = by(terms, kl_losses)
    result.entropy = by(terms, result.entropies)
    result.loss = result.pg_loss
    if objective.kl_loss_coef:
        result.loss = result.loss + objective.kl_loss_coef * result.kl_loss
    if objective.entropy_coef:
        result.loss = result.loss - objective.entropy_coef * result.entropy
    return result


# Metrics


def document_mean(samples: Step, values: PerToken) -> float:
    """Token mean of each document (rollout) that has an active token, then the mean over those
    documents.
    """
    means = []
    for members in rollouts(samples):
        count = active_tokens(samples, members)
        if count > 0:
            means.append(masked_sum(samples, values, members).item() / count)
    return sum(means) / len(means)
