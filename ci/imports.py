"""Print the packages of the project with their lines, and fail if an import breaks a rule.

    python ci/imports.py

A package is a folder or a file in `megatron_pg/`. Every import counts: at the top of a file, inside
a function, for type checking, or in `importlib.import_module("megatron_pg...")`. The rules: no
cycle of files or packages, and every package imports only from lower layers.
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
"""Layers, from the bottom up."""


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """List the package's modules that a file imports, including literal `import_module` calls."""
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


def package_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def cycles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Find one cycle per group of nodes that reach each other."""
    reach = {node: set(targets) for node, targets in arrows.items()}
    for middle in arrows:
        for node in arrows:
            if middle in reach[node]:
                reach[node] |= reach[middle]
    groups = {frozenset(o for o in reach[n] if n in reach[o]) for n in arrows if n in reach[n]}
    return [sorted(group) for group in groups]


def lines_in(package: str) -> int:
    place = PACKAGE / package
    files = place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")]
    return sum(len(path.read_text().splitlines()) for path in files)


def main() -> int:
    paths = sorted(PACKAGE.rglob("*.py"))
    modules = {module_of(path) for path in paths}
    files = {module_of(path): imports_of(path, modules) for path in paths}
    # Every file imports its package's `__init__`, which re-exports files, so ignore that import.
    inner = {m: {t for t in targets if not m.startswith(t + ".")} for m, targets in files.items()}
    packages: dict[str, set[str]] = {}
    for module, targets in inner.items():
        packages.setdefault(package_of(module), set()).update(
            package_of(target) for target in targets
        )
    packages = {package: targets - {package} for package, targets in packages.items()}
    layer = {package: number for number, names in enumerate(ORDER, 1) for package in names}
    errors = [
        f"{package}: not in ORDER of ci/imports.py" for package in packages if package not in layer
    ]
    counts = {package: lines_in(package) for package in packages}
    for number, names in reversed(list(enumerate(ORDER, 1))):
        for package in sorted(names, key=lambda name: -counts.get(name, 0)):
            below = " ".join(sorted(packages.get(package, ())))
            print(
                f"layer {number}  {package:<14}{counts.get(package, 0):>6} lines   imports: {below}"
            )
    print(f"{sum(counts.values())} lines")
    for package, targets in packages.items():
        for target in targets:
            if layer.get(target, 0) >= layer.get(package, 0):
                errors.append(f"{package} imports {target}, which is not below it")
    errors += [f"cycle of packages: {' '.join(cycle)}" for cycle in cycles(packages)]
    errors += [f"cycle of files: {' '.join(cycle)}" for cycle in cycles(inner)]
    print(*errors, sep="\n")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
