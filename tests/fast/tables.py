"""The docs' tables that are read off parsers and rows. `python -m tests.fast.tables` rewrites them."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from megatron_pg.config import PolicyLossConfig, add_policy_loss_args
from megatron_pg.config.planning import PlanningConfig, add_planning_args
from megatron_pg.critic.settings import CriticConfig, add_critic_args
from megatron_pg.loss import AGGREGATIONS, CORRECTIONS, KL_ESTIMATES, METRICS, OBJECTIVES
from megatron_pg.loss.metric_table import DERIVED
from megatron_pg.migrate.line import OTHERS

DOCS = Path(__file__).parents[2] / "docs"
Lines = list[tuple[str, ...]]
"""The cells of a table's lines, its head first."""
FORMULAS = {
    AGGREGATIONS.field: "aggregation-loss-aggregation",
    OBJECTIVES.field: "policy-objectives-policy-loss",
    KL_ESTIMATES.field: "divergence-and-entropy",
}
"""The section of docs/objectives.md that has the formulas of a field's choices."""


def flags(add_args: Any, config: type[Any]) -> Lines:
    """One line a flag: its words or type, its default, and the text of `--help`, with a link in place of formulas."""
    lines: Lines = [("flag", "default", "meaning")]
    for action in add_args(argparse.ArgumentParser(add_help=False))._actions:
        default = getattr(config, action.dest, None)
        is_switch = action.nargs == 0
        # As argparse shows choices: a bar would end the cell, and be seen with its backslash on the site.
        words = "" if is_switch else " " + (action.metavar or f"{{{', '.join(action.choices)}}}")
        shown = "off" if is_switch else f"`{default}`" if default not in (None, ()) else "none"
        text = (action.help or "").replace("%%", "%").split(" (default: ")[0]
        if section := FORMULAS.get(action.dest):
            text = f"{text.partition('. ')[0]}. [Formulas](objectives.md#{section})."
        lines.append((f"`{action.option_strings[0]}{words}`", shown, text))
    return lines


def rows(table: Any, meaning: str) -> Lines:
    """One line a row: its name, or its flag where it has one of its own, and what it says of itself."""
    default = getattr(PolicyLossConfig, table.field, None)
    head = "flag" if default is None else "name"
    lines: Lines = [(head, meaning, "about", "reads")]
    for row in table.values():
        name = f"`{getattr(row, head)}`" + " (default)" * (row.name == default)
        lines.append((name, f"`{row.formula}`", row.about, ", ".join(row.inputs)))
    return lines


def metrics() -> Lines:
    lines: Lines = [("name", "what", "kind", "reported")]
    for row in METRICS:
        fields = f"with {', '.join(row.reads)}" if row.reads else "always"
        where = "with a ratio" if row.of_ratio else fields
        name = f"`{row.name}`" + " (of a micro-batch)" * (not row.is_reported)
        lines.append((name, row.help, row.kind, where))
    for derived in DERIVED:
        lines.append(
            (f"`{derived.name}`", derived.help, "derived", f"from {', '.join(derived.of)}")
        )
    return lines


def their_words() -> Lines:
    """One line a setting of another trainer that `migrate` knows and that is in no table of its own."""
    lines: Lines = [("trainer", "its setting", "here")]
    for name, other in OTHERS.items():
        for word, meaning in other["words"].items():
            lines.append((name, f"`{word}`", meaning))
            name = ""
    return lines


TABLES = {
    "their words": ("migrating.md", their_words),
    "flags": ("flags.md", partial(flags, add_policy_loss_args, PolicyLossConfig)),
    "critic flags": ("flags.md", partial(flags, add_critic_args, CriticConfig)),
    "planning flags": ("flags.md", partial(flags, add_planning_args, PlanningConfig)),
    "aggregations": ("objectives.md", partial(rows, AGGREGATIONS, "objective")),
    "objectives": ("objectives.md", partial(rows, OBJECTIVES, "loss of a token")),
    "estimates": ("objectives.md", partial(rows, KL_ESTIMATES, "estimate")),
    "corrections": ("objectives.md", partial(rows, CORRECTIONS, "effect")),
    "metrics": ("metrics.md", metrics),
}
"""By the name that is in the comments around it: the page, and what makes the lines."""


def page_with(name: str) -> tuple[Path, str]:
    """The page of a table, and its text with the table as it should be; a column without an entry is left out."""
    page, lines = DOCS / TABLES[name][0], TABLES[name][1]()
    columns = [(head, "---", *cells) for head, *cells in zip(*lines, strict=True) if any(cells)]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in zip(*columns, strict=True))
    table = "".join(f"| {' | '.join(line)} |\n" for line in escaped)
    begin, end = f"<!-- {name} begin -->\n", f"<!-- {name} end -->\n"
    before, found = page.read_text().split(begin)
    return page, before + begin + table + end + found.split(end)[1]


if __name__ == "__main__":
    for each in TABLES:
        path, text = page_with(each)
        path.write_text(text)
