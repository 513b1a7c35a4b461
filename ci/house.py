"""Print the rooms of the project with their lines, and fail where the house breaks one of its rules.

    python ci/house.py

A room is a folder or a file in `megatron_pg/`. An import is an arrow, wherever it stands: at the top of a file, inside a
function, for type checking alone, or in `importlib.import_module("megatron_pg...")`. A room's floor is one above the
highest room that it imports. The rules: no circle of files or rooms, no arrow that runs upward, and no room above its
ceiling of lines. A change that raises a ceiling says in its commit what it removed and why the rest must be.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_pg"
ORDER = (
    ("config", "head"),
    ("step",),
    ("loss", "rollout_files"),
    ("megatron",),
    ("critic",),
    ("exports", "integrations", "explain", "check", "migrate"),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
"""The floors, from the ground up: a room imports from floors below its own."""
CORE = ("config", "step", "loss", "head", "megatron")
CEILINGS = {
    "config": 1653,
    "head": 3076,
    "step": 3275,
    "loss": 3254,
    "rollout_files": 1587,
    "exports": 58,
    "__init__": 20,
    "megatron": 2285,
    "megatron/cpu": 382,
    "critic": 649,
    "integrations": 2925,
    "explain": 998,
    "check": 3096,
    "migrate": 1548,
    "cli": 56,
    "__main__": 7,
    "core": 13543,
    "package": 24869,
    "examples": 3967,
    "tests": 38400,
}
"""The most lines that each part may have. `core` is the sum of `CORE` without `megatron/cpu`."""


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """List the modules of the package that a file imports, `importlib.import_module` of a literal name included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                names.add(name if name in modules else node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names |= {each.value for each in node.args[:1] if isinstance(each, ast.Constant)}
    return {name for name in names if name in modules} - {module_of(path)}


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Find one circle for each group of nodes that reach each other."""
    reach = {node: set(targets) for node, targets in arrows.items()}
    for middle in arrows:
        for node in arrows:
            if middle in reach[node]:
                reach[node] |= reach[middle]
    groups = {frozenset(o for o in reach[n] if n in reach[o]) for n in arrows if n in reach[n]}
    return [sorted(group) for group in groups]


def lines_in(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def sizes(rooms: dict[str, set[str]]) -> dict[str, int]:
    """Count the lines of each part that has a ceiling."""
    places = {room: PACKAGE / room for room in rooms}
    counts = {
        room: lines_in(place) if place.is_dir() else len(place.with_suffix(".py").read_text().splitlines())
        for room, place in places.items()
    }  # fmt: skip
    counts["megatron/cpu"] = lines_in(PACKAGE / "megatron" / "cpu")
    counts["megatron"] -= counts["megatron/cpu"]
    counts["core"] = sum(counts[room] for room in CORE)
    counts["package"] = lines_in(PACKAGE)
    counts |= {name: lines_in(ROOT / name) for name in ("examples", "tests")}
    return counts


def main() -> int:
    paths = sorted(PACKAGE.rglob("*.py"))
    modules = {module_of(path) for path in paths}
    files = {module_of(path): imports_of(path, modules) for path in paths}
    # A package's own `__init__` re-exports its files, and every file runs it: no arrow of the reader's.
    inner = {m: {t for t in targets if not m.startswith(t + ".")} for m, targets in files.items()}
    rooms: dict[str, set[str]] = {}
    for module, targets in inner.items():
        rooms.setdefault(room_of(module), set()).update(room_of(target) for target in targets)
    rooms = {room: targets - {room} for room, targets in rooms.items()}
    floor = {room: number for number, names in enumerate(ORDER, 1) for room in names}
    errors = [f"{room}: not in ORDER of ci/house.py" for room in rooms if room not in floor]
    counts = sizes(rooms)
    for number, names in reversed(list(enumerate(ORDER, 1))):
        for room in sorted(names, key=lambda name: -counts.get(name, 0)):
            below = " ".join(sorted(rooms.get(room, ())))
            print(f"floor {number}  {room:<14}{counts.get(room, 0):>6} lines   imports: {below}")
    print(
        *(f"{name} {counts[name]}" for name in ("core", "package", "examples", "tests")), sep=", "
    )
    for name, count in counts.items():
        if count > CEILINGS.get(name, 0):
            errors.append(f"{name} has {count} lines, above its ceiling of {CEILINGS.get(name, 0)}")
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
