"""Table: from hidden states and output weight to the loss and all gradients.

    python -m benchmarks.fused_head [--tokens 8192] [--hidden 4096] [--columns 151936] [--goal-alone]

Floor: the three matrix products alone, unchunked, bfloat16 out and the weight's gradient accumulated in float32, and
6 bytes a logit over the copy rate, both of the same run. Every method gets the same inputs and loss, with the
entropy's gradient; the weight's gradient ends in a float32 buffer, or for peers where they put it. --goal-alone times
the products and ours and nothing else: single calls of both vary by more than they differ, so that takes many rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.inputs import Tokens, exact_gradient, hidden_and_weight, sampled_tokens
from benchmarks.timing import (
    OWN,
    Contender,
    append_results,
    copy_rate,
    measure,
    relative_error,
    table,
)
from megatron_pg.head import HeadOptions, linear_log_probs_and_entropy, linear_token_loss

GOAL = 1.3
"""Times the traffic of the row passes at the copy rate, on top of the three products: what ours may take."""


class Work:
    """Leaves and their gradients; the weight has a float32 `main_grad` as under Megatron's DDP."""

    def __init__(self, tokens: int, hidden_size: int, columns: int) -> None:
        hidden, weight = hidden_and_weight(tokens, hidden_size, columns)
        self.hidden, self.weight = hidden.requires_grad_(), weight.requires_grad_()
        self.main_grad = torch.zeros(weight.shape, device="cuda")
        self.weight.main_grad, self.weight.grad_added_to_main_grad = self.main_grad, False
        self.gradient = torch.empty((tokens, hidden_size), dtype=torch.bfloat16, device="cuda")
        with torch.no_grad():
            logits = torch.empty((tokens, columns), dtype=torch.bfloat16, device="cuda")
            torch.mm(hidden, weight.t(), out=logits)
            self.tokens = sampled_tokens(logits)

    def clear(self) -> None:
        self.main_grad.zero_()
        self.hidden.grad = self.weight.grad = None

    def products(self) -> None:
        """The three matrix products and nothing else."""
        with torch.no_grad():
            logits = torch.mm(self.hidden, self.weight.t())
            torch.mm(logits, self.weight, out=self.gradient)
            torch.addmm(
                self.main_grad, logits.t(), self.hidden, out_dtype=torch.float32, out=self.main_grad
            )

    def known(self, *, defer: bool = True, **options: object) -> None:
        """Coefficients known in the pass, in backward (`defer`, as under Megatron) or in forward."""
        loss, _, _ = linear_token_loss(
            self.hidden,
            self.weight,
            self.tokens.targets,
            self.tokens.loss,
            HeadOptions(**options),
            defer=defer,
        )
        loss.backward()

    def downstream(self, *, keep_logits: bool) -> None:
        """Coefficients known in backward only."""
        outputs = linear_log_probs_and_entropy(
            self.hidden, self.weight, self.tokens.targets, keep_logits=keep_logits
        )
        self.tokens.loss(*outputs).backward()

    def peer(self, call: Callable[..., tuple[Tensor, Tensor]]) -> None:
        """A peer's function; its weight gradient goes to main_grad as DDP's hook would take it."""
        self.tokens.loss(*call(self.hidden, self.weight, self.tokens.targets)).backward()


def compiled_layer() -> Callable[..., tuple[Tensor, Tensor]]:
    compiled = peers.compiled()
    return lambda hidden, weight, targets: compiled(hidden @ weight.t(), targets)


