"""report.png: six curves against the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CURVES = (
    ("reward", "reward (share of right answers)"),
    ("response_length", "response length (tokens)"),
    ("pg_loss", "policy-gradient loss"),
    ("clipped_ratio_fraction", "clip fraction"),
    ("kl_new_old", "KL (old || new), nats"),
    ("grad_norm", "gradient norm"),
)


def draw_report(steps: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw the curves of CURVES from the lines of metrics.jsonl; a metric that was not logged stays empty."""
    figure, axes = plt.subplots(2, 3, figsize=(12, 6.5), layout="constrained", sharex=True)
    for axis, (name, label) in zip(axes.flat, CURVES, strict=True):
        points = [(step["step"], step[name]) for step in steps if step.get(name) is not None]
        axis.set_title(label, fontsize=10)
        axis.grid(alpha=0.3)
        if points:
            x, y = zip(*points, strict=True)
            axis.plot(x, y, color="tab:blue", alpha=0.35, linewidth=1)
            axis.plot(x, _smoothed(y), color="tab:blue", linewidth=2)
    axes[0, 0].set_ylim(0, 1)
    for axis in axes[1]:
        axis.set_xlabel("step")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _smoothed(values: tuple[float, ...], window: int = 7) -> list[float]:
    """Centred moving average, over fewer points at the ends."""
    half = window // 2
    parts = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]
