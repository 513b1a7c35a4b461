"""Generalised advantage estimation and whitening, against plain loops; what is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from megatron_pg import gae, whiten
from tests import critic_oracle

LENGTHS = [1, 7, 0, 4, 12, 3]


def responses(seed: int = 0) -> dict[str, Any]:
    """Ragged responses with masked tokens inside and at the ends; one is masked as a whole."""
    rng = random.Random(seed)
    masks = [[int(rng.random() < 0.7) for _ in range(length)] for length in LENGTHS]
    masks[0], masks[3] = [1], [0] * 4
    masks[4][0] = masks[4][-1] = 0
    return {
        "rewards": [[rng.uniform(-1, 1) * keep for keep in mask] for mask in masks],
        "values": [[rng.uniform(-1, 1) for _ in mask] for mask in masks],
        "loss_mask": masks,
        "bootstrap_values": [rng.uniform(-1, 1) * (index % 2) for index in range(len(masks))],
    }


def check(estimate: Any, gamma: float, lam: float) -> None:
    given = responses()
    found = estimate(**given, gamma=gamma, lam=lam)
    for index in range(len(LENGTHS)):
        one = (given[name][index] for name in ("rewards", "values", "loss_mask"))
        advantages, returns = critic_oracle.gae(*one, gamma, lam, given["bootstrap_values"][index])
        assert found.advantages[index].tolist() == pytest.approx(advantages, rel=1e-6, abs=1e-6)
        assert found.returns[index].tolist() == pytest.approx(returns, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_advantages_and_returns_equal_the_sums_that_define_them(gamma, lam):
    check(gae, gamma, lam)


def masked_tokens_as_steps(**given: Any) -> Any:
    """A tool's tokens decay the advantage and have values of their own."""
    ones = [[1] * len(mask) for mask in given["loss_mask"]]
    return gae(**{**given, "loss_mask": ones})


def without_bootstrap(**given: Any) -> Any:
    """A response that was cut is taken for one that ended."""
    return gae(**{**given, "bootstrap_values": None})


@pytest.mark.parametrize("mutant", [masked_tokens_as_steps, without_bootstrap])
def test_a_wrong_estimate_is_seen(mutant):
    with pytest.raises(AssertionError):
        check(mutant, 0.9, 0.95)


def test_a_response_that_is_masked_as_a_whole_may_keep_its_reward():
    """As `filter_overlong` leaves it; it has neither advantages nor returns."""
    found = gae([[0.0, 1.0]], [[0.5, 0.5]], [[0, 0]])
    assert found.advantages[0].tolist() == found.returns[0].tolist() == [0.0, 0.0]


def test_no_response_and_values_of_masked_tokens_that_are_not_read():
    assert gae([], [], []).advantages == []
    found = gae([[1.0, 0.0]], [[0.5, float("nan")]], [[1, 0]])
    assert found.advantages[0].tolist() == [0.5, 0.0]


def test_whitening_has_mean_0_and_deviation_1_over_the_active_tokens():
    given = responses(1)
    advantages = gae(**given).advantages
    is_active = torch.tensor(sum(given["loss_mask"], [])).bool()
    active = torch.cat(advantages)[is_active].tolist()
    mean = sum(active) / len(active)
    deviation = (sum((a - mean) ** 2 for a in active) / (len(active) - 1) + 1e-8) ** 0.5
    found = torch.cat(whiten(advantages, given["loss_mask"]))
    expected = torch.tensor([(a - mean) / deviation for a in active])
    torch.testing.assert_close(found[is_active], expected, rtol=1e-6, atol=1e-6)
    assert not found[~is_active].any()


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5], []])
def test_equal_advantages_become_zeros(values):
    (found,) = whiten([torch.tensor(values)], [[1] * len(values)])
    assert found.tolist() == [0.0] * len(values)


NAN = float("nan")
GIVEN = {"rewards": [[0.0, 1.0]], "values": [[0.0, 0.0]], "loss_mask": [[1, 1]]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gamma": 1.01}, "--gamma must be a finite number >= 0 and <= 1; found 1.01"),
        ({"lam": NAN}, "--lam must be"),
        ({"values": [[0.0, NAN]]}, r"values\[0\]\[1\] is nan at an active token"),
        ({"rewards": [[NAN, 0.0]]}, r"rewards\[0\]\[0\] is nan at an active token"),
        ({"values": [[0.0]]}, r"values\[0\] has shape \[1\], expected \[2\]"),
        ({"rewards": [[0.0, 0.0]] * 2}, "rewards has 2 responses and loss_mask 1"),
        ({"loss_mask": [[1, 2]]}, r"loss_mask\[0\]\[1\] is 2.0, expected 0 or 1"),
        ({"loss_mask": [[1, 0]]}, r"rewards\[0\]\[1\] is 1.0 at a token that the loss mask drops"),
        ({"loss_mask": [[1, 0]], "rewards": [[0.0, -0.5]]}, r"rewards\[0\]\[1\] is -0.5 at a token that"),
        ({"bootstrap_values": [NAN]}, r"bootstrap_values\[0\] is nan"),
        ({"bootstrap_values": [0.0, 0.0]}, r"bootstrap_values\[0\] has shape \[2\], expected \[1\]"),
    ],
)  # fmt: skip
def test_refusals(changes, message):
    with pytest.raises(ValueError, match=message):
        gae(**{**GIVEN, **changes})
