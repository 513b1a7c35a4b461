"""Idle times of a GPU, and the host's part in them, of a trace written by hand."""

import json
import runpy
from pathlib import Path

import pytest

from benchmarks.idle_time import CLOCK, Activity, Span, activities_of, ahead, idle_times, overlap

ROOT = Path(__file__).parents[2]


def event(cat: str, name: str, begin: float, length: float, correlation: int) -> dict:
    """Microseconds, as in a trace."""
    arguments = {"correlation": correlation}
    return {"cat": cat, "name": name, "ts": begin, "dur": length, "args": arguments}


TRACE = [
    event("cuda_runtime", "cudaLaunchKernel", 500, 5, 1),
    event("kernel", f"{CLOCK}(long)", 510, 1, 1),
    event("cuda_runtime", "cudaLaunchKernel", 1000, 5, 2),
    event("kernel", "product", 1010, 7000, 2),
    event("cuda_driver", "cuLaunchKernelEx", 2000, 5, 3),
    event("kernel", "rows", 8010, 990, 3),
    event("cpu_op", "aten::add", 0, 99999, 4),
    event("cuda_runtime", "cudaMemcpyAsync", 9500, 5, 5),
    event("gpu_memcpy", "copy", 10000, 1000, 5),
    event("kernel", "on another stream", 10500, 1500, 6),
]


def test_the_gpu_waits_for_the_spans_that_its_idle_times_meet():
    activities, clock = activities_of(TRACE)
    assert clock == 0.5
    launched = [activity.launched for activity in activities]
    assert launched == pytest.approx([1.0, 2.0, 9.5, 10.5])
    idle = idle_times(activities, 2.0, 13.0)
    assert [*sum(idle, ())] == pytest.approx([9.0, 10.0, 12.0, 13.0])
    # A loss while the product runs, and packing into a gap of one millisecond.
    assert overlap(idle, [(2.5, 4.0)]) == 0
    assert overlap(idle, [(8.5, 9.7), (9.2, 9.6)]) == pytest.approx(0.7)
    assert ahead(activities, Span("loss", 2.5, 4.0)) == pytest.approx(6.5)
    assert ahead(activities, Span("packing", 9.2, 9.6)) == 0


def test_touching_work_leaves_no_gap_and_a_step_without_work_is_idle():
    pair = [Activity(0, 1, 2), Activity(0, 2, 3), Activity(0, 1.5, 1.7)]
    assert idle_times(pair, 1, 3) == []
    assert idle_times([], 1, 3) == [(1, 3)]
    assert idle_times(pair, 5, 6) == [(5, 6)]


def test_the_figure_of_a_step_can_be_drawn():
    pytest.importorskip("matplotlib")
    draw = runpy.run_path(str(ROOT / "docs/figures/step_timeline.py"))["draw"]
    host = [["packing", 0, 1], ["before the model", 1, 1.5], ["loss", 5, 6]]
    step = {"milliseconds": 9, "gpu": [[0.5, 4], [4.1, 9]], "host": host}
    assert len(draw(json.loads(json.dumps(step))).axes) == 2
