"""Output of the report: tables, by rich in a terminal and plain when piped, and a plot."""

import importlib.util
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_pg.explain.report import Report
from megatron_pg.explain.step import ExplainedStep, ExplainOptions
from megatron_pg.megatron.scale_contract import FACTORS

MAX_ROWS = 12
"""Samples or groups to show. From more, some are picked over the range."""
TextTable = tuple[str, list[tuple[str, ...]]]
"""Title and rows. The first row names the columns. All columns except the first are
right-aligned."""


def print_report(step: ExplainedStep, report: Report, options: ExplainOptions) -> None:
    """Print every table, then notes on missing aggregations, unused flags and likely mistakes."""
    notes = [f"{name} is not shown: {reason}" for name, reason in report["unavailable"].items()]
    if step.num_skipped:
        notes.append(f"bad rows skipped (--on-bad-row skip): {step.num_skipped}")
    if kept := report["step"]["kept_sets"]:
        is_read = options.config.replay_sampling_set
        use = "" if is_read else ", which only --replay-sampling-set reads"
        notes.append(
            f"sampling sets: {kept['num_tokens']} of {report['step']['num_active_tokens']} active "
            f"tokens have one, with {kept['mean_size']:.3g} ids on average and at most "
            f"{kept['largest']}{use}"
        )
    if terms := report["regularizers"]:
        relative = terms["relative_coefficient"]
        least, most = f"{min(relative):.3g}", f"{max(relative):.3g}"
        size = least if least == most else f"{least} to {most}"
        notes.append(
            f"KL and entropy terms: {terms['aggregation']} (--regularizer-aggregation "
            f"{options.config.regularizer_aggregation}). "
            "Before --kl-loss-coef and --entropy-coef, a token's weight in them is "
            f"{size} times its weight in the policy loss"
        )
    if options.unused_flags:
        notes.append(f"not used: {' '.join(options.unused_flags)}")
    notes += [f"warning: {warning}" for warning in report["warnings"]]
    tables = [_objectives(report, options), *_shares(step, report), _scale(report)]
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        _print_rich(tables, notes)
        return
    for title, rows in tables:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        print(title)
        for first, *others in rows:
            cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
            print("  ".join([first.ljust(widths[0]), *cells]).rstrip())
        print()
    print(*notes, sep="\n", end="\n" if notes else "")


