"""The tables of docs/flags.md, from the parsers. ``python -m tests.fast.flags_page`` rewrites them."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_pg.config import PolicyLossConfig, add_policy_loss_args
from megatron_pg.step import PlanningConfig, add_planning_args

PAGE = Path(__file__).parents[2] / "docs" / "flags.md"
TABLES = {
    "flags": (add_policy_loss_args, PolicyLossConfig),
    "planning flags": (add_planning_args, PlanningConfig),
}
"""By the name that is in the comments around it: what adds the flags, and the dataclass that has their defaults."""


def table(name: str) -> str:
    """One row a flag: its words or type, its default, and the text of ``--help``."""
    add_args, config = TABLES[name]
    parser = add_args(argparse.ArgumentParser(add_help=False))
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for action in parser._actions:
        default = getattr(config, action.dest, None)
        is_switch = action.nargs == 0
        words = "" if is_switch else " " + (action.metavar or "\\|".join(action.choices))
        shown = "off" if is_switch else f"`{default}`" if default not in (None, ()) else "none"
        text = (action.help or "").replace("%%", "%").split(" (default: ")[0].replace("|", "\\|")
        rows.append(f"| `{action.option_strings[0]}{words}` | {shown} | {text} |")
    return "\n".join(rows) + "\n"


def written_table(name: str) -> str:
    """The table that the page holds."""
    begin, end = _comments(name)
    return PAGE.read_text().split(begin)[1].split(end)[0]


def _comments(name: str) -> tuple[str, str]:
    return f"<!-- {name} begin -->\n", f"<!-- {name} end -->\n"


if __name__ == "__main__":
    for each in TABLES:
        first, last = _comments(each)
        page = PAGE.read_text()
        PAGE.write_text(
            page.replace(first + written_table(each) + last, first + table(each) + last)
        )
