"""`CriticConfig`: the settings of a critic, each with its flag."""

import argparse
from dataclasses import dataclass

from megatron_pg.config.settings import Settings, add_args, setting
from megatron_pg.config.values import ABOVE_0, Interval


@dataclass(frozen=True)
class CriticConfig(Settings):
    """Settings of a critic's training and of the advantages made of its values.

    Raises:
        ValueError: values out of range, all of them in one error that names their flags.
    """

    # fmt: off
    value_clip: float = setting(0.2, Interval(0, metavar="C"), """
        c of the value loss 1/2 max((v - R)^2, (v_clip - R)^2), v_clip = v_old + clamp(v - v_old,
        +-c). Above 0.""")
    gamma: float = setting(1.0, Interval(0, 1, closed=True), """
        Discount of one token in generalised advantage estimation (arXiv:1506.02438), at most
        1.""")
    lam: float = setting(1.0, Interval(0, 1, closed=True), """
        lambda of generalised advantage estimation: 0 trusts the value of the next token, 1 the
        rewards until the end.""")
    value_lam: float | None = setting(None, Interval(0, 1, closed=True), """
        lambda of the critic's returns (decoupled GAE, VAPO, arXiv:2504.05118). Unset: lam.""")
    lam_alpha: float | None = setting(None, ABOVE_0, """
        alpha of a lambda of the advantages of max(0, 1 - 1 / (alpha l)) over l active tokens
        (VAPO: 0.05); lam is then of the returns. Above 0.""")
    whiten_advantages: bool = setting(False, """
        Bring the advantages to mean 0 and standard deviation 1 over the active tokens of the whole
        step.""")


def add_critic_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of a critic in a group of their own; usable as Megatron's
    `extra_args_provider`.

    Raises:
        ValueError: the parser has a flag of the same name that stores to another attribute.
    """
    add_args(parser, CriticConfig, "critic", "v: the critic's value of a token; R: its return.")
    return parser
