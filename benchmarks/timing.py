"""Timing and tables shared by the benchmark scripts."""

import json
import random
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

Call = Callable[[], object]

# The GPU is kept busy this long before each measurement, so that launches are queued and what is
# timed is the work and not the Python that asked for it. A method that synchronises gains nothing.
_HEAD_START_CYCLES = 4_000_000

# A GPU's clock depends on what ran before: right after a slow method the same matrix products took
# 40.8 ms, else 43.4. So a method is called several times in its turn, and what the first call finds
# is not counted.
_CALLS_A_TURN = 4


OWN = "megatron_pg"


@dataclass
class Contender:
    """One way to compute the same thing. `prepare` runs before each call, outside the
    measurement.
    """

    name: str
    call: Call
    prepare: Call = lambda: None
    note: str = ""


@dataclass
class Timing:
    """Milliseconds of a contender, and its peak memory above what was allocated before the call."""

    name: str
    median: float
    p10: float
    p90: float
    peak_gib: float
    note: str = ""


def measure(contenders: list[Contender], rounds: int, calls: int = _CALLS_A_TURN) -> list[Timing]:
    """Times the contenders in turn, `rounds` times over, after an unmeasured round.

    Each round has an order of its own, and each turn several calls, of which the first is not
    counted.
    """
    shuffle = random.Random(0)
    samples: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    peaks: dict[str, float] = {}
    for index in range(rounds + 1):
        for contender in shuffle.sample(contenders, len(contenders)):
            times, peak = _turn(contender, calls)
            if index >= 1:
                samples[contender.name] += times
                peaks[contender.name] = peak
    return [Timing(c.name, *_quantiles(samples[c.name]), peaks[c.name], c.note) for c in contenders]


def _turn(contender: Contender, calls: int) -> tuple[list[float], float]:
    """Milliseconds of the calls that count, and the peak in GiB above what was allocated before the
    last.
    """
    torch.cuda.synchronize()
    events, before = [], 0
    for _ in range(calls):
        contender.prepare()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_HEAD_START_CYCLES)
        begin.record()
        result = contender.call()
        end.record()
        events.append((begin, end))
        del result
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    return [begin.elapsed_time(end) for begin, end in events[1:]], peak


def _quantiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return statistics.median(values), tenths[0], tenths[-1]


def copy_rate() -> float:
    """Bytes a second of a device-to-device copy of 8 GiB, reads and writes both counted."""
    source = torch.randint(0, 2**31, (2**31,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    timing = measure([Contender("copy", lambda: target.copy_(source))], rounds=15)[0]
    return 2 * source.numel() * 4 / (timing.median * 1e-3)


def begin() -> float:
    """Seeds, says where this runs, and returns the copy rate."""
    torch.manual_seed(0)
    rate, name = copy_rate(), torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, copy {rate / 1e12:.2f} TB/s\n")
    return rate


def table(title: str, timings: list[Timing], floor_ms: float, columns: dict[str, dict]) -> str:
    """A Markdown table: times, ratios to the floor and to ours, peak memory, further columns by
    name.
    """
    extra = list(columns)
    lines = [f"**{title}** (floor {floor_ms:.3f} ms)", ""]
    own = next(t.median for t in timings if t.name == OWN)
    heads = ["", "ms (p10, p90)", "x floor", f"x {OWN}", "peak GiB", *extra]
    lines += ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for t in timings:
        cells = [t.name + (f" ({t.note})" if t.note else "")]
        cells += [f"{t.median:.3f} ({t.p10:.3f}, {t.p90:.3f})", f"{t.median / floor_ms:.2f}"]
        cells += [f"{t.median / own:.2f}"]
        cells += [f"{t.peak_gib:.2f}", *(str(columns[name].get(t.name, "")) for name in extra)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def append_results(path: Path | None, setting: dict, timings: list[Timing]) -> None:
    """One JSON line a setting, for later comparison."""
    if path is not None:
        with path.open("a") as lines:
            record = {**setting, "timings": [asdict(timing) for timing in timings]}
            lines.write(json.dumps(record) + "\n")


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> str:
    """Norm of the difference over the norm, as text."""
    wanted = wanted.double()
    return f"{float((found.double() - wanted).norm() / wanted.norm()):.1e}"
