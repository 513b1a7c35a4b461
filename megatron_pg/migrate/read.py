"""The reader of a launch line or a YAML. It runs nothing."""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_pg.migrate.rows import UNKNOWN, VARIABLE

OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
"""`key.of.a.section=value`, as in Hydra."""
YAML = (".yaml", ".yml")
CONFIGS = {"--config": False, "--custom-config-path": True}
"""Flags that name a YAML of settings, and whether the YAML overrides the line."""
OPTIONS = re.compile(
    r"\$\{?\w*(ARGS|ARGUMENTS|CONFIG|EXTRA|FLAGS|OPTIONS|OPTS|OVERRIDE)\w*\}?", re.I
)
"""A variable that holds options, judged by its name."""
MAX_DEPTH = 8
"""The largest depth of nested `defaults`."""


@dataclass
class Launch:
    """The words and settings of a launch line or a YAML."""

    words: Sequence[str]
    keys: dict[str, Any]
    unread: list[str] = field(default_factory=list)
    """Files of settings that were not found."""
    open: list[str] = field(default_factory=list)
    """Unknown words that may hold options, such as an unset `$EXTRA_ARGS`."""

    @property
    def program(self) -> str:
        """The launched module after `-m`, or Python file, or "" if the line has none."""
        for before, word in zip(["", *self.words], self.words, strict=False):
            if (before == "-m" and "." in word) or re.fullmatch(r"[^\s=]+\.py", word):
                return word
        return ""


def read_yaml(path: Path) -> Launch:
    """Read the settings of a YAML and its `defaults`. Needs PyYAML."""
    launch = Launch([str(path)], {})
    launch.keys = _yaml(path, launch.unread)
    return launch


def read_line(words: Sequence[str]) -> Launch:
    """Read the keys of a line: `--flag value`, `--flag=value`, `--flag` (true), and
    `section.key=value`. The last value wins.
    """
    keys: dict[str, Any] = {}
    launch, flag = Launch(words, keys), None
    for word in words:
        override = OVERRIDE.fullmatch(word)
        if word.startswith("--") and len(word) > 2:
            flag, equals, value = word.partition("=")
            keys[flag] = value if equals else "true"
            flag = None if equals else flag
        elif flag:
            keys[flag], flag = word, None
        elif override:
            keys[override[1]] = override[2].strip("'\"")
        elif UNKNOWN.match(word) and VARIABLE.sub("", word, 1)[:1] in ("", "$", "`"):
            launch.open.append(word)
        if word == launch.program:
            launch.open.clear()  # earlier words belong to a launcher
    launch.open += [value for value in keys.values() if OPTIONS.fullmatch(value)]
    for flag, wins in CONFIGS.items():
        if name := str(keys.get(flag, "")):
            if Path(name).is_file() and Path(name).suffix in YAML:
                settings = _yaml(Path(name), launch.unread)
                launch.keys = launch.keys | settings if wins else settings | launch.keys
            else:
                launch.unread.append(name)
    if "--config-name" in keys:
        _read_hydra(launch, str(keys["--config-name"]))
    return launch


def _read_hydra(launch: Launch, name: str) -> None:
    """Read the configuration that Hydra finds next to the launched module."""
    path, module = str(launch.keys.get("--config-path", "config")), launch.program.split(".")[:-1]
    file = Path(path) / (name if Path(name).suffix in YAML else f"{name}.yaml")
    # The checkout itself may be the package, as verl-recipe is `recipe`.
    for place in ([], module, module[1:]):
        if (found := Path(*place, file)).is_file():
            launch.keys = _yaml(found, launch.unread) | launch.keys
            return
    launch.unread.append(str(file))


def _yaml(path: Path, unread: list[str], depth: int = 0) -> dict[str, Any]:
    tree = dict(_tree(path))
    parents = tree.pop("defaults", [])
    keys: dict[str, Any] = {}
    for name in [parents] if isinstance(parents, str) else parents:
        if isinstance(name, dict):  # Hydra's groups
            continue
        parent = path.parent / str(name)
        parent = parent if parent.suffix in YAML else parent.with_name(f"{parent.name}.yaml")
        if parent.is_file() and depth < MAX_DEPTH:
            keys |= _yaml(parent, unread, depth + 1)
        elif name != "_self_":
            unread.append(str(name))
    # slime and miles use a flag's attribute name.
    return keys | dict(_flat(tree))


@functools.cache
def _tree(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise ImportError(f"{path}: reading YAML requires PyYAML (pip install pyyaml)") from error
    try:
        tree = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path} holds a {type(tree).__name__}: expected keys with values")
    return tree


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
