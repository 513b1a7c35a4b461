"""The docs' tables that are read off parsers and rows. `python -m tests.fast.tables` rewrites
them.
"""

import argparse
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from megatron_pg.config import PolicyLossConfig, add_policy_loss_args
from megatron_pg.config.planning import PlanningConfig, add_planning_args
from megatron_pg.critic.settings import CriticConfig, add_critic_args
from megatron_pg.loss import AGGREGATIONS, CORRECTIONS, KL_ESTIMATES, METRICS, OBJECTIVES
from megatron_pg.loss.metrics import DERIVED
from megatron_pg.migrate.line import OTHERS
from megatron_pg.migrate.rows import TRAINERS, Term

OURS = "megatron_pg_"
"""What the names of this package begin with among those of another trainer."""
DOCS = Path(__file__).parents[2] / "docs"
Lines = list[tuple[str, ...]]
"""The cells of a table's lines, its head first."""
FORMULAS = {
    "loss_aggregation": "aggregation-loss-aggregation",
    "policy_loss": "policy-objectives-policy-loss",
    "kl_loss_type": "divergence-and-entropy",
}
"""The section of docs/objectives.md that has the formulas of a field's choices."""


TEXT = set(
    """
    if or else as in is tokens with sequences drop outside clamped to by the sign of and for
""".split()
)
"""Words of a formula that are no mathematics."""
CALLS = {
    "(": ("(", ")"),
    "[": ("[", "]"),
    "{": ("{", "}"),
    "^(": ("^{", "}"),
    "sqrt(": (r"\sqrt{", "}"),
    "abs(": (r"\lvert ", r"\rvert "),
    "1/(": (r"\frac{1}{", "}"),
}
SYMBOLS = {
    "*": r"\cdot",
    "+-": r"\pm",
    ">=": r"\ge",
    "<=": r"\le",
    "tau": r"\tau",
    "lam": r"\lambda",
    "log_prob": r"\log p",
    "rollout_log_prob": r"\log p_{\text{rollout}}",
    "p_old": r"p_{\text{old}}",
    "1/N": r"\frac{1}{N}",
    "1/P": r"\frac{1}{P}",
    "1/max(T, 1)": r"\frac{1}{\max(T, 1)}",
} | {name: rf"\{name}" for name in ("min", "max", "exp", "log")}
CUT = r"\0[^\0]+\0"
WORD = re.compile(r"1/max\(T, 1\)|1/\w|1/\(|\^\(|(?:sqrt|abs)\(|[A-Za-z]\w*|[\d.]*\d|\+-|[<>]=|\S")


def typeset(formula: str) -> str:
    """A row's formula as TeX between dollars, its words as text; what is called by Python stays
    code.
    """
    if "->" in formula:
        return f"`{formula}`"
    found = ""
    for part in re.split(f"({CUT})", _typeset(iter(WORD.findall(formula)), "")):
        tight = re.sub(r"(?<!\w) | (?!\w)", "", part.strip())  # TeX spaces by itself
        found += part[1:-1] if part.startswith("\0") else f" ${tight}$" if tight else ""
    return found.strip()


def _typeset(words: Iterator[str], end: str, is_index: bool = False) -> str:
    """The words up to a closing bracket; outside of all brackets, what is no mathematics between
    \\0.
    """
    found = ""
    for word in words:
        if word == end:
            break
        if word in CALLS:
            before, after = CALLS[word]
            inner = _typeset(words, ")" if word[-1] == "(" else after, word == "{")
            found += f"{before}{inner}{after} "
        elif not end and word in (",", ";"):
            found += f"\0{word}\0"
        elif not end and word in TEXT:
            found += f"\0 {word}\0"
        else:
            found += (r"\in" if is_index and word == "in" else _symbol(word)) + " "
    return found.strip(" ")


def _symbol(word: str) -> str:
    if word in SYMBOLS or not re.match(r"[A-Za-z]", word):
        return SYMBOLS.get(word, word)
    if match := re.fullmatch(r"(sum|mean)(_\w?)?", word):
        return (r"\sum" if match[1] == "sum" else r"\operatorname{mean}") + (match[2] or "")
    if re.fullmatch(r"[A-Za-z](_\w)?", word):
        return word
    if word in ("clip", "clamp", "sg", "sigmoid", "D"):
        return rf"\operatorname{{{word}}}"
    return rf"\texttt{{{word}}}" if "_" in word else rf"\text{{{word}}}"


def flags(add_args: Any, config: type[Any]) -> Lines:
    """One line a flag: its words or type, its default, and the text of `--help`, with a link in
    place of formulas.
    """
    lines: Lines = [("flag", "default", "meaning")]
    for action in add_args(argparse.ArgumentParser(add_help=False))._actions:
        if action.help == argparse.SUPPRESS:  # a removed flag
            continue
        default = getattr(config, action.dest, None)
        is_switch = action.nargs == 0
        # As argparse shows choices: a bar would end the cell, and be seen with its backslash on the
        # site.
        words = "" if is_switch else " " + (action.metavar or f"{{{', '.join(action.choices)}}}")
        shown = "off" if is_switch else f"`{default}`" if default not in (None, ()) else "none"
        text = (action.help or "").replace("%%", "%").split(" (default: ")[0]
        if section := FORMULAS.get(action.dest):
            text = f"{text.partition('. ')[0]}. [Formulas](objectives.md#{section})."
        lines.append((f"`{action.option_strings[0]}{words}`", shown, text))
    return lines


