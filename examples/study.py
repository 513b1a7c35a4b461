"""Ways to train on the quickstart's task, several seeds each: runs them, draws study.png and writes
study.md.

Launched by study.sh. A run that is finished is not repeated, and one that was stopped goes on from
its checkpoint.
"""

import argparse
import itertools
import json
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray
from scipy.stats import sem
from scipy.stats import t as student_t

warnings.filterwarnings("ignore", "Mean of empty slice")  # NaN: no answer of that kind in the steps

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


class Study(NamedTuple):
    """Ways to train; the others are compared with the one that is the baseline."""

    modes: dict[str, str]
    """Flags of each, in the order in which they run with a seed; {out} is the folder and {seed} the
    seed."""
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
        # Half of the wrong answers that the warm start teaches are too long, and a response may be
        # twice as long as the longest answer: otherwise right and wrong answers of a prompt would
        # all have the same length.
        flags="--warm-start-corruption 0.25 --warm-start-stutter 0.25 --max-response-len 16",
    ),
    "distillation": Study(
        {
            "teacher": "--num-layers 3 --hidden-size 160 --train-iters 48",
            "rewards": "",
            "rewards_2e-3": "--lr 2e-3",
            "distilled": "--lr 2e-3 --policy-loss distill --distill-teacher hidden --teacher "
            "{out}/teacher-seed-{seed}",
        },
        baseline="rewards",
        flags="--train-iters 32",
    ),
}


class StudyRun:
    """A finished run: its smoothed curves, and what the tables have of it."""

    def __init__(self, folder: Path) -> None:
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        steps = np.array([[line[name] for name in CURVES] for line in lines], dtype=float).T
        count, half = steps.shape[1], SMOOTHED_STEPS // 2
        smoothed = [np.nanmean(steps[:, max(i - half, 0) : i + half], 1) for i in range(count)]
        self.curves = dict(zip(CURVES, np.transpose(smoothed), strict=True))
        # One more than there are steps where the reward is never reached.
        self.learned_at = int(np.argmax([*(self.curves["reward"] >= LEARNED), True])) + 1
        reward, _, wrong, grad_norm = np.nanmean(steps, 1)
        last_tenth = steps[:, -max(round(0.1 * count), 1) :]
        reward_last, right_last, wrong_last, _ = np.nanmean(last_tenth, 1)
        summary = json.loads((folder / "summary.json").read_text())
        self.quantities: dict[str, float] = {
            "reward, all steps": reward,
            "reward, last tenth": reward_last,
            "held out, after": summary["held_out_after"],
            f"steps to {LEARNED}": self.learned_at,
            "length right, last tenth": right_last,
            "length wrong, last tenth": wrong_last,
            "length wrong, all steps": wrong,
            "gradient norm, all steps": grad_norm,
        }


def interval(values: ArrayLike) -> tuple[Any, Any]:
    """Mean over the first axis, the seeds, and half width of its 95 % confidence interval by
    Student's t.

    It takes the values as normal. A ValueError says that an interval needs two seeds.
    """
    if (count := len(np.asarray(values))) < 2:
        raise ValueError(f"{count} seeds: an interval needs 2 or more; change --seeds")
    return np.mean(values, 0), student_t.ppf(0.975, count - 1) * sem(values)


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
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    for axis, (name, label) in zip(axes.flat, CURVES.items(), strict=True):
        for mode, group in runs.items():
            centre, width = interval([run.curves[name] for run in group])
            steps = range(1, len(centre) + 1)
            (line,) = axis.plot(steps, centre, label=mode, linewidth=1.8)
            band = {"color": line.get_color(), "alpha": 0.15, "linewidth": 0}
            axis.fill_between(steps, centre - width, centre + width, **band)
        axis.set_title(label, fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("step")
    axes[0, 0].legend()
    seeds = len(next(iter(runs.values())))
    figure.suptitle(f"{seeds} seeds: mean and 95 % confidence band, over {SMOOTHED_STEPS} steps")
    figure.savefig(path, dpi=90)


def tables(study: Study, runs: dict[str, list[StudyRun]]) -> str:
    """Markdown of every way, its difference from the baseline, the mean reward by step, and how
    soon each seed learned.
    """
    values = {
        mode: np.array([list(run.quantities.values()) for run in group])
        for mode, group in runs.items()
    }
    base = values[study.baseline]
    whole, apart, curves, learned = {}, {}, {}, {}
    for mode, group in runs.items():
        whole[mode] = _intervals(values[mode], "{:.3f}")
        if mode != study.baseline:
            apart[f"{mode} - {study.baseline}"] = _intervals(values[mode] - base, "{:+.3f}")
        curve = np.mean([run.curves["reward"] for run in group], 0)
        curves[mode] = [f"{reward:.2f}" for reward in curve[3::4]]
        learned[mode] = [str(run.learned_at) for run in group]
    steps, seeds = range(4, len(curve) + 1, 4), range(1, len(base) + 1)
    sections = [_table("", group[0].quantities, rows) for rows in (whole, apart)]
    sections.append(_table("reward by step", steps, curves))
    sections.append(_table(f"steps to {LEARNED}, by seed", seeds, learned))
    return "\n".join(sections)


def _intervals(values: NDArray[np.float64], centre: str) -> list[str]:
    return [f"{centre} ± {{:.3f}}".format(*each) for each in zip(*interval(values), strict=True)]


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
    interval(args.seeds)  # refuses a number of seeds before hours of runs
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
    runs = {mode: [StudyRun(folder_of(mode, seed)) for seed in args.seeds] for mode in study.modes}
    draw(runs, out / "study.png")
    (out / "study.md").write_text(tables(study, runs))
    print(f"{tables(study, runs)}\nsee {out}/study.png and study.md")


if __name__ == "__main__":
    main()
