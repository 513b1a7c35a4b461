"""Reader of a launch line, a shell script or a YAML, by the trainer's own keys. Nothing is run."""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_pg.migrate.shell import Command, read_script

OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
"""`key.of.a.section=value`, as Hydra takes it."""
YAML = (".yaml", ".yml")
CONFIGS = ("--config", "--custom-config-path")
"""Flags that name a YAML of settings."""
MAX_DEPTH = 8
"""Limit on how often a YAML may stand for its `defaults`."""


@dataclass
class Launch:
    """One launch line, or a YAML: its words, its settings, and files of settings that are not here."""

    words: Sequence[str]
    keys: dict[str, Any]
    line: int = 0
    missing: list[str] = field(default_factory=list)

    @property
    def is_stray(self) -> bool:
        """Return whether the line begins with an option: the shell has cut it off its command."""
        return bool(self.words) and bool(
            OVERRIDE.fullmatch(self.words[0]) or self.words[0].startswith("--")
        )

    @property
    def program(self) -> str:
        """Module after `-m`, or Python file, that is launched; "" where the line names none."""
        for before, word in zip(["", *self.words], self.words, strict=False):
            if (before == "-m" and "." in word) or re.fullmatch(r"[^\s=]+\.py", word):
                return word
        return ""


def read_yaml(path: Path) -> Launch:
    """Read the settings of a YAML and of its `defaults`; needs PyYAML."""
    launch = Launch([str(path)], {})
    launch.keys = _yaml(path, launch.missing)
    return launch


def read_launches(
    path: Path, true: int | None = None
) -> tuple[list[Launch], list[tuple[int, str]]]:
    """Read the commands of a shell script as `read_script` does, and return them with the conditions left undecided."""
    script = read_script(path, true)
    launches = [
        read_line(command, [path.parent, *path.resolve().parents]) for command in script.commands
    ]
    for launch in launches:
        launch.missing += script.missing
    return launches, script.undecided


def read_line(command: Command, folders: Sequence[Path] = (Path(),)) -> Launch:
    """Read the keys of a line: `--flag value`, `--flag=value`, `--flag` (true), and `section.key=value`; the last wins."""
    keys: dict[str, Any] = {}
    flag = None
    for word in command.words:
        override = OVERRIDE.fullmatch(word)
        if word.startswith("--") and len(word) > 2:
            flag, equals, value = word.partition("=")
            keys[flag] = value if equals else "true"
            flag = None if equals else flag
        elif flag:
            keys[flag], flag = word, None
        elif override:
            keys[override[1]] = override[2].strip("'\"")
    launch = Launch(command.words, keys, command.line)
    for flag in CONFIGS:
        if name := str(keys.get(flag, "")):
            files = (
                f / name for f in folders if (f / name).is_file() and Path(name).suffix in YAML
            )
            if file := next(files, None):
                launch.keys = _yaml(file, launch.missing) | launch.keys
            else:
                launch.missing.append(name)
    if "--config-name" in keys:
        _read_hydra(launch, str(keys["--config-name"]), folders)
    return launch


def _read_hydra(launch: Launch, name: str, folders: Sequence[Path]) -> None:
    """Read the configuration that Hydra finds beside the module that is launched."""
    path, module = str(launch.keys.get("--config-path", ".")), launch.program.split(".")[:-1]
    file = Path(path) / (name if Path(name).suffix in YAML else f"{name}.yaml")
    for folder in folders:
        for found in (folder / file, Path(folder, *module) / file):
            if found.is_file():
                launch.keys = _yaml(found, launch.missing) | launch.keys
                return
    launch.missing.append(name)


def _yaml(path: Path, missing: list[str], depth: int = 0) -> dict[str, Any]:
    tree = dict(_tree(path))
    parents = tree.pop("defaults", [])
    keys: dict[str, Any] = {}
    for name in [parents] if isinstance(parents, str) else parents:
        if isinstance(name, dict):  # Hydra's groups
            continue
        parent = path.parent / str(name)
        parent = parent if parent.suffix in YAML else parent.with_name(f"{parent.name}.yaml")
        if parent.is_file() and depth < MAX_DEPTH:
            keys |= _yaml(parent, missing, depth + 1)
        elif name != "_self_":
            missing.append(str(name))
    # slime and miles name a flag by its attribute.
    return keys | dict(_flat(tree))


@functools.cache
def _tree(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise ImportError(f"{path}: reading YAML needs PyYAML: pip install pyyaml") from error
    try:
        tree = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path} holds a {type(tree).__name__}: expected keys with values")
    return tree


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
