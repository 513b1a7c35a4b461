"""The validation of the flags and lines that `migrate` prints."""

import argparse
import functools
import importlib
import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

from megatron_pg.config import PolicyLossConfig, add_policy_loss_args
from megatron_pg.migrate.line import Line

WITH_HOOKS = ("slime", "miles")
"""Trainers with hooks in `megatron_pg.integrations` that check a launch at startup."""


def refused_flag(flags: Sequence[str]) -> int | None:
    """Return the index of the last flags named in the package's first refusal, or None.

    Flags that only training scripts have, such as --advantage, are ignored.
    """
    try:
        args, _ = _parser().parse_known_args(" ".join(flags).replace("<L>", "1").split())
        text = "".join(PolicyLossConfig.checked(vars(args))[0][:1])
    except argparse.ArgumentError as error:
        text = str(error)
    named = re.findall(r"--[\w-]+", text)
    indices = [index for index, words in enumerate(flags) if {*words.split()} & {*named}]
    return max(indices) if indices else None


@functools.cache
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    return add_policy_loss_args(parser)


def refusal_of_hook(line: Line, mode: str, settings: Mapping[str, str]) -> str:
    """Return why an aggregation's hook refuses a launch line of slime or miles, or "".

    `settings` are the lines of the `--custom-config-path` file. Flags that the printed lines
    replace are left out.
    """
    name = line.trainer.name
    if name not in WITH_HOOKS or mode == "sample_mean":
        return ""
    module = f"megatron_pg.integrations.{name}"
    hooks = getattr(importlib.import_module(module), name.upper())
    args = {**line.given, **{key: x for key, x in line.settings.items() if x is not None}}
    args = {key.strip("-").replace("-", "_"): _whole(value) for key, value in args.items()}
    args |= dict.fromkeys(("calculate_per_token_loss", "custom_pg_loss_reducer_function_path"))
    args |= dict.fromkeys(("loss_aggregation", "loss_aggregation_divisor"))
    args |= {key: value.replace("<L>", "1") for key, value in settings.items()}
    args |= {hooks.hook: f"{module}.{mode}", "custom_megatron_init_path": f"{module}.check"}
    try:
        hooks.require(mode, SimpleNamespace(**args))
    except ValueError as error:
        return str(error).removeprefix(f"{hooks.path(mode)}: ")
    return ""


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value
