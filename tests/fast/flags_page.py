"""The table of docs/flags.md, from the parser. ``python -m tests.fast.flags_page`` rewrites it."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_pg.arguments import PolicyLossConfig, add_policy_loss_args

PAGE = Path(__file__).parents[2] / "docs" / "flags.md"
BEGIN, END = "<!-- flags begin -->\n", "<!-- flags end -->\n"


def table() -> str:
    """One row a flag: its words or type, its default, and the text of ``--help``."""
    parser = add_policy_loss_args(argparse.ArgumentParser(add_help=False))
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for action in parser._actions:
        default = getattr(PolicyLossConfig, action.dest, None)
        is_switch = action.nargs == 0
        words = "" if is_switch else " " + (action.metavar or "\\|".join(action.choices))
        shown = "off" if is_switch else "none" if default is None else f"`{default}`"
        text = (action.help or "").replace("%%", "%").split(" (default: ")[0].replace("|", "\\|")
        rows.append(f"| `{action.option_strings[0]}{words}` | {shown} | {text} |")
    return "\n".join(rows) + "\n"


def written_table() -> str:
    """The table that the page holds."""
    return PAGE.read_text().split(BEGIN)[1].split(END)[0]


if __name__ == "__main__":
    page = PAGE.read_text()
    PAGE.write_text(page.replace(BEGIN + written_table() + END, BEGIN + table() + END))
