"""`CriticConfig`: the critic's settings and flags."""

import argparse
from dataclasses import dataclass

from megatron_pg.config.settings import Settings, add_args, setting
from megatron_pg.config.values import ABOVE_0, Interval


@dataclass(frozen=True)
class CriticConfig(Settings):
    """Settings for a critic's training and the advantages from its values.

    Raises:
        ValueError: values are out of range. One error lists all violations and names flags.
    """

    # fmt: off
    value_clip: float = setting(0.2, Interval(0, metavar="C"), """
        Bound c in the value loss 1/2 max((v - R)^2, (v_clip - R)^2), v_clip = v_old + clamp(v -
        v_old, +-c). Above 0.""")
    gamma: float = setting(1.0, Interval(0, 1, closed=True), """
        Discount per token in generalized advantage estimation (arXiv:1506.02438). At most 1.""")
    lam: float = setting(1.0, Interval(0, 1, closed=True), """
        Lambda in generalized advantage estimation: 0 trusts the next token's value, 1 the rewards
        until the end.""")
    value_lam: float | None = setting(None, Interval(0, 1, closed=True), """
        Lambda for the critic's returns (decoupled GAE, VAPO, arXiv:2504.05118). Unset: lam.""")
    lam_alpha: float | None = setting(None, ABOVE_0, """
        Alpha in lambda = max(0, 1 - 1 / (alpha l)) for the advantages of l active tokens (VAPO:
        0.05). lam then applies only to the returns. Above 0.""")
    whiten_advantages: bool = setting(False, """
        Normalize the advantages to mean 0 and standard deviation 1 over the step's active
        tokens.""")


def add_critic_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the critic's flags in an argument group. Usable as Megatron's `extra_args_provider`.

    Raises:
        ValueError: the parser has a flag of the same name that stores to a different attribute.
    """
    add_args(parser, CriticConfig, "critic", "v: the critic's value of a token, R: its return.")
    return parser
