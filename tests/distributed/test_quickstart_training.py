"""The training steps of the quickstart: advantages, means, its fused head and its critic."""

import dataclasses
import itertools
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
import tasks
import torch
import train_grpo
from run_log import checkpoints

from megatron_pg import PolicyLossConfig, Sample
from tests.distributed.launch import run_ranks
from tests.distributed.quickstart_run import parse_for_two_ranks, run, steps_of

pytestmark = pytest.mark.full


def test_lengths_of_right_and_wrong_answers_are_means_over_all_ranks() -> None:
    for means, all_wrong in run_ranks(means_of_answers, 2):
        assert means == {
            "reward": 0.25,
            "response_length": (2 + 4 + 6 + 9) / 4,
            "response_length_right": 4,
            "response_length_wrong": (2 + 6 + 9) / 3,
        }
        assert all_wrong["response_length_right"] is None


def new_run(flags: str) -> train_grpo.Run:
    args = parse_for_two_ranks(flags)
    train_grpo.start_megatron(args)
    return train_grpo.Run(args)


def samples_of_lengths(*lengths: int, **fields: Any) -> list[Sample]:
    """Responses of three tokens each, all from one old policy."""
    given = {"loss_mask": torch.ones(3), "advantages": 1.0, "old_log_probs": torch.full((3,), -2.4)}
    return [
        Sample(tokens=torch.arange(n) % 11, response_length=3, group_index=n, **(given | fields))
        for n in lengths
    ]


def means_of_answers() -> tuple[dict[str, Any], dict[str, Any]]:
    """Two answers on each of two data-parallel ranks; then only the wrong ones."""
    worker = new_run("").worker
    lengths, rewards = [((2, 4), (0.0, 1.0)), ((6, 9), (0.0, 0.0))][worker.groups.data_rank]
    answers = [Sample([1] * (n + 1), response_length=n, loss_mask=[1] * n) for n in lengths]
    wrong = [answer for answer, reward in zip(answers, rewards, strict=True) if not reward]
    return worker.means(answers, rewards), worker.means(wrong, [0.0] * len(wrong))


ONE_RIGHT = {  # advantages of the rewards 1, 0, 0, 0
    "grpo": [1.5, -0.5, -0.5, -0.5],
    "dr_grpo": [0.75, -0.25, -0.25, -0.25],
    "rloo": [1.0, -1 / 3, -1 / 3, -1 / 3],
    "maxrl": [3.0, -1.0, -1.0, -1.0],
    "step_rloo": [1.0, -1 / 3, -1 / 3, -1 / 3],
    "reward": [1.0, 0.0, 0.0, 0.0],
}
TWO_OF_EIGHT = {"step_rloo": [6 / 7, -2 / 7, -2 / 7, -2 / 7]}  # over the two ranks
WHITENED = "reward --whiten-advantages"  # REINFORCE++


def test_advantages_are_those_that_the_flag_names() -> None:
    ranks = run_ranks(advantages_by_flag, 2, [*ONE_RIGHT, WHITENED])
    for found in ranks:
        for method, expected in (ONE_RIGHT | TWO_OF_EIGHT).items():
            advantages = [advantage for advantage, _ in found[method]]
            assert advantages == pytest.approx(expected, rel=1e-5), method
    whitened = [pair for found in ranks for pair in found[WHITENED]]
    tokens = [reward for _, n in whitened[::4] for reward in [1.0] * n]
    tokens += [0.0 for place, (_, n) in enumerate(whitened) if place % 4 for _ in range(n)]
    mean, deviation = statistics.mean(tokens), statistics.stdev(tokens)
    expected = [((1.0 if place % 4 == 0 else 0.0) - mean) / deviation for place in range(8)]
    assert [advantage for advantage, _ in whitened] == pytest.approx(expected, rel=1e-5)


