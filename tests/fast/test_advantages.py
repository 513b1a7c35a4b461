"""Group-relative and generalised advantages, and whitening, against plain loops; what is
refused.
"""

import itertools
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_pg import (
    Sample,
    filter_overlong,
    gae,
    group_advantages,
    multi_reward_advantages,
    step_totals,
    whiten,
)
from megatron_pg.rollout_files import RewardedSample, with_group_advantages
from megatron_pg.step.advantages import METHODS, half_of_dr_grpo
from tests import critic_oracle
from tests.fast.refusals import assert_refused

LARGEST = 2**63 - 1


def expected_advantages(
    rewards: list[float], groups: list[int], method: str, rollouts: list[int] | None = None
) -> list[float]:
    """Sample by sample, from the rewards of the group's rollouts; None makes each sample one."""
    if method == "reward":
        return rewards
    if rollouts is None:
        rollouts = list(range(len(rewards)))
    advantages = []
    for reward, group in zip(rewards, groups, strict=True):
        of_rollout = {}
        for rollout, other, its_group in zip(rollouts, rewards, groups, strict=True):
            if its_group == group or method == "step_rloo":
                of_rollout[rollout] = other
        members = list(of_rollout.values())
        if len(members) == 1 or max(members) == min(members):
            advantages.append(0.0)
        elif method in ("rloo", "step_rloo"):
            advantages.append(reward - (sum(members) - reward) / (len(members) - 1))
        else:
            mean = sum(members) / len(members)
            deviation = statistics.stdev(members)
            scale = {"grpo": deviation + 1e-6, "dr_grpo": 1.0, "maxrl": mean + 1e-6}[method]
            advantages.append((reward - mean) / scale)
    return advantages


OF_GROUPS = [name for name in METHODS if name not in ("step_rloo", "reward")]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(5))
def test_equal_to_the_loops(method, seed):
    rng = random.Random(seed)
    names = [rng.randrange(-LARGEST - 1, LARGEST) for _ in range(4)] + [LARGEST]
    groups = [rng.choice(names) for _ in range(30)]
    lowest = 0 if method == "maxrl" else -5
    rewards = [rng.choice([0.0, 0.25, 1.0, rng.uniform(lowest, 5)]) for _ in groups]
    found = group_advantages(rewards, groups, method=method)
    assert found.advantages.dtype == torch.float32
    expected = torch.tensor(expected_advantages(rewards, groups, method))
    torch.testing.assert_close(found.advantages, expected, rtol=1e-6, atol=1e-7)
    assert found.num_groups == len(set(groups))


HALF = 0.5**0.5
CUT_IN_THREE = {  # a rollout of three samples has the reward 1, and one of a sample the reward 0
    "grpo": [HALF, HALF, HALF, -HALF],
    "dr_grpo": [0.5, 0.5, 0.5, -0.5],
    "rloo": [1.0, 1.0, 1.0, -1.0],
    "step_rloo": [1.0, 1.0, 1.0, -1.0],
    "maxrl": [1.0, 1.0, 1.0, -1.0],
    "reward": [1.0, 1.0, 1.0, 0.0],
}


def turns_of(rewards: list[float], rollouts: list[int | None], **fields: Any) -> list[Sample]:
    """Samples of one prompt group."""
    pairs = enumerate(zip(rewards, rollouts, strict=True))
    fields = {"group_index": 5, **fields}
    return [
        RewardedSample(
            [1, 2], 1, [1], reward=reward, rollout_id=rollout, name=f"turn {n}", **fields
        )
        for n, (reward, rollout) in pairs
    ]


@pytest.mark.parametrize("method", METHODS)
def test_a_rollout_of_several_samples_counts_once(method):
    rewards, rollouts = [1.0, 1.0, 1.0, 0.0], [7, 7, 7, None]
    samples, step = with_group_advantages(turns_of(rewards, rollouts), method=method)
    found = group_advantages(rewards, [5] * 4, method=method, rollout_ids=rollouts).advantages
    for values in ([float(sample.advantages) for sample in samples], found.tolist()):
        assert values == pytest.approx(CUT_IN_THREE[method], rel=1e-5)
    assert step.num_groups == 1 and step.zero_advantage_groups == ()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(5))
