"""The four aggregations on the quickstart's task, several seeds each: runs them, draws study.png and writes study.md.

Launched by study.sh. A run that is finished is not repeated, and one that was stopped goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from scipy.stats import t as student_t

ROOT = Path(__file__).resolve().parents[1]
MODES = {
    "sample_mean": (),
    "prompt_mean": (),
    "token_mean": (),
    "constant": ("--loss-aggregation-divisor", "8"),
}
BASELINE = "sample_mean"
TASK_FLAGS = (
    # Half of the wrong answers that the warm start teaches are too long, and a response may be twice as long as the
    # longest answer: otherwise right and wrong answers of a prompt would all have the same length.
    *("--warm-start-corruption", "0.25", "--warm-start-stutter", "0.25"),
    *("--max-response-len", "16"),
)
SMOOTHED_STEPS = 8

CURVES = {
    "reward": "reward (share of right answers)",
    "response_length_right": "length of right answers (tokens)",
    "response_length_wrong": "length of wrong answers (tokens)",
    "grad_norm": "gradient norm, before clipping",
}


@dataclass(frozen=True)
class StudyRun:
    """A finished run: the lines of metrics.jsonl, and summary.json."""

    steps: list[dict[str, Any]]
    summary: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> StudyRun:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        summary = json.loads((folder / "summary.json").read_text())
        return cls([json.loads(line) for line in lines], summary)

    def mean(self, name: str, last_share: float = 1.0) -> float:
        """Mean of a metric over the last part of the steps; steps that do not have it are left out."""
        first = len(self.steps) - max(round(last_share * len(self.steps)), 1)
        return statistics.fmean(step[name] for step in self.steps[first:] if step[name] is not None)

    def curve(self, name: str) -> list[float]:
        """Moving average of a metric over SMOOTHED_STEPS steps, fewer at the ends."""
        half = SMOOTHED_STEPS // 2
        windows = [self.steps[max(i - half, 0) : i + half] for i in range(len(self.steps))]
        known = [[step[name] for step in part if step[name] is not None] for part in windows]
        return [statistics.fmean(values) if values else math.nan for values in known]


QUANTITIES: dict[str, Callable[[StudyRun], float]] = {
    "reward, all steps": lambda run: run.mean("reward"),
    "reward, last tenth": lambda run: run.mean("reward", 0.1),
    "held out, after": lambda run: float(run.summary["held_out_after"]),
    "length right, last tenth": lambda run: run.mean("response_length_right", 0.1),
    "length wrong, last tenth": lambda run: run.mean("response_length_wrong", 0.1),
    "length wrong, all steps": lambda run: run.mean("response_length_wrong"),
    "gradient norm, all steps": lambda run: run.mean("grad_norm"),
}
"""What the table has of each run."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of its 95 % confidence interval by Student's t, which takes the values as normal.

    Raises:
        ValueError: fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"{len(values)} seeds: an interval needs 2 or more; change --seeds")
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), float(student_t.ppf(0.975, len(values) - 1)) * error


def launch(mode: str, seed: int, folder: Path) -> str | None:
    """Start a run, or go on with it, and wait; None where it is finished, else what went wrong."""
    if (folder / "summary.json").exists():
        return None
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    command = ["bash", "examples/quickstart.sh", "--loss-aggregation", mode, *MODES[mode]]
    command += [*TASK_FLAGS, "--seed", str(seed), "--run-dir", str(folder), "--resume"]
    with open(log, "a") as file:
        status = subprocess.run(command, cwd=ROOT, stdout=file, stderr=file, check=False)
    print(f"{mode}, seed {seed}: {'done' if status.returncode == 0 else 'FAILED'}", flush=True)
    return None if status.returncode == 0 else f"{mode}, seed {seed} failed: see {log}"


def draw(runs: dict[str, list[StudyRun]], path: Path) -> None:
    """CURVES against the step: mean over the seeds, and its 95 % confidence band."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained", sharex=True)
    for axis, (name, label) in zip(axes.flat, CURVES.items(), strict=True):
        for mode, group in runs.items():
            points = zip(*(run.curve(name) for run in group), strict=True)
            centre, width = zip(*(interval(values) for values in points), strict=True)
            steps = range(1, len(centre) + 1)
            (line,) = axis.plot(steps, centre, label=mode, linewidth=1.8)
            low = [c - w for c, w in zip(centre, width, strict=True)]
            high = [c + w for c, w in zip(centre, width, strict=True)]
            axis.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        axis.set_title(label, fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("step")
    axes[0, 0].legend()
    seeds = len(next(iter(runs.values())))
    figure.suptitle(f"{seeds} seeds: mean and 95 % confidence band, over {SMOOTHED_STEPS} steps")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def tables(runs: dict[str, list[StudyRun]]) -> str:
    """Two markdown tables: every aggregation, and its difference from BASELINE seed by seed."""
    values = {
        mode: {name: [read(run) for run in group] for name, read in QUANTITIES.items()}
        for mode, group in runs.items()
    }
    header = f"| aggregation | {' | '.join(QUANTITIES)} |\n|---|{'---|' * len(QUANTITIES)}\n"
    lines = [
        _row(mode, [interval(each) for each in columns.values()])
        for mode, columns in values.items()
    ]
    differences = [
        _row(
            f"{mode} - {BASELINE}",
            [
                interval([a - b for a, b in zip(each, values[BASELINE][name], strict=True)])
                for name, each in columns.items()
            ],
            signed=True,
        )
        for mode, columns in values.items()
        if mode != BASELINE
    ]
    return f"{header}{''.join(lines)}\n{header}{''.join(differences)}"


def _row(name: str, cells: Sequence[tuple[float, float]], signed: bool = False) -> str:
    sign = "+" if signed else ""
    texts = [f"{mean:{sign}.3f} ± {width:.3f}" for mean, width in cells]
    return f"| `{name}` | {' | '.join(texts)} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time, of two processes")
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    args = parser.parse_args()
    interval([float(seed) for seed in args.seeds])  # refuses a number of seeds before hours of runs
    # Seed by seed, so that a study which is stopped has all aggregations of the seeds it has.
    todo = [(mode, seed) for seed in args.seeds for mode in MODES]
    folders = {key: (args.out / f"{key[0]}-seed-{key[1]}").resolve() for key in todo}
    with ThreadPoolExecutor(args.parallel) as pool:
        errors = [*filter(None, pool.map(lambda key: launch(*key, folders[key]), todo))]
    if errors:
        sys.exit("\n".join(errors))
    runs = {mode: [StudyRun.read(folders[mode, seed]) for seed in args.seeds] for mode in MODES}
    draw(runs, args.out / "study.png")
    (args.out / "study.md").write_text(tables(runs))
    print(f"{tables(runs)}\nsee {args.out}/study.png and study.md")


if __name__ == "__main__":
    main()
