"""The settings of the policy loss: a frozen dataclass, its flags, and their startup validation."""

from megatron_pg.arguments.config import PolicyLossConfig
from megatron_pg.arguments.flags import add_policy_loss_args
from megatron_pg.arguments.validation import validate_policy_loss_args

__all__ = ["PolicyLossConfig", "add_policy_loss_args", "validate_policy_loss_args"]
