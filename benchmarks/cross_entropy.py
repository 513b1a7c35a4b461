"""Plain cross-entropy from hidden states: minus the sum of log-probabilities, without entropy."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.fused_head import Work
from benchmarks.timing import Contender, relative_error
from megatron_pg.head import HeadOptions, linear_token_loss


def negative(log_probs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
    return -log_probs.sum()


class CrossEntropy(Work):
    def own(self, **options: object) -> None:
        head, targets = HeadOptions(with_entropy=False, **options), self.tokens.targets
        loss, *_ = linear_token_loss(self.hidden, self.weight, targets, negative, head, defer=True)
        loss.backward()

    def of(self, call: Callable[..., Tensor | tuple[Tensor, Tensor]]) -> None:
        """Run a peer's function that returns a loss for autograd, or the gradients."""
        found = call(self.hidden, self.weight, self.tokens.targets)
        if isinstance(found, tuple):
            self.hidden.grad, self.of_weight = found
        else:
            found.backward()

    def clear(self) -> None:
        super().clear()
        self.of_weight: Tensor | None = None

    def weight_gradient(self) -> Tensor:
        if self.of_weight is not None:
            return self.of_weight
        own = self.weight.grad is None or self.weight.grad.is_sparse
        return self.main_grad if own else self.weight.grad


class Exact:
    """The float64 gradients of 64 tokens' hidden states and their targets' weights."""

    def __init__(self, work: CrossEntropy) -> None:
        hidden, targets = work.hidden.detach().double(), work.tokens.targets
        weight = work.weight.detach().double()
        self.rows = torch.arange(0, len(hidden), len(hidden) // 64, device="cuda")
        self.columns = targets[self.rows].unique()
        self.weight = torch.zeros((len(self.columns), hidden.shape[1]), device="cuda").double()
        of_hidden = torch.zeros_like(hidden)
        for rows in torch.arange(len(hidden), device="cuda").split(1024):
            gradient = (hidden[rows] @ weight.t()).softmax(1)
            gradient[torch.arange(len(rows), device="cuda"), targets[rows]] -= 1
            of_hidden[rows] = gradient @ weight
            self.weight += gradient[:, self.columns].t() @ hidden[rows]
        self.hidden = of_hidden[self.rows]

    def errors(self, work: CrossEntropy, contender: Contender) -> str:
        contender.prepare()
        contender.call()
        weight = work.weight_gradient()[self.columns]
        of_hidden = relative_error(work.hidden.grad[self.rows], self.hidden)
        return f"{of_hidden}, {relative_error(weight, self.weight)}"
