"""Tables and figures of the studies from their CSV files: python -m benchmarks.studies.report
[--results DIR] [--figures DIR]
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from . import table
from .table import Row

Rows = dict[str, dict[int, Row]]
"""Finished runs by arm and seed."""


def finished(path: Path) -> Rows:
    rows: Rows = {}
    for row in table.read(path):
        if row["status"] == "done":
            rows.setdefault(row["arm"], {})[int(row["seed"])] = row
    return rows


def curve(row: Row, column: str) -> list[float]:
    return [float(value) for value in row[column].split()]


def mean_of(row: Row, column: str) -> float:
    return statistics.mean(curve(row, column))


def models(rows: Rows, arms: Sequence[str]) -> str:
    """The arms of study 2 or 3 that have run."""
    lines = []
    for name in filter(rows.__contains__, arms):
        found = list(rows[name].values())
        rewards = [curve(row, "reward") for row in found]
        collapsed = sum(values[-1] < 0.5 * max(values) for values in rewards)
        lines.append([
            name,
            len(found),
            table.shown([statistics.mean(values) for values in rewards]),
            table.shown([values[-1] for values in rewards]),
            table.shown([float(row["greedy"]) for row in found]),
            collapsed,
            table.shown([mean_of(row, "grad_norm") for row in found]),
            table.shown([mean_of(row, "difference") for row in found]),
            table.shown([mean_of(row, "rollout_ess") for row in found]),
        ])  # fmt: skip
    header = [
        "arm", "seeds", "reward, all steps", "last 8", "likeliest tokens", "collapsed",
        "gradient norm", "mean abs(log p - log p engine)", "effective sample size",
    ]  # fmt: skip
    return table.markdown(header, lines)


def differences(rows: Rows, pairs: Sequence[tuple[str, str]], column: str) -> str:
    """Differences of the second arm of each pair from the first, seed by seed, with their
    intervals.
    """
    lines = []
    for first, second in pairs:
        seeds = sorted(rows.get(first, {}).keys() & rows.get(second, {}).keys())
        values = [
            mean_of(rows[second][seed], column) - mean_of(rows[first][seed], column)
            for seed in seeds
        ]
        lines.append([f"{second} - {first}", len(seeds), table.shown(values, "+")])
    return table.markdown(["arms", "seeds", column], lines)


def draw_arms(
    rows: Rows, names: Sequence[str], kinds: dict[str, str], column: str, path: Path
) -> None:
    """Draw mean and interval of the arms with two seeds and more: a line for each name, a colour
    for each kind.

    Args:
        kinds: for each kind a pattern of its arms' names, where {} stands for a name.
        column: "greedy", or "reward", whose mean over all steps is drawn.
        path: the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.2 + 0.4 * len(names)), layout="constrained")
    axis = figure.subplots()
    for place, (kind, pattern) in enumerate(kinds.items()):
        shift = 0.72 / len(kinds) * (place - (len(kinds) - 1) / 2)
        points = [
            (line + shift, *table.interval([mean_of(row, column) for row in found.values()]))
            for line, name in enumerate(names)
            if len(found := rows.get(pattern.format(name), {})) > 1
        ]
        lines, means, widths = zip(*points, strict=True) if points else ((), (), ())
        axis.errorbar(means, lines, xerr=widths, fmt="o", markersize=4, capsize=2, label=kind)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel(
        {"greedy": "share right by the likeliest tokens", "reward": "mean reward of all steps"}[
            column
        ]
    )
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=90)


def draw_sanity(rows: Rows, path: Path) -> None:
    """Draw study 3."""
    from .model_studies import OBJECTIVES

    kinds = {
        f"{steps}, {dtype}": f"{{}}, {arm}, {short}"
        for steps, arm in (("off policy", "four steps"), ("on policy", "on policy"))
        for dtype, short in (("bfloat16", "bf16"), ("float16", "fp16"))
    }
    draw_arms(rows, list(OBJECTIVES), kinds, "greedy", path)


def draw_numerics(rows: Rows, path: Path) -> None:
    """Draw study 2."""
    from .model_studies import CENTERED, CORRECTIONS

    engines = ("int4", "fp8", "int8", "none", "4 steps stale", "8 steps stale")
    kinds = {name: f"{name}, {{}}" for name in engines}
    draw_arms(rows, [*CORRECTIONS, *CENTERED], kinds, "reward", path)


def failed_runs(path: Path) -> str:
    failed = [(r["arm"], r["seed"], r["status"]) for r in table.read(path) if r["status"] != "done"]
    return f"failed runs: {failed or 'none'}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--figures", type=Path, help="the folder where to draw them")
    args = parser.parse_args()
    from .model_studies import STUDIES

    drawings = {"sanity": draw_sanity, "numerics": draw_numerics}
    for study, (arms, _) in (STUDIES | {"sanity_longer": STUDIES["sanity"]}).items():
        path = args.results / f"{study}.csv"
        if not path.exists():
            continue
        rows = finished(path)
        print(f"{study}\n\n{models(rows, list(arms))}\n")
        if study == "sanity":
            pairs = [(name, name.replace("bf16", "fp16")) for name in arms if "bf16" in name]
            print(differences(rows, pairs, "greedy"), end="\n\n")
        elif study == "numerics":
            pairs = [(f"{name.split(', ')[0]}, none", name) for name in arms]
            pairs = [(first, second) for first, second in pairs if first != second]
            pairs += [(name.replace("centering + ", ""), name) for name in arms if " + " in name]
            print(differences(rows, pairs, "reward"), end="\n\n")
        if args.figures and study in drawings:
            drawings[study](rows, args.figures / f"{study}.png")
        print(failed_runs(path))


if __name__ == "__main__":
    main()
