"""Ways to train on the quickstart's task, several seeds each: runs them, draws study.png and writes study.md.

Launched by study.sh; `--study` says which ways. A run that is finished is not repeated, and one that was stopped goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from scipy.stats import t as student_t

ROOT = Path(__file__).resolve().parents[1]
SMOOTHED_STEPS = 8
LEARNED = 0.8
"""A reward at which a run counts as having learned."""
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

    def steps_to(self, reward: float) -> int:
        """The first step whose moving average reaches it; one more than there are where none does."""
        reached = (number for number, mean in enumerate(self.curve("reward"), 1) if mean >= reward)
        return next(reached, len(self.steps) + 1)


QUANTITIES: dict[str, Callable[[StudyRun], float]] = {
    "reward, all steps": lambda run: run.mean("reward"),
    "reward, last tenth": lambda run: run.mean("reward", 0.1),
    "held out, after": lambda run: float(run.summary["held_out_after"]),
    f"steps to {LEARNED}": lambda run: run.steps_to(LEARNED),
    "length right, last tenth": lambda run: run.mean("response_length_right", 0.1),
    "length wrong, last tenth": lambda run: run.mean("response_length_wrong", 0.1),
    "length wrong, all steps": lambda run: run.mean("response_length_wrong"),
    "gradient norm, all steps": lambda run: run.mean("grad_norm"),
}
"""What the table has of each run."""


@dataclass(frozen=True)
class Study:
    """Ways to train; the others are compared with the one that is the baseline."""

    modes: dict[str, str]
    """Flags of each, in the order in which they run with a seed; {out} is the folder and {seed} the seed."""
    baseline: str
    flags: str
    """Of all of them."""


STUDIES = {
    "aggregations": Study(
        {
            "sample_mean": "--loss-aggregation sample_mean",
            "prompt_mean": "--loss-aggregation prompt_mean",
            "token_mean": "--loss-aggregation token_mean",
            "constant": "--loss-aggregation constant --loss-aggregation-divisor 8",
        },
        baseline="sample_mean",
        # Half of the wrong answers that the warm start teaches are too long, and a response may be twice as long as the
        # longest answer: otherwise right and wrong answers of a prompt would all have the same length.
        flags="--warm-start-corruption 0.25 --warm-start-stutter 0.25 --max-response-len 16",
    ),
    "distillation": Study(
        {
            "teacher": "--num-layers 3 --hidden-size 160 --train-iters 48",
            "rewards": "",
            "rewards_2e-3": "--lr 2e-3",
            "distilled": "--lr 2e-3 --policy-loss distill --distill-teacher hidden --teacher {out}/teacher-seed-{seed}",
        },
        baseline="rewards",
        flags="--train-iters 32",
    ),
}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of its 95 % confidence interval by Student's t, which takes the values as normal.

    Raises:
        ValueError: fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"{len(values)} seeds: an interval needs 2 or more; change --seeds")
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), float(student_t.ppf(0.975, len(values) - 1)) * error


def launch(study: Study, mode: str, seed: int, folder: Path) -> str | None:
    """Start a run, or go on with it, and wait; None where it is finished, else what went wrong."""
    if (folder / "summary.json").exists():
        return None
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    own = [flag.format(out=folder.parent, seed=seed) for flag in study.modes[mode].split()]
    command = ["bash", "examples/quickstart.sh", *study.flags.split(), *own]
    command += ["--seed", str(seed), "--run-dir", str(folder), "--resume"]
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


def tables(study: Study, runs: dict[str, list[StudyRun]]) -> str:
    """Markdown: every way, its difference from the baseline, the curve of the mean reward, and how soon each seed learned."""
    values = {
        mode: [[read(run) for run in group] for read in QUANTITIES.values()]
        for mode, group in runs.items()
    }
    base = values[study.baseline]
    steps = range(4, len(runs[study.baseline][0].steps) + 1, 4)
    whole, paired, by_step, by_seed = {}, {}, {}, {}
    for mode, group in runs.items():
        whole[mode] = ["{:.3f} ± {:.3f}".format(*interval(each)) for each in values[mode]]
        if mode != study.baseline:
            both = (zip(*each, strict=True) for each in zip(values[mode], base, strict=True))
            apart = ([a - b for a, b in each] for each in both)
            paired[f"{mode} - {study.baseline}"] = [
                "{:+.3f} ± {:.3f}".format(*interval(each)) for each in apart
            ]
        curve = [
            statistics.fmean(each)
            for each in zip(*(run.curve("reward") for run in group), strict=True)
        ]
        by_step[mode] = [f"{curve[step - 1]:.2f}" for step in steps]
        by_seed[mode] = [str(run.steps_to(LEARNED)) for run in group]
    found = [
        _table("", QUANTITIES, whole),
        _table("", QUANTITIES, paired),
        _table("reward by step", steps, by_step),
        _table(f"steps to {LEARNED}, by seed", range(1, len(base[0]) + 1), by_seed),
    ]
    return "\n".join(found)


def _table(corner: str, columns: Iterable[object], rows: Mapping[str, Sequence[str]]) -> str:
    lines = [[corner, *map(str, columns)]] + [[f"`{name}`", *cells] for name, cells in rows.items()]
    header, *rest = (f"| {' | '.join(line)} |\n" for line in lines)
    return f"{header}{'|---' * len(lines[0])}|\n{''.join(rest)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--study", choices=STUDIES, default="aggregations")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--parallel", type=int, default=1, help="seeds at a time")
    parser.add_argument("--out", type=Path, help="folder (runs/study, or that of another study)")
    args = parser.parse_args()
    interval([float(seed) for seed in args.seeds])  # refuses a number of seeds before hours of runs
    study = STUDIES[args.study]
    out = args.out or Path("runs", "study" if args.study == "aggregations" else args.study)

    def folder_of(mode: str, seed: int) -> Path:
        return (out / f"{mode}-seed-{seed}").resolve()

    def run_seed(seed: int) -> list[str | None]:
        return [launch(study, mode, seed, folder_of(mode, seed)) for mode in study.modes]

    # Seed by seed, so that a study which is stopped has all ways of the seeds it has.
    with ThreadPoolExecutor(args.parallel) as pool:
        errors = [*filter(None, itertools.chain(*pool.map(run_seed, args.seeds)))]
    if errors:
        sys.exit("\n".join(errors))
    runs = {
        mode: [StudyRun.read(folder_of(mode, seed)) for seed in args.seeds] for mode in study.modes
    }
    draw(runs, out / "study.png")
    (out / "study.md").write_text(tables(study, runs))
    print(f"{tables(study, runs)}\nsee {out}/study.png and study.md")


if __name__ == "__main__":
    main()
