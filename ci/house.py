"""The rooms of the package: lines, floors, circles of imports, and imports that run upward.

    python ci/house.py          # fails on a circle or on an import that runs upward

A room is a folder or a file in `megatron_pg/`. An import is an arrow wherever it stands: at the top of a file, inside a
function, or for type checking alone. A room's floor is one above the highest room that it imports.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "megatron_pg"
ORDER = (
    ("config", "head"),
    ("step",),
    ("loss", "rollout_files"),
    ("__init__", "megatron"),
    ("integrations", "explain", "check", "migrate"),
    ("cli",),
    ("__main__",),
)
"""The floors, from the ground up: a room imports from floors below its own."""


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """The modules of the package that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in modules else node.module)
    return {name for name in found if name in modules} - {module_of(path)}


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """One circle for each group of nodes that reach each other."""
    reach = {node: set(targets) for node, targets in arrows.items()}
    for middle in arrows:
        for node in arrows:
            if middle in reach[node]:
                reach[node] |= reach[middle]
    groups = {frozenset(o for o in reach[n] if n in reach[o]) for n in arrows if n in reach[n]}
    return [sorted(group) for group in groups]


def main() -> int:
    paths = sorted(PACKAGE.rglob("*.py"))
    modules = {module_of(path) for path in paths}
    files = {module_of(path): imports_of(path, modules) for path in paths}
    # A package's own `__init__` re-exports its files, and every file runs it: no arrow of the reader's.
    inner = {m: {t for t in targets if not m.startswith(t + ".")} for m, targets in files.items()}
    rooms: dict[str, set[str]] = {}
    lines: dict[str, int] = {}
    for path, module in zip(paths, map(module_of, paths), strict=True):
        room = room_of(module)
        lines[room] = lines.get(room, 0) + len(path.read_text().splitlines())
        rooms.setdefault(room, set()).update(room_of(t) for t in inner[module])
    rooms = {room: targets - {room} for room, targets in rooms.items()}
    floor = {room: number for number, names in enumerate(ORDER, 1) for room in names}
    errors = [f"{room}: not in ORDER of ci/house.py" for room in rooms if room not in floor]
    for number, names in reversed(list(enumerate(ORDER, 1))):
        for room in sorted(names, key=lambda name: -lines.get(name, 0)):
            below = " ".join(sorted(rooms.get(room, ())))
            print(f"floor {number}  {room:<14}{lines.get(room, 0):>6} lines   imports: {below}")
    print(f"{sum(lines.values())} lines in {len(lines)} rooms")
    for room, targets in rooms.items():
        for target in targets:
            if floor.get(target, 0) >= floor.get(room, 0):
                errors.append(f"{room} imports {target}, which is not below it")
    errors += [f"circle of rooms: {' '.join(circle)}" for circle in circles(rooms)]
    errors += [f"circle of files: {' '.join(circle)}" for circle in circles(inner)]
    print(*errors, sep="\n")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
