"""Table: log-probabilities and entropy from bfloat16 logits, forward and forward with backward.

    python -m benchmarks.log_probs_from_logits [--tokens 4096 8192] [--columns 18992 151936]

Every method gets the same logits and the same loss, a dozen small operations on [tokens] under
torch.compile. Liger's kernel includes its own loss. "op alone" is ours with given incoming
gradients. Floors: 2 bytes per logit for forward, 6 with backward, over the copy rate of the same
run. "Error" is against float64 on 64 rows.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.inputs import Tokens, exact_gradient, peaked_logits, sampled_tokens
from benchmarks.timing import Contender, append_results, begin, measure, relative_error, table
from megatron_pg.head import log_probs_and_entropy


class _Given(torch.autograd.Function):
    """A function from two vectors to a number, with the vectors as gradients, at no cost."""

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, entropy: Tensor) -> Tensor:
        ctx.save_for_backward(log_probs, entropy)
        return log_probs[0]

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:
        return ctx.saved_tensors


def op_alone(logits: Tensor, tokens: Tokens) -> Tensor:
    """Run the op's two passes without a loss."""
    return _Given.apply(*log_probs_and_entropy(logits, tokens.targets, with_entropy=True))


def losses(*, kernels_alone: bool) -> dict[str, Callable[[Tensor, Tokens], Tensor]]:
    """Return (logits, tokens) -> loss by name. `kernels_alone` leaves out torch's, which compile
    and run longest.
    """
    methods: dict[str, Callable[[Tensor, Tokens], Tensor]] = {
        "megatron_pg, op alone": op_alone,
        "megatron_pg": lambda logits, tokens: tokens.loss(
            *log_probs_and_entropy(logits, tokens.targets, with_entropy=True)
        ),
        "megatron_pg, no entropy": lambda logits, tokens: tokens.loss(
            *log_probs_and_entropy(logits, tokens.targets)
        ),
    }
    grpo = peers.try_load("liger", peers.liger_grpo)
    if grpo is not None:
        methods["Liger GRPO kernel, no entropy"] = grpo
    for name, load in (
        ("Transformer Engine, no entropy", peers.transformer_engine),
        ("Transformer Engine 2.20, no entropy", peers.transformer_engine_rewritten),
        ("Megatron fused, no entropy", peers.megatron),
    ):
        peer = peers.try_load(name, load)
        if peer is not None:
            methods[name] = lambda logits, tokens, peer=peer: tokens.loss(
                -peer(logits, tokens.targets), None
            )
    if kernels_alone:
        return methods
    compiled = peers.compiled()
    methods["torch.compile"] = lambda logits, tokens: tokens.loss(*compiled(logits, tokens.targets))
    methods["eager float32"] = lambda logits, tokens: tokens.loss(
        *peers.eager(logits, tokens.targets)
    )
    return methods


class Work:
    """The logits of one setting, restored before each call, since methods overwrite them."""

    def __init__(self, tokens: int, columns: int) -> None:
        self.original = peaked_logits(tokens, columns)
        self.tokens = sampled_tokens(self.original)
        self.leaf = self.original.clone().requires_grad_()

    def restore(self) -> None:
        with torch.no_grad():
            self.leaf.copy_(self.original)

    def forward(self, loss: Callable[[Tensor, Tokens], Tensor]) -> Tensor:
        return loss(self.leaf.view_as(self.leaf), self.tokens)

    def backward(self, loss: Callable[[Tensor, Tokens], Tensor]) -> Tensor:
        # Without a reference to the logits, as in a model.
        return torch.autograd.grad(self.forward(loss), self.leaf)[0]


def errors(work: Work, methods: dict[str, Callable]) -> dict[str, str]:
    rows = torch.arange(0, len(work.tokens.targets), len(work.tokens.targets) // 64, device="cuda")
    wanted = exact_gradient(work.original, work.tokens, rows)[2]
    found = {}
    for name, loss in methods.items():
        if "no entropy" not in name and loss is not op_alone:
            work.restore()
            found[name] = relative_error(work.backward(loss)[rows], wanted)
    return found


def run(tokens: int, columns: int, rate: float, options: argparse.Namespace) -> None:
    work, methods = Work(tokens, columns), losses(kernels_alone=options.kernels_alone)
    if tokens * columns > 2**31:
        methods.pop("eager float32", None)
    torch.compiler.reset()
    methods_errors = errors(work, methods)
    entropy = log_probs_and_entropy(work.original, work.tokens.targets, with_entropy=True)[1]
    title = f"T = {tokens}, V = {columns}, mean entropy {entropy.mean():.2f} nat"
    for kind, bytes_a_logit, step in (
        ("forward", 2, work.forward),
        ("forward + backward", 6, work.backward),
    ):
        contenders = [
            Contender(name, lambda loss=loss, step=step: step(loss), work.restore)
            for name, loss in methods.items()
        ]
        timings = measure(contenders, options.rounds)
        floor = bytes_a_logit * tokens * columns / rate * 1e3
        setting = {"kind": kind, "tokens": tokens, "columns": columns, "floor_ms": floor}
        append_results(options.output, setting, timings)
        print(table(f"{title}: {kind}", timings, floor, {"error of gradient": methods_errors}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--columns", type=int, nargs="+", default=[18992, 37984, 75968, 151936])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kernels-alone", action="store_true", help="without torch's methods")
    parser.add_argument("--output", type=Path, help="append results as JSON lines")
    options = parser.parse_args()
    rate = begin()
    for tokens in options.tokens:
        for columns in options.columns:
            run(tokens, columns, rate, options)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
