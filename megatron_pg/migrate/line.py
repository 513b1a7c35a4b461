"""Whose launch line a file or a list of words is, which of a script's commands it is, and the settings that it gives."""

import re
import tomllib
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_pg.migrate.read import YAML, Launch, read_launches, read_line, read_yaml
from megatron_pg.migrate.rows import CALLED, TRAINERS, VARIABLE, Settings, TrainerTable, unknown
from megatron_pg.migrate.shell import Command, Condition, Script

OTHERS: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("others.toml").read_text())
"""Trainers whose settings are not read, by name: a sentence that says so, and their words for the loss."""
MAX_RUNS = 96
"""Limit on the combinations of a script's open tests."""
SHOWN = 8
"""Keys that an error lists."""


@dataclass
class Line:
    """The launch line of a trainer, with its settings."""

    trainer: TrainerTable
    settings: Settings
    notes: list[str]
    """Open questions of the file: tests, variables, files that are not here, another program."""
    passed: list[str]
    """Unknown keys that are not about the loss."""
    given: Mapping[str, Any]
    """All keys of the line with their values as they are written."""


def read(path: Path | None, words: Sequence[str], name: str | None = None) -> Line:
    """Read the line of a file, or of words, as that of a trainer by name; raise ValueError for what is not known.

    A script is read as it runs when it is called with the words: variables as `NAME=VALUE`, then its arguments.
    """
    if path is None:
        return _line([read_line(Command(0, list(words)))], None, name)
    if not path.is_file():
        raise ValueError(
            f"{path}: no such file; give a YAML, a shell script, or `--` and the launch line"
        )
    if path.suffix == ".py":
        raise ValueError(
            f"{path} is a Python launcher, and no Python is read: give the command that it runs after `--`"
        )
    if path.suffix in YAML:
        if words:
            raise ValueError(
                f"{path} is a YAML: give nothing after `--`, or the line that names it"
            )
        return _line([read_yaml(path)], path, name)
    try:
        return _script(path, words, name)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; or give the launch line itself after `--`") from None


def trainer_of(launches: Sequence[Launch], path: Path | None = None) -> TrainerTable:
    """Find the trainer by its mark on keys, values and words, a fork by the checkout; raise ValueError where none has one."""
    seen = " ".join(
        " ".join([*one.words, *one.keys, *map(str, one.keys.values())]) for one in launches
    )
    marked = [trainer for trainer in TRAINERS.values() if trainer.mark.search(seen)]
    if marked:
        bases = {trainer.name for trainer in marked}
        forks = [trainer for trainer in TRAINERS.values() if trainer.like in bases]
        return next((one for one in marked + forks if _is_beside(one.package, path)), marked[0])
    for name, other in OTHERS.items():
        if re.search(other["mark"], seen) or _is_beside(other["package"], path):
            answer = f"{name} is not read: {other['answer']}"
            raise ValueError("\n  ".join([answer, *_words(other["words"], launches)]))
    names, keys = ", ".join(sorted(TRAINERS)), sorted({key for one in launches for key in one.keys})
    among = ", ".join([*keys[:SHOWN], "..."] if keys[SHOWN:] else keys or ["nothing"])
    unset = [f"\n  {unknown(word)}" for one in launches for word in [*one.open, *one.unread]]
    raise ValueError(
        f"no key tells which trainer this is for (found: {among}): give --trainer with one of {names}"
        + "".join(dict.fromkeys(unset))
    )


def _is_beside(package: str, path: Path | None) -> bool:
    """Return whether a file lies in a checkout that has the package."""
    if path is None or not package:
        return False
    return any((folder / package / "__init__.py").is_file() for folder in path.resolve().parents)


def _words(rows: Mapping[str, str], launches: Sequence[Launch]) -> list[str]:
    found = {}
    for launch in launches:
        for key, value in launch.keys.items():
            word = re.split(r"[.-]+", key)[-1]
            if meaning := rows.get(f"{word}={value}", rows.get(word)):
                found[f"{word}={value}"] = meaning
    return [f"{setting}: {meaning}" for setting, meaning in found.items()]


def _line(launches: Sequence[Launch], path: Path | None, name: str | None) -> Line:
    trainer = TRAINERS[name] if name else trainer_of(launches, path)
    launch, settings = _chosen(trainer, launches)
    notes = [
        f"{unknown(word)}. It counts as empty: settings in it are not read."
        for word in dict.fromkeys(launch.open)
    ]
    if launch.program and not trainer.programs.search(launch.program):
        notes.append(
            f"{launch.program} is launched: defaults and loss of its own are not known here."
        )
    given = trainer.named(launch.keys)
    others = given.keys() - trainer.settings.keys()
    passed = sorted(key for key in others if not trainer.is_elsewhere(key))
    return Line(trainer, settings, notes, passed, given)


