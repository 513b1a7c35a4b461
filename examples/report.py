"""Draws runs of train.py in one figure: python examples/report.py RUN [RUN ...] --output
report.png
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

CURVES = {
    "reward": "Mean reward per step, and held-out score (points)",
    "response_length": "Response length, tokens",
    "grad_norm": "Gradient norm",
    "clipped_ratio_fraction": "Tokens outside the clip range",
    "kl_new_old": "KL(old || new), nats",
}
IN_TITLE = {"policy_loss": "", "loss_aggregation": "", "advantage": "advantages ", "seed": "seed "}
COLORS = ("#1f5fa8", "#d66e14", "#2f8a57", "#8b4fa0", "#b8323f", "#5c6670")


class Run(NamedTuple):
    """The results in a run's folder. Held-out scores are after a step."""

    name: str
    settings: Mapping[str, str]
    steps: Sequence[Mapping[str, Any]]
    held_out: Sequence[tuple[int, float]]

    def smoothed(self, name: str) -> tuple[list[int], list[float], list[float]]:
        """Return the steps with a value, the values, and their mean over the last sixteenth of the
        run.
        """
        known = [(step["step"], step[name]) for step in self.steps if step.get(name) is not None]
        numbers, values = [number for number, _ in known], [value for _, value in known]
        window = max(len(known) // 16, 1)
        parts = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
        return numbers, values, [fmean(part) for part in parts]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the steps of a run. Ignore a last line without a newline, which a killed run leaves
    half-written.
    """
    steps = []
    texts = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, text in enumerate(texts, 1):
        try:
            steps.append({**json.loads(text)})
            int(steps[-1]["step"])
        except (ValueError, TypeError, KeyError):
            found = f"{path} line {number} is not a step of a run, found {text[:40]!r}"
            raise ValueError(f"{found}: fix or remove the line") from None
    return steps


def read_run(folder: Path) -> Run:
    """Read a run's folder. Raise ValueError if it has no step."""
    if not (steps := read_lines(folder / "metrics.jsonl")):
        raise ValueError(f"{folder} has no step in metrics.jsonl: give a run's --save folder")
    path = folder / "settings.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    held_out = [(line["step"], line["score"]) for line in read_lines(folder / "held_out.jsonl")]
    return Run(folder.name, settings, steps, held_out)


def summary(folder: Path) -> str:
    """Describe a run's change in held-out score, or in mean reward if there is no held-out
    score.
    """
    run = read_run(folder)
    text, (_, rewards, _) = f"{len(run.steps)} steps", run.smoothed("reward")
    if run.held_out:
        return f"{text}, held-out score {run.held_out[0][1]:.2f} -> {run.held_out[-1][1]:.2f}"
    if tenth := max(len(rewards) // 10, 1) if rewards else 0:
        ends = f"{fmean(rewards[:tenth]):.2f} -> {fmean(rewards[-tenth:]):.2f}"
        return f"{text}, mean reward {ends} (first, last tenth)"
    return text


def report(runs: Sequence[Run], path: Path) -> None:
    """Draw the curves of runs, raw (faint) and smoothed."""
    from matplotlib.figure import Figure  # only drawing needs it
    from matplotlib.ticker import MaxNLocator

    figure, settings = Figure(figsize=(13.3, 7.5), layout="constrained"), runs[0].settings
    told = [text + settings[name] for name, text in IN_TITLE.items() if name in settings]
    figure.suptitle(" · ".join([settings.get("task", "None").replace("None", "rollouts"), *told]))
    places = [["reward", *list(CURVES)[1:3]], ["reward", *list(CURVES)[3:]]]
    for name, panel in figure.subplot_mosaic(places, width_ratios=[1.6, 1, 1]).items():
        panel.set_title(CURVES[name], loc="left", fontsize=11.5)
        for run, color in zip(runs, COLORS * len(runs), strict=False):
            steps, values, means = run.smoothed(name)
            marker = "o" if len(steps) < 20 else None
            panel.plot(steps, values, color=color, alpha=0.25, linewidth=1, marker=marker)
            panel.plot(steps, means, color=color, linewidth=2, label=run.name)
            for step, score in run.held_out if name == "reward" else ():
                panel.plot(step, score, "o", color=color, markersize=9, markeredgecolor="white")
                at = {"xytext": (9, -4), "textcoords": "offset points", "color": color}
                panel.annotate(f"{score:.2f}", (step, score), **at)
        if name == "reward" and len(runs) > 1:
            panel.legend(frameon=False, loc="lower right")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#e4e6e9")
        panel.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        panel.set_xlabel("step")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--output", type=Path, default=Path("report.png"))
    args = parser.parse_args()
    try:
        report([read_run(folder) for folder in args.runs], args.output)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
