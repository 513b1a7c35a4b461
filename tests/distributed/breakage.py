"""What a way of breaking Megatron is: its patches, its flags, and what must fail."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

Patch = pytest.MonkeyPatch
Break = Callable[[Patch], None]

PER_TOKEN, PER_MICRO_BATCH = "per token", "per micro-batch"
IN_PER_TOKEN_MODE = {"fails": PER_TOKEN, "passes": PER_MICRO_BATCH}
IN_THE_OTHER_MODE = {"fails": PER_MICRO_BATCH, "passes": PER_TOKEN}

GROUPS: dict[str, tuple[int, str]] = {
    "DP2": (2, ""),
    "CP2": (2, "--context-parallel-size 2"),
    "TP2 SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "TP2": (2, "--tensor-model-parallel-size 2"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "PP2 VPP2": (2, "--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2"),
    "EP2": (2, "--num-experts 4 --expert-model-parallel-size 2"),
    "DP2 multi-token": (2, "--mtp-num-layers 1"),
    "CP2 experts": (2, "--num-experts 4 --context-parallel-size 2"),
    "DP2 distributed optimizer": (2, "--use-distributed-optimizer"),
    "DP2 overlap": (2, "--use-distributed-optimizer --overlap-grad-reduce"),
    "bf16": (1, "--dtype bf16"),
}
"""Processes and flags of `megatron-pg check`. All breakages of a group run in one process group."""


@dataclass(frozen=True)
class Breakage:
    """One row of the family. Labels are `model what aggregation per token`, or `... per
    micro-batch`.
    """

    name: str
    """The mistake in words."""
    group: str
    apply: Break
    """Patches Megatron in this process."""
    fails: str = "end to end"
    """A regular expression: some row whose label it matches must fail."""
    passes: str = "^$"
    """A regular expression: every row whose label it matches must pass."""
    is_around_the_model: bool = False
    """It is of schedules, DDP or the optimizer, which the reference has no part in.

    The reference runs under every other breakage too: a trainer that is wrong is so from the start.
    """

    def concerns(self, model: str, case: str, per_token: bool = False) -> bool:
        """Whether CI runs the rows of a case of a model: the plain ones, and what is to fail or to
        pass beside it; those of the per-token mode where the modes are told apart.
        """
        named = {*self.fails.split("|"), *self.passes.split("|")}
        is_mode = not per_token or not named.isdisjoint({PER_TOKEN, PER_MICRO_BATCH})
        return is_mode and {model, case} <= {"end to end", "loss only", "gradient", *named}


FAMILY: dict[str, Breakage] = {}


def breakage(group: str, name: str = "", **fields: Any) -> Callable[[Break], Break]:
    """Adds a function to the family, whose name is the mistake where no other is given."""

    def add(apply: Break) -> Break:
        mistake = name or apply.__name__.replace("_", " ")
        if mistake in FAMILY or group not in GROUPS:
            raise ValueError(f"{mistake!r} of {group!r}: named twice, or of no group")
        FAMILY[mistake] = Breakage(mistake, group, apply, **fields)
        return apply

    return add


def wrap(patch: Patch, owner: Any, name: str, wrong: Callable[..., Any]) -> None:
    """Has `wrong(right, *arguments)` run in the place of a function, or of a method of any kind."""
    right = getattr(owner, name)

    @functools.wraps(right)  # Megatron keeps attributes at functions
    def function(*args: Any, **keywords: Any) -> Any:
        return wrong(right, *args, **keywords)

    has_no_self = isinstance(inspect.getattr_static(owner, name), (staticmethod, classmethod))
    patch.setattr(owner, name, staticmethod(function) if has_no_self else function)


def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], Break]:
    """Makes `wrong(right, *arguments)` a way of breaking: it runs in the place of a function."""

    def breaking(wrong: Callable[..., Any]) -> Break:
        @functools.wraps(wrong)
        def apply(patch: Patch) -> None:
            wrap(patch, owner, name, wrong)

        return apply

    return breaking


def with_argument(owner: Any, name: str, argument: str, change: Callable[[Any], Any]) -> Break:
    signature = inspect.signature(getattr(owner, name))

    @around(owner, name)
    def wrong(right: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        bound = signature.bind(*args, **keywords)
        bound.apply_defaults()
        bound.arguments[argument] = change(bound.arguments[argument])
        return right(*bound.args, **bound.kwargs)

    return wrong
