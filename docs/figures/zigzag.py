"""Draws docs/figures/zigzag.png, the token window of two samples at context-parallel size 2.

    python docs/figures/zigzag.py

The cells are those of megatron_pg.step.token_window.TokenWindow: nothing here knows the layout.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from megatron_pg import TokenWindow

TOTAL_LENGTHS, RESPONSE_LENGTHS = [7, 5], [4, 3]
NAMES = ["A", "B"]
CP_SIZE = 2
RANK_COLORS = ["#d9822b", "#2b6cb0"]
PROMPT, RESPONSE, PADDING = "#e5e7eb", "#cfe8cf", "white"


def cell(axes: Axes, x: float, y: float, text: str, face: str, edge: str, width: float) -> None:
    axes.add_patch(Rectangle((x, y), 0.92, 0.8, facecolor=face, edgecolor=edge, linewidth=width))
    axes.text(x + 0.46, y + 0.4, text, ha="center", va="center", fontsize=8)


def token_name(sample: int, position: int) -> str:
    """Such as A p1 for a prompt token, A r0 for a response token; a dot for padding."""
    prompt = TOTAL_LENGTHS[sample] - RESPONSE_LENGTHS[sample]
    if position >= TOTAL_LENGTHS[sample]:
        return "·"
    return f"p{position}" if position < prompt else f"r{position - prompt}"


def face_of(name: str) -> str:
    return {"p": PROMPT, "r": RESPONSE}.get(name[0], PADDING)


def draw() -> Figure:
    windows = [
        TokenWindow.build(TOTAL_LENGTHS, RESPONSE_LENGTHS, cp_rank=rank, cp_size=CP_SIZE)
        for rank in range(CP_SIZE)
    ]
    starts = windows[0].cu_seqlens.tolist()
    owner = {
        (sample, position): rank
        for rank, window in enumerate(windows)
        for sample, position in zip(
            window.segment_ids.tolist(), window.position_ids.tolist(), strict=True
        )
    }
    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.text(-0.2, 4.9, "whole sequences, padded to 2·CP chunks", fontsize=10, weight="bold")
    for (sample, position), rank in owner.items():
        name = token_name(sample, position)
        x = starts[sample] + position
        cell(axes, x, 3.8, name, face_of(name), RANK_COLORS[rank], 2.2)
    for sample, name in enumerate(NAMES):
        middle = (starts[sample] + starts[sample + 1]) / 2
        axes.text(middle, 3.45, f"sample {name}", ha="center", fontsize=9)
    for rank, window in enumerate(windows):
        y = 1.9 - 1.9 * rank
        _draw_rank(axes, window, y, RANK_COLORS[rank])
    axes.set(xlim=(-0.5, 16.2), ylim=(-0.9, 5.3))
    axes.set_axis_off()
    return figure


def _draw_rank(axes: Axes, window: TokenWindow, y: float, color: str) -> None:
    """The local rows of one rank, and under each the response token that it scores."""
    title = f"rank {window.cp_rank}: local rows, and the window: the response token each row scores"
    axes.text(-0.2, y + 1.0, title, fontsize=10, weight="bold", color=color)
    rows = zip(window.segment_ids.tolist(), window.position_ids.tolist(), strict=True)
    for row, (sample, position) in enumerate(rows):
        name = token_name(sample, position)
        label = name if name == "·" else f"{NAMES[sample]} {name}"
        cell(axes, row, y, label, face_of(name), color, 1.2)
    for row, sample, index in zip(
        window.logit_rows.tolist(),
        window.window_segment_ids.tolist(),
        window.response_indices.tolist(),
        strict=True,
    ):
        response = index - sum(RESPONSE_LENGTHS[:sample])
        axes.text(row + 0.46, y - 0.3, f"↓ {NAMES[sample]} r{response}", ha="center", fontsize=8)


if __name__ == "__main__":
    draw().savefig(Path(__file__).with_suffix(".png"), dpi=130)
