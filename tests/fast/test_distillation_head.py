"""The divergence from a teacher, from logits and from hidden states, against plain float64 loops."""

from __future__ import annotations

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
    log_probs_and_divergence,
)
from tests.distributed.launch import run_ranks
from tests.fast import distillation_oracle as oracle

TOKENS, HIDDEN, TEACHER_HIDDEN, WIDTH, VOCAB_SIZE, TEMPERATURE, K = 9, 6, 4, 28, 21, 0.7, 5
DIVERGENCES = [
    Divergence("forward_kl"),
    Divergence("reverse_kl"),
    Divergence("jsd", 0.5),
    Divergence("jsd", 0.2),
]
TEACHERS = ("logits", "hidden", "top k")


class Problem:
    """Student and teacher, a loss of all three outputs, and what it must give."""

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
        self.hidden, self.weight = (2 * normal(TOKENS, HIDDEN)).to(dtype), normal(WIDTH, HIDDEN)
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
        rows, log_probs, entropies = oracle.of_student(logits, self.targets.tolist(), TEMPERATURE)
        loss, divergences = torch.zeros((), dtype=torch.float64), []
        for t, log_p in enumerate(rows):
            if self.kind == "top k":
                given = self.ids[t].tolist(), self.log_q[t].tolist()
                value = oracle.over_top_k(self.divergence.kind, self.divergence.beta, log_p, *given)
            else:
                row = [self.teacher_logits[t, v].double() for v in range(VOCAB_SIZE)]
                log_q = oracle.log_softmax_of(row, TEMPERATURE)
                value = oracle.divergence(self.divergence.kind, self.divergence.beta, log_p, log_q)
            divergences.append(value)
            if self.mask[t]:
                parts = zip(
                    self.coefficients[:, t].tolist(),
                    (log_probs[t], entropies[t], value),
                    strict=True,
                )
                for coefficient, each in parts:
                    loss = loss + coefficient * each
        loss.backward()
        self.wanted = [torch.stack(each).detach() for each in (log_probs, entropies, divergences)]
        self.wanted_gradients = [logits.grad, hidden.grad, weight.grad]

    def teacher(self, rank: int = 0, size: int = 1) -> WholeTeacher | TopKTeacher:
        columns = slice(rank * WIDTH // size, (rank + 1) * WIDTH // size)
        if self.kind == "logits":
            return WholeTeacher(self.divergence, logits=self.teacher_logits[:, columns])
        if self.kind == "hidden":
            weight = self.teacher_weight[columns]
            return WholeTeacher(self.divergence, hidden=self.teacher_hidden, weight=weight)
        return TopKTeacher(self.divergence, self.ids, self.log_q)

    def options(self, size: int, **changes: object) -> HeadOptions:
        group = dist.group.WORLD if size > 1 else None
        return HeadOptions(group, temperature=TEMPERATURE, vocab_size=VOCAB_SIZE, **changes)

    def loss(self, log_probs: Tensor, entropy: Tensor, divergence: Tensor, rows: slice) -> Tensor:
        found = torch.stack([log_probs, entropy, divergence])
        weighted = self.coefficients[:, rows].to(found) * found
        return torch.where(self.mask[rows], weighted, 0.0).sum()

    def from_logits(self, rank: int = 0, size: int = 1) -> tuple[list[Tensor], list[Tensor]]:
        columns = slice(rank * WIDTH // size, (rank + 1) * WIDTH // size)
        logits = (self.hidden @ self.weight.T)[:, columns].detach().clone()
        logits[2] = float("nan")  # masked
        logits.requires_grad_()
        found = log_probs_and_divergence(
            logits,
            self.targets,
            self.teacher(rank, size),
            tensor_parallel_group=dist.group.WORLD if size > 1 else None,
            temperature=TEMPERATURE,
            vocab_size=VOCAB_SIZE,
            row_mask=self.mask,
        )
        self.loss(*found, slice(None)).backward()
        return [each.detach() for each in found], [logits.grad]

    def factors(self, rank: int, size: int) -> tuple[Tensor, Tensor]:
        columns = slice(rank * WIDTH // size, (rank + 1) * WIDTH // size)
        weight = self.weight[columns].clone().requires_grad_()
        return self.hidden.clone().requires_grad_(), weight

    def one_pass(
        self, rank: int = 0, size: int = 1, piece_sizes: list[int] | None = None, **changes: object
    ) -> tuple[list[Tensor], list[Tensor]]:
        factors = self.factors(rank, size)
        loss, *found = linear_token_loss(
            *factors,
            self.targets,
            self.loss,
            self.options(size, **{"chunk_tokens": 4, **changes}),
            piece_sizes=piece_sizes,
            defer=True,
            teacher=self.teacher(rank, size),
        )
        loss.backward()
        return found, [each.grad for each in factors]

    def one_piece(self, rank: int = 0, size: int = 1) -> tuple[list[Tensor], list[Tensor]]:
        """As for a loss that may look at all rows."""
        return self.one_pass(rank, size, [TOKENS])

    def in_pieces(self, rank: int = 0, size: int = 1) -> tuple[list[Tensor], list[Tensor]]:
        """Of no row, of one chunk, and of seven chunks of a row that are multiplied again."""
        return self.one_pass(rank, size, [0, 2, 7], chunk_tokens=1)


def close(found: Tensor, wanted: Tensor, rounding: float) -> None:
    error = (found.double().cpu() - wanted).abs().amax() / wanted.abs().amax().clamp(min=1.0)
    assert found.shape == wanted.shape and error <= rounding, error


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


@pytest.mark.parametrize("teacher", TEACHERS)
def test_float32_logits(teacher):
    """Of both models: what is left is the rounding of the logits' gradient, and of the hidden states'."""
    problem = Problem(DIVERGENCES[3], teacher, torch.bfloat16)
    values, gradients = problem.one_pass(fp32_logits=True)
    check(problem, "one pass", [(values, gradients)], 0.012)
    for found, expected in zip(values, problem.wanted, strict=True):
        close(found, expected, 1e-5)


def on_rank(kinds: list[tuple[str, str, Divergence]]) -> list:
    rank, size = dist.get_rank(), dist.get_world_size()
    return [
        WAYS[way](Problem(divergence, teacher), rank, size) for way, teacher, divergence in kinds
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_shards_equal_the_whole_vocabulary(size):
    """The last of four has columns of padding alone."""
    kinds = [
        (way, teacher, DIVERGENCES[(place + number) % len(DIVERGENCES)])
        for place, way in enumerate(WAYS)
        for number, teacher in enumerate(TEACHERS)
    ]
    ranks = run_ranks(on_rank, size, kinds)
    for place, (way, teacher, divergence) in enumerate(kinds):
        found = [of_rank[place] for of_rank in ranks]
        assert all(
            torch.equal(a, b)
            for a, b in zip(found[0][0], found[-1][0], strict=True)
            if way != "logits"
        )
        check(Problem(divergence, teacher), way, found, 1e-12)


def without_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient as if the probabilities were free of each other."""
    from megatron_pg.head.distill import divergence as passes

    whole = passes.write_gradient

    def wrong(pair: passes.LogitPair, moment: Tensor, incoming: Tensor, out: Tensor) -> None:
        whole(pair, torch.zeros_like(moment), incoming, out)

    monkeypatch.setattr(passes, "write_gradient", wrong)


def without_teacher_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_pg.head.distill import teacher

    whole = teacher.LogitRows

    def wrong(
        logits: Tensor, targets: Tensor, shard: object, temperature: Tensor, mask: Tensor
    ) -> object:
        return whole(logits, targets, shard, torch.ones_like(temperature), mask)

    monkeypatch.setattr(teacher, "LogitRows", wrong)


def without_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The k tokens alone."""
    from megatron_pg.head.distill import teacher

    monkeypatch.setattr(teacher, "_LEAST_REST", 1.0)


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
    with pytest.raises(
        ValueError, match=r"the teacher's logits are \[4, 20\] and the student's \[4, 28\]"
    ):
        problem.one_pass()


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)
def test_a_token_that_neither_side_gives_any_probability_adds_nothing(divergence):
    """Its logits are -inf on both sides, as a sampling filter leaves them: 0 log 0/0 is 0, in value and gradient."""
    generator = torch.Generator().manual_seed(5)
    student, teacher = torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
    incoming = torch.tensor([1.0, 0.5, -2.0], dtype=torch.float64)
    found = []
    for width in (6, 8):
        both = (torch.full((3, width), -torch.inf, dtype=torch.float64) for _ in range(2))
        logits, of_teacher = both
        logits[:, :6], of_teacher[:, :6] = student, teacher
        logits.requires_grad_()
        *_, value = log_probs_and_divergence(
            logits, torch.tensor([0, 1, 2]), WholeTeacher(divergence, logits=of_teacher)
        )
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
    *_, value = log_probs_and_divergence(
        logits, torch.tensor([0, 0]), given, row_mask=torch.tensor([True, False])
    )
    value.sum().backward()
    assert value[0] > 0 and value[1] == 0
    assert logits.grad[0].any() and logits.grad[1].tolist() == [0.0] * 6