def test_rollouts_of_several_samples_are_equal_to_the_loops(method, seed):
    """The cut changes no advantage, whatever the order of the samples."""
    rng = random.Random(seed)
    cut = []
    for rollout in range(20):
        reward = rng.choice([0.0, 0.25, 1.0, rng.uniform(0, 5)])
        cut += [(reward, rng.randrange(4), rollout - 9)] * rng.randint(1, 4)
    groups = {rollout: group for _, group, rollout in cut}
    rng.shuffle(cut)
    rewards, _, rollouts = map(list, zip(*cut, strict=True))
    members = [groups[rollout] for rollout in rollouts]
    found = group_advantages(rewards, members, method=method, rollout_ids=torch.tensor(rollouts))
    expected = torch.tensor(expected_advantages(rewards, members, method, rollouts))
    torch.testing.assert_close(found.advantages, expected, rtol=1e-6, atol=1e-7)
    once = {rollout: reward for reward, _, rollout in cut}
    whole = group_advantages(list(once.values()), [groups[r] for r in once], method=method)
    of_whole = dict(zip(once, whole.advantages.tolist(), strict=True))
    torch.testing.assert_close(found.advantages, torch.tensor([of_whole[r] for r in rollouts]))
    assert found.zero_advantage_groups == whole.zero_advantage_groups


def test_samples_without_a_group_are_reported_by_rollout():
    turns = turns_of([1.0, 1.0, 0.0], [7, 7, None], group_index=None)
    _, step = with_group_advantages(turns, method="reward")
    assert step.num_groups == 2 and step.zero_advantage_fraction == 0.5


TURNS = turns_of([1.0, 0.0, 0.0], [None, None, None])
ADVANCED = replace(turns_of([1.0], [None], has_advantages=True, advantages=0.3)[0], name="given")
OF_ANOTHER_GROUP = replace(ADVANCED, group_index=6)


def test_given_advantages_of_another_group_stay_as_they_are():
    for method in (*OF_GROUPS, "reward"):
        samples, step = with_group_advantages([*TURNS, OF_ANOTHER_GROUP], method=method)
        expected = expected_advantages([1.0, 0.0, 0.0], [5] * 3, method)
        found = [float(sample.advantages) for sample in samples]
        assert found == pytest.approx([*expected, 0.3], rel=1e-5) and step.num_groups == 1


@pytest.mark.parametrize("method", OF_GROUPS)
@pytest.mark.parametrize("reward", [0.1, 1.0, -7.3, 1e6])
def test_equal_rewards_give_exactly_zero(method, reward):
    """(0.1 + 0.1 + 0.1) / 3 is not 0.1: a mean that rounds must not become an advantage."""
    reward = abs(reward) if method == "maxrl" else reward
    found = group_advantages([reward] * 3 + [0.0, 1.0], [5, 5, 5, -2, -2], method=method)
    assert found.advantages[:3].tolist() == [0.0, 0.0, 0.0]
    assert found.advantages[3] < 0 < found.advantages[4]
    assert found.zero_advantage_groups == (5,)
    assert found.zero_advantage_fraction == 0.5


@pytest.mark.parametrize("method", ["dr_grpo", "rloo"])
@pytest.mark.parametrize("spread", [1e-10, 1e-6, 1e-3])
def test_rewards_that_are_nearly_equal_are_not_equal(method, spread):
    rewards, groups = [0.0, spread, spread / 4], [4, 4, 4]
    found = group_advantages(rewards, groups, method=method)
    expected = torch.tensor(expected_advantages(rewards, groups, method))
    torch.testing.assert_close(found.advantages, expected, rtol=1e-6, atol=0)
    assert found.zero_advantage_groups == ()


def test_groups_are_named_by_their_whole_ids():
    """Ids that are the same number but for the bits above 32."""
    groups = [-LARGEST - 1, 7 + 2**40, 7, LARGEST, LARGEST, 7, 7 + 2**40]
    found = group_advantages([1.0, 2.0, 0.0, 1.0, 1.0, 5.0, 2.0], groups)
    assert found.zero_advantage_groups == (-LARGEST - 1, 7 + 2**40, LARGEST)
    assert found.num_groups == 4


