"""Checks before a trainer loads its model, and the line that says what is on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_pg.integrations.reducers import PREFIX, refuse_flag
from megatron_pg.integrations.settings import find_divisor
from megatron_pg.integrations.source_fingerprints import Sources, refuse_unknown_source
from megatron_pg.loss.aggregation import AGGREGATIONS, Aggregation, checked_aggregation


@dataclass(frozen=True)
class Trainer:
    """A trainer whose `rollout_mask_sums` are overwritten by one of its own hooks."""

    name: str
    """Its package, and its module here."""
    hook: str
    """The setting that has the import path of the hook."""
    proven_with: str
    """The commit with which it was proven (`ci/trainers.sh`)."""
    sources: Sources
    """The functions that the derivation rests on, as they are in that commit."""
    refusals: Callable[[Any, Aggregation], Iterable[str]] = lambda args, row: ()
    """Violations of this trainer alone, from its args."""

    def path(self, name: str) -> str:
        """Return the flag with the import path of one of its functions here."""
        return f"--{self.hook.replace('_', '-')} megatron_pg.integrations.{self.name}.{name}"


def require(trainer: Trainer, name: str, args: Any) -> tuple[Aggregation, float | None]:
    """Return the aggregation and its divisor, if the trainer's args and source make it exact.

    No communication.

    Raises:
        ValueError: a setting that excludes it, all of them by flag; the trainer is an unknown version.
    """
    row = _row(trainer.path(name), name)
    divisor = find_divisor(args, trainer.path(name)) if name == "constant" else None
    violations = list(_violations(trainer, row, args))
    if violations:
        raise ValueError(f"{trainer.path(name)}: " + "; ".join(violations))
    if divisor is not None and divisor < 1:
        raise ValueError(
            f"{trainer.path(name)}: the divisor is {divisor:g}, and {trainer.name} divides by 1 at least: give the tokens "
            "of a response, such as --rollout-max-response-len"
        )
    refuse_unknown_source(
        trainer.name,
        trainer.sources,
        trainer.proven_with,
        _setting(args, "megatron_pg_proven_source"),
    )
    return checked_aggregation(name, divisor), divisor


def check(trainer: Trainer, args: Any) -> None:
    """Do the `check` of `megatron_pg.integrations.slime` and `.miles`: see there."""
    named = str(_setting(args, trainer.hook) or "")
    reducer = str(_setting(args, "custom_pg_loss_reducer_function_path") or "")
    package = f"megatron_pg.integrations.{trainer.name}."
    if named.startswith(package):
        name = named.removeprefix(package)
        row, divisor = require(trainer, name, args)
        what = "policy loss, KL, entropy and their metrics"
    elif reducer.startswith("megatron_pg.integrations."):
        name = reducer.rpartition(".")[2]
        row, divisor = _require_reducer(name, args)
        what = "the policy loss alone; KL, entropy and metrics keep the trainer's own mean"
    else:
        raise ValueError(
            f"--custom-megatron-init-path {package}check: nothing of megatron_pg is on that it could check; add "
            f"{trainer.path('prompt_mean')}, or token_mean or constant in its place"
        )
    if int(_setting(args, "rank") or 0) == 0:
        length = "" if divisor is None else f", L = {divisor:g}"
        print(
            f"megatron_pg: {name} is on in {trainer.name}: {row.formula}{length}, for {what}",
            flush=True,
        )


def _require_reducer(name: str, args: Any) -> tuple[Aggregation, float | None]:
    """Require a reducer of `megatron_pg.integrations`."""
    _row(f"{PREFIX}{name}", name)
    refuse_flag(name, bool(_setting(args, "calculate_per_token_loss")))
    violations = list(_without_window(args))
    if violations:
        raise ValueError(f"{PREFIX}{name}: " + "; ".join(violations))
    divisor = find_divisor(args, f"{PREFIX}{name}") if name == "constant" else None
    return checked_aggregation(name, divisor), divisor


def _row(path: str, name: str) -> Aggregation:
    if name not in AGGREGATIONS:
        raise ValueError(f"{path}: no such function; there are {', '.join(AGGREGATIONS)}")
    return AGGREGATIONS[name]


def _setting(args: Any, field: str) -> Any:
    return getattr(args, field, None)


def _without_window(args: Any) -> Iterator[str]:
    """Yield layouts of tokens over context-parallel ranks other than the zigzag of THD."""
    if int(_setting(args, "context_parallel_size") or 1) == 1:
        return
    layout = _setting(args, "qkv_format") or "thd"
    if layout != "thd":
        yield f"--qkv-format {layout} with --context-parallel-size above 1 has no token window here: use --qkv-format thd"
    if _setting(args, "allgather_cp"):
        yield "--allgather-cp has another order of tokens than was proven: drop it, or --context-parallel-size"


def _violations(trainer: Trainer, row: Aggregation, args: Any) -> Iterator[str]:
    """Yield the trainer's args that make the divisors inexact."""
    if _setting(args, "calculate_per_token_loss"):
        yield (
            "--calculate-per-token-loss divides by the step's tokens and leaves rollout_mask_sums unused: drop the flag "
            "(token_mean here is exact without it, and where samples have no active token too)"
        )
    if reducer := _setting(args, "custom_pg_loss_reducer_function_path"):
        yield f"--custom-pg-loss-reducer-function-path {reducer} divides a second time: drop it"
    divisor = _setting(args, "loss_aggregation_divisor")
    if divisor is not None and row.name != "constant":
        yield f"loss_aggregation_divisor {divisor} is of constant alone: drop it, or take {trainer.path('constant')}"
    wanted = _setting(args, "loss_aggregation")
    if wanted not in (None, row.name):
        yield f"loss_aggregation {wanted} in the settings is another aggregation: drop it, or take {trainer.path(wanted)}"
    batch, group = _setting(args, "global_batch_size"), _setting(args, "n_samples_per_prompt")
    if row.name == "prompt_mean" and batch and group and batch % group:
        yield (
            f"--global-batch-size {batch} is no multiple of --n-samples-per-prompt {group}: a prompt group would lie in two "
            "optimizer steps"
        )
    yield from _without_window(args)
    yield from trainer.refusals(args, row)
