"""Table: plain cross-entropy from hidden states, with the peers that have it; a peer that does not run says why.

    python -m benchmarks.cross_entropy [--tokens 8192] [--hidden 4096] [--columns 151936 128256] [--rounds 6]

The sum over tokens of minus the log-probability, as the policy gradient of supervised rows or of a first step has it; no
entropy. Ratios are to the three matrix products of the same run; the error is that of the gradient of the hidden states of
64 tokens and of the weight of their targets against float64.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.fused_head import Work, settings
from benchmarks.timing import OWN, Contender, begin, measure, relative_error, table
from megatron_pg.head import HeadOptions, linear_token_loss


def negative(log_probs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
    return -log_probs.sum()


TORCH_OPTIONS: dict[str, dict[str, object]] = {
    "auto": {},
    "accurate": {"acc_policy": "accurate", "acc_dtype": torch.float32},
    "balanced": {"acc_policy": "balanced", "acc_dtype": torch.float32},
    "compact, aspect ratio": {"acc_policy": "compact", "chunking_method": "aspect_ratio"},
    "compact, 4096 rows": {
        "acc_policy": "compact",
        "chunking_method": None,
        "batch_chunk_size": 4096,
    },
}


def verl_sum() -> Callable[..., Tensor]:
    """verl's backward wants a gradient without gaps, which that of a plain sum is not."""
    call = peers.verl()
    return lambda *inputs: torch.dot(
        call(*inputs)[0], torch.full_like(inputs[2], -1.0, dtype=torch.float32)
    )


def of_logits(load: Callable[[], Callable[..., Tensor]]) -> Callable[[], Callable[..., Tensor]]:
    """The output layer before a peer that takes logits."""

    def loaded() -> Callable[..., Tensor]:
        call = load()
        return lambda hidden, weight, targets: call(hidden @ weight.t(), targets).sum()

    return loaded


class CrossEntropy(Work):
    def own(self, **options: object) -> None:
        head, targets = HeadOptions(with_entropy=False, **options), self.tokens.targets
        loss, *_ = linear_token_loss(self.hidden, self.weight, targets, negative, head, defer=True)
        loss.backward()

    def of(self, call: Callable[..., Tensor | tuple[Tensor, Tensor]]) -> None:
        """A peer's function to a loss that autograd differentiates, or to the gradients."""
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
    """float64 gradients of the hidden states of 64 tokens, and of the weights of their targets."""

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


def contenders(work: CrossEntropy) -> list[Contender]:
    methods: dict[str, Callable[[], object]] = {
        "three products alone": work.products,
        OWN: work.own,
        "megatron_pg, float32 logits": lambda: work.own(fp32_logits=True, use_quack=False),
        "megatron_pg, on QuACK's products": lambda: work.own(fp32_logits=True),
    }
    loaders = {
        "QuACK": peers.quack,
        "Liger SM90": peers.liger_cross_entropy,
        "torchtitan": peers.torchtitan,
        "verl": verl_sum,
        "NeMo-RL": peers.nemo_rl,
        "Transformer Engine on logits": of_logits(peers.transformer_engine),
        "Transformer Engine 2.20 on logits": of_logits(peers.transformer_engine_rewritten),
    } | {
        f"torch, {name}": peers.torch_linear_cross_entropy(**options)
        for name, options in TORCH_OPTIONS.items()
    }
    for name, load in loaders.items():
        peer = peers.try_load(name, load)
        if peer is not None and peers.try_load(name, lambda peer=peer: work.of(peer) or peer):
            methods[name] = lambda peer=peer: work.of(peer)
    return [Contender(name, call, work.clear) for name, call in methods.items()]


def run(setting: dict[str, int], rounds: int) -> None:
    work = CrossEntropy(setting["tokens"], setting["hidden_size"], setting["columns"])
    methods = contenders(work)
    exact = Exact(work)
    torch.cuda.empty_cache()
    errors = {method.name: exact.errors(work, method) for method in methods[1:]}
    del exact
    torch.cuda.empty_cache()
    timings = measure(methods, rounds)
    floor = timings[0].median
    title = ", ".join(f"{name} = {size}" for name, size in setting.items())
    print(table(title, timings, floor, {"error of dH, dW": errors}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096])
    parser.add_argument("--columns", type=int, nargs="+", default=[151936, 128256])
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    begin()
    for setting in settings(options):
        run(setting, options.rounds)


if __name__ == "__main__":
    main()
