"""Timing and tables shared by the benchmark scripts."""

import json
import random
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

Call = Callable[[], object]

# The GPU is kept busy this long before each measurement, so that launches are queued and the timing
# excludes Python. A method that synchronizes gains nothing.
_HEAD_START_CYCLES = 4_000_000

# A GPU's clock depends on earlier work: right after a slow method, the same matrix products took
# 40.8 ms, else 43.4. So a method is called several times in its turn, and the first call is not
# counted.
_CALLS_A_TURN = 4


OWN = "megatron_pg"


@dataclass
class Contender:
    """A method to compare. `prepare` runs before each call and is not timed."""

    name: str
    call: Call
    prepare: Call = lambda: None
    note: str = ""


@dataclass
class Timing:
    """A contender's milliseconds, and its peak memory above the allocation before the call."""

    name: str
    median: float
    p10: float
    p90: float
    peak_gib: float
    note: str = ""


def measure(contenders: list[Contender], rounds: int, calls: int = _CALLS_A_TURN) -> list[Timing]:
    """Time the contenders in turn for `rounds` rounds, after an unmeasured round.

    Each round has a random order, and each turn several calls, without counting the first.
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
    """Return the milliseconds of the counted calls, and the peak GiB above the allocation before
    the last call.
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
    """Measure the bytes per second of a device-to-device copy of 8 GiB, counting reads and
    writes.
    """
    source = torch.randint(0, 2**31, (2**31,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    timing = measure([Contender("copy", lambda: target.copy_(source))], rounds=15)[0]
    return 2 * source.numel() * 4 / (timing.median * 1e-3)


def begin() -> float:
    """Seed, print the environment, and return the copy rate."""
    torch.manual_seed(0)
    rate, name = copy_rate(), torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, copy {rate / 1e12:.2f} TB/s\n")
    return rate


def table(title: str, timings: list[Timing], floor_ms: float, columns: dict[str, dict]) -> str:
    """Return a Markdown table: times, ratios to the floor and ours, peak memory, further columns by
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
    """Append one JSON line per setting, for later comparison."""
    if path is not None:
        with path.open("a") as lines:
            record = {**setting, "timings": [asdict(timing) for timing in timings]}
            lines.write(json.dumps(record) + "\n")


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> str:
    """Return the difference's norm over the norm, as text."""
    wanted = wanted.double()
    return f"{float((found.double() - wanted).norm() / wanted.norm()):.1e}"
