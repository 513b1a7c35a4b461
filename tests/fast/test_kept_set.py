"""Log-probs and entropy over the kept set, from logits and by the sparse head, against plain
float64 loops.
"""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg import Ragged, log_probs_and_entropy
from megatron_pg.head import HeadOptions, linear_log_probs_and_entropy
from megatron_pg.head.kept import sets as kept_set
from megatron_pg.head.kept import sparse_layer
from megatron_pg.head.ragged import offsets_of
from tests.distributed.launch import run_ranks
from tests.fast.log_probs_oracle import close, reference
from tests.fast.refusals import assert_refused
from tests.fast.test_log_probs import shapes_gathered

TOKENS, HIDDEN, WIDTH, VOCAB_SIZE, TEMPERATURE = 13, 6, 24, 21, 0.7
SIZES = {"sets": (3, 1, 9, 2), "mixed": (3, 0, 1, 9, 0, 2), "one": (1,), "none": (0,)}


def ragged(rows: list[list[int]]) -> Ragged:
    sizes = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return Ragged(torch.tensor(sum(rows, []), dtype=torch.int64), offsets_of(sizes))


def random_sets(
    seed: int, tokens: int, vocab_size: int, sizes: Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    """Distinct ids in no order, of sizes that go round, and a target of each set (0: no set, any
    target).
    """
    rng = random.Random(seed)
    kept = [rng.sample(range(vocab_size), sizes[t % len(sizes)]) for t in range(tokens)]
    return kept, [rng.choice(ids) if ids else rng.randrange(vocab_size) for ids in kept]


def vocabulary(size: int) -> dict[str, Any]:
    group = dist.group.WORLD if size > 1 else None
    return {"tensor_parallel_group": group, "temperature": TEMPERATURE, "vocab_size": VOCAB_SIZE}


class Problem:
    def __init__(
        self, sizes: str = "mixed", dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        generator = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.hidden, self.weight = (3 * normal(TOKENS, HIDDEN)).to(dtype), normal(WIDTH, HIDDEN)
        self.weight = self.weight.to(dtype)
        self.kept, targets = random_sets(1, TOKENS, VOCAB_SIZE, SIZES[sizes])
        self.sets, self.targets = ragged(self.kept), torch.tensor(targets)
        to_log_probs, to_entropy = normal(TOKENS), normal(TOKENS)
        # Row 4 has a gradient of its entropy alone, row 5 none, row 6 one of its log-prob alone.
        to_log_probs[4:6] = to_entropy[5:7] = 0.0
        self.incoming = to_log_probs, to_entropy
        hidden, weight = self.hidden.double(), self.weight.double()[:VOCAB_SIZE]
        *values, gradient = self.reference(hidden @ weight.T)
        self.of_head = *values, gradient @ weight, gradient.T @ hidden
        self.logits = (self.hidden.float() @ self.weight.float().T).to(dtype)
        self.of_logits = self.reference(self.logits[:, :VOCAB_SIZE])
        self.incoming = tuple(each.to(device) for each in self.incoming)
        for name in ("hidden", "weight", "targets", "logits"):
            setattr(self, name, getattr(self, name).to(device))

    def reference(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        settings = {"temperature": TEMPERATURE, "kept": self.kept}
        return reference(logits, self.targets, *self.incoming, **settings)

    def head(self, rank: int = 0, size: int = 1, **changes: object) -> list[Tensor]:
        """Log-probs, entropy and both gradients of one tensor-parallel rank."""
        hidden = self.hidden.clone().requires_grad_()
        weight = self.weight.chunk(size)[rank].clone().requires_grad_()
        options = HeadOptions(**vocabulary(size), **changes)
        found = linear_log_probs_and_entropy(hidden, weight, self.targets, options, kept=self.sets)
        return self.differentiated(found, hidden, weight)

    def from_logits(self, rank: int = 0, size: int = 1) -> list[Tensor]:
        logits = self.logits.chunk(size, 1)[rank].clone().requires_grad_()
        settings = {"with_entropy": True, "kept": self.sets, **vocabulary(size)}
        found = log_probs_and_entropy(logits, self.targets, **settings)
        return self.differentiated(found, logits)

    def differentiated(self, found: tuple[Tensor, Tensor], *leaves: Tensor) -> list[Tensor]:
        torch.autograd.backward(found, [each.to(found[0]) for each in self.incoming])
        return [*(each.detach() for each in found), *(leaf.grad for leaf in leaves)]


def check_head(problem: Problem, found: list[Tensor], rounding: float) -> None:
    *others, of_weight = found
    for value, expected in zip((*others, of_weight[:VOCAB_SIZE]), problem.of_head, strict=True):
        close(value, expected, rounding)
    assert (of_weight[VOCAB_SIZE:] == 0).all()


PRECISIONS = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 0.01}


@pytest.fixture(params=["sparse", "dense"])
def layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both sides of the crossover."""
    monkeypatch.setattr(sparse_layer, "_LEAST_DENSE_ROWS", 1)
    columns = 1e-9 if request.param == "sparse" else 1e9
    monkeypatch.setattr(sparse_layer, "_COLUMNS_OF_A_PAIR", columns)
    return request.param


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_head(layer, sizes, dtype):
    problem = Problem(sizes, dtype)
    rounding = PRECISIONS[dtype] * (6 if layer == "dense" or sizes != "sets" else 1)
    check_head(problem, problem.head(chunk_tokens=4), rounding)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_from_logits(sizes, dtype):
    problem = Problem(sizes, dtype)
    log_probs, entropy, gradient = problem.from_logits()
    close(log_probs, problem.of_logits[0], min(PRECISIONS[dtype], 3e-6))
    close(entropy, problem.of_logits[1], min(PRECISIONS[dtype], 3e-6))
    close(gradient[:, :VOCAB_SIZE], problem.of_logits[2], PRECISIONS[dtype])
    assert (gradient[:, VOCAB_SIZE:] == 0).all()


@pytest.mark.parametrize(("sizes", "dense"), [
    ([20, 1, 0, 7], [2]),
    ([20] * 10 + [3000], []),  # a dense product would read the whole weight for one long row
    ([20] * 10 + [3000] * 300, list(range(10, 310))),
    ([510] * 300 + [0], list(range(301))),
    ([0, 0], [0, 1]),
    ([], []),
])  # fmt: skip
def test_which_rows_take_which_layer(sizes, dense):
    """At a vocabulary of 152,000: a dense row costs as much as a set of 507 ids, and 256 rows at
    least.
    """
    kept = ragged([[0] * size for size in sizes])
    sparse_rows, dense_rows = sparse_layer.split_rows(kept, 152000, None)
    assert dense_rows.tolist() == dense
    assert sorted([*sparse_rows.tolist(), *dense]) == list(range(len(sizes)))


@pytest.mark.parametrize("kept", [ragged([[1]]), Ragged(torch.zeros(13), torch.arange(14))])
def test_sets_that_do_not_fit_are_refused(kept):
    problem, words = Problem(), "kept must be 13 sets of int64 ids"
    factors = problem.hidden, problem.weight, problem.targets
    assert_refused(words, linear_log_probs_and_entropy, *factors, kept=kept)
    assert_refused(words, log_probs_and_entropy, problem.logits, problem.targets, kept=kept)


def on_rank(kind: str, sizes: str) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    problem = Problem(sizes, torch.float64)
    sparse_layer._LEAST_DENSE_ROWS = 1
    sparse_layer._COLUMNS_OF_A_PAIR = 1e9 if kind == "dense" else 1e-9  # type: ignore[assignment]
    run = problem.from_logits if kind == "logits" else problem.head
    return shapes_gathered(lambda: run(dist.get_rank(), dist.get_world_size()))


@pytest.mark.parametrize(("kind", "sizes", "size"), [
    ("sparse", "one", 2),
    ("sparse", "sets", 4),
    ("sparse", "mixed", 2),
    ("dense", "mixed", 2),
    ("logits", "mixed", 4),
    ("logits", "one", 2),
])  # fmt: skip
def test_shards_equal_the_whole_vocabulary(kind, sizes, size):
    """Sets of one id leave all ranks but one without a pair in every row; the last of four holds
    padding but for 3 ids.
    """
    problem = Problem(sizes, torch.float64)
    ranks, gathers = zip(*run_ranks(on_rank, size, kind, sizes), strict=True)
    for found in ranks:
        assert torch.equal(found[0], ranks[0][0]) and torch.equal(found[1], ranks[0][1])
    whole = torch.cat([found[-1] for found in ranks], 1 if kind == "logits" else 0)
    if kind == "logits":
        found = *ranks[0][:2], whole[:, :VOCAB_SIZE]
        for value, expected in zip(found, problem.of_logits, strict=True):
            close(value, expected, 1e-13)
    else:
        of_hidden = torch.stack([found[2] for found in ranks]).sum(0)
        check_head(problem, [*ranks[0][:2], of_hidden, whole], 1e-13)
    if sizes != "mixed" or kind == "logits":
        assert gathers[0] == [(TOKENS, 4)], "one exchange of statistics"


def whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entropy and log-prob against the whole vocabulary: the set is not looked at."""
    monkeypatch.setattr(sparse_layer, "_COLUMNS_OF_A_PAIR", 1e9)
    monkeypatch.setattr(sparse_layer, "_LEAST_DENSE_ROWS", 1)
    monkeypatch.setattr("megatron_pg.head.kept.sparse_layer.keep_only", lambda *_: None)


def without_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the normaliser alone."""
    whole = kept_set.kept_gradient

    def wrong(logits: Tensor, pairs: kept_set.KeptPairs, *rest: object) -> Tensor:
        is_target = torch.zeros_like(pairs.is_target)
        return whole(logits, dataclasses.replace(pairs, is_target=is_target), *rest)

    monkeypatch.setattr(sparse_layer, "kept_gradient", wrong)


def one_row_late(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sparse_layer.KeptPairs.build

    def wrong(kept: Ragged, targets: Tensor, *rest: object) -> kept_set.KeptPairs:
        return whole(kept.select(torch.arange(len(kept)).roll(1)), targets, *rest)

    monkeypatch.setattr(sparse_layer.KeptPairs, "build", wrong)


def without_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the logits over the temperature, as that of the logits."""
    whole = kept_set.kept_gradient
    wrong = lambda logits, pairs, *rest: whole(logits, pairs, *rest) * TEMPERATURE  # noqa: E731
    monkeypatch.setattr(sparse_layer, "kept_gradient", wrong)


def last_pair_of_a_column_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the rows that kept the same id the last one's gradient alone reaches its weight."""

    def wrong(gradient: Tensor, hidden: Tensor, pairs: kept_set.KeptPairs, out: Tensor) -> None:
        out[pairs.columns] = gradient[:, None] * hidden[pairs.rows]

    monkeypatch.setattr("megatron_pg.head.kept.sets.add_weight_gradient", wrong)


MUTANTS = [whole_vocabulary, without_target, one_row_late, without_temperature]


@pytest.mark.parametrize("mutant", [*MUTANTS, last_pair_of_a_column_alone])
def test_mutants(mutant, monkeypatch):
    problem = Problem("sets", torch.float64)
    monkeypatch.setattr(sparse_layer, "_COLUMNS_OF_A_PAIR", 1e-9)
    check_head(problem, problem.head(), 1e-13)
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check_head(problem, problem.head(), 1e-3)