def test_the_step_is_one_group_and_groups_are_reported_as_they_are():
    found = group_advantages([1.0, 0.0, 0.5, 0.5, 0.5], [3, 3, 4, 4, 5], method="step_rloo")
    assert found.advantages.tolist() == [0.625, -0.625, 0.0, 0.0, 0.0]
    assert found.num_groups == 3 and found.zero_advantage_groups == (4, 5)
    equal = group_advantages([0.1] * 3, [1, 2, 3], method="step_rloo")
    assert equal.advantages.tolist() == [0.0] * 3
    bare = group_advantages([0.0, 0.5, 0.5], [1, 2, 2], method="reward")
    assert bare.advantages.tolist() == [0.0, 0.5, 0.5] and bare.zero_advantage_groups == (1,)


@pytest.mark.parametrize("method", OF_GROUPS)
def test_a_lone_sample_has_advantage_zero(method):
    found = group_advantages([3.0, 0.0, 1.0], [9, 4, 4], method=method)
    assert found.advantages[0] == 0.0
    assert found.zero_advantage_groups == (9,)


def test_a_step_without_samples():
    found = group_advantages([], [])
    assert found.advantages.shape == (0,) and found.num_groups == 0
    assert found.zero_advantage_groups == () and found.zero_advantage_fraction == 0.0


@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "rloo"])
def test_equal_rewards_are_never_too_far_apart(method):
    equal = group_advantages([1e308] * 4, [7] * 4, method=method)
    assert equal.advantages.tolist() == [0.0] * 4


NO_IDS = [math.nan, 0.5, True, 1 + 2j]
"""Such as rows without a group, from a table whose column is float for their sake: not one
group."""


