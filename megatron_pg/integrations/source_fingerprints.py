"""Is the trainer that is installed one that was proven? By the source of the functions which the derivation rests on.

A version number would not tell: these trainers are run from their main branch and from forks. The source is read, not
imported, so that asking costs nothing and needs none of what they import.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import io
import tokenize
from collections.abc import Mapping
from pathlib import Path

Sources = Mapping[str, Mapping[str, str]]
"""Fingerprints by file of the trainer's package, by function (`Class.method`): the fingerprint of its source."""

_accepted: set[str] = set()
"""The packages that were asked about in this process: an edit of the checkout is not to stop a run half-way."""


def fingerprint(source: str) -> str:
    """Return 16 hexadecimal digits of one function's source without comments, docstring and empty lines."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ) and ast.get_docstring(node):
            first, last = node.body[0].lineno, node.body[0].end_lineno or 0
            lines[first - 1 : last] = [""] * (last - first + 1)
    code = [line.rstrip() for line in lines if line.strip()]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:16]


def source_of(path: Path, name: str) -> str | None:
    """Return the source of a function, or of a method as `Class.method`; None if the file lacks it."""
    if not path.is_file():
        return None
    lines = path.read_text().splitlines(keepends=True)
    body = ast.parse("".join(lines)).body
    for part in name.split("."):
        found = [
            n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part
        ]
        if not found:
            return None
        node = found[-1]
        body = node.body
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    indent = " " * node.col_offset
    return "".join(line.removeprefix(indent) for line in lines[first - 1 : node.end_lineno])


def package_folder(package: str) -> Path:
    """Find the folder of a package without importing the package.

    Raises:
        ValueError: there is none.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"{package} cannot be imported here: this is to be called by {package} itself"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def found_sources(folder: Path, expected: Sources) -> dict[str, dict[str, str]]:
    """Fingerprint the functions of `expected` in the folder; "missing" for an absent function."""
    found: dict[str, dict[str, str]] = {}
    for file, functions in expected.items():
        for name in functions:
            source = source_of(folder / file, name)
            found.setdefault(file, {})[name] = "missing" if source is None else fingerprint(source)
    return found


def combined(sources: Sources) -> str:
    """Return one fingerprint, 16 hexadecimal digits, of all functions."""
    text = repr([(file, sorted(of_file.items())) for file, of_file in sorted(sources.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def refuse_unknown_source(
    package: str, expected: Sources, proven_with: str, proven_here: str | None
) -> None:
    """Refuse a trainer whose functions are not those that were proven.

    Args:
        package: the trainer's package.
        expected: its functions and their fingerprints.
        proven_with: the commit that has them, for the error.
        proven_here: the fingerprint of a source that the user proved; None where there is none.

    Raises:
        ValueError: unknown version: which functions differ, and the command that proves them.
    """
    if package in _accepted:
        return
    found = found_sources(package_folder(package), expected)
    mine = combined(found)
    if found == expected or mine == proven_here:
        _accepted.add(package)
        return
    differing = [
        f"{name} ({package}/{file})"
        for file, functions in expected.items()
        for name, known in functions.items()
        if found[file][name] != known
    ]
    raise ValueError(
        f"unknown version of {package}: {', '.join(differing)} not as in commit {proven_with}, with which the divisors "
        f"were proven exact. Run the proof on yours, in a checkout of megatron_pg: `TRAINERS=<the folder that holds your "
        f"{package} checkout, named {package}> bash ci/trainers.sh`. If it passes, say so in the YAML of "
        f'--custom-config-path: `megatron_pg_proven_source: "{mine}"`'
    )
