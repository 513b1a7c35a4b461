"""Table: the loss over sampling sets and all gradients from hidden states and output weight.

    python -m benchmarks.kept_set [--tokens 8192] [--hidden 4096] [--columns 151936]
        [--mean 20] [--largest 200]
    python -m benchmarks.kept_set --crossover
        # the sparse and the dense layer by set size

A set has a row's largest logits, with a skewed size from 1 on, so that rows hardly share ids. With
--shared, ids are drawn like words (Zipf), so that some are in most sets. Floor: hidden states and
kept columns read twice, `main_grad` of these columns read and written, and the hidden states'
gradient written, over the copy rate of the same run. Every method gets the same inputs and a loss
with the entropy's gradient. The weight's gradient ends in a float32 `main_grad`.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.inputs import Tokens, hidden_and_weight
from benchmarks.timing import (
    OWN,
    Contender,
    append_results,
    copy_rate,
    measure,
    relative_error,
    table,
)
from megatron_pg.head import Ragged, linear_log_probs_and_entropy, linear_token_loss
from megatron_pg.head.kept import sparse_layer
from megatron_pg.head.ragged import offsets_of

CROSSOVER_SIZES = (5, 20, 50, 100, 200, 400, 800, 1600)


class Work:
    """Leaves and their gradients, the sets, and a token from each set. The weight has a float32
    `main_grad` as under DDP.
    """

    def __init__(self, sizes: Tensor, hidden_size: int, columns: int, *, shared: bool) -> None:
        hidden, weight = hidden_and_weight(len(sizes), hidden_size, columns)
        self.hidden, self.weight = hidden.requires_grad_(), weight.requires_grad_()
        self.weight.main_grad = torch.zeros(weight.shape, device="cuda")
        self.weight.grad_added_to_main_grad = False
        ids = torch.cat(list(self._ids(sizes, shared)))
        self.kept = Ragged(ids, offsets_of(sizes))
        rows = self.kept.row_of_element()
        first = self.kept.offsets[:-1].cuda()
        pick = first + (torch.rand(len(sizes), device="cuda") * sizes.cuda().sqrt()).long()
        with torch.no_grad():
            logits = torch.cat(
                [(hidden[r] * weight[i]).float().sum(1) for r, i in _parts(rows, ids)]
            )
        total = torch.zeros(len(sizes), device="cuda").index_add_(0, rows, logits.exp())
        old = logits[pick] - total.log() + 0.1 * torch.randn(len(sizes), device="cuda")
        advantages = torch.randn(len(sizes), device="cuda")
        weights = torch.full((len(sizes),), 1 / len(sizes), device="cuda")
        self.tokens = Tokens(ids[pick], old, advantages, weights)

    @torch.no_grad()
    def _ids(self, sizes: Tensor, shared: bool) -> Iterator[Tensor]:
        """Yield the ids of a few rows at a time, the likeliest first."""
        columns, largest = len(self.weight), int(sizes.max())
        for rows in torch.arange(len(sizes)).split(1024):
            if shared:
                rank = torch.arange(1, columns + 1, device="cuda").double()
                noise = torch.rand(len(rows), columns, device="cuda").clamp(1e-20).log().neg().log()
                score = (
                    -rank.log().float() - noise
                )  # Gumbel: distinct draws of probability 1 / rank
            else:
                score = (self.hidden[rows.cuda()] @ self.weight.t()).float()
            chosen = score.topk(largest, dim=1).indices
            is_kept = torch.arange(largest)[None] < sizes[rows][:, None]
            yield chosen[is_kept.cuda()]

    def clear(self) -> None:
        self.weight.main_grad.zero_()
        self.hidden.grad = self.weight.grad = None

    def sparse(self, *, columns_of_a_pair: float | None = None) -> None:
        """Run over the sets, with the layers chosen by size, or by a given cost of a pair."""
        measured = sparse_layer._COLUMNS_OF_A_PAIR
        if columns_of_a_pair is not None:
            sparse_layer._COLUMNS_OF_A_PAIR = columns_of_a_pair
        outputs = linear_log_probs_and_entropy(
            self.hidden, self.weight, self.tokens.targets, kept=self.kept
        )
        sparse_layer._COLUMNS_OF_A_PAIR = measured
        self.tokens.loss(*outputs).backward()

    def dense(self) -> None:
        """Run over the whole vocabulary in one pass."""
        loss, *_ = linear_token_loss(
            self.hidden, self.weight, self.tokens.targets, self.tokens.loss, defer=True
        )
        loss.backward()

    def floor_bytes(self) -> int:
        columns, size = self.kept.values.unique().numel(), self.hidden.shape[1]
        return size * (3 * 2 * len(self.hidden) + columns * (2 * 2 + 2 * 4))


def _parts(rows: Tensor, ids: Tensor, count: int = 1 << 15) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(rows.split(count), ids.split(count), strict=True)


def exact(work: Work) -> tuple[Tensor, ...]:
    """Return log-probs, entropy and both gradients in float64."""
    hidden, weight = work.hidden.detach().double(), work.weight.detach()
    rows, ids = work.kept.row_of_element(), work.kept.values
    leaf = torch.cat([(hidden[r] * weight[i].double()).sum(1) for r, i in _parts(rows, ids)])
    leaf.requires_grad_()
    largest = torch.full((len(hidden),), -torch.inf, dtype=torch.float64, device="cuda")
    largest = largest.scatter_reduce(0, rows, leaf.detach(), "amax")
    shifted = leaf - largest[rows]
    zeros = torch.zeros_like(largest)
    log_p = shifted - zeros.index_add(0, rows, shifted.exp()).log()[rows]
    log_probs = zeros.index_add(0, rows, log_p * (ids == work.tokens.targets[rows]))
    entropy = zeros.index_add(0, rows, -log_p.exp() * log_p)
    (gradient,) = torch.autograd.grad(work.tokens.loss(log_probs, entropy), leaf)
    of_hidden = torch.zeros_like(hidden)
    of_weight = torch.zeros(weight.shape, dtype=torch.float64, device="cuda")
    at = 0
    for r, i in _parts(rows, ids):
        part = gradient[at : at + len(r), None]
        of_hidden.index_add_(0, r, part * weight[i].double())
        of_weight.index_add_(0, i, part * hidden[r])
        at += len(r)
    return log_probs.detach(), entropy.detach(), of_hidden, of_weight


def errors(work: Work) -> dict[str, str]:
    """Return the errors of ours against float64, and whether it is bitwise repeatable."""
    outputs = linear_log_probs_and_entropy(
        work.hidden, work.weight, work.tokens.targets, kept=work.kept
    )
    work.clear()
    work.tokens.loss(*outputs).backward()
    found = (*(each.detach() for each in outputs), work.hidden.grad, work.weight.main_grad)
    names = ("log-probs", "entropy", "hidden gradient", "weight gradient")
    report = {
        name: relative_error(each, wanted)
        for name, each, wanted in zip(names, found, exact(work), strict=True)
    }
    first = work.weight.main_grad.clone(), work.hidden.grad.clone()
    work.clear()
    work.sparse()
    same = torch.equal(first[0], work.weight.main_grad) and torch.equal(first[1], work.hidden.grad)
    return report | {"same bits twice": str(same)}


def skewed_sizes(tokens: int, mean: float, largest: int) -> Tensor:
    """Return log-normal sizes from 1 to the largest, with the given mean."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(tokens, generator=generator) * 1.1
    low, high = 0.0, float(largest)
    for _ in range(50):  # bisect the scale for the mean
        middle = (low + high) / 2
        sizes = (middle * normal.exp()).round().clamp(1, largest)
        low, high = (middle, high) if sizes.mean() < mean else (low, middle)
    return sizes.long()


