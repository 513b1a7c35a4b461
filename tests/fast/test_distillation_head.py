"""The divergence from a teacher, from logits and from hidden states, against plain float64
loops.
"""

import functools
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.head import (
    Divergence,
    HeadOptions,
    TopKTeacher,
    WholeTeacher,
    linear_token_loss,
    log_probs_and_score,
)
from megatron_pg.head.distill import divergence as passes
from megatron_pg.head.distill import teacher as teachers
from tests.distributed.launch import run_ranks
from tests.fast import distillation_oracle as oracle
from tests.fast.log_probs_oracle import close
from tests.fast.refusals import assert_refused
from tests.fast.test_kept_set import TEMPERATURE, VOCAB_SIZE, vocabulary

TOKENS, HIDDEN, TEACHER_HIDDEN, WIDTH, K = 9, 6, 4, 28, 5
KINDS = (("forward_kl",), ("reverse_kl",), ("jsd", 0.5), ("jsd", 0.2))
DIVERGENCES = [Divergence(*kind) for kind in KINDS]
TEACHERS = ("logits", "hidden", "top k")


class Problem:
    """Student and teacher, a loss of all three outputs, and what it must give."""

    scale = 2.0  # of the hidden states

    def __init__(
        self,
        divergence: Divergence,
        teacher: str = "logits",
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
    ) -> None:
        generator = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.divergence, self.kind = divergence, teacher
        self.hidden, self.weight = (
            (self.scale * normal(TOKENS, HIDDEN)).to(dtype),
            normal(WIDTH, HIDDEN),
        )
        self.weight = self.weight.to(dtype)
        self.teacher_hidden = (2 * normal(TOKENS, TEACHER_HIDDEN)).to(dtype)
        self.teacher_weight = normal(WIDTH, TEACHER_HIDDEN).to(dtype)
        self.targets = torch.randint(0, VOCAB_SIZE, (TOKENS,), generator=generator)
        self.coefficients = normal(3, TOKENS)
        self.coefficients[:, 4] = 0.0
        self.mask = torch.arange(TOKENS) != 2
        self.teacher_logits = self.teacher_hidden.double() @ self.teacher_weight.double().T
        if teacher == "logits":
            self.teacher_logits = self.teacher_logits.to(dtype)
        whole = self.teacher_logits.double()[:, :VOCAB_SIZE] / TEMPERATURE
        self.log_q, self.ids = whole.log_softmax(1).topk(K, dim=1)
        self._expect()
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and not name.startswith("wanted"):
                setattr(self, name, value.to(device))

    def _expect(self) -> None:
        hidden = self.hidden.double().clone().requires_grad_()
        weight = self.weight.double().clone().requires_grad_()
        logits = (hidden @ weight.T)[:, :VOCAB_SIZE]
        logits.retain_grad()
        outputs = []
        for t, target in enumerate(self.targets.tolist()):
            log_p = oracle.log_softmax_of(list(logits[t].unbind()), TEMPERATURE)
            entropy = -sum(torch.exp(value) * value for value in log_p)
            outputs.append(torch.stack([log_p[target], entropy, self._divergence(t, log_p)]))
        outputs = torch.stack(outputs, 1)
        (self.coefficients.double() * outputs)[:, self.mask].sum().backward()
        self.wanted = outputs.detach().unbind()
        self.wanted_gradients = [logits.grad, hidden.grad, weight.grad]

    def _divergence(self, t: int, log_p: list[Tensor]) -> Tensor:
        kind, beta = self.divergence.kind, self.divergence.beta
        if self.kind == "top k":
            ids, log_q = self.ids[t].tolist(), self.log_q[t].tolist()
            return oracle.over_top_k(kind, beta, log_p, ids, log_q)
        row = list(self.teacher_logits[t, :VOCAB_SIZE].double().unbind())
        return oracle.divergence(kind, beta, log_p, oracle.log_softmax_of(row, TEMPERATURE))

    def teacher(self, rank: int = 0, size: int = 1) -> WholeTeacher | TopKTeacher:
        if self.kind == "logits":
            return WholeTeacher(self.divergence, logits=self.teacher_logits.chunk(size, 1)[rank])
        if self.kind == "hidden":
            weight = self.teacher_weight.chunk(size)[rank]
            return WholeTeacher(self.divergence, hidden=self.teacher_hidden, weight=weight)
        return TopKTeacher(self.divergence, self.ids, self.log_q)

    def loss(self, log_probs: Tensor, entropy: Tensor, divergence: Tensor, rows: slice) -> Tensor:
        found = torch.stack([log_probs, entropy, divergence])
        weighted = self.coefficients[:, rows].to(found) * found
        return torch.where(self.mask[rows], weighted, 0.0).sum()

    def from_logits(self, rank: int = 0, size: int = 1) -> tuple[list[Tensor], list[Tensor]]:
        logits = (self.hidden @ self.weight.T).chunk(size, 1)[rank].clone()
        logits[2] = float("nan")  # masked
        logits.requires_grad_()
        settings = {"row_mask": self.mask, **vocabulary(size)}
        found = log_probs_and_score(logits, self.targets, self.teacher(rank, size), **settings)
        self.loss(*found, slice(None)).backward()
        return [each.detach() for each in found], [logits.grad]

    def one_pass(
        self, rank: int = 0, size: int = 1, piece_sizes: list[int] | None = None, **changes: object
    ) -> tuple[list[Tensor], list[Tensor]]:
        weight = self.weight.chunk(size)[rank].clone().requires_grad_()
        factors = self.hidden.clone().requires_grad_(), weight
        options = HeadOptions(**vocabulary(size), **{"chunk_tokens": 4, **changes})
        settings = {"piece_sizes": piece_sizes, "scorer": self.teacher(rank, size), "defer": True}
        loss, *found = linear_token_loss(*factors, self.targets, self.loss, options, **settings)
        loss.backward()
        return found, [each.grad for each in factors]

    def one_piece(self, rank: int = 0, size: int = 1) -> tuple[list[Tensor], list[Tensor]]:
        """As for a loss that may look at all rows."""
        return self.one_pass(rank, size, [TOKENS])

    def in_pieces(self, rank: int = 0, size: int = 1) -> tuple[list[Tensor], list[Tensor]]:
        """Of no row, of one chunk, and of seven chunks of a row that are multiplied again."""
        return self.one_pass(rank, size, [0, 2, 7], chunk_tokens=1)


