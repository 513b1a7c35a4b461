"""The hooks of slime and miles: their checks before the model is loaded, and the line that says what is on."""

from __future__ import annotations

import operator
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_pg.integrations.reducers import PREFIX, refuse_flag
from megatron_pg.integrations.settings import HOOKS, divisor_of_args
from megatron_pg.integrations.source_fingerprints import Sources, refuse_unknown_source
from megatron_pg.loss.aggregation import AGGREGATIONS, Aggregation, checked_aggregation
from megatron_pg.step.agreement import compute_and_gather

PROVEN = tomllib.loads(Path(__file__).with_name("proven_sources.toml").read_text())
Chosen = tuple[Aggregation, float | None]
"""The aggregation that is on, and L of `constant`."""


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

    @classmethod
    def proven(cls, name: str, hook: str, **others: Any) -> Trainer:
        """Make a trainer of `proven_sources.toml`."""
        return cls(name, hook, PROVEN[name]["commit"], PROVEN[name]["sources"], **others)

    def path(self, name: str) -> str:
        """Return the flag with the import path of one of its functions here."""
        return f"--{self.hook.replace('_', '-')} megatron_pg.integrations.{self.name}.{name}"

    def require(self, name: str, args: Any, group: dist.ProcessGroup | None = None) -> Chosen:
        """Return the aggregation and its divisor. Every rank of the data-parallel group calls it; None: one rank.

        Raises:
            ValueError: settings that exclude the aggregation, all of them by flag; an unknown version of the trainer;
                ranks with different divisors.
        """
        # The environment and the installed source may differ from node to node.
        found, divisors = compute_and_gather(
            partial(self._require, name, args), operator.itemgetter(1), group
        )
        if len(set(divisors)) > 1:
            raise ValueError(
                f"{self.path(name)}: the data-parallel ranks have the divisors {divisors}: give all nodes the same"
            )
        return found

    def _require(self, name: str, args: Any) -> Chosen:
        path = self.path(name)
        _refuse_absent(path, name)
        divisor = divisor_of_args(path, args) if name == "constant" else None
        if violations := [*self._violations(AGGREGATIONS[name], args)]:
            raise ValueError(f"{path}: {'; '.join(violations)}")
        if divisor is not None and divisor < 1:
            raise ValueError(
                f"{path}: the divisor is {divisor:g}, and {self.name} divides by 1 at least: give the tokens of a response, "
                "such as --rollout-max-response-len"
            )
        proven_here = getattr(args, "megatron_pg_proven_source", None)
        refuse_unknown_source(self.name, self.sources, self.proven_with, proven_here)
        return checked_aggregation(name, divisor), divisor

    def check(self, args: Any) -> None:
        """Refuse inexact settings before the model is loaded, and say what is on (`--custom-megatron-init-path`).

        The trainer calls it in every training process. There is no communication. Rank 0 prints one line.

        Raises:
            ValueError: settings that exclude each other, no or two divisors, an unknown version of the trainer, or
                nothing is on.
        """
        named = str(getattr(args, self.hook, None) or "")
        reducer = str(getattr(args, "custom_pg_loss_reducer_function_path", None) or "")
        package = f"megatron_pg.integrations.{self.name}."
        if named.startswith(package):
            row, divisor = self.require(named.removeprefix(package), args)
            what = "policy loss, KL, entropy and their metrics"
        elif reducer.startswith("megatron_pg.integrations."):
            row, divisor = _require_reducer(reducer.rpartition(".")[2], args)
            what = "the policy loss alone; KL, entropy and metrics keep the trainer's own mean"
        else:
            raise ValueError(
                f"--custom-megatron-init-path {package}check: nothing of megatron_pg is on that it could check; add "
                f"{self.path('prompt_mean')}, or token_mean or constant in its place"
            )
        if int(getattr(args, "rank", None) or 0) == 0:
            length = "" if divisor is None else f", L = {divisor:g}"
            text = (
                f"megatron_pg: {row.name} is on in {self.name}: {row.formula}{length}, for {what}"
            )
            print(text, flush=True)

    def _violations(self, row: Aggregation, args: Any) -> Iterator[str]:
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
        if divisor is not None and row.name != "constant":
            yield f"loss_aggregation_divisor {divisor} is of constant alone: drop it, or take {self.path('constant')}"
        if wanted not in (None, row.name):
            yield f"loss_aggregation {wanted} in the settings is another aggregation: drop it, or take {self.path(wanted)}"
        batch, group = setting("global_batch_size"), setting("n_samples_per_prompt")
        if row.name == "prompt_mean" and batch and group and batch % group:
            yield (
                f"--global-batch-size {batch} is no multiple of --n-samples-per-prompt {group}: a prompt group would lie in "
                "two optimizer steps"
            )
        yield from _without_window(args)
        yield from self.refusals(args, row)


def _require_reducer(name: str, args: Any) -> Chosen:
    """Require a reducer of `megatron_pg.integrations`."""
    path = f"{PREFIX}{name}"
    _refuse_absent(path, name)
    refuse_flag(name, bool(_setting(args, "calculate_per_token_loss")))
    if violations := [*_without_window(args)]:
        raise ValueError(f"{path}: {'; '.join(violations)}")
    divisor = divisor_of_args(path, args) if name == "constant" else None
    return checked_aggregation(name, divisor), divisor


def _refuse_absent(path: str, name: str) -> None:
    if name not in HOOKS:
        raise ValueError(f"{path}: no such function; there are {', '.join(HOOKS)}")


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
