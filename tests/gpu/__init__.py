import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

HeadInputs = tuple[Tensor, Tensor, Tensor, Callable[..., Tensor]]
"""Hidden states, weight, targets, and the loss of log-probs, entropy and rows."""


@contextlib.contextmanager
def waits_refused() -> Iterator[None]:
    """Raise where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def exact_head(
    inputs: HeadInputs, scale: Tensor, temperature: float = 1.0, vocab_size: int | None = None
) -> list[Tensor]:
    """Loss, log-probs, entropy, and the gradients of hidden states and weight: dense, float64."""
    *leaves, targets, token_loss = inputs
    hidden, weight = (leaf.detach().double().requires_grad_() for leaf in leaves)
    log_p = (hidden @ weight[:vocab_size].t() / temperature).log_softmax(1)
    log_probs = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(1)
    loss = token_loss(log_probs, entropy, slice(None))
    loss.backward(scale.double())
    outputs = [each.detach() for each in (loss, log_probs, entropy)]
    return [*outputs, hidden.grad, weight.grad]


def errors(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[float]:
    """The norm of each difference over that of what is right."""
    return [
        float((value.double() - exact.double()).norm() / exact.double().norm())
        for value, exact in zip(found, wanted, strict=True)
    ]
