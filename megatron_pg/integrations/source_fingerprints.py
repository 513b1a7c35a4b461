"""The proof that an installed trainer is a proven one, by the source of the functions that the derivation rests on.

A version number would not tell: these trainers are run from their main branch and from forks. The source is read and
not imported, so that the proof needs nothing that the trainer imports.
"""

import ast
import hashlib
import importlib.util
import io
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Sources = Mapping[str, Mapping[str, str]]
"""Fingerprints by file of the trainer's package, by function (`Class.method`)."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_accepted: set[str] = set()
"""The packages that this process has accepted: an edit of the checkout is not to stop a run half-way."""


def fingerprint(source: str) -> str:
    """Return 16 hexadecimal digits of one function's source without comments, docstring and empty lines."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Definition) and ast.get_docstring(node):
            first, last = node.body[0].lineno, node.body[0].end_lineno or 0
            lines[first - 1 : last] = [""] * (last - first + 1)
    return _digits("\n".join(line.rstrip() for line in lines if line.strip()))


def _digits(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def source_of(path: Path, name: str) -> str | None:
    """Return the source of a function, or of a method as `Class.method`; None if the file lacks it."""
    if not path.is_file():
        return None
    lines = path.read_text().splitlines(keepends=True)
    node: Any = ast.parse("".join(lines))
    for part in name.split("."):
        named = [child for child in node.body if getattr(child, "name", None) == part]
        if not named:
            return None
        node = named[-1]
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    indent = " " * node.col_offset
    return "".join(line.removeprefix(indent) for line in lines[first - 1 : node.end_lineno])


def found_sources(folder: Path, expected: Sources) -> dict[str, dict[str, str]]:
    """Fingerprint the functions of `expected` in the folder of a package; "missing" for an absent function."""
    sources = {}
    for file, names in expected.items():
        texts = {name: source_of(folder / file, name) for name in names}
        sources[file] = {
            name: "missing" if text is None else fingerprint(text) for name, text in texts.items()
        }
    return sources


def combined(sources: Sources) -> str:
    """Return one fingerprint, 16 hexadecimal digits, of all functions."""
    in_order = [(file, sorted(functions.items())) for file, functions in sorted(sources.items())]
    return _digits(repr(in_order))


def refuse_unknown_source(
    package: str, expected: Sources, proven_with: str, proven_here: str | None
) -> None:
    """Refuse a package whose functions differ from the `expected` ones of a commit, unless the user proved its source."""
    if package in _accepted:
        return
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{package} cannot be imported here: only {package} itself may call this")
    sources = found_sources(Path(next(iter(spec.submodule_search_locations))), expected)
    mine = combined(sources)
    if sources == expected or mine == proven_here:
        _accepted.add(package)
        return
    differing = ", ".join(
        f"{name} ({package}/{file})"
        for file, functions in expected.items()
        for name, known in functions.items()
        if sources[file][name] != known
    )
    raise ValueError(
        f"unknown version of {package}: {differing} not as in commit {proven_with}, with which the divisors were proven "
        f"exact. Run the proof on yours, in a checkout of megatron_pg: `TRAINERS=<the folder that holds your {package} "
        f"checkout, named {package}> bash ci/trainers.sh`. If it passes, say so in the YAML of --custom-config-path: "
        f'`megatron_pg_proven_source: "{mine}"`'
    )