def advantages_by_flag(methods: list[str]) -> dict[str, list[tuple[float, int]]]:
    """The advantage of each answer's first token, and its length."""
    worker, found = new_run("").worker, {}
    rewards = itertools.cycle([1.0, 0.0, 0.0, 0.0])
    worker.tasks.reward = lambda entry, answer: next(rewards)
    for method in methods:
        worker.args = parse_for_two_ranks(f"--advantage {method}")
        samples = worker.with_advantages(*worker.collect(worker.tasks.held_out[:2], 4))
        found[method] = [(float(s.advantages[0]), s.response_length) for s in samples]
    return found


def test_a_step_without_an_active_token_updates_nothing() -> None:
    for before, metrics, unchanged in run_ranks(step_without_active_token, 2):
        assert before["grad_norm"] > 0.0
        assert metrics == {}
        assert unchanged


def step_without_active_token() -> tuple[dict[str, float], dict[str, float], bool]:
    run = new_run("--context-parallel-size 2")
    config = PolicyLossConfig(loss_aggregation="prompt_mean")
    first = run.train_step(config, samples_of_lengths(5, 7, 8), lr=1e-3)
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    masked = samples_of_lengths(5, 7, 8, loss_mask=torch.zeros(3))
    metrics = run.train_step(config, masked, lr=1e-3)
    return first, metrics, all(map(torch.equal, before, run.model.parameters()))


def two_steps(flags: str) -> list[dict[str, float]]:
    run = new_run(f"--context-parallel-size 2 {flags}")
    samples = [
        dataclasses.replace(sample, advantages=sample.total_length - 6.0)
        for sample in samples_of_lengths(5, 7, 8, loss_mask=torch.tensor([1, 0, 1]))
    ]
    return [run.train_step(run.config, samples, lr=1e-2) for _ in range(2)]


def test_two_steps_equal_those_on_logits() -> None:
    expected = run_ranks(two_steps, 2, "")[0]
    found = run_ranks(two_steps, 2, "--fused-lm-head --fp32-lm-head")[0]
    for step, (fused, plain) in enumerate(zip(found, expected, strict=True)):
        assert fused.keys() == plain.keys()
        for name, value in plain.items():
            assert fused[name] == pytest.approx(value, rel=1e-4, abs=1e-6), (step, name)
    assert expected[0]["loss"] != pytest.approx(expected[1]["loss"], rel=1e-3), "it trains"


CRITIC = "--advantage gae --whiten-advantages --lam-alpha 0.5 --train-iters 6 --save-interval 2"
CRITIC += " --kl-loss-coef 0.5 --kl-target 0.001 --kl-horizon 16"


def even_lengths_win(rank: int) -> None:
    """A reward that a model this little trained finds by chance."""
    tasks.Tasks.reward = lambda self, entry, answer: float(len(answer) % 2 == 0)


def test_a_resumed_critic_goes_on_where_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, CRITIC, even_lengths_win)
    steps = steps_of(folder)
    assert len(steps) == 6
    for step in steps:
        assert step["value_aggregation_checksum"] == pytest.approx(1.0, abs=1e-9)
        assert step["aggregation_checksum"] == pytest.approx(1.0, abs=1e-9)
        assert step["advantage"] == pytest.approx(0.0, abs=0.5)
    # A head of zeros explains nothing and is half the mean square away from returns of 0 and 1.
    first, last = steps[0], steps[-1]
    assert first["value"] == 0.0 and first["value_clipfrac"] == 0.0
    assert first["value_loss"] == pytest.approx(first["return"] / 2, rel=0.2)
    assert first["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert last["value"] != 0.0
    # The reference is the policy of the first step. A step has as many rollouts as the horizon.
    coefficients = [step["kl_loss_coef"] for step in steps]
    assert coefficients[:2] == [0.5, pytest.approx(0.4)] and len({*coefficients}) == 6
    for late in checkpoints(folder)[-1:]:
        shutil.rmtree(late)
    run(folder, f"{CRITIC} --resume", even_lengths_win)
    assert steps_of(folder) == steps
