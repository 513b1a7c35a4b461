"""Whose launch line a file or a list of words is, which of a script's commands it is, and the settings that it gives."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_pg.migrate.read import YAML, Launch, read_launches, read_line, read_yaml
from megatron_pg.migrate.rows import TRAINERS, Settings, TrainerTable
from megatron_pg.migrate.shell import Command

OTHERS: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("others.toml").read_text())
"""Trainers whose settings are not read, by name: a sentence that says so, and their words for the loss."""
MAX_CONDITIONS = 64
SHOWN = 8
"""Keys that an error lists."""


@dataclass
class Line:
    """The launch line of a trainer, with its settings."""

    trainer: TrainerTable
    settings: Settings
    notes: list[str]
    """Open questions of the file: conditions, files that are not here, another program."""
    passed: list[str]
    """Unknown keys that are not about the loss."""


def read(path: Path | None, words: Sequence[str], name: str | None = None) -> Line:
    """Read the line of a file, or of words, as that of a trainer by name; raise ValueError for what is not known."""
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
        return _line([read_yaml(path)], path, name)
    try:
        return _script(path, name)
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
    raise ValueError(
        f"no key of {names} among {among} tells whose it is: give --trainer with its name"
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
        f"{file} is not here: settings in it are not read."
        for file in dict.fromkeys(launch.missing)
        if Path(file).stem not in trainer.configs
    ]
    if launch.program and not trainer.programs.search(launch.program):
        notes.append(
            f"{launch.program} is launched: defaults and loss of its own are not known here."
        )
    others = trainer.named(launch.keys).keys() - trainer.settings.keys()
    passed = sorted(key for key in others if not trainer.is_elsewhere(key))
    return Line(trainer, settings, notes, passed)


def _chosen(trainer: TrainerTable, launches: Sequence[Launch]) -> tuple[Launch, Settings]:
    """Choose the only launch line, or the first of several with the same settings."""
    own = _own(trainer, launches)
    if not own:
        raise ValueError(f"no launch line of {trainer.name} in it")
    launch, settings = own[0], trainer.read(own[0].keys)
    for other in own[1:]:
        differ = [key for key, value in trainer.read(other.keys).items() if value != settings[key]]
        if differ:
            lines = f"lines {launch.line} and {other.line}"
            raise ValueError(
                f"{lines} launch with another {', '.join(differ)}: give the one that you mean"
            )
    return launch, settings


def _own(trainer: TrainerTable, launches: Sequence[Launch]) -> list[Launch]:
    """List the launches of a trainer: of its programs, or else any with its keys."""
    if len(launches) == 1:
        return list(launches)
    own = [one for one in launches if one.keys and trainer.programs.search(one.program)]
    with_keys = (
        one for one in launches if trainer.named(one.keys).keys() & trainer.settings.keys()
    )
    return own or [one for one in with_keys if not one.is_stray]


def _script(path: Path, name: str | None) -> Line:
    """Read a script with all undecided conditions false; where it launches nothing then, with the first that lets it."""
    launches, undecided = read_launches(path)
    others = [(text, read_launches(path, true)[0]) for true, text in undecided[:MAX_CONDITIONS]]
    everything = [one for _, every in [("", launches), *others] for one in every]
    trainer = TRAINERS[name] if name else trainer_of(everything, path)
    taken = None
    if not _own(trainer, launches):
        taken, launches = next(
            (each for each in others if _own(trainer, each[1])), (None, launches)
        )
    line = _line(launches, path, trainer.name)
    if taken:
        line.notes.append(f"{taken}: taken to hold.")
    stray = next((one for one in launches if one.is_stray and one.keys), None)
    if stray:
        cause = "a comment or a blank after a backslash ends the one before"
        line.notes.append(
            f"line {stray.line}: {stray.words[0]} is a command of its own, since {cause}: it is not passed."
        )
    for text, other in others:
        if text == taken or not _own(trainer, other):
            continue
        try:
            settings = _chosen(trainer, other)[1]
        except ValueError as error:
            line.notes.append(f"{text}: where it holds, {error}")
            continue
        changed = [
            f"{key} is {value}" for key, value in settings.items() if value != line.settings[key]
        ]
        if changed:
            line.notes.append(f"{text}: where it holds, {', '.join(changed)}.")
    return line
