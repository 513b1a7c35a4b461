"""Score centering in plain Python loops over the formulas of arXiv:2609.20807, float64."""

import math

import torch
from torch import Tensor


def centers(
    p: dict[int, float], q: dict[int, float], weights: str, low: float, high: float
) -> dict[int, float]:
    """The coefficient of each log-prob of the head, from the probabilities in it by id."""
    rho = max(1 - sum(q.values()), 0.0) / max(1 - sum(p.values()), 1e-6)
    found = {}
    for v in q:
        if weights == "none":
            m, alpha = q[v], rho
        elif weights == "clip":
            m = min(max(p[v], low * q[v]), high * q[v])
            alpha = min(max(1.0, low * rho), high * rho)
        else:
            m = p[v] if low * q[v] <= p[v] <= high * q[v] else 0.0
            alpha = 1.0 if low * rho <= 1 <= high * rho else 0.0
        found[v] = m - alpha * p[v]
    return found


def centering(
    log_p: list[Tensor],
    head: dict[int, float],
    weights: str = "none",
    low: float = 0.0,
    high: float = math.inf,
) -> Tensor:
    """C of one row, from the log-probs of its whole vocabulary and the sampler's by id."""
    p = {v: float(log_p[v].detach().exp()) for v in head}
    q = {v: math.exp(log_q) for v, log_q in head.items()}
    parts = [c * log_p[v] for v, c in centers(p, q, weights, low, high).items()]
    return sum(parts, start=torch.zeros((), dtype=torch.float64))
