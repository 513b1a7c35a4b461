"""The teacher of the quickstart's `--teacher`: the model of a finished run, by whose whole distribution another one learns."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from run_log import checkpoints
from torch import Tensor

import megatron_pg as pg
from megatron_pg.megatron import compute_hidden_states

OWN = ("num_layers", "hidden_size", "num_attention_heads")
SHARED = ("tensor_model_parallel_size", "max_response_len", "seed")
"""Flags that a teacher has for itself, and those that it shares with the student, whose questions are of the same seed."""


def check_teacher_args(args: argparse.Namespace) -> None:
    """Raises a ValueError that names the flags, where there is no such teacher, or none for it to teach."""
    if (args.teacher is not None) != (args.distill_teacher == "hidden"):
        raise ValueError(
            f"--teacher {args.teacher} and --distill-teacher {args.distill_teacher}: a run's model teaches by its hidden states; "
            "give --teacher and --distill-teacher hidden, with --policy-loss distill or --distill-coef, or none of them"
        )
    if args.distill_teacher not in (None, "hidden"):
        raise ValueError(f"--distill-teacher {args.distill_teacher}: give hidden, and --teacher")
    if args.teacher is not None:
        if not (args.teacher / "summary.json").exists():
            raise ValueError(f"--teacher {args.teacher} is not the folder of a finished run")
        settings = _settings(args.teacher)
        for name in SHARED:
            if settings[name] != str(mine := getattr(args, name)):
                raise ValueError(
                    f"--teacher {args.teacher} was made with --{name.replace('_', '-')} {settings[name]}, found {mine}: "
                    "give the same"
                )


def _settings(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / "settings.json").read_text())
    return found


class Teacher:
    """A trained model, forward only; every rank makes one.

    Args:
        args: the flags of the student's run.
        build_model: makes a model of the sizes among the flags.
    """

    def __init__(
        self, args: argparse.Namespace, build_model: Callable[[argparse.Namespace], Any]
    ) -> None:
        sizes = {name: int(_settings(args.teacher)[name]) for name in OWN}
        self._model = build_model(argparse.Namespace(**vars(args) | sizes))
        # Of every run's ranks the first ones are the tensor-parallel ones.
        rank = dist.get_rank() % args.tensor_model_parallel_size
        state = torch.load(checkpoints(args.teacher)[-1] / f"rank_{rank}.pt", map_location="cpu")
        self._model.load_state_dict(state["model"])
        self._budget = args.max_tokens_per_microbatch

    @property
    def weight(self) -> Tensor:
        """The output weight [v/tp, hidden]."""
        weight: Tensor = self._model.module.output_layer.weight
        return weight

    def taught(self, samples: Sequence[pg.Sample]) -> list[pg.Sample]:
        """The samples with what the teacher says of their response tokens."""
        states = compute_hidden_states(self._model, samples, max_tokens_per_microbatch=self._budget)
        return [
            replace(sample, side_channels={"teacher_hidden": each})
            for sample, each in zip(samples, states, strict=True)
        ]
