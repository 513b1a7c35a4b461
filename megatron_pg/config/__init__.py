"""The settings of the policy loss: a frozen dataclass, its flags, and their startup validation."""

from megatron_pg.config.flags import add_policy_loss_args
from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.config.validation import validate_policy_loss_args

__all__ = ["PolicyLossConfig", "add_policy_loss_args", "validate_policy_loss_args"]
