"""Print the sizes of the project, and fail if one grew by more than 2 % without a reason.

    python ci/sizes.py             # compare with ci/sizes.json, as the lint stage does
    python ci/sizes.py --write     # write today's sizes there

`ci/sizes.json` has the sizes at the last merge that wrote it. If lines of the package, lines of the
tests or public names exceed them by more than 2 %, the script fails. Then write the file again, in
a commit with a line `Growth: <why>` in its body. Smaller sizes need no reason.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "ci/sizes.json"
LIMITED = ("megatron_pg", "tests", "public names")
ALLOWED_GROWTH = 1.02


def git(*arguments: str) -> str:
    """Run git in the project. Return "" in a folder without history, such as an archive."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else ""


def files_in(folder: str, *suffixes: str) -> list[Path]:
    names = git("ls-files", "--cached", "--others", "--exclude-standard", folder).splitlines()
    paths = [ROOT / name for name in names if name.endswith(suffixes)]
    return [path for path in paths if path.exists()]


def lines_in(folder: str, *suffixes: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in files_in(folder, *suffixes))


def words_in(*folders: str) -> int:
    return sum(len(path.read_text().split()) for f in folders for path in files_in(f, ".md"))


def public_names(tree: ast.Module) -> int:
    """Count the entries of a module's `__all__`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return len(ast.literal_eval(node.value))
    return 0


def flags() -> int:
    """Count the flags that the package adds to a launch script's parser."""
    sys.path.insert(0, str(ROOT))
    from megatron_pg import add_critic_args, add_planning_args, add_policy_loss_args

    parser = argparse.ArgumentParser(add_help=False)
    for add in (add_policy_loss_args, add_planning_args, add_critic_args):
        add(parser)
    return len(parser._actions)


def measured() -> dict[str, int]:
    package = ROOT / "megatron_pg"
    trees = [ast.parse(path.read_text()) for path in files_in("megatron_pg", ".py")]
    sizes = {
        f"megatron_pg/{folder.name}": lines_in(f"megatron_pg/{folder.name}", ".py")
        for folder in sorted(package.iterdir())
        if files_in(f"megatron_pg/{folder.name}/", ".py")
    }
    sizes |= {name: lines_in(name, ".py") for name in ("megatron_pg", "tests", "benchmarks")}
    sizes["examples"] = lines_in("examples", ".py", ".sh")
    records = words_in("docs/records")
    sizes["words for users"] = words_in("docs", "README.md", "CONTRIBUTING.md") - records
    sizes["words of records"] = records
    sizes["public names"] = sum(map(public_names, trees))
    sizes["flags"] = flags()
    nodes = (node for tree in trees for node in ast.walk(tree))
    sizes["raise statements"] = sum(isinstance(node, ast.Raise) for node in nodes)
    return sizes


def growth(sizes: dict[str, int], before: dict[str, int]) -> dict[str, str]:
    """Describe sizes that exceed the allowed growth, by name."""
    return {
        name: f"{before[name]} -> {sizes[name]}"
        for name in LIMITED
        if name in before and sizes[name] > ALLOWED_GROWTH * before[name]
    }


def unexplained() -> dict[str, str]:
    """Describe growth in the last write of the record, unless its commit gives a reason."""
    commit, _, body = git("log", "-1", "--format=%H%n%B", "--", str(RECORD)).partition("\n")
    before = git("show", f"{commit}~1:ci/sizes.json") if commit else ""
    if not before or re.search(r"^Growth: \S", body, re.MULTILINE):
        return {}
    return growth(json.loads(git("show", f"{commit}:ci/sizes.json")), json.loads(before))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="Write today's sizes as the record.")
    arguments = parser.parse_args()
    if not git("ls-files", "ci"):
        print("no git history here: no sizes")
        return 0
    before, sizes = json.loads(RECORD.read_text()) if RECORD.exists() else {}, measured()
    for name, size in sizes.items():
        print(f"{name:<28}{size:>7}  before {before.get(name, '-')}")
    if arguments.write:
        RECORD.write_text(json.dumps(sizes, indent=1) + "\n")
        return 0
    errors = [
        f"{name} grew by more than 2 %: {change}. Run `python ci/sizes.py --write` and commit "
        "ci/sizes.json with a line `Growth: <why>` in the body."
        for name, change in growth(sizes, before).items()
    ]
    errors += [
        f"{name} grew by more than 2 % in ci/sizes.json: {change}. Add a line `Growth: <why>` to "
        "the body of its commit."
        for name, change in unexplained().items()
    ]
    print(*errors, sep="\n")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
