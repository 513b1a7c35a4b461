r"""Draws docs/figures/real_model.png: the reward of runs of examples/launch/smollm2.sh, and where
their seconds go.

python docs/figures/real_model.py runs/smollm2-1 runs/smollm2-2 runs/smollm2-3
python docs/figures/real_model.py runs/cpu1 runs/cpu2 --mean-of 5 \
    --output docs/figures/real_model_cpu.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure

PHASES = ("rollouts", "scoring", "training")


def main(folders: list[Path], output: Path, mean_of: int) -> None:
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    reward, seconds = figure.subplots(1, 2)
    for number, folder in enumerate(folders):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        steps = [line["step"] for line in lines]
        held_out = [
            json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()
        ]
        color = f"C{number}"
        rewards = [line["reward"] for line in lines]
        parts = [rewards[max(0, i + 1 - mean_of) : i + 1] for i in range(len(rewards))]
        reward.plot(steps, [sum(p) / len(p) for p in parts], color=color, label=folder.name)
        reward.plot([e["step"] for e in held_out], [e["score"] for e in held_out], "o", color=color)
        if number == 0:
            of_phases = [[line[f"seconds_{phase}"] for line in lines[5:]] for phase in PHASES]
            seconds.stackplot(steps[5:], of_phases, labels=PHASES)
    smoothed = f", mean of {mean_of} steps" if mean_of > 1 else ""
    reward.set(title=f"share of right answers{smoothed} (points: held out)", xlabel="step")
    reward.legend()
    seconds.set(title=f"seconds of a step, {folders[0].name}", xlabel="step")
    seconds.legend()
    figure.savefig(output, dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".png"))
    parser.add_argument("--mean-of", type=int, default=1, help="steps of a point of the curve")
    args = parser.parse_args()
    main(args.folders, args.output, args.mean_of)
