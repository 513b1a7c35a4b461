"""The reference's mixture of experts in float64: routing, router losses and expert bias.

It uses no code of Megatron's routers. Sources: load-balancing loss, Switch Transformers
(arXiv:2101.03961); z loss, ST-MoE (arXiv:2202.08906); bias, arXiv:2408.15664.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_pg.check.cases import BIAS_RATE, Case
from megatron_pg.check.weights import expert_bias


class Pack(NamedTuple):
    """A micro-batch of the reference: a single sample if the step has only the policy loss."""

    indices: list[int]
    """The indices of its samples in the step."""
    weight: float
    """The weight of its auxiliary losses."""
    turn: int
    """Its place among the micro-batches of its data-parallel rank."""


class Choices(NamedTuple):
    """The number of tokens by layer and expert, [layers, experts] float64."""

    favorites: Tensor
    """The tokens for which an expert has one of the k largest logits."""
    taken: Tensor
    """The tokens that go to an expert."""

    @property
    def tokens(self) -> float:
        return float(self.taken[0].sum())  # times k


def route(
    case: Case, name: str, logits: Tensor, k: int, given: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return each token's expert weights and choices, [tokens, experts] float64 and bool.

    Args:
        case: defines how experts are scored.
        name: the name of the router's bias in the whole model.
        logits: [tokens, experts] float64.
        given: [tokens, k] experts to take, or -1 for a token that chooses. None if all tokens
            choose.
    """
    scores = logits.sigmoid() if case.has_sigmoid else logits
    bias = expert_bias(name, scores[0]) if case.has_expert_bias else 0.0
    experts = (scores + bias).topk(k).indices
    if given is not None:
        experts = torch.where(given < 0, experts, given)
    is_taken = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, experts, True)
    if case.has_sigmoid:
        kept = scores * is_taken
        return kept / kept.sum(1, keepdim=True), is_taken
    return torch.softmax(scores.masked_fill(~is_taken, -math.inf), dim=1), is_taken


def choices(logits: Sequence[Tensor], taken: Sequence[Tensor], k: int) -> Choices:
    """Count a pack's tokens from its layers' logits and choices."""
    favorites = [torch.zeros_like(z).scatter_(1, z.topk(k).indices, 1.0).sum(0) for z in logits]
    counts = [is_taken.double().sum(0) for is_taken in taken]
    return Choices(torch.stack(favorites).detach().cpu(), torch.stack(counts).cpu())


def router_losses(
    case: Case, logits: Sequence[Tensor], place: int, packs: Sequence[Pack], of: Sequence[Choices]
) -> Tensor:
    """Return the weighted losses of a pack's routers, 0-d float64.

    `global_aux_loss` treats the packs of one turn as one micro-batch. It counts experts' tokens
    over this turn and earlier turns.

    Args:
        logits: [tokens, experts] float64 per layer.
        place: the pack's index.
        of: the choices in each pack.
    """
    pack, total = packs[place], torch.zeros((), dtype=torch.float64, device=logits[0].device)
    peers = [i for i, other in enumerate(packs) if other.turn == pack.turn]
    before = [of[i].favorites for i, other in enumerate(packs) if other.turn <= pack.turn]
    seen = torch.stack(before).sum(0)
    turn_weight = sum(packs[i].weight for i in peers)
    whole_weight = turn_weight * of[place].tokens / sum(of[i].tokens for i in peers)
    for layer, rows in enumerate(logits):
        scores = rows.sigmoid() if case.has_sigmoid else rows.softmax(1)
        shares = (scores / scores.sum(1, keepdim=True)).mean(0)
        for kind, coefficient in case.balancing.items():
            is_global = kind == "global_aux_loss"
            counts = seen[layer] if is_global else of[place].favorites[layer]
            weight = coefficient * (whole_weight if is_global else pack.weight)
            frequencies = (counts / counts.sum()).to(shares)
            total = total + weight * len(counts) * (frequencies * shares).sum()
        z = case.builds.get("moe_z_loss_coeff", 0.0)
        total = total + z * pack.weight * torch.logsumexp(rows, dim=1).square().mean()
    return total


def head_start(counts: Tensor) -> Tensor:
    """Return the tokens [experts] to start from, so that the sums after a step with `counts` differ
    by one.

    An expert's bias goes up if its sum is below the mean, and down if above. So close to the mean,
    every token decides.
    """
    return counts.max() - counts + _lead(counts)


def bias_update(counts: Tensor) -> Tensor:
    """Return the update [experts] of the bias after a step with a head start."""
    lead = _lead(counts)
    return BIAS_RATE * torch.sign(lead.mean() - lead)


def _lead(counts: Tensor) -> Tensor:
    return torch.arange(len(counts), dtype=counts.dtype) % 2
