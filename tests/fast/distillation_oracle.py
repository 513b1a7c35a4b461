"""The reference of the distillation tests: float64, one row and one token of the vocabulary at a
time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def log_softmax_of(row: Sequence[Tensor], temperature: float) -> list[Tensor]:
    largest = max(float(z.detach()) for z in row)
    total = torch.zeros((), dtype=torch.float64)
    for z in row:
        total = total + torch.exp((z - largest) / temperature)
    return [(z - largest) / temperature - torch.log(total) for z in row]


KINDS = ("forward_kl", "reverse_kl", "jsd")


def divergence(kind: str, beta: float, log_p: Sequence[Tensor], log_q: Sequence[Tensor]) -> Tensor:
    """Of p, the student's, from q, the teacher's."""
    total = torch.zeros((), dtype=torch.float64)
    for a, b in zip(log_p, log_q, strict=True):
        p, q = torch.exp(a), torch.exp(b)
        if kind == "forward_kl":
            total = total + q * (b - a)
        elif kind == "reverse_kl":
            total = total + p * (a - b)
        elif kind not in KINDS:
            raise KeyError(kind)
        else:
            m = beta * q + (1 - beta) * p
            total = total + beta * q * (b - torch.log(m)) + (1 - beta) * p * (a - torch.log(m))
    return total


def over_top_k(
    kind: str, beta: float, log_p: Sequence[Tensor], ids: Sequence[int], log_q: Sequence[float]
) -> Tensor:
    """The teacher's ids, and one bucket of the rest on both sides."""
    of_ids = [log_p[id] for id in ids]
    of_teacher = [torch.tensor(value, dtype=torch.float64) for value in log_q]
    rest_p, rest_q = torch.ones((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    for a, b in zip(of_ids, of_teacher, strict=True):
        rest_p, rest_q = rest_p - torch.exp(a), rest_q - torch.exp(b)
    return divergence(kind, beta, [*of_ids, torch.log(rest_p)], [*of_teacher, torch.log(rest_q)])