def crossover(arguments: argparse.Namespace) -> None:
    """Print the milliseconds of both layers over sets of equal size."""
    tokens, columns = arguments.tokens, arguments.columns
    print(
        "| ids in a set | sparse layer, ms | dense layer over the sets, ms | dense layer, whole "
        "vocabulary, ms |"
    )
    print("|---|---|---|---|")
    for size in CROSSOVER_SIZES:
        work = Work(torch.full((tokens,), size), arguments.hidden, columns, shared=arguments.shared)
        methods: dict[str, Callable[[], object]] = {
            "sparse": lambda work=work: work.sparse(columns_of_a_pair=1e-9),
            "dense": lambda work=work: work.sparse(columns_of_a_pair=1e9),
            "whole": work.dense,
        }
        found = measure([Contender(n, c, work.clear) for n, c in methods.items()], arguments.rounds)
        print(
            f"| {size} | " + " | ".join(f"{each.median:.2f}" for each in found) + " |", flush=True
        )
        del work, methods
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=151936)
    parser.add_argument("--mean", type=float, default=20)
    parser.add_argument("--largest", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--crossover", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.crossover:
        crossover(arguments)
        return
    sizes = skewed_sizes(arguments.tokens, arguments.mean, arguments.largest)
    work = Work(sizes, arguments.hidden, arguments.columns, shared=arguments.shared)
    methods: dict[str, Callable[[], object]] = {
        OWN: work.sparse,
        "dense layer over the sets": lambda: work.sparse(columns_of_a_pair=1e9),
        "dense layer, whole vocabulary": work.dense,
    }
    timings = measure([Contender(n, c, work.clear) for n, c in methods.items()], arguments.rounds)
    rate = copy_rate()
    setting = {
        **{name: getattr(arguments, name) for name in ("tokens", "hidden", "columns", "shared")},
        **{"pairs": int(sizes.sum()), "largest": int(sizes.max()), "copy_rate": rate},
        **{"distinct": work.kept.values.unique().numel(), "errors": errors(work)},
    }
    title = (
        f"T={arguments.tokens} H={arguments.hidden} V={arguments.columns}, "
        f"{sizes.float().mean():.1f} kept"
    )
    print(table(title, timings, work.floor_bytes() / rate * 1e3, {}))
    print(setting)
    append_results(arguments.output, setting, timings)


if __name__ == "__main__":
    main()
