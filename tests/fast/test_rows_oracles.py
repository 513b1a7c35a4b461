"""Every divergence and metric against plain float64 loops of its own; one without loops is refused.

A row is checked through the public loss of a step, on ragged samples of which two share a rollout.
The rows that settings choose are in `test_cut_invariance`.
"""

import dataclasses
import random
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_pg import PolicyLossConfig, Sample, pack, policy_loss_function
from megatron_pg.head.distill.divergence import Divergence, Kind
from megatron_pg.loss import CORRECTIONS, METRICS, OBJECTIVES
from megatron_pg.loss.metrics import DERIVED, MicroBatchMetrics
from megatron_pg.loss.micro_batch import MicroBatchLoss
from megatron_pg.loss.resolved import resolve
from tests.fast import centering_oracle, distillation_oracle
from tests.fast.objectives_oracle import Sequence1
from tests.fast.one_step import reported
from tests.fast.sequences import flat_log_probs, package_sample, random_sequences
from tests.metric_loops import DERIVED_LOOPS, METRIC_LOOPS, TOLD_VERSION, Token
from tests.random_steps import uneven_totals

FAR = Sequence1(
    torch.tensor([-4.5, -2.5, -12.5, -0.5], dtype=torch.float64, requires_grad=True),
    [1] * 4,
    advantages=[0.5, -1.0, 2.0, -0.25],
    old_log_probs=[-5.0, -2.75, -12.25, -0.625],
    ref_log_probs=[-0.5, -0.5, -0.5, -3.0],
    rollout_log_probs=[-4.25, -2.5, -12.5, -0.75],
    turn_ids=[0, 0, 1, 1],
)
"""A response so far from its reference that `low_var_kl` is held."""
SEQUENCES = [*random_sequences(1), FAR]
ROLLOUTS = [0, 0, 1, 2, 3, 4, 5, 6]
GROUPS = [10, 10, 10, 10, 11, 11, 11, 11]


def samples_of_step(**fields: Sequence[Any]) -> list[Sample]:
    fields |= {"rollout_id": ROLLOUTS, "group_index": GROUPS}
    rows = [dict(zip(fields, row, strict=True)) for row in zip(*fields.values(), strict=True)]
    return [package_sample(s, **row) for s, row in zip(SEQUENCES, rows, strict=True)]


def check_divergence(kind: str) -> None:
    beta = 0.3
    settings: dict[str, Any] = {"policy_loss": "distill", "distill_teacher": "logits"}
    settings |= {"distill_divergence": kind, "distill_beta": beta if kind == "jsd" else 0.5}

    def loss_of(log_p: list[Tensor], target: int, drawn: Tensor) -> Tensor:
        log_q = distillation_oracle.log_softmax_of(list(drawn), TEMPERATURE)
        return distillation_oracle.divergence(kind, beta, log_p, log_q)

    check_logits(settings, lambda drawn: {"side_channels": {"teacher_logits": drawn}}, loss_of)


def check_centering() -> None:
    def head(drawn: Tensor) -> tuple[Tensor, Tensor]:
        log_q, ids = drawn.float().log_softmax(1).topk(3, dim=1)
        return ids, log_q

    def loss_of(log_p: list[Tensor], target: int, drawn: Tensor) -> Tensor:
        ids, log_q = (each[0].tolist() for each in head(drawn[None]))
        center = centering_oracle.centering(log_p, dict(zip(ids, log_q, strict=True)))
        return ADVANTAGE * (center - log_p[target])

    settings = {"policy_loss": "reinforce", "score_centering": True}
    check_logits(settings, lambda drawn: {"sampler_top_k": head(drawn)}, loss_of)


ADVANTAGE, TEMPERATURE = 0.7, 0.8


