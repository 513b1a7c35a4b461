"""Reader of a launch line, a shell script or a YAML, by the trainer's own keys. Nothing is run."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
"""`key.of.a.section=value`, as Hydra takes it."""
VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
ARITHMETIC = re.compile(r"\$\(\(([^$]*?)\)\)")
SUMS = re.compile(r"([1-9]\d*|0)([-+*]([1-9]\d*|0))*")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
YAML = (".yaml", ".yml")
MAX_DEPTH = 8
"""Limit on how often variables may stand for variables, and a YAML for its `defaults`."""


def read_file(path: Path) -> dict[str, Any]:
    """Read the keys of a YAML (by its suffix; needs PyYAML) or of the launch line in a shell script."""
    if not path.is_file():
        kinds = "give a YAML, a shell script, or `--` and the launch line"
        raise ValueError(f"{path}: no such file; {kinds}")
    if path.suffix in YAML:
        return _read_yaml(path)
    try:
        return read_line(_words_of_script(path.read_text()))
    except ValueError as error:
        raise ValueError(f"{path}: {error}; give the launch line itself after `--`") from None


def read_line(words: Sequence[str]) -> dict[str, Any]:
    """Read the keys of a launch line: `--flag value`, `--flag=value`, `--flag` (true), and `section.key=value`."""
    found: dict[str, Any] = {}
    flag = None
    for word in words:
        override = OVERRIDE.fullmatch(word)
        if word.startswith("--") and len(word) > 2:
            flag, equals, value = word.partition("=")
            found[flag] = value if equals else "true"
            flag = None if equals else flag
        elif flag:
            found[flag], flag = word, None
        elif override:
            found[override[1]] = override[2].strip("'\"")
    for flag in ("--config", "--custom-config-path"):
        path = Path(str(found.get(flag, "")))
        if path.suffix in YAML and path.is_file():
            found = _read_yaml(path) | found
    return found


def _words_of_script(text: str) -> list[str]:
    """List the words of every command and array, without comments, with the variables that the script itself sets."""
    text = re.sub(r"(?m)(^|\s)#.*$", "", text.replace("\\\n", " "))
    text = ARITHMETIC.sub(lambda match: re.sub(r"\s", "", match[0]), text)
    # The words of an array, NAME=( ... ), are the line's.
    text = re.sub(r"(?m)^\s*\)\s*$", "", re.sub(r"\w+\+?=\(", " ", text))
    words = [word.rstrip(";") for word in shlex.split(text)]
    variables: dict[str, str] = {}
    for word in words:
        if ASSIGNMENT.fullmatch(word):
            name, value = word.split("=", 1)
            own = re.compile(rf"\$\{{{name}:?-([^{{}}]*)\}}")  # NAME=${NAME:-default}
            variables.setdefault(name, own.sub(r"\1", value))
    return [_filled_in(word, variables) for word in words]


def _filled_in(word: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        return variables.get(name, match[0] if default is None else default)

    def number(match: re.Match[str]) -> str:
        terms = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), match[1])
        # `SUMS` lets only numbers, +, - and * pass; another expression stays as it is.
        return str(eval(terms)) if SUMS.fullmatch(terms) else match[0]

    for _ in range(MAX_DEPTH):
        word = ARITHMETIC.sub(number, VARIABLE.sub(value, word))
    return word


def _read_yaml(path: Path, depth: int = 0) -> dict[str, Any]:
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
    parents = tree.pop("defaults", [])
    found: dict[str, Any] = {}
    for name in [parents] if isinstance(parents, str) else parents:
        parent = path.parent / str(name)
        if parent.is_file() and depth < MAX_DEPTH:
            found |= _read_yaml(parent, depth + 1)
    # slime and miles name a flag by its attribute.
    return found | dict(_flat(tree))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
