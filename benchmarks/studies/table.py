"""The rows of a study's finished runs, one CSV file that grows, and their tables."""

import csv
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import sem
from scipy.stats import t as student_t

Row = dict[str, str]


def interval(values: ArrayLike) -> tuple[Any, Any]:
    """Mean over the first axis, the seeds, and half width of its 95 % confidence interval by
    Student's t.

    It takes the values as normal. A ValueError says that an interval needs two seeds.
    """
    if (count := len(np.asarray(values))) < 2:
        raise ValueError(f"{count} seeds: an interval needs 2 or more; change --seeds")
    return np.mean(values, 0), student_t.ppf(0.975, count - 1) * sem(values)


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


def seconds(rows: Sequence[Row], arm: str) -> float:
    """What the finished runs of an arm took on average, or those of all arms; 0 where none has
    finished.
    """
    finished = [row for row in rows if row["status"] == "done"]
    alike = [row for row in finished if row["arm"] == arm] or finished
    return statistics.mean(float(row["seconds"]) for row in alike) if alike else 0.0


def shown(values: Sequence[float], sign: str = "") -> str:
    """An interval as text."""
    if not values:
        return "not run"
    if len(values) == 1:
        return f"{values[0]:{sign}.3f} (one seed)"
    mean, width = interval(values)
    return f"{mean:{sign}.3f} ± {width:.3f}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
