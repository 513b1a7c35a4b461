"""The rows of a study's finished runs, one CSV file that grows, and intervals over seeds."""

import csv
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import t as student_t

Row = dict[str, str]


def read(path: Path) -> list[Row]:
    """Read the rows, none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a row. The first row of a file names its columns."""
    old = read(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(
            file, list(old[0]) if old else list(row), restval="", lineterminator="\n"
        )
        if not old:
            writer.writeheader()
        writer.writerow(row)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of its 95 % confidence interval by Student's t; infinite for one value."""
    mean, count = statistics.mean(values), len(values)
    if count < 2:
        return mean, float("inf")
    return mean, float(student_t.ppf(0.975, count - 1)) * statistics.stdev(values) / count**0.5


def shown(values: Sequence[float], sign: str = "") -> str:
    """An interval as text."""
    if not values:
        return "not run"
    mean, width = interval(values)
    return f"{mean:{sign}.3f} ± {width:.3f}" if len(values) > 1 else f"{mean:{sign}.3f} (one seed)"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
