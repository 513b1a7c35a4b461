"""What distillation asks of samples and of calls, by name, before a model has run."""

import math
from typing import Any

import pytest
import torch

from megatron_pg import (
    PolicyLossConfig,
    Sample,
    pack,
    policy_loss_from_log_probs,
    policy_loss_function,
    step_totals,
)
from megatron_pg.loss.resolved import resolve
from tests.fast import distillation_oracle as oracle
from tests.fast.refusals import assert_refused, refusal

DISTILL = {"policy_loss": "distill", "distill_teacher": "top_k"}


def sample(**channels: torch.Tensor) -> Sample:
    log_probs = {"old_log_probs": [-1.0, -1.0]}
    return Sample([1, 2, 3, 4], 2, [1, 1], name="a", side_channels=channels, **log_probs)


def loss(
    given: Sample, settings: dict[str, Any], logits: torch.Tensor | None = None, **keywords: Any
) -> torch.Tensor:
    if logits is None:
        logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    config, totals = PolicyLossConfig(**settings), step_totals([given])
    return policy_loss_function(config, pack([given]), logits, totals=totals, **keywords)[0]


MISSING = {
    "ids": ({}, DISTILL, "['teacher_ids'] is missing or has the wrong length (none)"),
    "log-probs": ({"teacher_ids": torch.zeros(2, 1).long()}, DISTILL, "['teacher_log_probs'] is "
                                                                      "missing"),
    "logits of the prompt too": (
        {"teacher_logits": torch.zeros(4, 8)}, {"distill_coef": 0.1, "distill_teacher": "logits"},
        "['teacher_logits'] is missing or has the wrong length (4 rows for 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("channels", "settings", "words"), MISSING.values(), ids=MISSING)
def test_a_teacher_that_is_not_there(channels, settings, words):
    assert refusal(loss, sample(**channels), settings).startswith(f"a: side_channels{words}")


def test_a_teachers_weight_that_is_not_there():
    settings = {**DISTILL, "distill_teacher": "hidden"}
    message = refusal(loss, sample(teacher_hidden=torch.zeros(2, 3)), settings)
    assert message.startswith("--distill-teacher hidden requires teacher_weight=")


def top_k(ids: Any, probabilities: Any) -> dict[str, torch.Tensor]:
    log_probs = torch.as_tensor(probabilities, dtype=torch.float64).log()
    return {"teacher_ids": torch.as_tensor(ids), "teacher_log_probs": log_probs}


WRONG_TEACHERS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "outside": (top_k([[1, 2], [3, 8]], [[0.5, 0.2]] * 2), "['teacher_ids'][1, 1] is 8, outside "
                                                           "the vocabulary of 8"),
    "negative": (top_k([[1, 2], [-1, 3]], [[0.5, 0.2]] * 2), "['teacher_ids'][1] is a set with id "
                                                             "-1, expected ids"),
    "twice": (top_k([[1, 2, 3], [5, 2, 5]], [[0.5, 0.2, 0.1]] * 2), "['teacher_ids'][1] is a set "
                                                                    "with id 5 twice"),
    "more_than_1": (
        top_k([[1, 2], [3, 4]], [[0.5, 0.2], [0.9, 0.9]]),
        "['teacher_log_probs']: the sum of the probabilities of token [1] is 1.8",
    ),
    "positive": (top_k([[1], [2]], [[0.5], [1.5]]), "['teacher_log_probs'][1, 0] is 0.405465"),
    "nothing": (top_k([[1, 2], [3, 4]], [[1.0, 0.0], [0.5, 0.5]]), "['teacher_log_probs'][0, 1] is "
                                                                   "-inf"),
    "shapes": (top_k([[1, 2], [3, 4]], [[0.5], [0.5]]), "['teacher_ids'] has shape [2, 2] and "
                                                        "side_channels['teacher_log_probs'] has "
                                                        "shape [2, 1]"),
    "vector": (top_k([1, 2], [0.5, 0.5]), "['teacher_ids'] has shape [2], expected a tensor "
                                          "[response_length, k]"),
    "floats": (top_k([[1.0], [2.0]], [[0.5], [0.5]]), "['teacher_ids'] has dtype torch.float32, "
                                                      "expected integers"),
    "narrower": ({"teacher_logits": torch.zeros(2, 7)}, "['teacher_logits'] has rows of [7] "
                                                        "logits, expected the student's vocabulary "
                                                        "of 8"),
    "wider": ({"teacher_logits": torch.zeros(2, 9)}, "['teacher_logits'] has rows of [9] logits"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_TEACHERS)
def test_a_teacher_of_other_tokens_is_refused(case):
    channels, words = WRONG_TEACHERS[case]
    kind = "logits" if "teacher_logits" in channels else "top_k"
    settings = {**DISTILL, "distill_teacher": kind}
    message = refusal(lambda: loss(sample(**channels), settings))
    assert message.startswith("a: side_channels") and words in message
    if kind == "top_k" and case not in ("shapes", "vector", "floats"):
        # A masked token's is not read.
        masked = Sample([1, 2, 3, 4], 2, [0, 0], name="a", side_channels=channels)
        assert loss(masked, DISTILL) == 0


def test_a_teachers_padding_is_not_read():
    """Of 6 tokens and 8 columns: logits of 6 or of 8, whatever stands in the padding."""
    of_teacher = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    settings = {**DISTILL, "distill_teacher": "logits"}
    narrow, between, wide = (
        sample(teacher_logits=of_teacher[:, :columns]) for columns in (6, 7, 8)
    )
    assert loss(narrow, settings, vocab_size=6) == loss(wide, settings, vocab_size=6)
    words = "rows of [7] logits,  |  of 6 (with padding 8)"
    assert_refused(words, loss, between, settings, vocab_size=6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("k", [1, 8, 1024])
def test_probabilities_that_rounding_leaves_above_1_are_a_teachers(dtype, k):
    """Rounded log-probs of a whole distribution, k tokens of equal probability the worst: a sum of
    k^(2^-8).
    """
    scales = torch.tensor([0.0, 0.01, 1.0, 3.0])[:, None]
    logits = torch.randn(4, k, generator=torch.Generator().manual_seed(2)) * scales
    log_probs = logits.log_softmax(1).to(dtype)
    worst = torch.full((1, k), -math.log(k) * (1 - 2**-8))
    for given in (log_probs, log_probs.float(), worst):
        length = len(given)
        channels = {"teacher_ids": torch.arange(k).expand(length, k), "teacher_log_probs": given}
        Sample([1] * (length + 1), length, [1] * length, side_channels=channels)
        channels["teacher_log_probs"] = given + 0.05
        too_much = "the sum of the probabilities|is .* at an active token"
        with pytest.raises(ValueError, match=too_much):
            Sample([1] * (length + 1), length, [1] * length, side_channels=channels)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("student_dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("teacher_dtype", [torch.float64, torch.float32])
def test_what_little_a_teacher_leaves_to_other_tokens(kind, student_dtype, teacher_dtype):
    """A rest of 1e-5: 1 minus a float32 sum of probabilities keeps two of its digits."""
    generator = torch.Generator().manual_seed(3)
    of_teacher, logits = torch.randn(2, 4, 12, generator=generator, dtype=torch.float64)
    of_teacher[:, 8:] -= 12
    logits[:, 8:] += 8
    log_q = of_teacher[:2].log_softmax(1)[:, :8].to(teacher_dtype)
    given = sample(teacher_ids=torch.arange(8).expand(2, 8), teacher_log_probs=log_q)
    student = logits.to(student_dtype).requires_grad_()
    found = loss(given, {**DISTILL, "distill_divergence": kind}, student.clone())
    found.backward()
    plain = student.detach().double().requires_grad_()
    rows = [oracle.log_softmax_of(list(plain[row].unbind()), 1.0) for row in (1, 2)]
    divergences = [
        oracle.over_top_k(kind, 0.5, log_p, range(8), q.tolist())
        for log_p, q in zip(rows, log_q.double(), strict=True)
    ]
    expected = sum(divergences) / 2
    expected.backward()
    rounding = 1e-6 if student_dtype == torch.float32 else 1e-9
    tolerance = {"rtol": rounding, "atol": rounding}
    torch.testing.assert_close(found.double(), expected, **tolerance)
    torch.testing.assert_close(student.grad.double(), plain.grad, **tolerance)


def test_log_probs_alone_are_refused():
    given = sample(teacher_ids=torch.tensor([[1], [2]]), teacher_log_probs=torch.zeros(2, 1) - 1)
    arguments = PolicyLossConfig(**DISTILL), pack([given]), torch.zeros(2), None
    words = "Use PolicyStep or policy_loss_function"
    assert_refused(words, policy_loss_from_log_probs, *arguments, totals=step_totals([given]))


def test_the_loss_is_the_divergence_and_the_term_its_multiple():
    """Two teachers that say the same: their logits, and their hidden states with a weight."""
    hidden, weight = torch.randn(2, 3), torch.randn(8, 3)
    given = sample(teacher_hidden=hidden, teacher_logits=hidden @ weight.T)
    of_logits = loss(given, {**DISTILL, "distill_teacher": "logits"})
    of_hidden = loss(given, {**DISTILL, "distill_teacher": "hidden"}, teacher_weight=weight)
    torch.testing.assert_close(of_logits, of_hidden)
    plain = loss(given, {})
    mixed = loss(given, {"distill_coef": 0.25, "distill_teacher": "logits"})
    torch.testing.assert_close(mixed, plain + 0.25 * of_logits)


@pytest.mark.parametrize("teacher", ["logits", "top_k"])
def test_logits_are_those_of_the_rollout_temperature_and_of_the_vocabulary(teacher):
    """Padding columns weigh nothing on either side, and a masked token's teacher is not read."""
    generator = torch.Generator().manual_seed(1)
    logits, of_teacher = torch.randn(4, 8, generator=generator), torch.randn(6, generator=generator)
    log_q = oracle.log_softmax_of(list(of_teacher.double()), 0.7)
    nothing = torch.full((2, 2), torch.nan)
    channels = {
        "teacher_logits": torch.stack(
            [torch.cat([of_teacher, nothing[0]]), torch.full((8,), torch.nan)]
        ),
        "teacher_ids": torch.tensor([[4, 1], [0, 0]]),
        "teacher_log_probs": nothing.index_copy(
            0, torch.tensor([0]), torch.stack([log_q[4], log_q[1]])[None].float()
        ),
    }
    given = Sample([1, 2, 3, 4], 2, [1, 0], name="a", side_channels=channels)
    settings = {**DISTILL, "distill_teacher": teacher, "rollout_temperature": 0.7}
    of_loss = logits.clone().requires_grad_()
    found = loss(given, settings, of_loss, vocab_size=6)
    found.backward()
    of_oracle = logits.double().requires_grad_()
    log_p = oracle.log_softmax_of(list(of_oracle[1, :6]), 0.7)
    if teacher == "top_k":
        wanted = oracle.over_top_k(
            "reverse_kl", 0.5, log_p, [4, 1], [float(log_q[v]) for v in (4, 1)]
        )
    else:
        wanted = oracle.divergence("reverse_kl", 0.5, log_p, log_q)
    wanted.backward()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(of_loss.grad.double(), of_oracle.grad, rtol=1e-5, atol=1e-6)


def test_what_follows_from_the_settings():
    assert resolve(PolicyLossConfig(**DISTILL)).scope.tokens == "token"
    term = PolicyLossConfig(distill_coef=0.1, distill_teacher="logits")
    assert resolve(term).scope == ("token", False)
    assert resolve(PolicyLossConfig()).scope == ("token", True)


def test_the_token_whose_teacher_is_nan_is_told():
    """Beside an objective that knows nothing of it."""
    of_teacher = torch.zeros(2, 8).index_fill(0, torch.tensor([1]), torch.nan)
    given = sample(teacher_logits=of_teacher)
    config = PolicyLossConfig(distill_coef=0.1, distill_teacher="logits")
    _, metrics = policy_loss_function(
        config, pack([given]), torch.zeros(4, 8), totals=step_totals([given])
    )
    assert metrics.is_nan.tolist() == [False, True]
