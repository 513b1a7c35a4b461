"""Table: the loss and all gradients from hidden states and output weight.

    python -m benchmarks.fused_head [--tokens 8192] [--hidden 4096] [--columns 151936]
        [--goal-alone | --sequences 8] [--without-entropy]

Floor: only the three matrix products, unchunked, with bfloat16 outputs and the weight's gradient
accumulated in float32, plus 6 bytes per logit over the copy rate, both from the same run. Every
method gets the same inputs and loss, with the entropy's gradient (--without-entropy: ours without).
The weight's gradient ends in a float32 buffer, or wherever a peer puts it. --goal-alone times only
the products and ours. Single calls vary more than both differ, so this needs many rounds.
--sequences times them and gspo over a number of sequences of ragged lengths, in chunks of whole
sequences and with kept or recomputed logits: this package's loss with metrics.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.inputs import DEVICE, exact_gradient, hidden_and_weight, is_clipped, sampled_tokens
from benchmarks.timing import OWN, Contender, append_results, begin, measure, relative_error, table
from megatron_pg import PolicyLossConfig, Sample, pack, step_totals
from megatron_pg.head import HeadOptions, linear_log_probs_and_entropy, linear_token_loss
from megatron_pg.head.chunks import largest_chunk
from megatron_pg.loss.micro_batch import MicroBatchLoss
from megatron_pg.loss.resolved import resolve

GOAL = 1.3
"""The goal for ours: the three products plus this factor times the row passes' traffic at the copy
rate."""


class Work:
    """Leaves and their gradients. The weight has a float32 `main_grad` as under Megatron's DDP."""

    with_entropy = True

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
        """Run only the three matrix products."""
        with torch.no_grad():
            logits = torch.mm(self.hidden, self.weight.t())
            torch.mm(logits, self.weight, out=self.gradient)
            torch.addmm(
                self.main_grad, logits.t(), self.hidden, out_dtype=torch.float32, out=self.main_grad
            )

    def known(self, *, defer: bool = True, **options: object) -> None:
        """Run the loss with coefficients known in the pass, in backward (`defer`, as under
        Megatron) or forward.
        """
        loss, _, _ = linear_token_loss(
            self.hidden,
            self.weight,
            self.tokens.targets,
            self.loss,
            HeadOptions(with_entropy=self.with_entropy, **options),
            defer=defer,
        )
        loss.backward()

    def loss(self, log_probs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        return self.tokens.loss(log_probs, entropy if self.with_entropy else None, rows)

    def downstream(self, *, keep_logits: bool) -> None:
        """Run the loss with coefficients known only in backward."""
        outputs = linear_log_probs_and_entropy(
            self.hidden, self.weight, self.tokens.targets, keep_logits=keep_logits
        )
        self.tokens.loss(*outputs).backward()

    def peer(self, call: Callable[..., tuple[Tensor, Tensor]]) -> None:
        """Run a peer's function."""
        self.tokens.loss(*call(self.hidden, self.weight, self.tokens.targets)).backward()


class Sequences:
    """The tokens of a `Work` as whole responses, with gspo's loss."""

    def __init__(self, work: Work, count: int) -> None:
        self.work = work
        shares = torch.linspace(0.5, 1.5, count).cumsum(0)
        ends = (shares / shares[-1] * len(work.hidden)).round().long()
        lengths = ends.diff(prepend=ends.new_zeros(1)).tolist()
        prompt = torch.zeros(1, dtype=torch.int64)
        of_samples = zip(
            work.tokens.targets.cpu().split(lengths),
            work.tokens.old_log_probs.cpu().split(lengths),
            work.tokens.advantages.cpu().tolist(),
            strict=False,
        )
        samples = [
            Sample(
                torch.cat([prompt, tokens]), len(tokens), torch.ones(len(tokens)), advantage, old
            )
            for tokens, old, advantage in of_samples
        ]
        batch, size = pack(samples), largest_chunk(len(work.weight))
        everything = torch.ones(len(work.hidden), dtype=torch.bool)
        borders = torch.tensor(batch.window.sample_borders(everything, size))
        self.sizes = torch.nn.functional.pad(ends, (1, 0))[borders].diff().tolist()
        config = PolicyLossConfig(policy_loss="gspo")
        self.loss = MicroBatchLoss(resolve(config), batch.to(DEVICE), step_totals(samples))

    def part(self, log_probs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        """Compute the loss with zeros for other tokens, like `FusedHead`."""
        around = (rows.start, len(self.work.hidden) - rows.stop)
        whole = (torch.nn.functional.pad(each, around) for each in (log_probs, entropy))
        return self.loss.loss(*whole)

    def in_pieces(self) -> None:
        work = self.work
        loss, *outputs = linear_token_loss(
            work.hidden, work.weight, work.tokens.targets, self.part,
            piece_sizes=self.sizes, defer=True,
        )  # fmt: skip
        loss.backward()
        self.loss(*outputs)

    def downstream(self, *, keep_logits: bool) -> None:
        work = self.work
        outputs = linear_log_probs_and_entropy(
            work.hidden, work.weight, work.tokens.targets, keep_logits=keep_logits
        )
        self.loss(*outputs)[0].backward()

    def contenders(self) -> dict[str, Callable[[], object]]:
        return {
            f"gspo, {len(self.sizes)} chunks of whole sequences": self.in_pieces,
            "gspo, kept logits": lambda: self.downstream(keep_logits=True),
            "gspo, recomputed logits": lambda: self.downstream(keep_logits=False),
        }

    def differences(self, methods: list[Contender]) -> dict[str, str]:
        """Return the differences of dH and dW from the last method."""
        gradients = {}
        for method in methods:
            method.prepare()
            method.call()
            gradients[method.name] = self.work.hidden.grad.cpu(), self.work.main_grad.cpu()
        wanted = gradients[methods[-1].name]
        return {
            name: ", ".join(map(relative_error, found, wanted)) for name, found in gradients.items()
        }


def compiled_layer() -> Callable[..., tuple[Tensor, Tensor]]:
    compiled = peers.compiled()
    return lambda hidden, weight, targets: compiled(hidden @ weight.t(), targets)


def contenders(
    work: Work, *, goal_alone: bool, sequences: Sequences | None = None
) -> list[Contender]:
    methods: dict[str, Callable[[], object]]
    if goal_alone or sequences is not None:
        methods = {
            "three products alone": work.products,
            OWN: work.known,
            "megatron_pg, on QuACK's products": lambda: work.known(fp32_logits=True),
        }
        if sequences is not None:
            methods |= sequences.contenders()
        return [Contender(name, call, work.clear) for name, call in methods.items()]
    methods = {
        "three products alone": work.products,
        OWN: work.known,
        "megatron_pg, on QuACK's products": lambda: work.known(fp32_logits=True),
        "megatron_pg, in forward": lambda: work.known(defer=False),
        "megatron_pg, one chunk": lambda: work.known(chunk_tokens=len(work.hidden)),
        "megatron_pg, float32 logits": lambda: work.known(fp32_logits=True, use_quack=False),
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
    """The float64 gradients of some tokens' hidden states and some columns' weights."""

    def __init__(self, work: Work) -> None:
        tokens, columns = len(work.hidden), len(work.weight)
        self.rows = torch.arange(0, tokens, tokens // 64, device="cuda")
        self.columns = torch.arange(0, columns, columns // 64, device="cuda")
        # The targets' columns have large gradients.
        self.columns = torch.cat([self.columns, work.tokens.targets[self.rows]]).unique()
        weight, hidden = work.weight.detach().double(), work.hidden.detach().double()
        self.weight = torch.zeros((len(self.columns), hidden.shape[1]), dtype=torch.float64)
        self.weight = self.weight.cuda()
        hidden_gradient = torch.zeros_like(hidden)
        is_alike = torch.zeros(tokens, dtype=torch.bool, device="cuda")
        for rows in torch.arange(tokens, device="cuda").split(1024):
            part = work.tokens[rows]
            everything = torch.arange(len(rows), device="cuda")
            logits = hidden[rows] @ weight.t()
            log_probs, _, gradient = exact_gradient(logits, part, everything)
            hidden_gradient[rows] = gradient @ weight
            self.weight += gradient[:, self.columns].t() @ hidden[rows]
            rounded = exact_gradient(logits.bfloat16(), part, everything)[0]
            is_alike[rows] = is_clipped(log_probs, part) == is_clipped(rounded, part)
        self.hidden = hidden_gradient[self.rows]
        self.is_alike = is_alike[self.rows]
        """The rows with equal clipping under bfloat16 and exact logits. Different rows get the
        whole gradient or none."""

    def errors(self, work: Work, contender: Contender) -> str:
        contender.prepare()
        contender.call()
        hidden = work.hidden.grad if work.hidden.grad is not None else work.gradient
        weight = work.main_grad if work.main_grad.any() else work.weight.grad
        found, alike = hidden[self.rows], self.is_alike
        text = (
            f"{relative_error(found, self.hidden)}, "
            f"{relative_error(weight[self.columns], self.weight)}"
        )
        if not alike.all():
            rest = relative_error(found[alike], self.hidden[alike])
            text += f" (dH {rest} without {int((~alike).sum())} of {len(alike)} tokens)"
        return text


def run(setting: dict[str, int], rate: float, options: argparse.Namespace) -> None:
    work = Work(setting["tokens"], setting["hidden_size"], setting["columns"])
    work.with_entropy = not options.without_entropy
    torch.compiler.reset()
    sequences = Sequences(work, options.sequences) if options.sequences else None
    methods = contenders(work, goal_alone=options.goal_alone, sequences=sequences)
    errors: dict[str, str] = {}
    if sequences is not None:
        errors = sequences.differences(methods[3:])
    elif not options.goal_alone and work.with_entropy:
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
    against = "difference" if sequences is not None else "error"
    print(table(title, timings, floor, {f"{against} of dH, dW": errors}), flush=True)


def settings(options: argparse.Namespace) -> Iterator[dict[str, int]]:
    """Yield every combination of the given sizes, and free the device's memory after each."""
    for sizes in itertools.product(options.tokens, options.hidden, options.columns):
        yield dict(zip(("tokens", "hidden_size", "columns"), sizes, strict=True))
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096])
    parser.add_argument("--columns", type=int, nargs="+", default=[151936])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--goal-alone", action="store_true", help="only products and ours")
    parser.add_argument("--without-entropy", action="store_true", help="for ours and the products")
    parser.add_argument(
        "--sequences", type=int, help="gspo over this many sequences, without peers"
    )
    parser.add_argument("--output", type=Path, help="append results as JSON lines")
    options = parser.parse_args()
    rate = begin()
    for setting in settings(options):
        run(setting, rate, options)


if __name__ == "__main__":
    main()
