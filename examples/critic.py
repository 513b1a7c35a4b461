"""The critic of the quickstart's `--advantage gae`: PPO as published (arXiv:1707.06347, arXiv:1506.02438)."""

import argparse
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

import megatron_pg as pg
from megatron_pg.critic import compute_values
from megatron_pg.megatron import ParallelGroups
from megatron_pg.step.advantages import METHODS

CRITIC_LR = 1e-3
"""The default of `--critic-lr`."""


def add_advantage_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds `--advantage` and the flags of a critic."""
    parser.add_argument(
        "--advantage",
        choices=[*METHODS, "gae"],
        default="grpo",
        help="of rewards against those of the same question, grpo: (reward - mean) / std, dr_grpo: reward - mean, rloo: reward - "
        "mean of the others; gae: against a critic's values (grpo)",
    )
    return pg.add_critic_args(parser)


def check_advantage_args(args: Namespace) -> None:
    """Raises a ValueError that names the flags, where they are out of range or would be ignored."""
    settings = pg.CriticConfig.from_args(args)
    names = [f.name for f in fields(settings) if getattr(settings, f.name) != f.default]
    names += ["critic_lr"] * (args.critic_lr != CRITIC_LR)
    if names and args.advantage != "gae":
        given = " and ".join(f"--{name.replace('_', '-')}" for name in names)
        found = f"found --advantage {args.advantage}: choose gae, or drop the flags"
        raise ValueError(f"{given}: about the critic of --advantage gae; {found}")


class Critic:
    """A model with a value head under DDP, and what updates it; every rank makes one."""

    def __init__(self, args: Namespace, model: Any, groups: ParallelGroups) -> None:
        self.args, self.model, self.groups = args, model, groups
        self.settings = pg.CriticConfig.from_args(args)
        self.optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.0), [model])

    def with_estimates(
        self, samples: Sequence[pg.Sample], rewards: Sequence[float]
    ) -> list[pg.Sample]:
        """The samples of a step with GAE's advantages and returns; the reward stands on the last token.

        An answer cut at the length limit has ended too: the verifier has marked it as it is.
        """
        settings, budget = self.settings, self.args.max_tokens_per_microbatch
        values = compute_values(self.model, samples, max_tokens_per_microbatch=budget).values
        token_rewards = [torch.zeros(sample.response_length) for sample in samples]
        for of_sample, reward in zip(token_rewards, rewards, strict=True):
            of_sample[-1] = reward
        masks = [sample.loss_mask for sample in samples]
        estimates = pg.gae(token_rewards, values, masks, settings.gamma, settings.lam)
        advantages = estimates.advantages
        if settings.whiten_advantages:
            advantages = pg.whiten(advantages, masks, data_parallel_group=self.groups.data)
        rows = zip(samples, advantages, values, estimates.returns, strict=True)
        return [replace(s, advantages=a, old_values=v, returns=r) for s, a, v, r in rows]
