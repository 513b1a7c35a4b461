"""Draws docs/figures/scale.png from the tables of docs/records/scale.md.

python docs/figures/scale.py
"""

import re
from pathlib import Path

from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1]
RECORD = (DOCS / "records/scale.md").read_text()


def rows_of(title: str) -> list[list[float]]:
    """The numbers of the table under a title."""
    _, _, rest = RECORD.partition(f"**{title}**\n\n")
    lines = rest.split("\n\n")[0].splitlines()[2:]
    return [[float(cell) for cell in re.findall(r"[-+.\de]+", line)] for line in lines]


def main() -> None:
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    times, balance = figure.subplots(1, 2)
    for title, seconds, label in (
        ("Dealing lengths to ranks", 2, "dealing lengths"),
        ("plan_step of one rank", 3, "plan_step of one rank"),
        ("The collector", 2, "collector"),
    ):
        most: dict[float, float] = {}
        for row in rows_of(title):
            most[row[0]] = max(row[seconds], most.get(row[0], 0.0))
        times.loglog(list(most), list(most.values()), marker="o", label=label)
    times.axhline(5, color="gray", linestyle=":", label="goal of a plan")
    times.set(xlabel="samples of the step, over at most 16,384 ranks", ylabel="seconds a rank")
    times.legend(fontsize=7)
    rows = sorted((row[0] / row[1], row[4]) for row in rows_of("Dealing lengths to ranks"))
    balance.loglog(*zip(*rows, strict=True), marker="o")
    balance.axhline(1.02, color="gray", linestyle=":")
    balance.set(xlabel="samples a rank", ylabel="slowest rank over mean, predicted")
    figure.savefig(DOCS / "figures/scale.png", dpi=120)


if __name__ == "__main__":
    main()