OVERLONG = [Sample([1, 2, 3], 2, [1, 1], 0.5, name=name) for name in ("cut", "ended")]
PROMPTS = [[1, 2], [1, 2], [3, 4], [3, 4]]
ZERO_ONE = [0.0, 1.0]
TOO_FAR = "too far  | prompt group 7"
NAN = math.nan
# (function, its arguments, its keywords, words of the refusal)
REFUSED: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (group_advantages, (ZERO_ONE, [0, 0, 0]), {}, "rewards has shape [2] and group_indices [3]"),
    (group_advantages, (torch.zeros(1, 2), torch.zeros(1, 2).long()), {},
     "rewards has shape [1, 2] and group_indices [1, 2]"),
    (group_advantages, (ZERO_ONE, [0, 0]), {"method": "gae"},
     "method is 'gae', expected one of grpo, dr_grpo, rloo"),
    (group_advantages, ([0.0, -0.5], [0, 0]), {"method": "maxrl"},
     "rewards[1] is -0.5, expected 0 or more: maxrl divides"),
    *((group_advantages, ([0.0, value], [0, 0]), {},
       "rewards[1] is  | expected a finite number") for value in (NAN, math.inf, -math.inf)),
    *((group_advantages, (ZERO_ONE, ids([value] * 2)), {}, "group_indices has dtype")
      for value in NO_IDS for ids in (list, torch.tensor)),
    # Their squares, or their advantages, would be infinite.
    *((group_advantages, ([0.5, 0.0, reward, 0.0], [1, 1, 7, 7]), {"method": method},
       f"rewards[2] is {reward}, {TOO_FAR}")
      for method, reward in (("grpo", 1e200), ("dr_grpo", 1e39), ("rloo", 1e39))),
    (group_advantages, (ZERO_ONE * 2, [0] * 4), {"prompts": PROMPTS},
     "group_index 0 is given to rewards[0] | rewards[2]"),
    (group_advantages, (ZERO_ONE * 2, [0, 0, 1, 1]), {"prompts": PROMPTS[:3]},
     "3 prompts for 4 rewards"),
    # A rollout has one reward and one group.
    *((with_group_advantages, (turns_of([1.0, 0.0, 0.25], [7, None, 7]),), {"method": method},
       "rollout_id 7 has the rewards 1.0 (turn 0) and 0.25 (turn 2). Give all samples of a rollout")
      for method in METHODS),
    (group_advantages, ([1.0, 0.0, 0.25], [5, 5, 5]), {"rollout_ids": [7, 8, 7]},
     "rollout_id 7 has the rewards 1.0 (rewards[0]) and 0.25 (rewards[2])"),
    (group_advantages, ([1.0, 0.0, 1.0], [5, 5, 6]), {"rollout_ids": [7, 8, 7]},
     "rollout_id 7 has samples of group_index 5 and 6 | rewards[0] | rewards[2]"),
    (group_advantages, ([1.0] * 3, [5] * 3), {"rollout_ids": [1, 2]},
     "2 rollout_ids for 3 rewards"),
    (group_advantages, ([1.0] * 2, [5] * 2), {"rollout_ids": [1, 0.5]},
     "rollout_ids[1] is 0.5, expected an integer"),
    # Rewards are not compared with given advantages: without the fourth reward, 1, the others would
    # have the advantages 0.667, -0.333, -0.333.
    *((with_group_advantages, (samples,), {"method": method},
       f"given has advantages and turn 0 only a reward, both of prompt group 5. | {method}")
      for method in OF_GROUPS for samples in ([*TURNS, ADVANCED], [ADVANCED, *TURNS])),
    (with_group_advantages, ([*TURNS, OF_ANOTHER_GROUP],), {"method": "step_rloo"},
     "given has advantages and turn 0 only a reward, both of the step"),
    (with_group_advantages, ([replace(turn, rollout_id=2) for turn in (TURNS[0], ADVANCED)],),
     {"method": "reward"}, "both of rollout_id 2"),
    (filter_overlong, (OVERLONG, [True]), {}, "is_overlong has 1 flags for 2 samples"),
    # Of several rewards.
    (multi_reward_advantages, ({}, [0, 0]), {}, "rewards is empty"),
    (multi_reward_advantages, ({"a": [0, 1], "b": [0, 1]}, [0, 0]), {"weights": {"a": 1.0}},
     "weights is {'a': 1.0}, expected a finite number for each of a, b"),
    (multi_reward_advantages, ({"a": [0, 1]}, [0, 0]), {"weights": {"a": NAN}},
     "weights is {'a': nan}"),
    (multi_reward_advantages, ({"a": [0, 1]}, [0, 0]), {"method": "reward"},
     "method is 'reward', expected one of grpo,"),
    (multi_reward_advantages, ({"a": [0, 1], "b": [0, NAN]}, [0, 0]), {},
     "reward 'b': rewards[1] is nan"),
    (multi_reward_advantages, ({"a": [0, 1]}, [0, 0]), {"rollout_ids": [7, 7]},
     "reward 'a': rollout_id 7 has the rewards 0.0 (rewards[0]) and 1.0 (rewards[1])"),
]  # fmt: skip


def test_prompts_that_agree_with_their_groups_change_nothing():
    rewards, groups = ZERO_ONE * 2, [0, 0, 1, 1]
    given = group_advantages(rewards, groups, prompts=PROMPTS)
    assert torch.equal(given.advantages, group_advantages(rewards, groups).advantages)


@pytest.mark.parametrize(("function", "arguments", "keywords", "words"), REFUSED)
def test_bad_calls_are_refused(function, arguments, keywords, words):
    assert_refused(words, function, *arguments, **keywords)


def test_overlong_samples_are_masked_and_still_counted():
    filtered = filter_overlong(OVERLONG, [True, False])
    assert [s.loss_mask.tolist() for s in filtered] == [[False, False], [True, True]]
    assert filtered[1] is OVERLONG[1]
    assert OVERLONG[0].loss_mask.all(), "the sample that was given is left as it was"
    totals = step_totals(filtered)
    assert (totals.num_rollouts, totals.num_active_tokens) == (2, 2)


