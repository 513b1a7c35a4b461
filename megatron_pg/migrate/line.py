"""Whose launch line a YAML or a list of words is, and the settings that it gives."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_pg.migrate.read import YAML, Launch, read_line, read_yaml
from megatron_pg.migrate.rows import TRAINERS, VARIABLE, Settings, TrainerTable, unknown

OTHERS: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("others.toml").read_text())
"""Trainers whose settings are not read, by name: a sentence that says so, and their words for the
loss."""
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
    """Open questions of the line: variables, another program."""
    passed: list[str]
    """Unknown keys that are not about the loss."""
    given: Mapping[str, Any]
    """All keys of the line with their values as they are written."""


def read(path: Path | None, words: Sequence[str], name: str | None = None) -> Line:
    """Read the line of a YAML, or of words, as that of a trainer by name; raise ValueError for what
    is not known.
    """
    if path is None:
        return _line(read_line(words), None, name)
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give a YAML, or `--` and the launch line")
    if path.suffix not in YAML:
        paste = PASTE.get(path.suffix, "give a YAML, or paste the command line")
        raise ValueError(f"{path} is not read: {paste} after `--`")
    if words:
        raise ValueError(f"{path} is a YAML: give nothing after `--`, or the line that names it")
    return _line(read_yaml(path), path, name)


def trainer_of(launch: Launch, path: Path | None = None) -> TrainerTable:
    """Find the trainer by its mark on keys, values and words; raise ValueError if none has one."""
    seen = " ".join([*launch.words, *launch.keys, *map(str, launch.keys.values())])
    marked = [trainer for trainer in TRAINERS.values() if trainer.mark.search(seen)]
    if marked:
        return marked[0]
    for name, other in OTHERS.items():
        if re.search(other["mark"], seen) or _is_beside(other["package"], path):
            answer = f"{name} is not read: {other['answer']}"
            raise ValueError("\n  ".join([answer, *_words(other["words"], launch)]))
    names, keys = ", ".join(sorted(TRAINERS)), sorted(launch.keys)
    among = ", ".join([*keys[:SHOWN], "..."] if keys[SHOWN:] else keys or ["nothing"])
    unset = [f"\n  {unknown(word)}" for word in [*launch.open, *launch.unread]]
    raise ValueError(
        f"no key tells which trainer this is for (found: {among}): give --trainer with one of "
        f"{names}" + "".join(dict.fromkeys(unset))
    )


def _is_beside(package: str, path: Path | None) -> bool:
    """Return whether a file lies in a checkout that has the package."""
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


def _settings(trainer: TrainerTable, launch: Launch) -> Settings:
    """Read the settings of a launch line; raise ValueError where a file or a command holds some of
    them.
    """
    unread = [file for file in launch.unread if Path(file).stem not in trainer.configs]
    computed = [word for word in launch.open if not VARIABLE.fullmatch(word)]
    if unread or computed:
        raise ValueError(
            "\n  ".join(["not all settings are known:", *map(unknown, unread + computed)])
        )
    return trainer.read(launch.keys)
