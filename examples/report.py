"""Draws runs of train.py in one picture: python examples/report.py RUN [RUN ...] --output
report.png
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

CURVES = {
    "reward": "Mean reward of a step, and held-out score (points)",
    "response_length": "Response length, tokens",
    "grad_norm": "Gradient norm",
    "clipped_ratio_fraction": "Tokens outside of the clip range",
    "kl_new_old": "KL(old || new), nats",
}
OF_RATIO = ("clipped_ratio_fraction", "kl_new_old")
"""Curves that begin anew with every round of rollouts: a line for each step of a round, where a
round has several."""
COLORS = ("#1f5fa8", "#d66e14", "#2f8a57", "#8b4fa0", "#b8323f", "#5c6670")
IN_TITLE = {"policy_loss": "", "loss_aggregation": "", "advantage": "advantages ", "seed": "seed "}
NOT_COMPARED = {"run_dir", "save", "load", "tensorboard_dir", "config", "world_size"}
STYLE = {"color": "#5c6670", "fontsize": 10}


class Run(NamedTuple):
    """What a run has left in its folder."""

    name: str
    """Its task, or the name of its folder."""
    settings: Mapping[str, str]
    steps: Sequence[Mapping[str, Any]]
    held_out: Sequence[tuple[int, float]]
    """Step, and score of the held-out tasks after it."""
    folder: str = ""

    @property
    def steps_of_round(self) -> int:
        """Optimizer steps that are taken with the rollouts of one policy."""
        return int(self.settings.get("steps_per_round", 1))

    def smoothed(
        self, name: str, part: slice = slice(None)
    ) -> tuple[list[int], list[float], list[float]]:
        """Steps with a value, the values, and their mean over the last sixteenth of the run."""
        known = [
            (step["step"], step[name]) for step in self.steps[part] if step.get(name) is not None
        ]
        numbers, values = [number for number, _ in known], [value for _, value in known]
        window = max(len(known) // 16, 1)
        parts = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
        return numbers, values, [sum(part) / len(part) for part in parts]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the steps of a run. A last line without its end is none: a killed run leaves it half
    written.
    """
    steps = []
    texts = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, text in enumerate(texts, 1):
        try:
            steps.append({**json.loads(text)})
            int(steps[-1]["step"])
        except (ValueError, TypeError, KeyError):
            found = f"{path} line {number} is no line of a run, found {text[:40]!r}"
            raise ValueError(f"{found}: mend or remove the line") from None
    return steps


def read_run(folder: Path) -> Run:
    """Read the folder of a run; a ValueError says that there is none."""
    if not (steps := read_lines(folder / "metrics.jsonl")):
        raise ValueError(f"{folder} has no step in metrics.jsonl: give the --save of a run")
    path = folder / "settings.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    held_out = [(line["step"], line["score"]) for line in read_lines(folder / "held_out.jsonl")]
    name = settings.get("task", "None")
    return Run(folder.name if name == "None" else name, settings, steps, held_out, str(folder))