def test_half_of_dr_grpo_is_remarked_on_and_names_the_other_half():
    means = ("sample_mean", "prompt_mean", "token_mean")
    pairs = itertools.product((*METHODS, "gae"), (*means, "constant"))
    halves = {pair for pair in pairs if half_of_dr_grpo(*pair)}
    assert halves == {("grpo", "constant"), *(("dr_grpo", mean) for mean in means)}
    assert "Use --advantage dr_grpo for the other half" in half_of_dr_grpo("grpo", "constant")
    other = "Use --loss-aggregation constant with --loss-aggregation-divisor"
    assert other in half_of_dr_grpo("dr_grpo", "token_mean")


# Generalised advantage estimation.

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


def check_gae(estimate: Any, gamma: float, lam: float, **decoupled: float) -> None:
    given = responses()
    found = estimate(**given, gamma=gamma, lam=lam, **decoupled)
    for index in range(len(LENGTHS)):
        one = [given[name][index] for name in ("rewards", "values", "loss_mask")]
        bootstrap, num_active, policy_lam = given["bootstrap_values"][index], sum(one[2]), lam
        if alpha := decoupled.get("lam_alpha"):
            policy_lam = 1 - 1 / (alpha * num_active) if alpha * num_active > 1 else 0.0
        advantages, _ = critic_oracle.gae(*one, gamma, policy_lam, bootstrap)
        _, returns = critic_oracle.gae(*one, gamma, decoupled.get("value_lam", lam), bootstrap)
        assert found.advantages[index].tolist() == pytest.approx(advantages, rel=1e-6, abs=1e-6)
        assert found.returns[index].tolist() == pytest.approx(returns, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_advantages_and_returns_equal_the_sums_that_define_them(gamma, lam):
    check_gae(gae, gamma, lam)


@pytest.mark.parametrize("decoupled", [
    {"value_lam": 1.0}, {"lam_alpha": 0.3}, {"value_lam": 0.0, "lam_alpha": 0.3},
    {"lam_alpha": 0.05}, {"lam_alpha": 50.0},
])  # fmt: skip
def test_decoupled_and_length_adaptive_lambdas(decoupled):
    """Of VAPO. At 0.05 every response here is shorter than 1 / alpha, and lambda is 0."""
    check_gae(gae, 0.9, 0.6, **decoupled)


def coupled(**given: Any) -> Any:
    """The returns have the lambda of the advantages."""
    found = gae(**given)
    returns = [
        torch.as_tensor(v) + a for v, a in zip(given["values"], found.advantages, strict=True)
    ]
    kept = zip(returns, given["loss_mask"], strict=True)
    return replace(found, returns=[r * torch.tensor(mask) for r, mask in kept])


def test_mutant_returns_of_the_advantages_lambda_are_seen():
    with pytest.raises(AssertionError):
        check_gae(coupled, 0.9, 0.6, value_lam=1.0)


def masked_tokens_as_steps(**given: Any) -> Any:
    """A tool's tokens decay the advantage and have values of their own."""
    ones = [[1] * len(mask) for mask in given["loss_mask"]]
    return gae(**{**given, "loss_mask": ones})


def without_bootstrap(**given: Any) -> Any:
    """A response that was cut is taken for one that ended."""
    return gae(**{**given, "bootstrap_values": None})


@pytest.mark.parametrize("mutant", [masked_tokens_as_steps, without_bootstrap])
def test_mutant_a_wrong_estimate_is_seen(mutant):
    with pytest.raises(AssertionError):
        check_gae(mutant, 0.9, 0.95)


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


GIVEN = {"rewards": [[0.0, 1.0]], "values": [[0.0, 0.0]], "loss_mask": [[1, 1]]}


@pytest.mark.parametrize(("changes", "words"), [
    ({"gamma": 1.01}, "--gamma must be a finite number >= 0 and <= 1, not 1.01"),
    ({"lam": NAN}, "--lam must be"),
    ({"value_lam": -0.1, "lam_alpha": 0.0},
     "--value-lam must be | --lam-alpha must be a finite number > 0, not 0"),
    ({"values": [[0.0, NAN]]}, "values[0][1] is nan at an active token"),
    ({"rewards": [[NAN, 0.0]]}, "rewards[0][0] is nan at an active token"),
    ({"values": [[0.0]]}, "values[0] has shape [1], expected [2]"),
    ({"rewards": [[0.0, 0.0]] * 2}, "rewards has 2 rows and loss_mask 1"),
    ({"loss_mask": [[1, 2]]}, "loss_mask[0][1] is 2.0, expected 0 or 1"),
    *(({"loss_mask": [[1, 0]], "rewards": [[0.0, reward]]},
       f"rewards[0][1] is {reward} at a token that the loss mask drops") for reward in (1.0, -0.5)),
    ({"bootstrap_values": [NAN]}, "bootstrap_values[0] is nan"),
    ({"bootstrap_values": [0.0, 0.0]}, "bootstrap_values[0] has shape [2], expected [1]"),
])  # fmt: skip
def test_bad_calls_of_gae_are_refused(changes, words):
    assert_refused(words, gae, **{**GIVEN, **changes})


def expected_of_rewards(
    rewards: dict[str, list[float]],
    groups: list[int],
    rollouts: list[int],
    weights: dict[str, float],
    *,
    normalize: bool = True,
    method: str = "grpo",
) -> list[float]:
    """The weighted sum of each reward's own advantages, over its deviation over the rollouts."""
    parts = {
        name: expected_advantages(values, groups, method, rollouts)
        for name, values in rewards.items()
    }
    sums = [sum(weights[name] * parts[name][n] for name in parts) for n in range(len(groups))]
    deviation = statistics.stdev(dict(zip(rollouts, sums, strict=True)).values())
    return [total / (deviation + 1e-6) if normalize else total for total in sums]


def check_several_rewards(seed: int, wrong: dict[str, Any] | None = None, **options: Any) -> None:
    """`wrong` are arguments of the mutant."""
    rng, cut = random.Random(seed), []
    for rollout in range(16):
        pair = (rng.choice([0.0, 1.0, rng.uniform(0, 2)]), rng.choice([0.0, 100.0]))
        cut += [(*pair, rng.randrange(4), rollout)] * rng.randint(1, 3)
    rng.shuffle(cut)
    correct, brief, groups, rollouts = map(list, zip(*cut, strict=True))
    rewards, weights = {"correct": correct, "brief": brief}, {"correct": 1.0, "brief": 0.25}
    given: dict[str, Any] = {"weights": weights, "rollout_ids": rollouts, **options}
    found = multi_reward_advantages(rewards, groups, **(given | (wrong or {})))
    expected = expected_of_rewards(rewards, groups, rollouts, weights, **options)
    torch.testing.assert_close(found.advantages, torch.tensor(expected), rtol=1e-5, atol=1e-6)
    still = {
        g for g in groups if not any(a for a, h in zip(expected, groups, strict=True) if h == g)
    }
    assert found.num_groups == len(set(groups)) and {*found.zero_advantage_groups} == still


@pytest.mark.parametrize("method", OF_GROUPS)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_several_rewards_are_equal_to_the_loops(seed, normalize, method):
    check_several_rewards(seed, normalize=normalize, method=method)


@pytest.mark.parametrize("wrong", [
    {"rollout_ids": None}, {"weights": None}, {"normalize": False}, {"method": "dr_grpo"},
], ids=str)  # fmt: skip
def test_a_wrong_sum_of_rewards_is_seen(wrong):
    """Samples as rollouts, no weights, no deviation of the step, none of the group."""
    with pytest.raises(AssertionError):
        check_several_rewards(0, wrong)


def test_rewards_that_a_sum_would_hide_are_told_apart():
    """The example of GDPO's figure 2: 2 rewards are worth more than 1, in a group of 2 rollouts."""
    rewards = {"a": [0.0, 1.0, 0.0, 1.0], "b": [0.0, 0.0, 0.0, 1.0]}
    found = multi_reward_advantages(rewards, [0, 0, 1, 1], normalize=False).advantages
    assert found.tolist() == pytest.approx([-HALF, HALF, -2 * HALF, 2 * HALF], rel=1e-5)
    total = [a + b for a, b in zip(*rewards.values(), strict=True)]
    of_sum = group_advantages(total, [0, 0, 1, 1]).advantages
    assert of_sum.tolist() == pytest.approx([-HALF, HALF] * 2, rel=1e-5)
