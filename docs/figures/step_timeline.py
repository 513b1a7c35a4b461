"""Draws docs/figures/step_timeline.png: what the GPU does while the host is in packing and in the loss, one step.

torchrun --nproc-per-node 1 -m benchmarks.step_timeline --tokens 8192 --output timeline.json    # on a GPU
python docs/figures/step_timeline.py timeline.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLORS = {"packing": "#d9822b", "before the model": "#8e6bbf", "loss": "#c0392b"}
BUSY = "#2b6cb0"


def row(axes: Axes, height: float, spans: list[tuple[float, float]], color: str) -> None:
    bars = [(begin, end - begin) for begin, end in spans]
    axes.broken_barh(bars, (height, 0.7), facecolors=color, linewidth=0)


def panel(axes: Axes, step: dict[str, Any], begin: float, end: float, title: str) -> None:
    row(axes, 0.0, step["gpu"], BUSY)
    for name, color in COLORS.items():
        row(axes, 1.0, [(left, right) for kind, left, right in step["host"] if kind == name], color)
    axes.set_xlim(begin, end)
    axes.set_ylim(-0.15, 1.85)
    axes.set_yticks([0.35, 1.35], ["GPU", "host"])
    axes.set_title(title, fontsize=9, loc="left")
    axes.tick_params(labelsize=8)


def draw(step: dict[str, Any]) -> Figure:
    """The whole step, and its last micro-batch's loss from 5 ms before to 15 ms after."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    whole, near = figure.subplots(2, 1)
    panel(whole, step, 0.0, step["milliseconds"], "one step")
    loss = [left for kind, left, _ in step["host"] if kind == "loss"][-1]
    panel(near, step, loss - 5, loss + 15, "around the last loss")
    near.set_xlabel("milliseconds", fontsize=8)
    for name, color in {"GPU works": BUSY, **COLORS}.items():
        whole.bar(0, 0, color=color, label=name)
    whole.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, fontsize=8, frameon=False)
    return figure


def main() -> None:
    steps = json.loads(Path(sys.argv[1]).read_text())
    step = next(step for name, step in steps.items() if name.endswith("`--fused-lm-head`"))
    draw(step).savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
