"""The coefficient of a token against the length of its sample, one set of points for each aggregation."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_pg.explain.report import AggregationReport
from megatron_pg.explain.step import ExplainedStep

MARKERS = "osD^vP"


def plot(step: ExplainedStep, reports: Mapping[str, AggregationReport], path: str) -> None:
    """Writes the picture.

    Raises:
        ValueError: no sample has an active token, matplotlib is not installed, or it does not know the file's type.
    """
    if not step.totals.num_active_tokens:
        raise ValueError(
            f"--plot {path}: no sample of the step has an active token, so there is no point to draw; drop --plot, or "
            "give lengths above 0"
        )
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    lengths = [sample.num_active_tokens for sample in step.samples]
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    active = [index for index in order if lengths[index]]
    for number, report in enumerate(reports.values()):
        divisor = "" if report.divisor is None else f", L = {report.divisor:g}"
        axes.plot(
            [lengths[index] for index in active],
            [report.token_coefficient[index] for index in active],
            marker=MARKERS[number % len(MARKERS)],
            markersize=3,
            linestyle="none",
            alpha=0.6,
            label=f"{report.name}{divisor}",
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="active tokens of the sample",
        ylabel="coefficient of one token's loss",
        title=f"{len(lengths)} samples, {step.totals.num_active_tokens} active tokens",
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=150)
