"""The reference's mixture of experts: where its tokens go, the losses of its routers, and their
bias, in float64.

It has no part of Megatron's routers. A load-balancing loss is that of Switch Transformers
(arXiv:2101.03961), the z loss is that of ST-MoE (arXiv:2202.08906), the bias is that of
arXiv:2408.15664.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_pg.check.cases import BIAS_RATE, Case
from megatron_pg.check.weights import expert_bias


class Pack(NamedTuple):
    """A micro-batch of the reference: a sample alone where no loss is beside the policy's."""

    indices: list[int]
    """The places of its samples in the step."""
    weight: float
    """The weight of its losses beside the policy's."""
    turn: int
    """Its place among the micro-batches of its data-parallel rank."""


class Choices(NamedTuple):
    """The tokens of a pack by layer and expert, [layers, experts] float64."""

    favourites: Tensor
    """The tokens that give an expert one of their k largest logits."""
    taken: Tensor
    """The tokens that go to an expert."""

    @property
    def tokens(self) -> float:
        return float(self.taken[0].sum())  # times k


def route(
    case: Case, name: str, logits: Tensor, k: int, given: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return each token's weights of the experts and its choice, [tokens, experts] float64 and
    bool.

    Args:
        case: says how experts are scored.
        name: the router's bias in the whole model.
        logits: [tokens, experts] float64.
        given: [tokens, k] experts to take, -1 for a token that chooses by itself; None where all
            do.
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
    """Count a pack's tokens from the logits and the choices of its layers."""
    favourites = [torch.zeros_like(z).scatter_(1, z.topk(k).indices, 1.0).sum(0) for z in logits]
    counts = [is_taken.double().sum(0) for is_taken in taken]
    return Choices(torch.stack(favourites).detach().cpu(), torch.stack(counts).cpu())


def router_losses(
    case: Case, logits: Sequence[Tensor], place: int, packs: Sequence[Pack], of: Sequence[Choices]
) -> Tensor:
    """Return the weighted losses of a pack's routers, 0-d float64.

    `global_aux_loss` takes the packs of one turn for one micro-batch. Its shares of experts are of
    that turn and those before.

    Args:
        logits: [tokens, experts] float64 of each layer.
        place: the pack's place.
        of: the choices in each pack.
    """
    pack, total = packs[place], torch.zeros((), dtype=torch.float64, device=logits[0].device)
    peers = [i for i, other in enumerate(packs) if other.turn == pack.turn]
    before = [of[i].favourites for i, other in enumerate(packs) if other.turn <= pack.turn]
    seen = torch.stack(before).sum(0)
    turn_weight = sum(packs[i].weight for i in peers)
    whole_weight = turn_weight * of[place].tokens / sum(of[i].tokens for i in peers)
    for layer, rows in enumerate(logits):
        scores = rows.sigmoid() if case.has_sigmoid else rows.softmax(1)
        shares = (scores / scores.sum(1, keepdim=True)).mean(0)
        for kind, coefficient in case.balancing.items():
            is_global = kind == "global_aux_loss"
            counts = seen[layer] if is_global else of[place].favourites[layer]
            weight = coefficient * (whole_weight if is_global else pack.weight)
            frequencies = (counts / counts.sum()).to(shares)
            total = total + weight * len(counts) * (frequencies * shares).sum()
        z = case.builds.get("moe_z_loss_coeff", 0.0)
        total = total + z * pack.weight * torch.logsumexp(rows, dim=1).square().mean()
    return total


def head_start(counts: Tensor) -> Tensor:
    """Return the tokens [experts] to count before a step that counts `counts`, so that the sums
    differ by one.

    The bias of an expert goes up below the mean of the sums and down above it: so close to it every
    token decides.
    """
    return counts.max() - counts + _lead(counts)


def bias_update(counts: Tensor) -> Tensor:
    """Return what a step with a head start adds to the bias [experts]."""
    lead = _lead(counts)
    return BIAS_RATE * torch.sign(lead.mean() - lead)


def _lead(counts: Tensor) -> Tensor:
    return torch.arange(len(counts), dtype=counts.dtype) % 2
