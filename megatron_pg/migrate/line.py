"""The trainer and settings of a launch line, from a YAML or a list of words."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_pg.migrate.read import YAML, Launch, read_line, read_yaml
from megatron_pg.migrate.rows import TRAINERS, VARIABLE, Settings, TrainerTable, unknown

OTHERS: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("others.toml").read_text())
"""Trainers with settings that are not read, by name: advice, and their words for the loss."""
SHOWN = 8
"""Keys that an error lists."""
PASTE = {
    ".sh": "paste the expanded command line (`bash -x` or `set -x` prints it)",
    ".py": "paste the command line that it runs",
}


@dataclass
class Line:
    """The launch line of a trainer, with its settings."""

    trainer: TrainerTable
    settings: Settings
    notes: list[str]
    """Unknowns of the line: variables, or a different program."""
    passed: list[str]
    """Unknown keys that do not affect the loss."""
    given: Mapping[str, Any]
    """All keys of the line with their values as written."""


def read(path: Path | None, words: Sequence[str], name: str | None = None) -> Line:
    """Read the line of a YAML or of words, for the trainer `name` if given. Raise ValueError for
    anything unknown.
    """
    if path is None:
        return _line(read_line(words), None, name)
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give a YAML file, or `--` and the launch line")
    if path.suffix not in YAML:
        paste = PASTE.get(path.suffix, "give a YAML file, or paste the command line")
        raise ValueError(f"{path} is not a YAML file: {paste} after `--`")
    if words:
        raise ValueError(
            f"{path} is a YAML file: remove the words after `--`, or give only the launch line "
            "that names it"
        )
    return _line(read_yaml(path), path, name)


def trainer_of(launch: Launch, path: Path | None = None) -> TrainerTable:
    """Find the trainer whose pattern matches keys, values or words. Raise ValueError if there is
    none.
    """
    seen = " ".join([*launch.words, *launch.keys, *map(str, launch.keys.values())])
    marked = [trainer for trainer in TRAINERS.values() if trainer.mark.search(seen)]
    if marked:
        return marked[0]
    for name, other in OTHERS.items():
        if re.search(other["mark"], seen) or _is_beside(other["package"], path):
            answer = f"migrate does not read {name}: {other['answer']}"
            raise ValueError("\n  ".join([answer, *_words(other["words"], launch)]))
    names, keys = ", ".join(sorted(TRAINERS)), sorted(launch.keys)
    among = ", ".join([*keys[:SHOWN], "..."] if keys[SHOWN:] else keys)
    found = f" from the settings {among}" if keys else ", because no settings are given"
    unset = [f"\n  {unknown(word)}" for word in [*launch.open, *launch.unread]]
    raise ValueError(
        f"cannot identify the trainer{found}. Add --trainer with one of {names}"
        + "".join(dict.fromkeys(unset))
    )


def _is_beside(package: str, path: Path | None) -> bool:
    """Tell whether a file lies in a checkout that has the package."""
    if path is None or not package:
        return False
    return any((folder / package / "__init__.py").is_file() for folder in path.resolve().parents)


def _words(rows: Mapping[str, str], launch: Launch) -> list[str]:
    found = {}
    for key, value in launch.keys.items():
        word = re.split(r"[.-]+", key)[-1]
        if meaning := rows.get(f"{word}={value}", rows.get(word)):
            found[f"{word}={value}"] = meaning
    return [f"{setting}: {meaning}" for setting, meaning in found.items()]


def _line(launch: Launch, path: Path | None, name: str | None) -> Line:
    trainer = TRAINERS[name] if name else trainer_of(launch, path)
    settings = _settings(trainer, launch)
    notes = [
        f"{unknown(word)}. It is treated as empty, so its settings are not read."
        for word in dict.fromkeys(launch.open)
    ]
    if launch.program and not trainer.programs.search(launch.program):
        notes.append(
            f"{launch.program} is an unknown program, which may have different defaults or a "
            "different loss."
        )
    given = trainer.named(launch.keys)
    others = given.keys() - trainer.settings.keys()
    passed = sorted(key for key in others if not trainer.is_elsewhere(key))
    return Line(trainer, settings, notes, passed, given)


def _settings(trainer: TrainerTable, launch: Launch) -> Settings:
    """Read the settings of a launch line. Raise ValueError if a file or a command holds some of
    them.
    """
    unread = [file for file in launch.unread if Path(file).stem not in trainer.configs]
    computed = [word for word in launch.open if not VARIABLE.fullmatch(word)]
    if unread or computed:
        raise ValueError(
            "\n  ".join(["some settings are unknown:", *map(unknown, unread + computed)])
        )
    return trainer.read(launch.keys)
