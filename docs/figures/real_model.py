"""Draws docs/figures/real_model.png: the reward of runs of examples/launch/smollm2.sh, and where their seconds go.

python docs/figures/real_model.py runs/smollm2-1 runs/smollm2-2 runs/smollm2-3
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

PHASES = ("rollouts", "scoring", "training")


def main(folders: list[Path]) -> None:
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    reward, seconds = figure.subplots(1, 2)
    for number, folder in enumerate(folders):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        steps = [line["step"] for line in lines]
        held_out = [
            json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()
        ]
        color = f"C{number}"
        reward.plot(steps, [line["reward"] for line in lines], color=color, label=folder.name)
        reward.plot([e["step"] for e in held_out], [e["score"] for e in held_out], "o", color=color)
        if number == 0:
            parts = [[line[f"seconds_{phase}"] for line in lines[5:]] for phase in PHASES]
            seconds.stackplot(steps[5:], parts, labels=PHASES)
    reward.set(title="share of right answers (points: held-out questions)", xlabel="step")
    reward.legend()
    seconds.set(title=f"seconds of a step, {folders[0].name}", xlabel="step")
    seconds.legend()
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=100)


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
