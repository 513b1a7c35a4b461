"""The studies' parts whose errors a table of results would not show: runs that go on, roundings."""

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("reasoning_gym")

from benchmarks.studies import llama, pool, table


@pytest.mark.full
def test_runs_go_on_where_the_time_ended_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.csv"

    def job(name: str, function: Any) -> pool.Job:
        def finish(result: Any, seconds: float) -> None:
            table.append(path, {"arm": name, "status": str(result).splitlines()[-1]})

        return pool.Job(name, 1, function, finish)

    def quick(folder: str, device: None) -> str | int:
        return 40

    def fails(folder: str, device: None) -> None:
        raise ValueError("no such arm")

    def slow(folder: str, device: None) -> None:
        os.write(1, b"step 3 of 96\n")
        time.sleep(600)

    jobs = [job("quick", quick), job("fails", fails), job("slow", slow), job("not begun", quick)]
    left = pool.run(jobs, 1, 20.0, 0.0)
    assert sorted(job.name for job in left) == ["not begun", "slow"]
    rows = {row["arm"]: row["status"] for row in table.read(path)}
    assert rows == {"quick": "40", "fails": "ValueError: no such arm"}
    cut = r"slow, seed 1: cut off after \d+ s, step 3 of 96"
    assert re.search(cut, capsys.readouterr().out)


@pytest.mark.parametrize(("seconds", "longest"), [(60.0, 0.0), (0.0, 60.0)])
def test_a_run_that_cannot_end_gives_way_to_one_that_can(seconds: float, longest: float) -> None:
    ended = []

    def job(name: str, expected: float) -> pool.Job:
        def function(folder: str, device: None) -> None:
            return None

        def finish(result: None, seconds: float) -> None:
            ended.append(name)

        return pool.Job(name, 1, function, finish, seconds=expected)

    began = time.monotonic()
    left = pool.run([job("long", seconds), job("short", 0.1)], 1, 30.0, longest)
    assert ([job.name for job in left], ended) == (["long"], ["short"])
    assert time.monotonic() - began < 25, "it does not wait where nothing can start"


@pytest.mark.parametrize(("name", "most"), [("int8", 255), ("fp8", 255), ("int4", 16)])
def test_roundings_are_near_and_have_few_values(name: str, most: int) -> None:
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(1))
    rounded = llama.ROUNDINGS[name](weight)
    error = (rounded - weight).abs().max() / weight.abs().max()
    assert 0 < error < {"int8": 0.005, "fp8": 0.04, "int4": 0.08}[name]
    groups = rounded.view(-1, llama.INT4_GROUP if name == "int4" else 128)
    assert max(len(group.unique()) for group in groups) <= most
    torch.testing.assert_close(llama.ROUNDINGS[name](rounded), rounded, rtol=1e-5, atol=1e-6)