def summary(folder: Path) -> str:
    """Say how the mean reward and the held-out score of a run have changed."""
    run = read_run(folder)
    rewards = [step["reward"] for step in run.steps if step.get("reward") is not None]
    tenth, parts = max(len(rewards) // 10, 1), [f"{len(run.steps)} steps"]
    if rewards:
        ends = f"{fmean(rewards[:tenth]):.2f} -> {fmean(rewards[-tenth:]):.2f}"
        parts.append(f"reward {ends} (first, last tenth)")
    if run.held_out:
        ends = f"{run.held_out[0][1]:.2f} -> {run.held_out[-1][1]:.2f}"
        parts.append(f"held-out {ends} (before, after)")
    return ", ".join(parts)


def names_of(runs: Sequence[Run]) -> tuple[str, list[str]]:
    """What the runs have in common, for the title, and what tells each from the others."""
    first = runs[0].settings
    # An older run lacks settings that a newer one has.
    shared = [name for name in first if all(name in run.settings for run in runs)]
    apart = [name for name in shared if any(run.settings[name] != first[name] for run in runs)]
    apart = [name for name in apart if name not in NOT_COMPARED]
    labels = [", ".join(f"{name} {run.settings[name]}" for name in apart) for run in runs]
    if len({*labels}) < len(runs):  # of the same settings, or of settings that one of them lacks
        labels = [
            ", ".join(filter(None, (label, run.folder)))
            for label, run in zip(labels, runs, strict=True)
        ]
    told = [f"{text}{first[name]}" for name, text in IN_TITLE.items() if name in first]
    return " · ".join(
        text for text, name in zip(told, IN_TITLE, strict=False) if name not in apart
    ), labels


def report(runs: Sequence[Run], title: str | None = None) -> Any:
    """The curves of runs, as a figure: faint as they are, and smoothed."""
    from matplotlib.figure import Figure  # a run that draws nothing needs none
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(13.3, 7.5), layout="constrained")
    shared, labels = names_of(runs)
    figure.get_layout_engine().set(rect=(0.01, 0.0, 0.98, 0.89), wspace=0.05, hspace=0.06)
    title = title or ", ".join(dict.fromkeys(run.name for run in runs))
    figure.text(0.02, 0.945, title, fontsize=19, fontweight="bold")
    figure.text(0.02, 0.905, shared, **STYLE | {"fontsize": 13})
    places = [["reward", *list(CURVES)[1:3]], ["reward", *OF_RATIO]]
    panels = figure.subplot_mosaic(places, width_ratios=[1.6, 1, 1])
    for name, title in CURVES.items():
        panel = panels[name]
        panel.set_title(title, loc="left", fontsize=11.5, fontweight="bold", pad=9)
        for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
            draw_curve(panel, run, name, label if name == "reward" else "", color_of(number))
        if any(line.get_label()[0] != "_" for line in panel.lines) and (
            name in OF_RATIO or len(runs) > 1
        ):
            panel.legend(
                frameon=False, fontsize=10, loc="lower right" if name == "reward" else "upper right"
            )
        panel.margins(x=0.1 if name == "reward" else 0.05, y=0.15 if name in OF_RATIO else 0.05)
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color("#c6cad0")
        panel.tick_params(colors=STYLE["color"], labelsize=10)
        panel.grid(axis="y", color="#e4e6e9")
        panel.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        panel.set_xlabel("step", **STYLE)
        if not any(len(line.get_xdata()) for line in panel.lines):
            panel.text(0.5, 0.5, "not reported", transform=panel.transAxes, ha="center", **STYLE)
    for number, run in enumerate(runs):
        draw_scores(panels["reward"], run, color_of(number))
    return figure


def color_of(number: int) -> str:
    return COLORS[number % len(COLORS)]


def draw_curve(panel: Any, run: Run, name: str, label: str, color: str) -> None:
    """Draw one curve of a run; of what the ratio decides a line for each step of its rounds, the
    last one solid.
    """
    passes = run.steps_of_round if name in OF_RATIO else 1
    for number in range(passes):
        steps, values, means = run.smoothed(name, slice(number, None, passes))
        if passes > 1:
            label = f"step {number + 1} of {passes} of a round" if color == COLORS[0] else ""
        marker = "o" if len(steps) < 20 else None
        panel.plot(steps, values, color=color, alpha=0.25, linewidth=1, marker=marker, markersize=4)
        style = "-" if number == passes - 1 else (0, (1, 1.2 + number))
        panel.plot(steps, means, color=color, linewidth=2, linestyle=style, label=label or "_")


def draw_scores(panel: Any, run: Run, color: str) -> None:
    """Draw the held-out scores, with the numbers of the first and the last."""
    for step, score in run.held_out:
        panel.plot(step, score, "o", color=color, markersize=9, markeredgecolor="white", zorder=4)
    for place in {0, len(run.held_out) - 1} if run.held_out else ():
        at = {"xytext": (9, -4), "textcoords": "offset points", "zorder": 5}
        text = f"{run.held_out[place][1]:.2f}"
        panel.annotate(
            text, run.held_out[place], color=color, fontsize=11.5, fontweight="bold", **at
        )


def draw_run(folder: Path) -> None:
    """Draw one run into its folder."""
    report([read_run(folder)]).savefig(folder / "report.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--title", help="first line of the picture (the task)")
    parser.add_argument("--output", type=Path, default=Path("report.png"))
    args = parser.parse_args()
    try:
        runs = [read_run(folder) for folder in args.runs]
    except ValueError as error:
        parser.error(str(error))
    report(runs, args.title).savefig(args.output, dpi=110)


if __name__ == "__main__":
    main()
