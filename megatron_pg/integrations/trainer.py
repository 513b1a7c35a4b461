"""The hooks of slime and miles: their checks before the model is loaded, and the line that says what is on.

An installed trainer must be a proven one, by the source of the functions that the derivation rests on: a version number
would not tell, as these trainers are run from their main branch and from forks. The source is read and not imported, so that
the proof needs nothing that the trainer imports.
"""

import ast
import hashlib
import importlib.util
import io
import tokenize
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_pg.integrations.reducers import HOOKS, PREFIX, divisor_of_args, refuse_flag
from megatron_pg.loss.aggregation import AGGREGATIONS, Aggregation, checked_aggregation

Sources = Mapping[str, Mapping[str, str]]
"""Fingerprints by file of the trainer's package, by function (`Class.method`)."""
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_accepted: set[str] = set()
"""The packages that this process has accepted: an edit of the checkout is not to stop a run half-way."""
PROVEN = tomllib.loads(Path(__file__).with_name("proven_sources.toml").read_text())
"""The fields `proven_with` and `sources` of each trainer."""
Chosen = tuple[Aggregation, float | None]
"""The aggregation that is on, and L of `constant`."""


@dataclass(frozen=True)
class Trainer:
    """A trainer whose `rollout_mask_sums` are overwritten by one of its own hooks."""

    name: str  # of its package, and of its module here
    hook: str  # the setting that has the import path of the hook
    proven_with: str  # the commit with which it was proven (`ci/trainers.sh`)
    sources: Sources  # the functions that the derivation rests on, as they are in that commit
    refusals: Callable[[Any, Aggregation], Iterable[str]] = lambda args, row: ()  # its own

    def path(self, name: str) -> str:
        """Return the flag with the import path of one of its functions here."""
        return f"--{self.hook.replace('_', '-')} megatron_pg.integrations.{self.name}.{name}"

    def require(self, name: str, args: Any) -> Chosen:
        """Return the aggregation and its divisor.

        Raises:
            ValueError: settings that exclude the aggregation, all of them by flag; an unknown version of the trainer.
        """
        path = self.path(name)
        row, divisor = _chosen(path, name, args, self._violations(name, args))
        if divisor is not None and divisor < 1:
            raise ValueError(
                f"{path}: the divisor is {divisor:g}, and {self.name} divides by 1 at least: give the tokens of a response, "
                "such as --rollout-max-response-len"
            )
        if self.name not in _accepted:
            self._refuse_unknown_source(_setting(args, "megatron_pg_proven_source"))
            _accepted.add(self.name)
        return row, divisor

    def _refuse_unknown_source(self, proven_here: str | None) -> None:
        """Refuse functions that are not those of the proven commit, unless the user has proven this source."""
        package = self.name
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(
                f"{package} cannot be imported here: only {package} itself may call this"
            )
        sources = found_sources(Path(next(iter(spec.submodule_search_locations))), self.sources)
        mine = combined(sources)
        if self.sources == sources or mine == proven_here:
            return
        differing = ", ".join(
            f"{name} ({package}/{file})"
            for file, functions in self.sources.items()
            for name, known in functions.items()
            if sources[file][name] != known
        )
        raise ValueError(
            f"unknown version of {package}: {differing} not as in commit {self.proven_with}, with which the divisors were proven "
            f"exact. Run the proof on yours, in a checkout of megatron_pg: `TRAINERS=<the folder that holds your {package} "
            f"checkout, named {package}> bash ci/trainers.sh`. If it passes, say so in the YAML of --custom-config-path: "
            f'`megatron_pg_proven_source: "{mine}"`'
        )

    def check(self, args: Any) -> None:
        """Refuse inexact settings before the model is loaded, and say what is on (`--custom-megatron-init-path`).

        The trainer calls it in every training process. There is no communication. Rank 0 prints one line. Errors are those
        of `require`, or nothing is on.
        """
        hook = str(_setting(args, self.hook) or "")
        reducer = str(_setting(args, "custom_pg_loss_reducer_function_path") or "")
        package = f"megatron_pg.integrations.{self.name}."
        if hook.startswith(package):
            row, divisor = self.require(hook.removeprefix(package), args)
            terms = "policy loss, KL, entropy and their metrics"
        elif reducer.startswith("megatron_pg.integrations."):
            name = reducer.rpartition(".")[2]
            row, divisor = _chosen(f"{PREFIX}{name}", name, args, _without_window(args))
            refuse_flag(name, bool(_setting(args, "calculate_per_token_loss")))
            terms = "the policy loss alone; KL, entropy and metrics keep the trainer's own mean"
        else:
            raise ValueError(
                f"--custom-megatron-init-path {package}check: nothing of megatron_pg is on that it could check; add "
                f"{self.path('prompt_mean')}, or token_mean or constant in its place"
            )
        if not int(_setting(args, "rank") or 0):
            formula = row.formula if divisor is None else f"{row.formula}, L = {divisor:g}"
            text = f"megatron_pg: {row.name} is on in {self.name}: {formula}, for {terms}"
            print(text, flush=True)

    def _violations(self, name: str, args: Any) -> Iterator[str]:
        """Yield the trainer's args that make the divisors inexact."""
        setting = partial(_setting, args)
        if setting("calculate_per_token_loss"):
            yield (
                "--calculate-per-token-loss divides by the step's tokens and leaves rollout_mask_sums unused: drop the flag "
                "(token_mean here is exact without it, and where samples have no active token too)"
            )
        if reducer := setting("custom_pg_loss_reducer_function_path"):
            yield f"--custom-pg-loss-reducer-function-path {reducer} divides a second time: drop it"
        divisor, wanted = setting("loss_aggregation_divisor"), setting("loss_aggregation")
        if divisor is not None and name != "constant":
            yield f"loss_aggregation_divisor {divisor} is of constant alone: drop it, or take {self.path('constant')}"
        if wanted not in (None, name):
            yield f"loss_aggregation {wanted} in the settings is another aggregation: drop it, or take {self.path(wanted)}"
        batch, group = setting("global_batch_size"), setting("n_samples_per_prompt")
        if name == "prompt_mean" and batch and group and batch % group:
            yield (
                f"--global-batch-size {batch} is no multiple of --n-samples-per-prompt {group}: a prompt group would lie in "
                "two optimizer steps"
            )
        yield from _without_window(args)
        yield from self.refusals(args, AGGREGATIONS[name])


def _chosen(path: str, name: str, args: Any, violations: Iterable[str]) -> Chosen:
    """Return the aggregation of the setting `path` and its divisor; refuse violations."""
    if name not in HOOKS:
        raise ValueError(f"{path}: no such function; there are {', '.join(HOOKS)}")
    divisor = divisor_of_args(path, args) if name == "constant" else None
    if texts := "; ".join(violations):
        raise ValueError(f"{path}: {texts}")
    return checked_aggregation(name, divisor), divisor


def _setting(args: Any, field: str) -> Any:
    return getattr(args, field, None)


def _without_window(args: Any) -> Iterator[str]:
    """Yield layouts of tokens over context-parallel ranks other than the zigzag of THD."""
    if int(_setting(args, "context_parallel_size") or 1) == 1:
        return
    if (layout := _setting(args, "qkv_format") or "thd") != "thd":
        yield f"--qkv-format {layout} with --context-parallel-size above 1 has no token window here: use --qkv-format thd"
    if _setting(args, "allgather_cp"):
        yield "--allgather-cp has another order of tokens than was proven: drop it, or --context-parallel-size"


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