def _print_rich(tables: Sequence[TextTable], notes: Sequence[str]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    # No markup, because file names may contain brackets and colons.
    console = Console(markup=False, emoji=False, highlight=False)
    for title, (names, *rows) in tables:
        # Without a frame, and with a cell's second half below the first, 80 columns suffice.
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
        for place, name in enumerate(names):
            table.add_column(name, justify="right" if place else "left", overflow="fold")
        for first, *others in rows:
            table.add_row(first, *(cell.replace(" -> ", "\n") for cell in others))
        console.print(table)
    for note in notes:
        console.print(note, style="yellow" if note.startswith("warning") else None)


def _objectives(report: Report, options: ExplainOptions) -> TextTable:
    """Show the counts, and each aggregation's size relative to sample_mean."""
    step, assumed = report["step"], options.config.loss_aggregation_divisor is None
    columns = ("aggregation", "objective", "normalizer", "total weight", "learning rate ratio")
    rows: list[tuple[str, ...]] = [columns]
    for name, each in report["aggregations"].items():
        star = "*" if name == report["loss_aggregation"] else " "
        ratio, objective = each["learning_rate_ratio"], each["formula"]
        if each["divisor"] is not None:
            objective += f", L = {each['divisor']:g}{' (the longest)' * assumed}"
        size = (f"{each['total_weight']:.4g}", "-" if ratio is None else f"{ratio:.4g}")
        rows.append((f"{star} {name}", objective, str(each["outer_count"]), *size))
    groups = "?" if step["num_prompt_groups"] is None else step["num_prompt_groups"]
    counts = f"N = {step['num_rollouts']} rollouts, P = {groups} prompt groups"
    title = f"Objectives (* selected): {counts}, T = {step['num_active_tokens']} active tokens"
    legend = (
        "learning rate ratio: total weight over the first row's, a factor for SGD but not for Adam"
    )
    return f"{title}\n{legend}", rows


def _shares(step: ExplainedStep, report: Report) -> Iterator[TextTable]:
    """Yield the tables with a column per aggregation: tokens, samples by length, prompt groups."""
    names, each = tuple(report["aggregations"]), report["aggregations"].values()
    lengths = report["step"]["active_tokens"]
    picked, some = _picked(range(len(lengths)), lengths.__getitem__, " samples, by length")
    rows: list[tuple[str, ...]] = [("sample", "group", "tokens", *names)]
    for index in picked:
        sample = step.samples[index]
        group = "-" if sample.group_index is None else str(sample.group_index)
        pairs = [(a["token_weight"][index], a["token_coefficient"][index]) for a in each]
        cells = [f"{weight:.4g} -> {coefficient:.4g}" for weight, coefficient in pairs]
        rows.append((sample.name, group, str(sample.num_active_tokens), *cells))
    title = (
        f"One token per sample{some}: weight -> coefficient in the gradient (weight / normalizer)"
    )
    yield title, rows
    rows = [("tokens", "samples", *names)]
    for parts in zip(*(a["quantile_shares"] for a in each), strict=True):
        first = f"{parts[0]['shortest']} to {parts[0]['longest']}"
        shares = [_percent(part["share"]) for part in parts]
        rows.append((first, str(parts[0]["num_samples"]), *shares))
    yield "Share of the weight by length", rows
    by_tokens = report["aggregations"]["token_mean"]["group_shares"]
    picked, some = _picked(list(by_tokens), lambda group: (by_tokens[group], group), ", by tokens")
    rows = [(str(g), *(_percent(a["group_shares"][g]) for a in each)) for g in picked]
    if len(rows) > 1:
        yield f"Share of the weight by prompt group{some}", [("group", *names), *rows]


def _scale(report: Report) -> TextTable:
    """Show the factors from local loss to gradient."""
    data_size, context_size, num_microbatches, per_token = report["parallelism"].values()
    *factors, net = report["aggregations"]["token_mean"]["megatron_scale"].values()
    named = zip(FACTORS[per_token], factors, strict=True)
    cells = [name if name == "1" else f"{name} = {factor:.4g}" for name, factor in named]
    title = (
        f"Factors on a micro-batch's loss, equal for every aggregation (DP = {data_size}, "
        f"CP = {context_size}, M = {num_microbatches}, calculate_per_token_loss "
        f"{'on' if per_token else 'off'})"
    )
    columns = ("returned loss", "schedule", "gradient reduction", "net")
    return title, [columns, (*cells, f"{net:.4g}")]


def _picked(items: Sequence[int], key: Any, what: str) -> tuple[Sequence[int], str]:
    """Pick up to `MAX_ROWS` items evenly over their order, including the first and the last, and
    return a text with their number.
    """
    if len(items) <= MAX_ROWS:
        return items, ""
    ordered, last = sorted(items, key=key), len(items) - 1
    picked = [ordered[round(last * part / (MAX_ROWS - 1))] for part in range(MAX_ROWS)]
    return picked, f" ({MAX_ROWS} of {len(items)}{what})"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 or share == 0 else f"{100 * share:.2g}%"


def plot(report: Report, path: str) -> None:
    """Plot a token's coefficient against its sample's length, one set of points per aggregation."""
    lengths, num_tokens = report["step"]["active_tokens"], report["step"]["num_active_tokens"]
    if not num_tokens:
        raise ValueError(
            f"--plot {path} has no points to draw: no sample in the step has an active token. Use "
            "lengths above 0."
        )
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot requires matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for marker, (name, each) in zip(itertools.cycle("osD^vP"), report["aggregations"].items()):
        points = [pair for pair in zip(lengths, each["token_coefficient"], strict=True) if pair[0]]
        label = name if each["divisor"] is None else f"{name}, L = {each['divisor']:g}"
        axes.plot(*zip(*points, strict=True), marker, markersize=3, alpha=0.6, label=label)
    axes.set(xscale="log", xlabel="active tokens of the sample")
    axes.set(yscale="log", ylabel="coefficient of one token's loss")
    axes.set(title=f"{len(lengths)} samples, {num_tokens} active tokens")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=150)