WAYS = {
    "logits": Problem.from_logits,
    "one pass": Problem.one_pass,
    "one piece": Problem.one_piece,
    "in pieces": Problem.in_pieces,
}


def check(problem: Problem, way: str, ranks: list, rounding: float) -> None:
    values, _ = ranks[0]
    mask = problem.mask.cpu() if way == "logits" else torch.ones(TOKENS, dtype=torch.bool)
    for found, expected in zip(values, problem.wanted, strict=True):
        close(found.cpu()[mask], expected[mask], rounding)
    of_logits, of_hidden, of_weight = problem.wanted_gradients
    gradients = [gradients for _, gradients in ranks]
    if way == "logits":
        whole = torch.cat([each[0].cpu() for each in gradients], 1)
        close(whole[:, :VOCAB_SIZE], of_logits, rounding)
        assert (whole[:, VOCAB_SIZE:] == 0).all() and (whole[2] == 0).all()
        return
    close(sum(each[0] for each in gradients), of_hidden, rounding)
    whole = torch.cat([each[1].cpu() for each in gradients])
    close(whole[:VOCAB_SIZE], of_weight[:VOCAB_SIZE], rounding)
    assert (whole[VOCAB_SIZE:] == 0).all()


PRECISIONS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.06}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("teacher", TEACHERS)
@pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)
def test_values_and_gradients(way, teacher, divergence):
    problem = Problem(divergence, teacher)
    check(problem, way, [WAYS[way](problem)], 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_precision(way, dtype):
    problem = Problem(DIVERGENCES[2], "hidden", dtype)
    check(problem, way, [WAYS[way](problem)], PRECISIONS[dtype])


@pytest.mark.parametrize("piece_sizes", [None, [1, 8]])
def test_one_chunk_of_the_teachers_logits_is_alive(piece_sizes, monkeypatch):
    """Chunks of 2 rows; a piece of 8 rows is in four, whose logits are made twice."""
    alive: list[weakref.ref[Tensor]] = []
    others: list[int] = []

    def multiply(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
        others.append(sum(other() is not None for other in alive))
        alive.append(weakref.ref(out))
        torch.mm(hidden, weight, out=out)

    monkeypatch.setattr(teachers, "multiply", multiply)
    Problem(DIVERGENCES[1], "hidden").one_pass(piece_sizes=piece_sizes, chunk_tokens=2)
    assert others == [0] * (5 if piece_sizes is None else 8)


@pytest.mark.parametrize("teacher", TEACHERS)
def test_float32_logits(teacher):
    """Of both models: what is left is the rounding of the logits' gradient, and of the hidden
    states'.
    """
    problem = Problem(DIVERGENCES[3], teacher, torch.bfloat16)
    values, gradients = problem.one_pass(fp32_logits=True)
    check(problem, "one pass", [(values, gradients)], 0.012)
    for found, expected in zip(values, problem.wanted, strict=True):
        close(found, expected, 1e-5)


def on_rank(kinds: list[tuple[str, Divergence, str]]) -> list:
    rank, size = dist.get_rank(), dist.get_world_size()
    return [WAYS[way](Problem(*problem), rank, size) for way, *problem in kinds]


@pytest.mark.parametrize("size", [2, 4])
def test_shards_equal_the_whole_vocabulary(size):
    """The last of four has columns of padding alone."""
    kinds = [
        (way, DIVERGENCES[(place + number) % len(DIVERGENCES)], teacher)
        for place, way in enumerate(WAYS)
        for number, teacher in enumerate(TEACHERS)
    ]
    ranks = run_ranks(on_rank, size, kinds)
    for (way, *problem), *found in zip(kinds, *ranks, strict=True):
        if way != "logits":
            assert all(map(torch.equal, found[0][0], found[-1][0]))
        check(Problem(*problem), way, found, 1e-12)


def without_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient as if the probabilities were free of each other."""
    whole = passes.write_gradient

    def wrong(pair: passes.LogitPair, moment: Tensor, incoming: Tensor, out: Tensor) -> None:
        whole(pair, torch.zeros_like(moment), incoming, out)

    monkeypatch.setattr(passes, "write_gradient", wrong)


def without_teacher_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = teachers.LogitRows

    def wrong(logits, targets, shard, temperature, mask):
        return whole(logits, targets, shard, torch.ones_like(temperature), mask)

    monkeypatch.setattr(teachers, "LogitRows", wrong)


def without_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The k tokens alone."""
    monkeypatch.setattr(teachers, "_LEAST_REST", 1.0)


@pytest.mark.parametrize(
    ("mutant", "teacher"),
    [(without_moment, "hidden"), (without_teacher_temperature, "logits"), (without_rest, "top k")],
)
def test_mutants(mutant, teacher, monkeypatch):
    problem = Problem(DIVERGENCES[1], teacher)
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check(problem, "one pass", [problem.one_pass()], 1e-3)


def test_a_teacher_of_another_vocabulary_is_refused():
    problem = Problem(DIVERGENCES[0])
    problem.teacher_logits = problem.teacher_logits[:, :20]
    words = "the teacher's logits are [4, 20] and the student's [4, 28]"
    assert_refused(words, problem.one_pass)


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)
def test_a_token_that_neither_side_gives_any_probability_adds_nothing(divergence):
    """Its logits are -inf on both sides, as a sampling filter leaves them: 0 log 0/0 is 0, in value
    and gradient.
    """
    generator = torch.Generator().manual_seed(5)
    student, teacher = torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
    incoming = torch.tensor([1.0, 0.5, -2.0], dtype=torch.float64)
    found = []
    for impossible in (0, 2):
        pad = functools.partial(torch.nn.functional.pad, pad=(0, impossible), value=-torch.inf)
        logits, whole = pad(student).requires_grad_(), WholeTeacher(divergence, logits=pad(teacher))
        *_, value = log_probs_and_score(logits, torch.tensor([0, 1, 2]), whole)
        (value * incoming).sum().backward()
        found.append((value.detach(), logits.grad))
    (value, gradient), (wider, wider_gradient) = found
    torch.testing.assert_close(wider, value, rtol=0, atol=1e-14)
    torch.testing.assert_close(wider_gradient[:, :6], gradient, rtol=0, atol=1e-14)
    assert not wider_gradient[:, 6:].any()


@pytest.mark.parametrize("teacher", ["logits", "top k"])
def test_a_masked_row_has_no_divergence_and_no_gradient(teacher):
    """Whatever its logits are, and whatever gradient arrives for it."""
    logits = torch.randn(2, 6, generator=torch.Generator().manual_seed(6))
    logits[1] = torch.nan
    logits.requires_grad_()
    given: WholeTeacher | TopKTeacher = WholeTeacher(DIVERGENCES[1], logits=torch.ones(2, 6))
    if teacher == "top k":
        given = TopKTeacher(DIVERGENCES[1], torch.tensor([[1], [1]]), torch.full((2, 1), -1.0))
    rows = {"targets": torch.tensor([0, 0]), "row_mask": torch.tensor([True, False])}
    *_, value = log_probs_and_score(logits, scorer=given, **rows)
    value.sum().backward()
    assert value[0] > 0 and value[1] == 0
    assert logits.grad[0].any() and logits.grad[1].tolist() == [0.0] * 6
