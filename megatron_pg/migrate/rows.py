"""The tables of trainers, `*.toml` next to this file, with one row per setting that affects the
loss.

    settings     by the trainer's key: kind (flag, number, text, bound (a number or words), count (a
                 number, None if unknown)), default (`${key}`: this key's value), choices, meaning,
                 and `here`: this package's flag, its words by the trainer's word ("*": any other),
                 or cases [condition, flag or words]; "" for a setting that is not read or is data.
                 Without `here`, a value other than the default has no counterpart; with `false`, no
                 value has one.
                 `note`: a limit for values other than the default. `null`: the key with the value
                 for null. `prefix`: removed from a word. `beside`: advice for a setting without a
                 flag outside the per-token loss, such as advantages
    steps        the split of a batch of rollouts into optimizer steps: `of`, keys to multiply;
                 `by`, the key of a step's size; `times`, of repetitions; `given`, of the steps
    terms        of the loss: coefficient, the condition for it to be on, aggregation, and divisor,
                 a key or a number
    limits       cases in which a setting does not do what its name says, with the factor
    exact        lines that make an aggregation exact in this trainer, or cases [condition, lines],
                 with <L> for the divisor
    programs     known programs. A different program may have a different loss
    configs      the trainer's files of defaults, which the table includes

Conditions are settings or names of terms, joined by `&`: `key`, `!key`, `key=a|b`, `key!=a`,
`key>1`.
"""

import difflib
import fnmatch
import functools
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_pg.config.values import did_you_mean, flag_of

Settings = Mapping[str, Any]
"""A launch line's settings by the trainer's keys, with defaults for the rest."""
CONDITION = re.compile(r"(!?)([^!=>]+?)(?:(!?=|>)(\S+))?")
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
UNKNOWN = re.compile(r"[$`]")
"""A value with one of these characters is unknown."""
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
"""A reference to a YAML key, as in OmegaConf."""
CLOSE = 0.86
"""From this similarity on, an unknown key is treated as a misspelling of a known one."""


class Term(NamedTuple):
    """A term of a trainer's loss: coefficient * aggregation(per-token values)."""

    name: str
    aggregation: str
    """A name of `--loss-aggregation`, `token_sum` for an undivided sum, or `unknown`."""
    coefficient: float = 1.0
    divisor: float | None = None
    """L of `constant`. None if the launch line does not give it."""

    @property
    def weighing(self) -> tuple[str, float | None]:
        """What decides a token's weight. Two terms with the same value have the ratio of their
        coefficients.
        """
        return self.aggregation, self.divisor


