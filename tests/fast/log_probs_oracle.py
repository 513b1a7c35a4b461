"""The reference of the log-prob tests: float64, one row at a time."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.oracle import log_prob_and_entropy


def reference(
    logits: Tensor,
    targets: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor,
    *,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    vocab_size: int | None = None,
    kept: Sequence[Sequence[int]] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """log_probs [tokens], entropy [tokens], gradient [tokens, vocabulary], all float64.

    `logits` holds the whole padded vocabulary. A row is normalised over its kept ids, where it has
    some.
    """
    tokens, width = logits.shape
    real = width if vocab_size is None else vocab_size
    log_probs = torch.zeros(tokens, dtype=torch.float64)
    entropy = torch.zeros(tokens, dtype=torch.float64)
    gradient = torch.zeros(tokens, width, dtype=torch.float64)
    for t in range(tokens):
        if row_mask is not None and not bool(row_mask[t]):
            continue
        leaf = logits[t].double().clone().requires_grad_()
        ids = kept[t] if kept is not None else ()
        log_prob, row_entropy = log_prob_and_entropy(leaf[:real], targets[t], temperature, ids)
        loss = log_prob * float(grad_log_probs[t]) + row_entropy * float(grad_entropy[t])
        (gradient[t],) = torch.autograd.grad(loss, leaf)
        log_probs[t], entropy[t] = float(log_prob.detach()), float(row_entropy.detach())
    return log_probs, entropy, gradient


def close(found: Tensor, wanted: Tensor, rounding: float) -> None:
    """Assert that no element is off by more than a share of the largest, or of 1."""
    error = (found.double().cpu() - wanted).abs().amax() / wanted.abs().amax().clamp(min=1.0)
    assert found.shape == wanted.shape and error <= rounding, error


def peaked_logits(
    tokens: int, width: int, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Logits of a trained policy (a few likely tokens, entropy under a nat or so) and sampled
    targets.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, width, generator=generator) * 1.5
    for t in range(tokens):
        likely = torch.randint(0, width, (3,), generator=generator)
        logits[t, likely] += torch.tensor([9.0, 7.5, 6.0]) + math.log(width) * 0.3
    logits = logits.to(dtype)
    targets = torch.multinomial(logits.float().softmax(1), 1, generator=generator)[:, 0]
    return logits, targets
