"""Table: the divergence and the student's gradients from both models' hidden states.

    python -m benchmarks.distillation [--tokens 8192] [--hidden 4096] [--teacher-hidden 4096]
        [--columns 151936]

Floor: only the four matrix products (both models' logits, the two gradients), unchunked, plus 10
bytes per logit over the copy rate, both from the same run. Statistics read both models' logits
once, and the gradient reads both and writes one. The weight's gradient ends in a float32
`main_grad`.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.inputs import hidden_and_weight
from benchmarks.timing import (
    OWN,
    Contender,
    append_results,
    copy_rate,
    measure,
    relative_error,
    table,
)
from megatron_pg.head import Divergence, HeadOptions, WholeTeacher, linear_token_loss

GOAL = 1.3


class Work:
    """Both models' leaves. The student's weight has a float32 `main_grad` as under Megatron's
    DDP.
    """

    def __init__(self, arguments: argparse.Namespace, divergence: Divergence) -> None:
        tokens, columns = arguments.tokens, arguments.columns
        hidden, weight = hidden_and_weight(tokens, arguments.hidden, columns)
        self.hidden, self.weight = hidden.requires_grad_(), weight.requires_grad_()
        # The teacher roughly agrees with the student: its hidden states point at the same rows.
        self.teacher_weight = weight.detach()
        self.teacher_hidden = (
            0.8 * hidden.detach().float() + torch.randn_like(hidden).float()
        ).bfloat16()
        if arguments.teacher_hidden != arguments.hidden:
            self.teacher_hidden, self.teacher_weight = hidden_and_weight(
                tokens, arguments.teacher_hidden, columns
            )
        self.weight.main_grad = torch.zeros(weight.shape, device="cuda")
        self.weight.grad_added_to_main_grad = False
        self.targets = torch.randint(0, columns, (tokens,), device="cuda")
        self.gradient = torch.empty_like(hidden)
        self.divergence = divergence

    def clear(self) -> None:
        self.weight.main_grad.zero_()
        self.hidden.grad = self.weight.grad = None

    @torch.no_grad()
    def products(self) -> None:
        """Run only the four matrix products."""
        torch.mm(self.teacher_hidden, self.teacher_weight.t())
        logits = torch.mm(self.hidden, self.weight.t())
        torch.mm(logits, self.weight, out=self.gradient)
        main_grad = self.weight.main_grad
        torch.addmm(main_grad, logits.t(), self.hidden, out_dtype=torch.float32, out=main_grad)

    def own(self, *, fp32_logits: bool = False) -> Tensor:
        def token_loss(
            log_probs: Tensor, entropy: Tensor, divergence: Tensor, rows: slice
        ) -> Tensor:
            return divergence.sum() / len(self.hidden)

        teacher = WholeTeacher(
            self.divergence, hidden=self.teacher_hidden, weight=self.teacher_weight
        )
        loss, *found = linear_token_loss(
            self.hidden,
            self.weight,
            self.targets,
            token_loss,
            HeadOptions(fp32_logits=fp32_logits),
            defer=True,
            scorer=teacher,
        )
        loss.backward()
        return found[2]

    def log_softmax(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        student = self.hidden[rows].double() @ self.weight.double().t()
        teacher = self.teacher_hidden[rows].double() @ self.teacher_weight.double().t()
        return student.log_softmax(1), teacher.log_softmax(1)


def errors(work: Work, fp32_logits: bool) -> dict[str, str]:
    """Return the errors of divergence and hidden gradient for some rows against float64."""
    rows = torch.arange(0, len(work.hidden), max(len(work.hidden) // 64, 1), device="cuda")
    work.clear()
    found = work.own(fp32_logits=fp32_logits)[rows]
    log_p, log_q = work.log_softmax(rows)
    value, weighted = work.divergence.terms(log_p, log_q)
    gradient = (weighted - log_p.exp() * weighted.sum(1, keepdim=True)) / len(work.hidden)
    wanted = gradient @ work.weight.double()
    return {
        "divergence": relative_error(found, value.sum(1)),
        "hidden gradient": relative_error(work.hidden.grad[rows], wanted),
    }


def run(work: Work, arguments: argparse.Namespace, rate: float) -> None:
    methods: dict[str, Callable[[], object]] = {
        "four products alone": work.products,
        OWN: work.own,
        f"{OWN}, float32 logits": lambda: work.own(fp32_logits=True),
    }
    contenders = [Contender(name, call, work.clear) for name, call in methods.items()]
    timings = measure(contenders, arguments.rounds)
    traffic = 10 * arguments.tokens * arguments.columns / rate * 1e3
    goal = timings[0].median + GOAL * traffic
    print(f"goal {goal:.2f} ms, {OWN} over goal {timings[1].median / goal:.3f}")
    print("bfloat16 logits:", errors(work, False), "float32 logits:", errors(work, True))
    kind = work.divergence.kind
    title = f"{kind}, T={arguments.tokens} H={arguments.hidden} V={arguments.columns}"
    print(table(title, timings, timings[0].median + traffic, {}), flush=True)
    append_results(arguments.output, {**vars(arguments), "kind": kind, "output": None}, timings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--teacher-hidden", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=151936)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rate = copy_rate()
    for kind in ("reverse_kl", "forward_kl", "jsd"):
        run(Work(arguments, Divergence(kind)), arguments, rate)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
