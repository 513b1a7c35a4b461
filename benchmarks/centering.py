"""Table: the fused head of a policy loss with and without score centering.

    python -m benchmarks.centering [--tokens 8192] [--hidden 4096] [--columns 151936] [--k 32]

It times hidden states to both factors' gradients, with the weight's in a float32 `main_grad`. The
loss is `-A log p(y)` plus `A C` per token. The engine's head of a row is the policy's top k with
noise. All methods run in turn in one process.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.inputs import hidden_and_weight
from benchmarks.timing import OWN, Contender, append_results, measure, relative_error, table
from megatron_pg.head import Centering, HeadOptions, linear_token_loss

GOAL = 1.03
ROWS = 2048  # rows of logits at a time for the engine's heads


class Work:
    """The factors, the advantages and the engine's heads."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        tokens, columns = arguments.tokens, arguments.columns
        hidden, weight = hidden_and_weight(tokens, arguments.hidden, columns)
        self.hidden, self.weight = hidden.requires_grad_(), weight.requires_grad_()
        self.weight.main_grad = torch.zeros(weight.shape, device="cuda")
        self.weight.grad_added_to_main_grad = False
        self.targets = torch.randint(0, columns, (tokens,), device="cuda")
        self.advantages = torch.randn(tokens, device="cuda")
        ids, log_probs = [], []
        with torch.no_grad():
            for rows in self.hidden.split(ROWS):
                log_p = (rows @ self.weight.t()).float().log_softmax(1)
                log_q, chosen = (log_p + 0.1 * torch.randn_like(log_p)).topk(arguments.k)
                ids.append(chosen)
                log_probs.append(log_q.clamp(max=-1e-3))
        self.centering = Centering(torch.cat(ids), torch.cat(log_probs))
        self.targets[::2] = self.centering.ids[::2, 0]

    def clear(self) -> None:
        self.weight.main_grad.zero_()
        self.hidden.grad = self.weight.grad = None

    def own(self, *, is_centered: bool, **options: bool) -> list[Tensor]:
        def token_loss(log_probs: Tensor, entropy: Tensor, *scores_and_rows: object) -> Tensor:
            *scores, rows = scores_and_rows
            value = -log_probs + (scores[0][0] if scores else 0.0)  # type: ignore[index]
            return (self.advantages[rows] * value).sum() / len(self.hidden)  # type: ignore[index]

        loss, *found = linear_token_loss(
            self.hidden,
            self.weight,
            self.targets,
            token_loss,
            HeadOptions(with_entropy=False, **options),  # type: ignore[arg-type]
            defer=True,
            scorer=self.centering if is_centered else None,
        )
        loss.backward()
        return found


def errors(work: Work, **options: bool) -> dict[str, str]:
    """Return the errors of C and the hidden gradient for some rows against float64."""
    rows = torch.arange(0, len(work.hidden), max(len(work.hidden) // 64, 1), device="cuda")
    work.clear()
    found = work.own(is_centered=True, **options)[2][0, rows]
    logits = (work.hidden[rows].double() @ work.weight.double().t()).detach().requires_grad_()
    log_p = logits.log_softmax(1)
    of_head = log_p.gather(1, work.centering.ids[rows])
    p, q = of_head.detach().exp(), work.centering.log_probs[rows].double().exp()
    rho = (1 - q.sum(1)).clamp(min=0) / (1 - p.sum(1)).clamp(min=1e-6)
    value = ((q - rho[:, None] * p) * of_head).sum(1)
    of_target = log_p.gather(1, work.targets[rows, None])[:, 0]
    loss = (work.advantages[rows] * (value - of_target)).sum() / len(work.hidden)
    loss.backward()
    wanted = logits.grad @ work.weight.double()
    return {
        "C": relative_error(found, value.detach()),
        "hidden gradient": relative_error(work.hidden.grad[rows], wanted),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=151936)
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    work = Work(arguments)
    variants: dict[str, dict[str, bool]] = {
        "bfloat16 logits": {},
        "float32 logits": {"fp32_logits": True},
        "float32 logits, own kernels": {"fp32_logits": True, "use_quack": False},
    }
    methods: dict[str, Callable[[], object]] = {}
    for name, options in variants.items():
        for is_centered in (False, True):
            label = OWN if not methods else f"{name}{', centered' if is_centered else ''}"
            methods[label] = lambda c=is_centered, o=options: work.own(is_centered=c, **o)  # type: ignore[misc]
    timings = measure([Contender(n, c, work.clear) for n, c in methods.items()], arguments.rounds)
    for name, (without, centered) in zip(
        variants, zip(timings[::2], timings[1::2], strict=True), strict=True
    ):
        ratio = centered.median / without.median
        print(
            f"{name}: {ratio:.3f} times the step without it, goal {GOAL}",
            errors(work, **variants[name]),
        )
    title = f"T={arguments.tokens} H={arguments.hidden} V={arguments.columns} k={arguments.k}"
    print(table(title, timings, timings[0].median, {}), flush=True)
    append_results(arguments.output, {**vars(arguments), "output": None}, timings)


if __name__ == "__main__":
    main()
