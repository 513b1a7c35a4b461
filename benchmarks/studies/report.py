"""Tables and figures of the studies from their CSV files: python -m benchmarks.studies.report [--results DIR] [--figures DIR]"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from . import table
from .table import Row

SEEDS = 5
"""Right runs that a person knows who is to notice a mistake."""
Rows = dict[str, dict[int, Row]]
"""Finished runs by arm and seed."""


def finished(path: Path) -> Rows:
    rows: Rows = {}
    for row in table.read(path):
        if row["status"] == "done":
            rows.setdefault(row["arm"], {})[int(row["seed"])] = row
    return rows


def comparable(rows: Rows, first: str, second: str) -> list[int]:
    """Seeds of which both arms have a run, from the same supervised weights."""
    pairs = rows.get(first, {}), rows.get(second, {})
    return sorted(
        seed
        for seed in pairs[0].keys() & pairs[1].keys()
        if pairs[0][seed]["start"] == pairs[1][seed]["start"]
    )


def curve(row: Row, column: str) -> list[float]:
    return [float(value) for value in row[column].split()]


def mean_of(row: Row, column: str) -> float:
    return statistics.mean(curve(row, column))


def quantities(row: Row) -> dict[str, float]:
    reward = curve(row, "reward")
    return {
        "reward, all steps": statistics.mean(reward),
        "last 8": reward[-1],
        "held out": float(row["held_out"]),
        "length": mean_of(row, "length"),
        "gradient norm": mean_of(row, "grad_norm"),
    }


def noticed(right: Sequence[Row], wrong: Row, columns: Sequence[str], block: int) -> int | None:
    """The last step of the first block in which, and in the next, a curve is outside of the right arm's seeds by more than
    half of their range; None where there is none."""
    for place in range(len(curve(wrong, "reward")) - 1):
        for column in columns:
            outside = []
            for here in (place, place + 1):
                values = [curve(row, column)[here] for row in right]
                margin = (max(values) - min(values)) / 2
                value = curve(wrong, column)[here]
                outside.append(not min(values) - margin <= value <= max(values) + margin)
            if all(outside):
                return (place + 1) * block
    return None


def mistakes(rows: Rows) -> str:
    """Differences of each mistake from the arm that is right, and the step at which it is noticed."""
    from .normaliser import BLOCK, WRONG

    lines = []
    for name, (right, _) in WRONG.items():
        pairs = [(rows[right][seed], rows[name][seed]) for seed in comparable(rows, right, name)]
        if not pairs:
            lines.append([f"`{name}`", "not run"])
            continue
        differences: dict[str, list[float]] = {}
        for good, bad in pairs:
            before, after = quantities(good), quantities(bad)
            for column in before:
                ratio = column == "gradient norm"
                value = after[column] / before[column] if ratio else after[column] - before[column]
                differences.setdefault(column, []).append(value)
        texts = [
            table.shown(values, "" if column == "gradient norm" else "+")
            for column, values in differences.items()
        ]
        everyone = list(rows[right].values())

        def steps(
            columns: Sequence[str],
            everyone: list[Row] = everyone,
            pairs: list[tuple[Row, Row]] = pairs,
        ) -> str:
            if len(everyone) < SEEDS:
                return f"needs {SEEDS} right seeds"
            found = [noticed(everyone, bad, columns, BLOCK) for _, bad in pairs]
            return " ".join("-" if step is None else str(step) for step in found)

        seen = [steps(["reward", "length"]), steps(["reward", "length", "grad_norm"])]
        off = max(float(bad["checksum_off_by"]) for _, bad in pairs)
        lines.append([f"`{name}`", len(pairs), *texts, *seen, f"{off:.1g}"])
    header = [
        "mistake", "seeds", "reward, all steps", "last 8", "held out", "length", "gradient norm, ratio",
        "noticed by reward or length", "with the gradient norm", "checksum off by",
    ]  # fmt: skip
    return table.markdown(header, lines)


def right_arms(rows: Rows) -> str:
    from .normaliser import RIGHT

    lines = []
    for name in RIGHT:
        values: dict[str, list[float]] = {}
        for row in rows.get(name, {}).values():
            for column, value in quantities(row).items():
                values.setdefault(column, []).append(value)
        lines.append([f"`{name}`", len(rows.get(name, {})), *map(table.shown, values.values())])
    return table.markdown(
        [
            "right arm",
            "seeds",
            "reward, all steps",
            "last 8",
            "held out",
            "length",
            "gradient norm",
        ],
        lines,
    )


def curves(rows: Rows) -> str:
    """The largest difference of the gradient norm from the first cut, by sharding, mode and cut."""
    from .normaliser import AT, CURVES, DOUBLE

    lines = []
    for arms in (CURVES, DOUBLE):
        first, *others = arms
        for name in others:
            seeds = comparable(rows, first, name)
            apart: dict[int, list[float]] = {}
            parting: list[str] = []
            rewards, norms = [], []
            for seed in seeds:
                base, other = rows[first][seed], rows[name][seed]
                for at, a, b in zip(
                    AT, curve(base, "grad_norm_at"), curve(other, "grad_norm_at"), strict=False
                ):
                    apart.setdefault(at, []).append(abs(a - b) / abs(a))
                pairs = zip(base["answers"][::2], base["answers"][1::2], strict=True)
                theirs = zip(other["answers"][::2], other["answers"][1::2], strict=True)
                same = [a == b for a, b in zip(pairs, theirs, strict=False)]
                parting.append(str(same.index(False) + 1) if False in same else "never")
                difference = (
                    quantities(other)["reward, all steps"] - quantities(base)["reward, all steps"]
                )
                rewards.append(difference)
                weights = [float(row["weights_norm"]) for row in (base, other)]
                norms.append(abs(weights[1] / weights[0] - 1.0))
            if not seeds:
                lines.append([name, "not run, or from other supervised weights"])
                continue
            numbers = [f"{max(apart[at]):.0e}" for at in AT if at in apart]
            lines.append(
                [
                    name,
                    len(seeds),
                    *numbers,
                    f"{max(norms, default=0.0):.0e}",
                    " ".join(parting),
                    table.shown(rewards, "+"),
                ]
            )
    header = [
        "cut",
        "seeds",
        *(f"step {at}" for at in AT),
        "norm of the weights",
        "first other answer",
        "reward, all steps",
    ]
    return table.markdown(header, lines)


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
        "arm", "seeds", "reward, all steps", "last 8", "likeliest tokens", "collapsed", "gradient norm",
        "mean abs(log p - log p engine)", "effective sample size",
    ]  # fmt: skip
    return table.markdown(header, lines)


def differences(rows: Rows, pairs: Sequence[tuple[str, str]], column: str) -> str:
    """Differences of the second arm of each pair from the first, seed by seed, with their intervals."""
    lines = []
    for first, second in pairs:
        seeds = sorted(rows.get(first, {}).keys() & rows.get(second, {}).keys())
        values = [
            mean_of(rows[second][seed], column) - mean_of(rows[first][seed], column)
            for seed in seeds
        ]
        lines.append([f"{second} - {first}", len(seeds), table.shown(values, "+")])
    return table.markdown(["arms", "seeds", column], lines)


def draw(rows: Rows, path: Path) -> None:
    """Reward and gradient norm: of all cuts of seed 1, and of the mistakes beside the right arm of each, mean over seeds."""
    from matplotlib.figure import Figure

    from .normaliser import BLOCK, CURVES, WRONG

    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    cuts = [rows[name][1] for name in CURVES if 1 in rows.get(name, {})]
    titles = {"reward": "reward", "grad_norm": "gradient norm, before clipping"}
    for line, (column, title) in enumerate(titles.items()):
        for row in cuts:
            means = curve(row, column)
            axes[line, 0].plot(_steps(means, BLOCK), means, linewidth=0.8)
        axes[line, 0].set_title(f"{title}: {len(cuts)} ways to cut, seed 1", fontsize=10)
        for name, (right, _) in WRONG.items():
            apart = [
                _apart(curve(rows[right][seed], column), curve(rows[name][seed], column), line == 1)
                for seed in comparable(rows, right, name)
            ]
            if apart:
                means = [statistics.mean(block) for block in zip(*apart, strict=True)]
                axes[line, 1].plot(_steps(means, BLOCK), means, label=name, linewidth=1.4)
        kind = ("difference from", "divided by that of")[line]
        axes[line, 1].set_title(f"{title}: {kind} the right arm", fontsize=10)
    axes[1, 1].set_yscale("log")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("step")
    axes[0, 1].legend(fontsize=7)
    figure.savefig(path, dpi=90)


def draw_arms(
    rows: Rows, names: Sequence[str], kinds: dict[str, str], column: str, path: Path
) -> None:
    """Draw mean and interval of the arms with two seeds and more: a line for each name, a colour for each kind.

    Args:
        kinds: for each kind a pattern of its arms' names, where {} stands for a name.
        column: "greedy", or "reward", whose mean over all steps is drawn.
        path: the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.2 + 0.4 * len(names)), layout="constrained")
    axis = figure.subplots()
    for place, (kind, pattern) in enumerate(kinds.items()):
        shift = 0.18 * (place - (len(kinds) - 1) / 2)
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
    from .model_studies import CORRECTIONS

    kinds = {name: f"{name}, {{}}" for name in ("int4", "fp8", "int8", "none")}
    draw_arms(rows, list(CORRECTIONS), kinds, "reward", path)


