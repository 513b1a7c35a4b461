"""Inputs as in RL training: peaked distributions (0.3 to 1 nat) and a clipped loss with an entropy
term.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ENTROPY_COEFFICIENT = 0.01
EPS_CLIP = 0.2


@dataclass
class Tokens:
    """The inputs of the per-token loss in addition to log-probabilities, [tokens] each."""

    targets: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    weights: Tensor

    def __getitem__(self, rows: Tensor) -> Tokens:
        return Tokens(*(vector[rows] for vector in vars(self).values()))

    def loss(self, log_probs: Tensor, entropy: Tensor | None, rows: slice = slice(None)) -> Tensor:
        """Compute the clipped policy loss, minus the entropy bonus if there is an entropy."""
        parts = self.old_log_probs[rows], self.advantages[rows], self.weights[rows]
        loss = policy_loss if log_probs.dtype == torch.float64 else compiled_loss
        return loss(log_probs, entropy, *parts)


def policy_loss(
    log_probs: Tensor,
    entropy: Tensor | None,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
) -> Tensor:
    """Compute the clipped policy loss, minus the entropy bonus if there is an entropy."""
    ratio = (log_probs - old_log_probs).exp()
    clipped = ratio.clamp(1 - EPS_CLIP, 1 + EPS_CLIP)
    per_token = -torch.minimum(ratio * advantages, clipped * advantages)
    if entropy is not None:
        per_token = per_token - ENTROPY_COEFFICIENT * entropy
    return (per_token * weights).sum()


def is_clipped(log_probs: Tensor, tokens: Tokens) -> Tensor:
    """Return a mask [tokens] of the tokens without a policy gradient, where `policy_loss` is
    flat.
    """
    ratio = (log_probs.double() - tokens.old_log_probs.double()).exp()
    is_above = (ratio > 1 + EPS_CLIP) & (tokens.advantages > 0)
    return is_above | ((ratio < 1 - EPS_CLIP) & (tokens.advantages < 0))


compiled_loss = torch.compile(policy_loss, dynamic=False)
"""`policy_loss` in a few kernels instead of about 25, forward and backward. Every method uses it,
so only the heads differ."""


def peaked_logits(tokens: int, width: int) -> Tensor:
    """Return [tokens, width] bfloat16 logits: a Gaussian background and two likely tokens above
    it.
    """
    logits = torch.empty((tokens, width), dtype=torch.bfloat16, device=DEVICE)
    background = math.log(width) + 1.5**2 / 2
    for rows in torch.arange(tokens, device=DEVICE).split(2048):
        chunk = torch.randn((len(rows), width), device=DEVICE) * 1.5
        likely = torch.randint(0, width, (len(rows), 2), device=DEVICE)
        height = background + torch.tensor([4.0, 2.5], device=DEVICE).expand(len(rows), 2)
        logits[rows] = chunk.scatter(1, likely, height).bfloat16()
    return logits


def sampled_tokens(logits: Tensor) -> Tokens:
    """Draw tokens from the logits, with old log-probs close to them."""
    tokens = logits.shape[0]
    targets = torch.empty(tokens, dtype=torch.int64, device=DEVICE)
    log_probs = torch.empty(tokens, device=DEVICE)
    for rows in torch.arange(tokens, device=DEVICE).split(1024):
        chunk = logits[rows].float().log_softmax(1)
        targets[rows] = torch.multinomial(chunk.exp(), 1)[:, 0]
        log_probs[rows] = chunk.gather(1, targets[rows, None])[:, 0]
    return Tokens(
        targets=targets,
        old_log_probs=(log_probs + 0.1 * torch.randn(tokens, device=DEVICE)).clamp(max=0.0),
        advantages=torch.randn(tokens, device=DEVICE),
        weights=torch.full((tokens,), 1 / tokens, device=DEVICE),
    )


def hidden_and_weight(tokens: int, hidden_size: int, width: int) -> tuple[Tensor, Tensor]:
    """Return bfloat16 hidden states that point at one or two rows of the output weight, and the
    weight.
    """
    scale = 1 / math.sqrt(hidden_size)
    weight = torch.randn((width, hidden_size), device=DEVICE).mul_(scale).bfloat16()
    likely = torch.randint(0, width, (2, tokens), device=DEVICE)
    peak = math.log(width) + 4.5
    hidden = peak * weight[likely[0]].float() + (peak - 1.5) * weight[likely[1]].float()
    return (hidden + torch.randn_like(hidden)).bfloat16(), weight


def exact_gradient(logits: Tensor, tokens: Tokens, rows: Tensor) -> tuple[Tensor, ...]:
    """Return log-probabilities, entropy and logit gradient of some rows in float64."""
    exact = logits[rows].double().requires_grad_()
    part = tokens[rows]
    log_p = exact.log_softmax(1)
    log_probs = log_p.gather(1, part.targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(1)
    (gradient,) = torch.autograd.grad(part.loss(log_probs, entropy), exact)
    return log_probs.detach(), entropy.detach(), gradient
