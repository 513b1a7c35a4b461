"""The report as text (drawn with rich in a terminal, plain when piped), as JSON and as a picture."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from megatron_pg.explain.report import StepReport
from megatron_pg.explain.step import ExplainedStep, ExplainOptions
from megatron_pg.megatron.scale_contract import FACTORS

MAX_ROWS = 12
"""Samples or groups shown one by one; of more, some are picked over the range."""


class TextTable(NamedTuple):
    """A titled table; the first column is left-aligned, the others right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def print_report(step: ExplainedStep, report: StepReport, options: ExplainOptions) -> None:
    """Prints every table, then what is not shown, not used, or likely not meant."""
    notes = [f"{name} is not shown: {reason}" for name, reason in report.unavailable.items()]
    if step.num_skipped:
        notes.append(f"rows that are no sample, skipped (--on-bad-row skip): {step.num_skipped}")
    if options.unused_flags:
        notes.append(f"not used: {' '.join(options.unused_flags)}")
    notes += [f"warning: {warning}" for warning in report.warnings]
    tables = [_objectives(step, report, options), *_shares(step, report), _scale(report, options)]
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        _print_rich(tables, notes)
        return
    for table in tables:
        lines = [table.columns, *table.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        print(table.title)
        for first, *others in lines:
            cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
            print("  ".join([first.ljust(widths[0]), *cells]).rstrip())
        print()
    for note in notes:
        print(note)


def _objectives(step: ExplainedStep, report: StepReport, options: ExplainOptions) -> TextTable:
    """The counts, and each aggregation's size against sample_mean."""
    totals, config = step.totals, options.config
    groups = "?" if totals.num_prompt_groups is None else totals.num_prompt_groups
    rows = []
    for name, each in report.aggregations.items():
        objective = (
            each.formula if each.divisor is None else f"{each.formula}, L = {each.divisor:g}"
        )
        if each.divisor is not None and config.loss_aggregation_divisor is None:
            objective += " (the longest)"
        ratio = each.learning_rate_ratio
        rows.append(
            (
                f"{'*' if name == config.loss_aggregation else ' '} {name}",
                objective,
                str(each.outer_count),
                f"{each.total_weight:.4g}",
                "-" if ratio is None else f"{ratio:.4g}",
            )
        )
    return TextTable(
        f"Objectives (* of the flags): N = {totals.num_rollouts} rollouts, P = {groups} prompt groups, "
        f"T = {totals.num_active_tokens} active tokens",
        ("aggregation", "objective", "outer count", "total weight", "learning rate ratio"),
        rows,
    )


def _shares(step: ExplainedStep, report: StepReport) -> Iterator[TextTable]:
    """One column for each aggregation: of one token of a sample, of the samples by length, of the prompt groups."""
    each, samples = report.aggregations.values(), step.samples
    picked = _picked(range(len(samples)), lambda index: samples[index].num_active_tokens)
    some = f" ({len(picked)} of {len(samples)} samples, by length)"
    yield TextTable(
        f"One token of each sample{some if len(picked) < len(samples) else ''}: "
        "weight -> coefficient in the gradient (weight / outer count)",
        ("sample", "group", "tokens", *report.aggregations),
        [
            (
                samples[index].name,
                "-" if samples[index].group_index is None else str(samples[index].group_index),
                str(samples[index].num_active_tokens),
                *(f"{a.token_weight[index]:.4g} -> {a.token_coefficient[index]:.4g}" for a in each),
            )
            for index in picked
        ],
    )
    yield TextTable(
        "Share of the weight by length",
        ("tokens", "samples", *report.aggregations),
        [
            (
                f"{parts[0].shortest} to {parts[0].longest}",
                str(parts[0].num_samples),
                *(_percent(part.share) for part in parts),
            )
            for parts in zip(*(a.quantile_shares for a in each), strict=True)
        ],
    )
    by_tokens = report.aggregations["token_mean"].group_shares
    groups = _picked(list(by_tokens), lambda group: (by_tokens[group], group))
    some = f" ({len(groups)} of {len(by_tokens)}, by tokens)"
    if len(groups) > 1:
        yield TextTable(
            f"Share of the weight by prompt group{some if len(groups) < len(by_tokens) else ''}",
            ("group", *report.aggregations),
            [(str(g), *(_percent(a.group_shares[g]) for a in each)) for g in groups],
        )


def _scale(report: StepReport, options: ExplainOptions) -> TextTable:
    """From the local loss to the gradient."""
    per_token, scale = options.config.calculate_per_token_loss, report.scale
    factors = (scale.returned, scale.schedule, scale.gradients)
    return TextTable(
        "What happens to the loss of a micro-batch, the same for every aggregation "
        f"(DP = {options.data_parallel_size}, CP = {options.context_parallel_size}, M = {options.num_microbatches}, "
        f"calculate_per_token_loss {'on' if per_token else 'off'})",
        ("returned: times", "schedule: times", "sum of gradients: times", "net"),
        [
            (
                *(
                    name if name == "1" else f"{name} = {factor:.4g}"
                    for name, factor in zip(FACTORS[per_token], factors, strict=True)
                ),
                f"{scale.net:.4g}",
            )
        ],
    )


def _print_rich(tables: Sequence[TextTable], notes: Sequence[str]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for table in tables:
        # 80 columns are enough: no frame, and a cell's second half goes below its first one. All of it is Text: of a
        # str, rich would take what a file name has in brackets or between colons for markup.
        title = Text(table.title, style="table.title")
        drawn = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
        for column in table.columns:
            is_first = column == table.columns[0]
            drawn.add_column(Text(column), justify="left" if is_first else "right", overflow="fold")
        for first, *others in table.rows:
            drawn.add_row(Text(first), *(Text(cell.replace(" -> ", "\n")) for cell in others))
        console.print(drawn)
    for note in notes:
        console.print(Text(note, style="yellow" if note.startswith("warning") else ""))


def _picked(items: Sequence[int], key: Callable[[int], Any] | None = None) -> Sequence[int]:
    """Some of many items, evenly over their order by `key`, the first and the last among them; all of a few."""
    if len(items) <= MAX_ROWS:
        return items
    ordered, last = sorted(items, key=key), len(items) - 1
    return [ordered[round(last * part / (MAX_ROWS - 1))] for part in range(MAX_ROWS)]


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 or share == 0 else f"{100 * share:.2g}%"


def print_json(step: ExplainedStep, report: StepReport, options: ExplainOptions) -> None:
    """Prints the whole report as one object, every sample in it."""
    totals, samples = step.totals, step.samples
    whole = {
        "step": {
            "num_samples": len(samples),
            "num_rollouts": totals.num_rollouts,
            "num_prompt_groups": totals.num_prompt_groups,
            "num_active_tokens": totals.num_active_tokens,
            "num_skipped": step.num_skipped,
            "active_tokens": [sample.num_active_tokens for sample in samples],
            "group_index": [sample.group_index for sample in samples],
            "rollout_id": [sample.rollout_id for sample in samples],
        },
        "parallelism": {
            "data_parallel_size": options.data_parallel_size,
            "context_parallel_size": options.context_parallel_size,
            "num_microbatches": options.num_microbatches,
            "calculate_per_token_loss": options.config.calculate_per_token_loss,
        },
        "loss_aggregation": options.config.loss_aggregation,
        "aggregations": report.aggregations,
        "unavailable": report.unavailable,
        "warnings": report.warnings,
        "unused_flags": options.unused_flags,
    }
    print(json.dumps(whole, indent=2, default=vars))


def plot(step: ExplainedStep, report: StepReport, path: str) -> None:
    """Draws the coefficient of a token against the length of its sample, one set of points for each aggregation.

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
    for marker, (name, each) in zip("osD^vP", report.aggregations.items(), strict=False):
        points = [(n, y) for n, y in zip(lengths, each.token_coefficient, strict=True) if n]
        label = name if each.divisor is None else f"{name}, L = {each.divisor:g}"
        axes.plot(*zip(*points, strict=True), marker, markersize=3, alpha=0.6, label=label)
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
