"""The studies' parts whose errors a table of results would not show: mistakes put back, runs that go on, curves, roundings."""

import functools
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("reasoning_gym")

from benchmarks.studies import llama, pool, report, table
from benchmarks.studies.mistakes import MISTAKES
from megatron_pg import PolicyLossConfig, Sample, pack
from megatron_pg.loss import micro_batch
from megatron_pg.loss.from_logits import policy_loss_from_log_probs
from megatron_pg.step.totals import sample_counts, totals_of_counts


def loss_of(losses: list[list[float]], *other_ranks: list[Sample]) -> float:
    """The loss of one micro-batch whose tokens have these losses, as negative log-probs of advantage 1."""
    samples = [Sample([0] * (len(x) + 1), len(x), [1] * len(x), 1.0) for x in losses]
    config = PolicyLossConfig(policy_loss="sft", loss_aggregation="token_mean")
    log_probs = -torch.tensor([value for row in losses for value in row])
    totals = totals_of_counts([sample_counts(part) for part in (samples, *other_ranks)], 0)
    loss, _ = policy_loss_from_log_probs(config, pack(samples), log_probs, None, totals=totals)
    return float(loss)


def test_open_instructs_two_for_one_point_two(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = [[3.0], [1.0] * 9]
    assert loss_of(losses) == pytest.approx(1.2, rel=1e-6)
    monkeypatch.setattr(micro_batch, "host_weights", micro_batch.host_weights)
    MISTAKES["sequence_mean"].apply()
    assert loss_of(losses) == pytest.approx(2.0, rel=1e-6)


def test_a_rank_that_divides_by_its_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    other = [Sample([0] * 31, 30, [1] * 30, 1.0)]
    assert loss_of([[2.0] * 10], other) == pytest.approx(20 / 40, rel=1e-6)
    monkeypatch.setattr(micro_batch, "host_weights", micro_batch.host_weights)
    MISTAKES["local_denominator"].apply()
    assert loss_of([[2.0] * 10], other) == pytest.approx(20 / 10 / 2, rel=1e-6)


def test_runs_go_on_where_the_time_ended_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.csv"

    def job(name: str, function: Any) -> pool.Job:
        def finish(result: Any, seconds: float) -> None:
            table.append(path, {"arm": name, "status": str(result).splitlines()[-1]})

        return pool.Job(name, 1, 2, function, finish)

    def quick(rank: int, folder: str, device: None) -> str | int:
        return rank + 40

    def fails(rank: int, folder: str, device: None) -> None:
        raise ValueError("no such arm")

    def slow(rank: int, folder: str, device: None) -> None:
        os.write(1, b"step 3 of 96\n")
        time.sleep(600)

    jobs = [job("quick", quick), job("fails", fails), job("slow", slow), job("not begun", quick)]
    left = pool.run(jobs, 2, 20.0, 0.0)
    assert sorted(job.name for job in left) == ["not begun", "slow"]
    rows = {row["arm"]: row["status"] for row in table.read(path)}
    assert rows == {"quick": "40", "fails": "ValueError: no such arm"}
    cut = r"slow, seed 1: cut off after \d+ s, step 3 of 96"
    assert re.search(cut, capsys.readouterr().out)


@pytest.mark.parametrize(("seconds", "longest"), [(60.0, 0.0), (0.0, 60.0)])
def test_a_run_that_cannot_end_gives_way_to_one_that_can(seconds: float, longest: float) -> None:
    ended = []

    def job(name: str, expected: float) -> pool.Job:
        def function(rank: int, folder: str, device: None) -> None:
            return None

        def finish(result: None, seconds: float) -> None:
            ended.append(name)

        return pool.Job(name, 1, 1, function, finish, seconds=expected)

    began = time.monotonic()
    left = pool.run([job("long", seconds), job("short", 0.1)], 1, 30.0, longest)
    assert ([job.name for job in left], ended) == (["long"], ["short"])
    assert time.monotonic() - began < 25, "it does not wait where nothing can start"


def test_a_curve_is_noticed_outside_of_the_right_seeds_in_two_blocks() -> None:
    right = [{"reward": "0.1 0.2 0.3 0.4"}, {"reward": "0.2 0.3 0.4 0.5"}]
    notice = functools.partial(report.noticed, right, columns=["reward"], block=8)
    assert notice({"reward": "0.24 0.34 0.44 0.54"}) is None, "half of the range beside it"
    assert notice({"reward": "0.1 0.36 0.3 0.4"}) is None, "one block alone"
    assert notice({"reward": "0.1 0.2 0.46 0.56"}) == 24


@pytest.mark.parametrize(("name", "most"), [("int8", 255), ("fp8", 255), ("int4", 16)])
def test_roundings_are_near_and_have_few_values(name: str, most: int) -> None:
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(1))
    rounded = llama.ROUNDINGS[name](weight)
    error = (rounded - weight).abs().max() / weight.abs().max()
    assert 0 < error < {"int8": 0.005, "fp8": 0.04, "int4": 0.08}[name]
    groups = rounded.view(-1, llama.INT4_GROUP if name == "int4" else 128)
    assert max(len(group.unique()) for group in groups) <= most
    torch.testing.assert_close(llama.ROUNDINGS[name](rounded), rounded, rtol=1e-5, atol=1e-6)
