"""Table: the pass that overwrites exponentials with the gradient of their logits, alone, over its launch constants.

    python -m benchmarks.exponential_pass [--tokens 8192] [--columns 151936 128256]

4 bytes a logit at the copy rate are its floor. "tl.log2" is the logarithm as a polynomial, as the pass had it before. The
error is that of the gradients of 64 rows against float64, of logits that the exponentials were made of in float32.
"""

import argparse
import functools
import math

import torch
import triton
from torch import Tensor

from benchmarks.inputs import DEVICE, peaked_logits
from benchmarks.timing import Contender, begin, measure, relative_error
from megatron_pg.head.hopper.exponentials import exponential_gradient_kernel

# Strips at a time, times these in a segment, warps, and whether by the special function unit.
VARIANTS = [
    *[(16, 8, 4, False), (16, 8, 4, True), (16, 4, 4, True), (16, 16, 4, True)],
    *[(32, 4, 8, True), (32, 4, 4, True), (16, 8, 2, True), (16, 1000, 4, True)],
]


class Pass:
    """Exponentials of peaked logits, in tiles as the first product makes them, and what reaches their rows."""

    def __init__(self, tokens: int, columns: int) -> None:
        self.tile, self.device = 192 if columns % 192 == 0 else 128, torch.device(DEVICE)
        self.rows = torch.arange(0, tokens, tokens // 64, device=self.device)
        logits = peaked_logits(tokens, columns)
        self.targets = logits.argmax(1)
        self.targets[::3] = torch.randint(0, columns, (len(self.targets[::3]),), device=DEVICE)
        self.exact = logits[self.rows].double()
        self.offsets = torch.empty((tokens, columns // self.tile), device=self.device)
        vectors = []
        for rows in torch.arange(tokens, device=self.device).split(512):
            some = logits[rows].float()
            tiles = (some * math.log2(math.e)).unflatten(1, (-1, self.tile))
            self.offsets[rows] = tiles.amax(2).round()
            logits[rows] = (tiles - self.offsets[rows][..., None]).exp2().flatten(1).bfloat16()
            log_p = some.log_softmax(1)
            largest, at_target = some.amax(1), log_p.gather(1, self.targets[rows, None])[:, 0]
            entropy = -(log_p.exp() * log_p).sum(1)
            vectors.append(torch.stack([largest, some.logsumexp(1) - largest, at_target, entropy]))
        self.exponentials, self.statistics = logits, torch.cat(vectors, 1).unbind()
        self.incoming = torch.randn((2, tokens), device=self.device).unbind()

    def launch(self, strips: int, times: int, warps: int, special: bool, out: Tensor) -> None:
        columns, tiles = out.shape[1], self.offsets.shape[1]
        segment = 64 * strips * min(times, triton.cdiv(columns, 64 * strips))
        segments = triton.cdiv(columns, segment)
        exponential_gradient_kernel[(len(out) * segments,)](
            out, self.offsets, self.targets, torch.ones((), device=self.device), *self.statistics,
            *self.incoming, columns, tiles, 0, segments, segment,
            OFFSET_TILE=self.tile, STRIPS=strips, STRIP=64, SPECIAL=special, num_warps=warps,
        )  # fmt: skip

    def error(self, variant: tuple[int, int, int, bool]) -> str:
        out = self.exponentials.clone()
        self.launch(*variant, out)
        leaf = self.exact.clone().requires_grad_()
        log_p = leaf.log_softmax(1)
        at_target = log_p.gather(1, self.targets[self.rows, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(1)
        vectors = [vector[self.rows].double() for vector in self.incoming]
        torch.autograd.backward([at_target, entropy], vectors)
        return relative_error(out[self.rows], leaf.grad)


def run(tokens: int, columns: int, rate: float) -> None:
    work = Pass(tokens, columns)
    errors = [work.error(variant) for variant in VARIANTS]
    out = work.exponentials
    methods = [
        Contender("{} strips x {}, {} warps".format(*v), functools.partial(work.launch, *v, out))
        for v in VARIANTS
    ]
    size = 4 * tokens * columns
    print(f"T = {tokens}, V = {columns}, floor {size / rate * 1e3:.3f} ms\n")
    print("| | ms (p10, p90) | GB/s | error |\n|---|---|---|---|")
    for timing, variant, error in zip(measure(methods, 6), VARIANTS, errors, strict=True):
        name = timing.name + ("" if variant[3] else ", tl.log2")
        print(
            f"| {name} | {timing.median:.3f} ({timing.p10:.3f}, {timing.p90:.3f}) "
            f"| {size / timing.median / 1e6:.0f} | {error} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--columns", type=int, nargs="+", default=[151936, 128256])
    options = parser.parse_args()
    rate = begin()
    for columns in options.columns:
        run(options.tokens, columns, rate)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
