"""When a GPU is idle, and for which of the host's functions: arithmetic on the events of torch's profiler.

All times are milliseconds.
"""

import itertools
from typing import Any, NamedTuple

ON_THE_GPU = ("kernel", "gpu_memset", "gpu_memcpy")
IN_THE_DRIVER = ("cuda_runtime", "cuda_driver")
CLOCK = "spin_kernel"  # of torch.cuda._sleep


class Span(NamedTuple):
    """A time of the host inside of a function, in milliseconds."""

    name: str
    begin: float
    end: float


class Activity(NamedTuple):
    """A kernel or copy: when the host launched it, when it began and ended, in milliseconds."""

    launched: float
    begin: float
    end: float


Interval = tuple[float, float]


def union(intervals: list[Interval], joined_below: float = 0.0) -> list[Interval]:
    """Return intervals in order that do not touch; gaps below `joined_below` are filled."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1] + joined_below:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def idle_times(activities: list[Activity], begin: float, end: float) -> list[Interval]:
    """Return the intervals of [begin, end] in which no activity runs."""
    busy = union([(activity.begin, activity.end) for activity in activities])
    edges = [begin, *(min(max(edge, begin), end) for pair in busy for edge in pair), end]
    return [
        (left, right) for left, right in zip(edges[::2], edges[1::2], strict=True) if right > left
    ]


def overlap(one: list[Interval], other: list[Interval]) -> float:
    """Return the time that lies in both unions."""
    pairs = itertools.product(union(one), union(other))
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in pairs)


def ahead(activities: list[Activity], span: Span) -> float:
    """Return the time from the span's begin until all that was launched before it is done; at least 0."""
    ends = [activity.end for activity in activities if activity.launched < span.begin]
    return max(0.0, max(ends, default=span.begin) - span.begin)


def activities_of(events: list[dict[str, Any]]) -> tuple[list[Activity], float]:
    """Return the activities of the GPU in a trace of torch's profiler, and when the last CLOCK was launched."""
    calls = [event for event in events if event.get("cat") in IN_THE_DRIVER]
    launched = {
        event["args"]["correlation"]: event
        for event in calls
        if "correlation" in event.get("args", {})
    }
    activities, clock = [], 0.0
    for event in sorted(
        (event for event in events if event.get("cat") in ON_THE_GPU), key=lambda event: event["ts"]
    ):
        begin, end = 1e-3 * event["ts"], 1e-3 * (event["ts"] + event["dur"])
        call = launched.get(event["args"].get("correlation"))
        at = begin if call is None else 1e-3 * call["ts"]
        if CLOCK in event["name"]:
            clock = at
            continue
        activities.append(Activity(at, begin, end))
    return activities, clock