def _apart(right: list[float], wrong: list[float], is_ratio: bool) -> list[float]:
    pairs = zip(right, wrong, strict=True)
    return [other / base if is_ratio else other - base for base, other in pairs]


def _steps(means: Sequence[float], block: int) -> list[int]:
    return [block * (place + 1) for place in range(len(means))]


def failed_runs(path: Path) -> str:
    failed = [(r["arm"], r["seed"], r["status"]) for r in table.read(path) if r["status"] != "done"]
    return f"failed runs: {failed or 'none'}\n"


def model_studies(results: Path, figures: Path | None) -> None:
    """Print the pair and studies 3 and 2, those that have run, and draw the studies."""
    from .model_studies import STUDIES

    drawings = {"sanity": draw_sanity, "numerics": draw_numerics}
    for study, (arms, _) in (STUDIES | {"sanity_longer": STUDIES["sanity"]}).items():
        path = results / f"{study}.csv"
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
            print(differences(rows, pairs, "reward"), end="\n\n")
        if figures and study in drawings:
            drawings[study](rows, figures / f"{study}.png")
        print(failed_runs(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--figures", type=Path, help="the folder where to draw them")
    args = parser.parse_args()
    path = args.results / "normaliser.csv"
    if path.exists():
        rows = finished(path)
        for part in (right_arms, mistakes, curves):
            print(part(rows), end="\n\n")
        if args.figures:
            draw(rows, args.figures / "normaliser.png")
        print(failed_runs(path))
    model_studies(args.results, args.figures)


if __name__ == "__main__":
    main()
