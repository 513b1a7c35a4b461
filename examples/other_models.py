"""The models beside the policy: the teacher of `--teacher`, and the critic of `--advantage gae`."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from run_log import checkpoints, read_checkpoint, read_settings

import megatron_pg as pg
from megatron_pg.config.values import flag_of
from megatron_pg.critic import compute_values
from megatron_pg.megatron import ParallelGroups, compute_hidden_states

OWN = ("num_layers", "hidden_size", "num_attention_heads")
SHARED = ("tensor_model_parallel_size", "max_response_len")
"""Flags that a teacher has for itself, and those that it shares with the student."""


def check_model_args(args: Namespace, parser: ArgumentParser) -> None:
    """Raises a ValueError that names the flags, where they contradict each other or would be
    ignored.
    """
    names = [*(field.name for field in fields(pg.CriticConfig)), "critic_lr"]
    names.remove("whiten_advantages")  # of any advantages
    pg.CriticConfig.from_args(args)
    changed = [name for name in names if getattr(args, name) != parser.get_default(name)]
    if changed and args.advantage != "gae":
        given = " and ".join(flag_of(name) for name in changed)
        found = f"found --advantage {args.advantage}: choose gae, or drop the flags"
        raise ValueError(f"{given}: about the critic of --advantage gae; {found}")
    if args.distill_teacher != (args.teacher and "hidden"):
        raise ValueError(
            f"--teacher {args.teacher} and --distill-teacher {args.distill_teacher}: a run's model "
            f"teaches by its hidden "
            "states; give --distill-teacher hidden and --teacher, or neither"
        )
    if not args.teacher:
        return
    if not (args.teacher / "summary.json").exists():
        raise ValueError(f"--teacher {args.teacher} is not the folder of a finished run")
    if args.teacher.resolve() == args.run_dir.resolve():
        raise ValueError(
            f"--teacher and --run-dir are both {args.teacher}, which a new run moves aside: give "
            f"another --run-dir"
        )
    settings = read_settings(args.teacher)
    for name in SHARED:
        if (theirs := settings.get(name)) != str(mine := getattr(args, name)):
            raise ValueError(f"--teacher {args.teacher} has {flag_of(name)} {theirs}, found {mine}")


class Teacher:
    """The model of a finished run, forward only; every rank makes one."""

    def __init__(self, args: Namespace, build_model: Callable[[Namespace], Any]) -> None:
        settings = read_settings(args.teacher)
        self.model = build_model(Namespace(**{name: int(settings[name]) for name in OWN}))
        self.budget = args.max_tokens_per_microbatch
        rank = dist.get_rank() % args.tensor_model_parallel_size  # all others hold copies
        state = read_checkpoint(checkpoints(args.teacher)[-1], rank)
        self.model.load_state_dict(state["model"])
        self.weight: torch.Tensor = self.model.module.output_layer.weight
        """The output weight [v/tp, hidden]."""

    def taught(self, samples: Sequence[pg.Sample]) -> list[pg.Sample]:
        """The samples with what the teacher says of their response tokens."""
        states = compute_hidden_states(self.model, samples, max_tokens_per_microbatch=self.budget)
        pairs = zip(samples, states, strict=True)
        return [replace(s, side_channels={"teacher_hidden": hidden}) for s, hidden in pairs]


class Critic:
    """A model with a value head, and what updates it (arXiv:1707.06347, arXiv:1506.02438); every
    rank makes one.
    """

    def __init__(self, args: Namespace, model: Any, groups: ParallelGroups) -> None:
        self.model, self.groups, self.budget = model, groups, args.max_tokens_per_microbatch
        self.settings = pg.CriticConfig.from_args(args)
        self.optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.0), [model])

    def with_estimates(
        self, samples: Sequence[pg.Sample], rewards: Sequence[float]
    ) -> list[pg.Sample]:
        """The samples of a step with GAE's advantages and returns; the reward stands on the last
        token.

        An answer cut at the length limit has ended too: the verifier has marked it as it is.
        """
        settings = self.settings
        scores = compute_values(self.model, samples, max_tokens_per_microbatch=self.budget)
        token_rewards = [torch.zeros(sample.response_length) for sample in samples]
        for rewards_of_tokens, reward in zip(token_rewards, rewards, strict=True):
            rewards_of_tokens[-1] = reward
        masks = [sample.loss_mask for sample in samples]
        lams = {"value_lam": settings.value_lam, "lam_alpha": settings.lam_alpha}
        numbers = settings.gamma, settings.lam
        estimates = pg.gae(token_rewards, scores.values, masks, *numbers, **lams)
        advantages = estimates.advantages
        if settings.whiten_advantages:
            advantages = pg.whiten(advantages, masks, data_parallel_group=self.groups.data)
        rows = zip(samples, advantages, scores.values, estimates.returns, strict=True)
        return [replace(s, advantages=a, old_values=v, returns=r) for s, a, v, r in rows]