def contenders(work: Work, *, goal_alone: bool) -> list[Contender]:
    methods: dict[str, Callable[[], object]]
    if goal_alone:
        methods = {"three products alone": work.products, OWN: work.known}
        return [Contender(name, call, work.clear) for name, call in methods.items()]
    methods = {
        "three products alone": work.products,
        OWN: work.known,
        "megatron_pg, in forward": lambda: work.known(defer=False),
        "megatron_pg, one chunk": lambda: work.known(chunk_tokens=len(work.hidden)),
        "megatron_pg, float32 logits": lambda: work.known(fp32_logits=True),
        "megatron_pg, kept logits": lambda: work.downstream(keep_logits=True),
        "megatron_pg, recomputed logits": lambda: work.downstream(keep_logits=False),
    }
    loaders = {
        "output layer + torch.compile": compiled_layer,
        "Liger SM90": peers.liger_sm90,
        "verl": peers.verl,
    }
    for name, load in loaders.items():
        peer = peers.try_load(name, load)
        if peer is not None and peers.try_load(name, lambda peer=peer: work.peer(peer) or peer):
            methods[name] = lambda peer=peer: work.peer(peer)
    return [Contender(name, call, work.clear) for name, call in methods.items()]


class Exact:
    """float64 gradients: of the hidden states of some tokens, of the weights of some columns."""

    def __init__(self, work: Work) -> None:
        tokens, columns = len(work.hidden), len(work.weight)
        self.rows = torch.arange(0, tokens, tokens // 64, device="cuda")
        self.columns = torch.arange(0, columns, columns // 64, device="cuda")
        # Columns that carry weight: targets' own.
        self.columns = torch.cat([self.columns, work.tokens.targets[self.rows]]).unique()
        weight, hidden = work.weight.detach().double(), work.hidden.detach().double()
        self.weight = torch.zeros((len(self.columns), hidden.shape[1]), dtype=torch.float64)
        self.weight = self.weight.cuda()
        hidden_gradient = torch.zeros_like(hidden)
        for rows in torch.arange(tokens, device="cuda").split(1024):
            part = Tokens(*(vector[rows] for vector in vars(work.tokens).values()))
            everything = torch.arange(len(rows), device="cuda")
            gradient = exact_gradient(hidden[rows] @ weight.t(), part, everything)[2]
            hidden_gradient[rows] = gradient @ weight
            self.weight += gradient[:, self.columns].t() @ hidden[rows]
        self.hidden = hidden_gradient[self.rows]

    def errors(self, work: Work, contender: Contender) -> str:
        contender.prepare()
        contender.call()
        hidden = work.hidden.grad if work.hidden.grad is not None else work.gradient
        weight = work.main_grad if work.main_grad.any() else work.weight.grad
        return (
            f"{relative_error(hidden[self.rows], self.hidden)}, "
            f"{relative_error(weight[self.columns], self.weight)}"
        )


def run(setting: dict[str, int], rate: float, options: argparse.Namespace) -> None:
    work = Work(setting["tokens"], setting["hidden_size"], setting["columns"])
    torch.compiler.reset()
    methods = contenders(work, goal_alone=options.goal_alone)
    errors: dict[str, str] = {}
    if not options.goal_alone:
        exact = Exact(work)
        torch.cuda.empty_cache()
        errors = {method.name: exact.errors(work, method) for method in methods[1:]}
        del exact
    torch.cuda.empty_cache()
    timings = measure(methods, options.rounds)
    traffic = 6 * setting["tokens"] * setting["columns"] / rate * 1e3
    goal = timings[0].median + GOAL * traffic
    floor = timings[0].median + traffic
    append_results(options.output, {**setting, "floor_ms": floor, "goal_ms": goal}, timings)
    print(f"goal {goal:.2f} ms, {OWN} over goal {timings[1].median / goal:.3f}")
    title = ", ".join(f"{name} = {size}" for name, size in setting.items())
    print(table(title, timings, floor, {"error of dH, dW": errors}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096])
    parser.add_argument("--columns", type=int, nargs="+", default=[151936])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--goal-alone", action="store_true", help="products and ours alone")
    parser.add_argument("--output", type=Path, help="append results as JSON lines")
    options = parser.parse_args()
    torch.manual_seed(0)
    rate = copy_rate()
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, copy {rate / 1e12:.2f} TB/s\n")
    for tokens in options.tokens:
        for hidden in options.hidden:
            for columns in options.columns:
                setting = {"tokens": tokens, "hidden_size": hidden, "columns": columns}
                run(setting, rate, options)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
