"""The teacher of the quickstart's `--teacher`: the model of a finished run, by whose whole distribution another one learns."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from run_log import checkpoints, read_checkpoint, read_settings
from torch import Tensor

import megatron_pg as pg
from megatron_pg.megatron import compute_hidden_states

OWN = ("num_layers", "hidden_size", "num_attention_heads")
SHARED = ("tensor_model_parallel_size", "max_response_len")
"""Flags that a teacher has for itself, and those that it shares with the student."""


def check_teacher_args(args: Namespace) -> None:
    """Raises a ValueError that names the flags, where there is no such teacher, or none for it to teach."""
    if args.distill_teacher != (args.teacher and "hidden"):
        raise ValueError(
            f"--teacher {args.teacher} and --distill-teacher {args.distill_teacher}: a run's model teaches by its hidden "
            "states; give --distill-teacher hidden and --teacher, or neither"
        )
    if args.teacher and not (args.teacher / "summary.json").exists():
        raise ValueError(f"--teacher {args.teacher} is not the folder of a finished run")
    if args.teacher and args.teacher.resolve() == args.run_dir.resolve():
        raise ValueError(
            f"--teacher and --run-dir are both {args.teacher}, which a new run moves aside: give another --run-dir"
        )
    for name in SHARED if args.teacher else ():
        if (theirs := read_settings(args.teacher).get(name)) != str(mine := getattr(args, name)):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"--teacher {args.teacher} has {flag} {theirs}, found {mine}")


class Teacher:
    """The model of a finished run, forward only; every rank makes one."""

    def __init__(self, args: Namespace, build_model: Callable[[Namespace], Any]) -> None:
        settings = read_settings(args.teacher)
        sizes = {name: int(settings[name]) for name in OWN}
        self.model = build_model(Namespace(**sizes))
        self.budget = args.max_tokens_per_microbatch
        rank = dist.get_rank() % args.tensor_model_parallel_size  # all others hold copies
        state = read_checkpoint(checkpoints(args.teacher)[-1], rank)
        self.model.load_state_dict(state["model"])
        self.weight: Tensor = self.model.module.output_layer.weight
        """The output weight [v/tp, hidden]."""

    def taught(self, samples: Sequence[pg.Sample]) -> list[pg.Sample]:
        """The samples with what the teacher says of their response tokens."""
        states = compute_hidden_states(self.model, samples, max_tokens_per_microbatch=self.budget)
        found = zip(samples, states, strict=True)
        return [replace(sample, side_channels={"teacher_hidden": each}) for sample, each in found]
