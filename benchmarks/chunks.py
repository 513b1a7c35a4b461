"""Table: the time of the chosen chunk, other chunks and QuACK's function.

    python -m benchmarks.chunks [--entropy | --against-quack] [--minutes 4.5]
        [--settings 8192,4096,151936 ...]

Without --entropy: plain cross-entropy, also by QuACK's function. With --entropy: the clipped policy
loss with an entropy bonus. Ratios are to the three matrix products of the same run. Methods run in
turn. Settings left out after the time limit are named. --against-quack: only the default chunk and
QuACK's function. Ours is also timed with first products in each tile width that divides the
vocabulary, and QuACK's with its gradient added to `main_grad`, which ours includes.
"""

import argparse
import functools
import time
from collections.abc import Callable

import torch

from benchmarks import cross_entropy, fused_head, peers
from benchmarks.timing import Contender, Timing, begin, measure
from megatron_pg.head.chunks import chunk_rows

DEFAULT = [
    *["8192,4096,128256", "8192,4096,151936", "8192,2048,151936"],
    *["32768,2048,128256", "32768,2048,151936", "32768,4096,151936"],
    *["8192,5120,248320", "8192,7168,248320", "8192,4096,248320"],
    # The columns of 2, 4 and 8 tensor-parallel ranks, on one GPU.
    *["32768,4096,124160", "32768,4096,62080", "32768,4096,31040"],
    *["131072,5120,248320", "131072,7168,248320", "131072,4096,248320"],
]
WITH_ENTROPY = [
    *["8192,4096,151936", "32768,2048,151936", "8192,2048,151936", "8192,4096,128256"],
    *["32768,4096,151936", "8192,5120,248320", "8192,7168,248320"],
]
PATHS = {"QuACK's products": {"fp32_logits": True}, "bfloat16 logits": {}}
BUDGETS = {"default": {}, "1.3 GiB": {"memory_gib": 1.3}}
_LONG = 100_000


class Method:
    """One path with one chunk."""

    def __init__(self, path: str, label: str, size: tuple[int, int, int], options: dict) -> None:
        self.name, self.options = f"{path}, {label}", PATHS[path] | options
        tokens, hidden, columns = size
        device, gib = torch.device("cuda"), options.get("memory_gib")
        self.rows = options.get("chunk_tokens") or chunk_rows(tokens, hidden, columns, device, gib)


def methods(size: tuple[int, int, int], *, against_quack: bool = False) -> list[Method]:
    if against_quack:
        return [Method(next(iter(PATHS)), "default", size, {})]
    found = [
        Method(path, *row) for path in PATHS for row in ((n, size, o) for n, o in BUDGETS.items())
    ]
    fixed = [rows for rows in (2048, 4096, 8192) if size[0] < _LONG]
    on_quack = next(iter(PATHS))
    return found + [Method(on_quack, str(rows), size, {"chunk_tokens": rows}) for rows in fixed]


def contenders(
    work: fused_head.Work, chosen: list[Method], call: Callable[..., object]
) -> list[Contender]:
    own = [Contender(m.name, functools.partial(call, **m.options), work.clear) for m in chosen]
    found = [Contender("three products", work.products, work.clear), *own]
    if isinstance(work, cross_entropy.CrossEntropy):
        peer = peers.try_load("QuACK", peers.quack)
        if peer is not None and peers.try_load("QuACK", lambda: work.of(peer) or peer):
            found.append(Contender("QuACK's own", lambda: work.of(peer), work.clear))
    return found


def in_other_tiles(method: Contender, columns: int, with_entropy: bool) -> list[Contender]:
    """Return the method with first products in each different tile width that divides the
    columns.
    """
    try:
        from megatron_pg.head.hopper import exponentials, quack_products
    except ImportError:
        return []
    usual, found = quack_products.tile_of, []

    def call(tile: int) -> None:
        quack_products.tile_of = lambda columns, with_dots: tile
        try:
            method.call()
        finally:
            quack_products.tile_of = usual

    for tile in (128, 192, 256):
        if columns % tile or tile == usual(columns, with_entropy):
            continue
        name = f"{method.name}, tiles of {tile}"
        method.prepare()
        call(tile)
        if exponentials._failures:
            print(f"left out {name}: {exponentials._failures.pop()}".splitlines()[0])
        else:
            found.append(Contender(name, functools.partial(call, tile), method.prepare))
    return found


def against_quack(work: fused_head.Work, turns: list[Contender]) -> list[Contender]:
    """Return further contenders: ours in different tiles, and QuACK's with the same result as
    ours.
    """
    added = in_other_tiles(turns[1], len(work.weight), work.with_entropy)
    theirs = [turn for turn in turns if turn.name == "QuACK's own"]

    def call() -> None:
        theirs[0].call()
        work.main_grad.add_(work.of_weight)
        work.of_weight = None

    if theirs:
        added.append(Contender("QuACK's own, added to main_grad", call, work.clear))
    return added


def run(size: tuple[int, int, int], options: argparse.Namespace) -> None:
    kind = fused_head.Work if options.entropy else cross_entropy.CrossEntropy
    work, is_long = kind(*size), size[0] >= _LONG
    chosen = methods(size, against_quack=options.against_quack)
    call = work.known if options.entropy else work.own  # type: ignore[attr-defined]
    turns = contenders(work, chosen, call)
    if options.against_quack:
        turns += against_quack(work, turns)
    errors: dict[str, str] = {}
    if size[0] <= 8192:
        exact = (fused_head if options.entropy else cross_entropy).Exact(work)
        torch.cuda.empty_cache()
        errors = {turn.name: exact.errors(work, turn) for turn in turns[1:]}
        del exact
    torch.cuda.empty_cache()
    timings = measure(turns, 1 if is_long else options.rounds, calls=2 if is_long else 4)
    print(text(size, timings, {method.name: method for method in chosen}, errors))


def text(
    size: tuple[int, int, int],
    timings: list[Timing],
    chosen: dict[str, Method],
    errors: dict[str, str],
) -> str:
    floor = timings[0].median
    heads = ["T, H, V = " + ", ".join(map(str, size)), "ms (p10, p90)", "ratio"]
    heads += ["rows", "peak GiB", "error of dH, dW"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for t in timings:
        method = chosen.get(t.name)
        cells = [t.name, f"{t.median:.2f} ({t.p10:.2f}, {t.p90:.2f})", f"{t.median / floor:.3f}"]
        cells.append(str(method.rows) if method else "")
        lines.append(
            "| " + " | ".join([*cells, f"{t.peak_gib:.2f}", errors.get(t.name, "")]) + " |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", nargs="+", help="tokens,hidden,columns")
    parser.add_argument(
        "--entropy", action="store_true", help="the policy loss with an entropy bonus"
    )
    parser.add_argument("--against-quack", action="store_true", help="only ours and QuACK's")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=4.5, help="no setting starts later")
    options = parser.parse_args()
    started = time.monotonic()
    # The loss is recompiled for every chunk size.
    torch._dynamo.config.recompile_limit = 64
    begin()
    for words in options.settings or (WITH_ENTROPY if options.entropy else DEFAULT):
        tokens, hidden, columns = map(int, words.split(","))
        if time.monotonic() - started > 60 * options.minutes:
            print(f"left out {words}: {options.minutes} minutes are over")
            continue
        torch.compiler.reset()
        try:
            run((tokens, hidden, columns), options)
        except torch.OutOfMemoryError as error:
            print(f"left out {words}: {error}".splitlines()[0])
        print(f"{time.monotonic() - started:.0f} s", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
