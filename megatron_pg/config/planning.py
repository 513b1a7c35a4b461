"""The flags of planning: what a step holds, and how it is cut into micro-batches."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from typing import Any

OVERSIZED = ("error", "own_microbatch")
"""What may become of a sample that is longer than a micro-batch may be."""
MODES = ("at_least", "exact")
ON_BAD_ROW = ("error", "skip")
"""What may become of a slot whose data make no sample."""

_HELP = {
    "max_tokens_per_microbatch": "The most packed tokens of a micro-batch over the context-parallel group, padding "
    "included; a rank holds 1/CP of them. Needed.",
    "oversized_samples": "What becomes of a sample longer than --max-tokens-per-microbatch. error: stop and name it. "
    "own_microbatch: give it a micro-batch of its own.",
    "ragged_microbatches": "Let data-parallel ranks run different numbers of micro-batches, where those with fewer "
    "would run empty ones. Refused with expert parallelism, whose ranks run in step.",
    "docs_per_step": "Documents (rollouts) of a step, over all data-parallel ranks. Unset: the training script says "
    "what a step holds.",
    "docs_per_step_mode": "at_least: a step keeps what was pulled beyond --docs-per-step. exact: it is carried into "
    "the next step.",
    "keep_prompt_groups": "End steps between prompt groups; a step then may hold a part of a group more than "
    "--docs-per-step. Without it a group cut by the end of a step is an error with --loss-aggregation prompt_mean.",
    "rollout_files": "Parquet and JSON Lines files to train from, one row a sample, read in this order; of a "
    "directory, all in it by name.",
    "on_bad_row": "What becomes of a row of --rollout-files that is no sample. error: stop and say what was expected. "
    "skip: pass it; such rows are counted.",
}
_CHOICES = {"oversized_samples": OVERSIZED, "docs_per_step_mode": MODES, "on_bad_row": ON_BAD_ROW}


@dataclass(frozen=True)
class PlanningConfig:
    """What a step holds, and how it is cut into micro-batches. The texts of the flags say what each does.

    Raises:
        ValueError: a value is out of range or contradicts another; the flag is named.
    """

    max_tokens_per_microbatch: int
    oversized_samples: str = "error"
    ragged_microbatches: bool = False
    docs_per_step: int | None = None
    docs_per_step_mode: str = "at_least"
    keep_prompt_groups: bool = False
    rollout_files: tuple[str, ...] = ()
    on_bad_row: str = "error"

    def __post_init__(self) -> None:
        _check_count("max_tokens_per_microbatch", self.max_tokens_per_microbatch)
        for name, choices in _CHOICES.items():
            _check_choice(name, getattr(self, name), choices)
        if self.on_bad_row != "error" and not self.rollout_files:
            raise ValueError("--on-bad-row is about --rollout-files: give files, or drop it")
        if self.docs_per_step is not None:
            _check_count("docs_per_step", self.docs_per_step)
            return
        for name, default in (("docs_per_step_mode", "at_least"), ("keep_prompt_groups", False)):
            if getattr(self, name) != default:
                raise ValueError(
                    f"{_flag(name)} says where a step of --docs-per-step ends: give --docs-per-step, or drop it"
                )

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> PlanningConfig:
        """Reads the config off parsed arguments; a flag that the parser did not define keeps its default.

        Raises:
            ValueError: a value is out of range, or ``--max-tokens-per-microbatch`` is missing.
        """
        found = vars(args)
        values = {field.name: found[field.name] for field in fields(cls) if field.name in found}
        values.setdefault("max_tokens_per_microbatch", None)
        values["rollout_files"] = tuple(values.get("rollout_files") or ())
        return cls(**values)


def add_planning_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the flags of planning, in a group of their own.

    Usable as Megatron's ``extra_args_provider``. A flag that the parser has already is left as it is: its value lands
    in the same attribute.

    Raises:
        ValueError: the parser has a flag of the same name that stores to another attribute.
    """
    missing = [name for name in _HELP if not _is_defined(parser, name)]
    if not missing:
        return parser
    group = parser.add_argument_group("planning", "What a step holds, and its micro-batches.")
    for name in missing:
        group.add_argument(_flag(name), **_argparse_keywords(name), help=_HELP[name])
    return parser


def validate_planning_args(args: argparse.Namespace) -> PlanningConfig:
    """Checks the flags of planning against each other and against the trainer's own; changes nothing.

    Raises:
        ValueError: a value is out of range, or ``--ragged-microbatches`` with expert parallelism.
    """
    config = PlanningConfig.from_args(args)
    expert_parallel_size = vars(args).get("expert_model_parallel_size") or 1
    if config.ragged_microbatches and expert_parallel_size > 1:
        raise ValueError(
            f"--ragged-microbatches with --expert-model-parallel-size {expert_parallel_size}: experts exchange tokens "
            "over data-parallel ranks, which therefore run the same number of micro-batches; drop "
            "--ragged-microbatches"
        )
    return config


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_defined(parser: argparse.ArgumentParser, name: str) -> bool:
    action = parser._option_string_actions.get(_flag(name))
    if action is not None and action.dest != name:
        raise ValueError(
            f"{_flag(name)} is already a flag of this parser and stores to {action.dest!r}; expected {name!r}: give "
            f"that flag another name, or dest={name!r}"
        )
    return action is not None


def _argparse_keywords(name: str) -> dict[str, Any]:
    if name in _CHOICES:
        return {"choices": _CHOICES[name], "default": _CHOICES[name][0]}
    if name == "rollout_files":
        return {"nargs": "+", "metavar": "PATH", "default": None}
    if name in ("ragged_microbatches", "keep_prompt_groups"):
        return {"action": "store_true"}
    return {"type": int, "metavar": "N", "default": None}


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{_flag(name)} must be an integer >= 1; found {value!r}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{_flag(name)} must be one of {', '.join(choices)}; found {value!r}")