def rows(table: Any, meaning: str) -> Lines:
    """One line a row: its name, or its flag where it has one of its own, and what it says of
    itself.
    """
    default = getattr(PolicyLossConfig, next(iter(table.values())).setting, None)
    head = "flag" if default is None else "name"
    lines: Lines = [(head, meaning, "about", "reads")]
    for row in table.values():
        name = f"`{getattr(row, head)}`" + " (default)" * (row.name == default)
        lines.append((name, typeset(row.formula), row.about, ", ".join(row.inputs)))
    return lines


def metrics() -> Lines:
    lines: Lines = [("name", "what", "kind", "reported")]
    for row in METRICS:
        fields = f"with {', '.join(row.reads)}" if row.reads else "always"
        where = "with a ratio" if row.of_ratio else fields
        name = f"`{row.name}`" + " (of a micro-batch)" * (not row.is_reported)
        lines.append((name, row.help, row.reduction, where))
    for derived in DERIVED:
        lines.append(
            (f"`{derived.name}`", derived.help, "derived", f"from {', '.join(derived.of)}")
        )
    return lines


def words_of(name: str) -> Lines:
    """One line a setting of a trainer that `migrate` reads; then those of the same name, and those
    without a flag here.
    """
    trainer, same, none = TRAINERS[name], [], []
    lines: Lines = [("its setting", "here")]
    for key, row in trainer.settings.items():
        values = row.get("choices", ["false", "true"] if row["kind"] == "flag" else [])
        terms = [trainer.terms(trainer.read({key: value}))[0] for value in values]
        if (
            row.get("here") == ""
            and key != "--loss-aggregation"
            and len({term.aggregation for term in terms}) > 1
        ):
            lines += [(f"{key}={v}", flags_of(t)) for v, t in zip(values, terms, strict=True)]
        for setting, words in words_here(key, row.get("here", False)):
            if words == key:
                same.append(f"`{key}`")
            elif words:
                lines.append((setting, words))
            elif words is None:
                none.append(f"`{short(key)}`")
    lines = [lines[0], *((f"`{short(s)}`", f"`{w}`") for s, w in lines[1:] if OURS not in s)]
    return [
        *lines,
        *(
            (", ".join(names), what)
            for names, what in ((same, "the same"), (none, "no flag"))
            if names
        ),
    ]


def words_here(key: str, own: Any) -> Iterator[tuple[str, str | None]]:
    """The words for a setting's values by `here` of its row: as they are by default, else under the
    last condition.
    """
    if own is False:
        yield key, None
    elif isinstance(own, str):
        yield key, own
    elif isinstance(own, dict):
        words = {
            each: [value for value in own if own[value] == each and OURS not in value]
            for each in own.values()
        }
        for each, values in words.items():
            named = values and values[0] not in ("True", "*") and "=" not in key
            yield (f"{key}={', '.join(values)}" if named else key), (each if values else "")
    else:
        cases = [(condition, case) for condition, case in own if case]
        of_key = [case for case in cases if case[0].startswith(f"{key}=")]
        for condition, case in of_key:
            yield from words_here(condition, case)
        if cases and not (of_key and cases[-1][0]):
            yield from words_here(key, cases[-1][1])


def flags_of(term: Term) -> str:
    if term.aggregation == "token_sum":
        return "none"
    divisor = f" --loss-aggregation-divisor {'1' if term.divisor == 1 else 'L'}"
    return f"--loss-aggregation {term.aggregation}" + divisor * (term.aggregation == "constant")


def short(condition: str) -> str:
    """The last part of each key, which a search of the site finds, with its values."""
    parts = []
    for part in condition.split(" & "):
        name, equals, value = part.removeprefix("!").partition("=")
        parts.append(name.split(".")[-1] + equals + value.replace("|", ", "))
        parts[-1] += "=false" * part.startswith("!")
    return "; ".join(parts).replace("name=", "adv_estimator=")


def other_words(*names: str) -> Lines:
    """One line a setting of trainers that `migrate` knows by their words alone; all but `names` if
    none is given.
    """
    lines: Lines = [("trainer", "its setting", "here")]
    for name, other in OTHERS.items():
        if name in names if names else name not in ("TRL", "Fast-LLM"):
            for word, meaning in other["words"].items():
                is_flag = meaning.startswith("--")
                lines.append((name, f"`{word}`", f"`{meaning}`" if is_flag else meaning))
                name = ""
    return [line[1:] for line in lines] if names else lines


TABLES = {
    "verl words": ("their_words.md", partial(words_of, "verl")),
    "slime words": ("their_words.md", partial(words_of, "slime")),
    "NeMo-RL words": ("their_words.md", partial(words_of, "nemo-rl")),
    "TRL words": ("their_words.md", partial(other_words, "TRL")),
    "Fast-LLM words": ("their_words.md", partial(other_words, "Fast-LLM")),
    "other words": ("their_words.md", other_words),
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
    """The page of a table, and its text with the table as it should be; a column without an entry
    is left out.
    """
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
