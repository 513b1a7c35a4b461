"""The report as tables: rich in a terminal, plain when piped."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_pg.config import PolicyLossConfig
from megatron_pg.explain.options import ExplainOptions, Parallelism
from megatron_pg.explain.report import AggregationReport
from megatron_pg.explain.step import ExplainedStep

MAX_ROWS = 12
"""Samples or groups shown one by one; of more, some are picked over the range."""


@dataclass(frozen=True)
class TextTable:
    """A titled table of text cells; the first column is left-aligned, the others right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def print_report(
    step: ExplainedStep,
    reports: Mapping[str, AggregationReport],
    reasons: Mapping[str, str],
    warnings: Sequence[str],
    options: ExplainOptions,
) -> None:
    """Prints every table, then the warnings."""
    tables = [
        objective_table(step, reports, options.config),
        token_table(step, reports),
        quantile_table(reports),
        group_table(reports),
        megatron_table(reports, options.parallelism, options.config),
    ]
    notes = [f"{name} is not shown: {reason}" for name, reason in reasons.items()]
    if step.num_skipped:
        notes.append(f"rows that are no sample, skipped (--on-bad-row skip): {step.num_skipped}")
    if options.unused_flags:
        notes.append(f"not used: {' '.join(options.unused_flags)}")
    notes += [f"warning: {warning}" for warning in warnings]
    shown = [table for table in tables if table.rows]
    if sys.stdout.isatty() and _print_rich(shown, notes):
        return
    for table in shown:
        print(plain(table), end="\n\n")
    for note in notes:
        print(note)


def objective_table(
    step: ExplainedStep, reports: Mapping[str, AggregationReport], config: PolicyLossConfig
) -> TextTable:
    """The counts, and each aggregation's size against sample_mean."""
    totals = step.totals
    groups = "?" if totals.num_prompt_groups is None else str(totals.num_prompt_groups)
    rows = []
    for report in reports.values():
        chosen = "*" if report.name == config.loss_aggregation else " "
        divisor = "" if report.divisor is None else f", L = {report.divisor:g}"
        assumed = report.name == "constant" and config.loss_aggregation_divisor is None
        rows.append(
            [
                f"{chosen} {report.name}",
                report.formula + divisor + (" (the longest)" if assumed else ""),
                str(report.outer_count),
                _number(report.total_weight),
                "-" if report.learning_rate_ratio is None else _number(report.learning_rate_ratio),
            ]
        )
    return TextTable(
        f"Objectives (* of the flags): N = {totals.num_rollouts} rollouts, P = {groups} prompt groups, "
        f"T = {totals.num_active_tokens} active tokens",
        ["aggregation", "objective", "outer count", "total weight", "learning rate ratio"],
        rows,
    )


def token_table(step: ExplainedStep, reports: Mapping[str, AggregationReport]) -> TextTable:
    """Weight and coefficient of one token of the samples."""
    order = sorted(range(len(step.samples)), key=lambda i: step.samples[i].num_active_tokens)
    picked = _picked(order) if len(order) > MAX_ROWS else list(range(len(order)))
    rows = []
    for index in picked:
        sample = step.samples[index]
        cells = [
            f"{_number(report.token_weight[index])} -> {_number(report.token_coefficient[index])}"
            for report in reports.values()
        ]
        group = "-" if sample.group_index is None else str(sample.group_index)
        rows.append([sample.name, group, str(sample.num_active_tokens), *cells])
    shown = "" if len(order) <= MAX_ROWS else f" ({len(picked)} of {len(order)} samples, by length)"
    return TextTable(
        f"One token of each sample{shown}: weight -> coefficient in the gradient (weight / outer count)",
        ["sample", "group", "tokens", *reports],
        rows,
    )


def quantile_table(reports: Mapping[str, AggregationReport]) -> TextTable:
    """Share of the weight of each quarter of the samples, by length."""
    columns = [report.quantile_shares for report in reports.values()]
    rows = [
        [f"{parts[0].shortest} to {parts[0].longest}", str(parts[0].num_samples)]
        + [_percent(part.share) for part in parts]
        for parts in zip(*columns, strict=True)
    ]
    return TextTable("Share of the weight by length", ["tokens", "samples", *reports], rows)


def group_table(reports: Mapping[str, AggregationReport]) -> TextTable:
    """Share of the weight of each prompt group."""
    shares = [report.group_shares for report in reports.values()]
    if not shares or len(shares[0]) < 2:
        return TextTable("", [], [])
    groups = list(shares[0])
    by_tokens = sorted(groups, key=lambda g: (reports["token_mean"].group_shares[g], g))
    picked = _picked(by_tokens) if len(groups) > MAX_ROWS else groups
    shown = "" if len(groups) <= MAX_ROWS else f" ({len(picked)} of {len(groups)}, by tokens)"
    rows = [[str(group)] + [_percent(share[group]) for share in shares] for group in picked]
    return TextTable(f"Share of the weight by prompt group{shown}", ["group", *reports], rows)


def megatron_table(
    reports: Mapping[str, AggregationReport], parallelism: Parallelism, config: PolicyLossConfig
) -> TextTable:
    """From the local loss to the gradient."""
    sizes = (
        f"DP = {parallelism.data_size}, CP = {parallelism.context_size}, "
        f"M = {parallelism.num_microbatches}"
    )
    scale = next(iter(reports.values())).scale
    names = ("DP M", "CP / M", "1 / (DP CP)")
    if config.calculate_per_token_loss:
        names = ("sum of n", "1", "1 / sum of n")
    factors = (scale.returned, scale.schedule, scale.gradients)
    cells = [
        name if name == "1" else f"{name} = {_number(factor)}"
        for name, factor in zip(names, factors, strict=True)
    ]
    mode = "on" if config.calculate_per_token_loss else "off"
    return TextTable(
        f"What happens to the loss of a micro-batch, the same for every aggregation ({sizes}, "
        f"calculate_per_token_loss {mode})",
        ["returned: times", "schedule: times", "sum of gradients: times", "net"],
        [[*cells, _number(scale.net)]],
    )


def plain(table: TextTable) -> str:
    """Columns aligned with spaces."""
    rows = [list(table.columns), *(list(row) for row in table.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.columns))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([table.title, *lines])


def _print_rich(tables: Sequence[TextTable], notes: Sequence[str]) -> bool:
    """Prints with rich; False where it is not installed."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    console = Console()
    for table in tables:
        # 80 columns are enough: no frame, and a cell's second half goes below its first one. All of it is Text: of a
        # str, rich would take what a file name has in brackets or between colons for markup.
        drawn = Table(
            title=Text(table.title, style="table.title"),
            title_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 0, 0, 1),
        )
        for index, column in enumerate(table.columns):
            drawn.add_column(
                Text(column), justify="left" if index == 0 else "right", overflow="fold"
            )
        for first, *others in table.rows:
            drawn.add_row(Text(first), *(Text(cell.replace(" -> ", "\n")) for cell in others))
        console.print(drawn)
    for note in notes:
        console.print(Text(note, style="yellow" if note.startswith("warning") else ""))
    return True


def _picked(items: Sequence[int]) -> list[int]:
    """Some of the items, evenly over their order, the first and the last among them."""
    last = len(items) - 1
    return [items[round(last * part / (MAX_ROWS - 1))] for part in range(MAX_ROWS)]


def _number(value: float) -> str:
    return f"{value:.4g}"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 or share == 0 else f"{100 * share:.2g}%"