def check_logits(
    settings: dict[str, Any],
    fields_of: Callable[[Tensor], dict[str, Any]],
    loss_of: Callable[[list[Tensor], int, Tensor], Tensor],
) -> None:
    """Loss and gradient of every logit, of two samples with fields that are made of numbers drawn
    for each response token and id of the vocabulary.
    """
    generator = torch.Generator().manual_seed(2)
    vocab_size, lengths = 6, [(2, [1, 0, 1, 1]), (3, [1, 1])]
    samples, losses, row = [], [], 0
    logits = torch.randn(11, vocab_size, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    for prompt, mask in lengths:
        tokens = torch.randint(vocab_size, (prompt + len(mask),), generator=generator)
        drawn = torch.randn(len(mask), vocab_size, generator=generator, dtype=torch.float64)
        samples.append(Sample(tokens, len(mask), mask, ADVANTAGE, **fields_of(drawn)))
        for token in range(len(mask)):
            if not mask[token]:
                continue
            of_token = list(logits[row + prompt + token - 1])
            log_p = distillation_oracle.log_softmax_of(of_token, TEMPERATURE)
            loss = loss_of(log_p, int(tokens[prompt + token]), drawn[token])
            losses.append(loss / (sum(mask) * len(lengths)))
        row += prompt + len(mask)
    expected = sum(losses, start=torch.zeros((), dtype=torch.float64))
    (gradient,) = torch.autograd.grad(expected, logits)
    config = PolicyLossConfig(**settings, rollout_temperature=TEMPERATURE)
    found, _ = policy_loss_function(config, pack(samples), logits, totals=uneven_totals(samples))
    found.backward()
    # Advantages are float32.
    tolerance = 1e-12 if config.distills else 1e-7
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(logits.grad, gradient, rtol=tolerance, atol=tolerance)


VERSIONS = [3, 3, 5, 5, 4, 6, 6, 7]
METRIC_SETTINGS: dict[str, Any] = {"kl_loss_type": "low_var_kl", "pg_metrics": "with_entropy"}
METRIC_SETTINGS |= {"eps_clip": 0.1, "eps_clip_high": 0.3}
OF_SETS = {"replay_sampling_set": True, "kept_set_mass": True}
OF_TEACHER = {"distill_coef": 0.5, "distill_teacher": "logits"}


def made_up(seed: int, low: float, high: float) -> Tensor:
    """A number for every response token of the step, [window] float64."""
    rng = random.Random(seed)
    count = sum(len(s.loss_mask) for s in SEQUENCES)
    return torch.tensor([rng.uniform(low, high) for _ in range(count)], dtype=torch.float64)


ENTROPY, DIVERGENCE = made_up(1, 0.5, 2.0), made_up(2, 0.1, 0.9)
SET_SIZE, SET_MASS = made_up(3, 0.0, 9.0).round(), made_up(4, 0.3, 1.0)


def active_tokens() -> list[Token]:
    found, place = [], 0
    for index, s in enumerate(SEQUENCES):
        for t, keep in enumerate(s.loss_mask):
            log_probs = (s.log_probs[t].item(), s.old_log_probs[t], s.ref_log_probs[t])
            log_probs += (s.rollout_log_probs[t],)
            numbers = (each[place].item() for each in (ENTROPY, DIVERGENCE, SET_SIZE, SET_MASS))
            token = Token(
                *(ROLLOUTS[index], *log_probs, s.advantages[t], VERSIONS[index], *numbers),
                kl_type="low_var_kl",
                clip_range=(0.9, 1.3),
            )
            found += [token] * keep
            place += 1
    return found


def metrics_of_step(settings: dict[str, Any]) -> tuple[MicroBatchMetrics, dict[str, float]]:
    """The pairs of the step's only micro-batch, and what the step reports."""
    config = PolicyLossConfig(**METRIC_SETTINGS, **settings)
    fields: dict[str, Sequence[Any]] = {"policy_version": VERSIONS}
    if config.replay_sampling_set:
        fields["kept_tokens"] = [[[0, 1]] * len(s.loss_mask) for s in SEQUENCES]
    else:
        teachers = [torch.zeros(len(s.loss_mask), 2) for s in SEQUENCES]
        fields["side_channels"] = [{"teacher_logits": teacher} for teacher in teachers]
    batch = pack(samples_of_step(**fields))
    batch = dataclasses.replace(batch, kept_set_size=SET_SIZE)
    loss = MicroBatchLoss(resolve(config), batch, uneven_totals(batch.samples))
    _, pairs = loss(flat_log_probs(SEQUENCES), ENTROPY, DIVERGENCE, SET_MASS)
    return pairs, reported(config, pairs, policy_version=TOLD_VERSION)


def check_metric(name: str) -> None:
    tokens = active_tokens()
    expected = (METRIC_LOOPS | DERIVED_LOOPS)[name](tokens)
    assert expected != 0, "nothing is compared"
    found = [metrics_of_step(settings) for settings in (OF_SETS, OF_TEACHER)]
    values = [report[name] for _, report in found if name in report]
    if not values:  # of a micro-batch alone
        values = [(pairs[name][0] / pairs[name][1]).item() for pairs, _ in found if name in pairs]
    assert values, f"{name} is in no report"
    for value in values:
        assert value == pytest.approx(expected, rel=1e-6), f"{name} is not close to its loops"


class Door(NamedTuple):
    """The names of a table's rows, at the time of the call, those that there are loops for, and the
    comparison of a row with them.
    """

    rows: Callable[[], Iterable[str]]
    has_oracle: Callable[[], Collection[str]]
    check: Callable[[str], None]


KINDS, DIVERGENCES = typing.get_args(Kind), distillation_oracle.KINDS
DOORS = {
    "divergences": Door(lambda: KINDS, lambda: DIVERGENCES, check_divergence),
    "metrics": Door(lambda: [row.name for row in METRICS], lambda: METRIC_LOOPS, check_metric),
    "derived": Door(lambda: [row.name for row in DERIVED], lambda: DERIVED_LOOPS, check_metric),
}
ROWS = [(table, name) for table, door in DOORS.items() for name in door.rows()]


def check_row(table: str, name: str) -> None:
    door = DOORS[table]
    assert name in door.has_oracle(), f"{name} of {table} has no oracle: write its plain loops"
    door.check(name)


@pytest.mark.parametrize(("table", "name"), ROWS)
def test_every_row_is_what_its_loops_say(table: str, name: str) -> None:
    check_row(table, name)


def broken(table: str, name: str, patch: pytest.MonkeyPatch) -> None:
    """Gives a row the other sign."""
    if table in ("metrics", "derived"):
        rows: list[Any] = METRICS if table == "metrics" else DERIVED
        (row,) = [row for row in rows if row.name == name]
        value = row.value
        wrong = lambda *given: -1.0 * (value(*given) + 0.0)  # noqa: E731  a truth value too
        patch.setitem(vars(row), "value", wrong)
    else:
        terms = Divergence.terms
        patch.setattr(Divergence, "terms", lambda *given: tuple(map(torch.neg, terms(*given))))


@pytest.mark.parametrize(("table", "name"), ROWS)
def test_mutant_with_its_sign_flipped(table, name, monkeypatch) -> None:
    broken(table, name, monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        check_row(table, name)


def test_a_centered_loss_is_what_its_loops_say() -> None:
    check_centering()


OF_LOGITS = {
    "distill": (OBJECTIVES, lambda: check_divergence("reverse_kl")),
    "score_centering": (CORRECTIONS, check_centering),
}
"""Rows that need logits, with their table and check; others are in `tests.mutants`."""


@pytest.mark.parametrize("change", [torch.neg, lambda loss: 2 * loss.detach() - loss])
@pytest.mark.parametrize("name", OF_LOGITS)
def test_mutant_with_the_sign_of_a_loss_of_logits_flipped(name, change, monkeypatch) -> None:
    """In value and gradient, and in the gradient alone."""
    table, check = OF_LOGITS[name]
    row = table[name]

    def wrong(*given: Any) -> Any:
        found = row.function(*given)
        changed = {"loss": change(found.loss)}
        is_tuple = isinstance(found, tuple)
        return found._replace(**changed) if is_tuple else dataclasses.replace(found, **changed)

    monkeypatch.setitem(table, name, dataclasses.replace(row, function=wrong))
    with pytest.raises(AssertionError, match="not close"):
        check()


@pytest.mark.parametrize("table", DOORS)
def test_a_row_without_loops_is_refused(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the last row under another name: right, and nobody could say so."""
    door, rows = DOORS[table], [*DOORS[table].rows(), "unheard_of"]
    monkeypatch.setitem(DOORS, table, door._replace(rows=lambda: rows))
    (name,) = set(DOORS[table].rows()) - {name for of, name in ROWS if of == table}
    with pytest.raises(AssertionError, match=f"unheard_of of {table} has no oracle"):
        check_row(table, name)