def _chosen(trainer: TrainerTable, launches: Sequence[Launch]) -> tuple[Launch, Settings]:
    """Choose the only launch line, or the first of several with the same settings."""
    own = _own(trainer, launches)
    if not own:
        raise ValueError(f"no launch line of {trainer.name} in it")
    launch, settings = own[0], _settings(trainer, own[0])
    for other in own[1:]:
        read = _settings(trainer, other)
        differ = [key for key, value in read.items() if value != settings[key]]
        if differ:
            lines = f"lines {launch.line} and {other.line}"
            raise ValueError(
                f"{lines} launch with another {', '.join(differ)}: give the one that you mean"
            )
    return launch, settings


def _settings(trainer: TrainerTable, launch: Launch) -> Settings:
    """Read the settings of a launch line; raise ValueError where a file or a command holds some of them."""
    unread = [file for file in launch.unread if Path(file).stem not in trainer.configs]
    computed = [word for word in launch.open if not VARIABLE.fullmatch(word)]
    if unread or computed:
        raise ValueError(
            "\n  ".join(["not all settings are known:", *map(unknown, unread + computed)])
        )
    return trainer.read(launch.keys)


def _own(trainer: TrainerTable, launches: Sequence[Launch]) -> list[Launch]:
    """List the launches of a trainer: of its programs, or else any with its keys."""
    if len(launches) == 1:
        return list(launches)
    own = [one for one in launches if one.keys and trainer.programs.search(one.program)]
    with_keys = (
        one for one in launches if trainer.named(one.keys).keys() & trainer.settings.keys()
    )
    return own or [one for one in with_keys if not one.is_stray]


class Run(NamedTuple):
    """A script, read with some of its open tests turned."""

    turned: frozenset[Condition]
    launches: list[Launch]
    script: Script

    @property
    def has_launch(self) -> bool:
        return any(one.keys and one.program for one in self.launches)

    def is_like(self, other: "Run") -> bool:
        return self.script._replace(end=0) == other.script._replace(end=0)


def _script(path: Path, words: Sequence[str], name: str | None) -> Line:
    """Read a script with its open tests as they are usually, or else as the first of their combinations that launches."""
    runs, is_whole = _runs(path, words)
    texts = {key: text for run in runs for key, text in run.script.undecided.items()}
    try:
        everything = [launch for run in runs for launch in run.launches]
        trainer = TRAINERS[name] if name else trainer_of(everything, path)
    except ValueError as error:
        end = runs[0].script.end
        text = f"\n  line {end} ends the script before a launch: {CALLED}" if end else ""
        raise ValueError(f"{error}{text}") from None
    own = [run for run in runs if _own(trainer, run.launches)]
    taken = own[0] if own else runs[0]
    line = _line(taken.launches, path, trainer.name)
    missing = dict.fromkeys(taken.script.missing)
    line.notes += [f"{file} is not here: settings in it are not read." for file in missing]
    if taken.turned:
        line.notes.append(f"{_joined(texts, taken)}: taken to hold.")
    if stray := next((one for one in taken.launches if one.is_stray and one.keys), None):
        line.notes.append(
            f"line {stray.line}: {stray.words[0]} is a command of its own, since a comment or a blank after a backslash ends "
            "the one before: it is not passed."
        )
    line.notes += _differences(trainer, line.settings, own, texts)
    if not is_whole:
        line.notes.append(
            f"its tests have more than {MAX_RUNS} combinations: the others are not read."
        )
    return line


def _runs(path: Path, words: Sequence[str]) -> tuple[list[Run], bool]:
    """Read a script under all combinations of open tests that change it, few turned ones first, and whether these are all."""

    def read(turned: frozenset[Condition]) -> Run:
        return Run(turned, *read_launches(path, words, turned))

    runs, idle = [read(frozenset())], set()
    for run in runs:
        if runs[0].has_launch and not run.has_launch:
            continue
        for condition in run.script.undecided:
            turned = run.turned | {condition}
            if condition in idle or any(turned == one.turned for one in runs):
                continue
            if len(runs) == MAX_RUNS:
                return runs, False
            new = read(turned)
            if run.is_like(new):
                idle.add(condition)
            elif not any(map(new.is_like, runs)):
                runs.append(new)
    return runs, True


def _differences(
    trainer: TrainerTable, settings: Settings, runs: Sequence[Run], texts: Mapping[Condition, str]
) -> list[str]:
    """Say which settings other combinations have, beyond what fewer turned tests say already."""
    notes: list[str] = []
    found: dict[frozenset[Condition], Settings | None] = {}
    for run in runs:
        fewer = [values for turned, values in found.items() if turned < run.turned]
        expected = ChainMap({}, *(dict(values or {}) for values in reversed(fewer)), dict(settings))
        try:
            read = _chosen(trainer, run.launches)[1]
            values = {key: value for key, value in read.items() if value != expected[key]}
            changes = ", ".join(f"{key} is {value}" for key, value in values.items())
            found[run.turned], text = values, changes and f"{changes}."
        except ValueError as error:
            found[run.turned] = None
            text = "" if None in fewer else " ".join(str(error).split())
        if text:
            notes.append(f"{_joined(texts, run)}: where it holds, {text}")
    return notes


def _joined(texts: Mapping[Condition, str], run: Run) -> str:
    return " and ".join(text for condition, text in texts.items() if condition in run.turned)