class TrainerTable:
    """One trainer's settings, read from its TOML file."""

    def __init__(self, path: Path) -> None:
        table, base = tomllib.loads(path.read_text()), {}
        if "like" in table:
            base = tomllib.loads(path.with_name(table["like"] + ".toml").read_text())
        self.name: str = table["name"]
        self.source: str = table["source"]
        self.mark = re.compile(table["mark"])
        """The pattern of keys, values or words that identifies the trainer."""
        self.programs = re.compile(table["programs"])
        self.configs: list[str] = table.get("configs", [])
        self.settings: dict[str, Any] = base.get("settings", {}) | table["settings"]
        self.exact: dict[str, Any] = base.get("exact", {}) | table.get("exact", {})
        for old, new in table.get("replace", {}).items():
            self.exact = {mode: lines.replace(old, new) for mode, lines in self.exact.items()}
        self._limits = base.get("limits", []) + table["limits"]
        self._table = base | table

    def named(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Spell the keys like the trainer's, because a YAML uses a flag's attribute name."""
        if not next(iter(self.settings)).startswith("--"):
            return dict(given)
        return {
            key if key.startswith("--") or key in self.settings else flag_of(key): value
            for key, value in given.items()
            if "." not in key
        }

    def read(self, given: Mapping[str, Any]) -> Settings:
        """Read the value of every setting. Raise ValueError with all unknown keys and bad
        values.
        """
        named, settings = self.named(given), dict[str, Any]()
        wrong = [error for key in named if (error := self.unknown(key))]
        for key, row in self.settings.items():
            try:
                default = REFERENCE.fullmatch(str(row.get("default")))
                settings[key] = settings[default[1]] if default else row.get("default")
                if key in named:
                    value = self._resolved(named[key], named)
                    is_null = "null" in row and _is_null(value)
                    settings[key] = settings[row["null"]] if is_null else _value(key, row, value)
            except ValueError as error:
                wrong.append(str(error))
        if wrong:
            raise ValueError("\n  ".join(["not understood:", *wrong]))
        return settings

    def _resolved(self, value: Any, named: Mapping[str, Any]) -> Any:
        """Follow a reference to a key."""
        match = REFERENCE.fullmatch(str(value))
        if match is None or "." not in match[1]:
            return value
        return named.get(match[1], self.settings.get(match[1], {}).get("default", value))

    def is_elsewhere(self, key: str) -> bool:
        """Tell whether a key is known not to affect the loss."""
        return any(fnmatch.fnmatchcase(key, each) for each in self._table["elsewhere"].split())

    @functools.cache  # noqa: B019
    def unknown(self, key: str) -> str | None:
        """Describe an unknown key, with the nearest known one. Return None for a key that is known
        or does not affect the loss.
        """
        if key in self.settings or self.is_elsewhere(key):
            return None
        same = [own for own in self.settings if own.split(".")[-1] == key.split(".")[-1]]
        near = difflib.get_close_matches(key, same or self.settings, n=1, cutoff=0.0)[0]
        is_near = difflib.SequenceMatcher(None, key, near).ratio() >= CLOSE
        if is_near or re.search(self._table["concerns_loss"], key):
            return f"{key}: unknown key of {self.name}, the nearest is {near}"
        return None

    def terms(self, given: Settings) -> list[Term]:
        """List the terms of the loss, the policy loss first. A term that is off has coefficient
        0.
        """

        def first(what: str, row: Mapping[str, Any]) -> Any:
            cases = [*row.get(what, ()), *self._table[what]]
            return next(case for condition, case in cases if holds(condition, given))

        terms = []
        for row in self._table["terms"]:
            name, divisor = first("aggregation", row), None
            if name == "constant":
                key = first("divisor", row)
                divisor = (given[key] or None) if isinstance(key, str) else key
            coefficient = given[row["coefficient"]] if "coefficient" in row else 1.0
            signed = row.get("sign", 1) * coefficient if holds(row.get("when", ""), given) else 0.0
            terms.append(Term(row["name"], name, signed, divisor))
        return terms

    def recipe(self, mode: str, given: Settings) -> str:
        """Return the lines that make an aggregation exact without changing the per-token loss."""
        cases = self.exact.get(mode, "no lines are known")
        if not isinstance(cases, str):
            cases = next(lines for condition, lines in cases if holds(condition, given))
        return _filled_in(cases, {**given, "steps": self.steps(given)})

    def steps(self, given: Settings) -> float | None:
        """Return the optimizer steps per batch of rollouts, None if unknown."""
        keys: Mapping[str, Any] = self._table["steps"]
        if number := given[keys["given"]] if "given" in keys else None:
            return float(number)
        sizes, step = [given[key] for key in keys["of"]], given[keys["by"]]
        times = given[keys["times"]] if "times" in keys else 1.0
        return math.prod(sizes) / step * times if all([*sizes, step, times]) else None

    def limits(self, given: Settings, terms: Iterable[Term]) -> list[str]:
        """List the limits that apply to the line, with the line's values."""
        known = with_terms(given, terms)
        texts = [row["text"] for row in self._limits if holds(row["when"], known)]
        notes = {key: row["note"] for key, row in self.settings.items() if "note" in row}
        texts += [
            note for key, note in notes.items() if given[key] != self.settings[key].get("default")
        ]
        return [_filled_in(text, known) for text in texts]


def with_terms(given: Settings, terms: Iterable[Term]) -> Settings:
    """Add each term's aggregation to the settings by the term's name, None for a term that is
    off.
    """
    return {**given, **{t.name: t.aggregation if t.coefficient else None for t in terms}}


def _filled_in(text: str, given: Settings) -> str:
    return re.sub(r"\{([^{}]+)\}", lambda key: shown(key[1], given[key[1]]), text)


def shown(key: str, value: Any) -> str:
    """Write a setting's value as the trainer reads it, or `<key>` if unknown."""
    if value is None:
        return f"<{key}>"
    return f"{value:g}" if isinstance(value, float) else str(value)


def holds(condition: str, given: Settings) -> bool:
    """Tell whether all parts of a condition hold."""
    for part in filter(None, map(str.strip, condition.split("&"))):
        match = CONDITION.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is not a condition")
        negated, key, operator, right = match.groups()
        value = given[key]
        if operator == ">":
            is_true = (value or 0) > float(right)
        elif operator:
            is_true = (value in right.split("|")) == (operator == "=")
        else:
            is_true = bool(value)
        if is_true == bool(negated):
            return False
    return True


def unknown(text: str) -> str:
    """Explain why a word, value or file of a line is unknown, with a remedy."""
    names = [f"${bare or braced}" for bare, braced in VARIABLE.findall(text)]
    if UNKNOWN.search(VARIABLE.sub("", text)):
        return f"{text} is known only to the shell: write its value instead"
    if names:
        return f"{', '.join(names)} is not set: write its value instead"
    return (
        f"{text} was not found, and its settings affect the loss: run migrate in the launch's "
        "folder, or leave it out"
    )


def _is_null(given: Any) -> bool:
    return str(given).strip().lower() in ("none", "null", "~", "")


def _value(key: str, row: Mapping[str, Any], given: Any) -> Any:
    word = str(given).strip().lower()
    if row["kind"] == "count":
        return float(word) if word.isdecimal() else None
    if UNKNOWN.search(word) and not (row["kind"] == "flag" and key.startswith("--")):
        raise ValueError(f"{key} is {given}: {unknown(str(given))}")
    if row["kind"] == "flag":
        if not key.startswith("--") and word not in ("true", "false", "1", "0"):
            raise ValueError(f"{key} is {given!r}: expected true or false")
        # A flag takes no value, so the next word on the line does not belong to it.
        return word not in ("false", "0")
    if _is_null(given):
        return row.get("default")
    if row["kind"] in ("number", "bound"):
        try:
            number = float(given)
        except (TypeError, ValueError):
            number = math.nan
        if row["kind"] == "bound" and math.isnan(number):
            return given
        if not math.isfinite(number):
            raise ValueError(f"{key} is {given!r}: expected a number")
        return number
    if isinstance(given, str):
        given = given.removeprefix(row.get("prefix", ""))
    choices = row.get("choices", [given])
    if given not in choices:
        expected = f"expected {' '.join(choices)}{did_you_mean(given, choices)}"
        raise ValueError(f"{key} is {given!r}: {expected}")
    return given


_TABLES = map(Path(__file__).with_name, "verl.toml nemo_rl.toml miles.toml slime.toml".split())
TRAINERS = {trainer.name: trainer for trainer in map(TrainerTable, _TABLES)}
"""The trainers by name. A launch line belongs to the first trainer whose pattern it matches."""
