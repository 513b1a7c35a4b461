"""The settings of the policy loss: a frozen dataclass, its flags, and their startup validation."""

from megatron_pg.arguments.config import PolicyLossConfig

__all__ = ["PolicyLossConfig"]
