"""Time cost of a sample: `a l + b l^2` for its length l, from the model's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_pg.config.planning import Balance


@dataclass(frozen=True)
class SampleCost:
    """Operations in a forward pass over one sequence of l tokens, `per_token * l + per_square *
    l**2`.

    Backward, recomputation and context parallelism multiply both terms equally, so that they do not
    change which of two micro-batches takes longer.
    """

    per_token: float
    per_square: float = 0.0

    @classmethod
    def of_model(cls, config: Any, vocab_size: int) -> SampleCost:
        """Derive the cost from a transformer's shape: Megatron's `TransformerConfig` or its parsed
        arguments.

        A token takes 2 operations per weight that it uses, including its experts and the output
        layer (`vocab_size` 0 omits it). Attention over d = heads * head size channels takes 2 d
        operations per earlier token, for scores and again for values. A token has l / 2 earlier
        tokens on average.
        """

        def setting(name: str) -> Any:
            return getattr(config, name, None)

        hidden, heads = config.hidden_size, config.num_attention_heads
        head_size = setting("kv_channels") or hidden // heads
        # Without --group-query-attention the parsed arguments have 1 group, but the config has one
        # per head.
        is_grouped = setting("group_query_attention") is not False
        groups = (setting("num_query_groups") if is_grouped else None) or heads
        channels = heads * head_size
        attention = hidden * (2 * channels + 2 * groups * head_size)
        matrices = 3 if setting("gated_linear_unit") or setting("swiglu") else 2
        width = setting("ffn_hidden_size") or 4 * hidden
        if setting("num_moe_experts") or setting("num_experts"):
            width = (setting("moe_ffn_hidden_size") or width) * (setting("moe_router_topk") or 1)
            width += setting("moe_shared_expert_intermediate_size") or 0
        weights = config.num_layers * (attention + matrices * hidden * width) + hidden * vocab_size
        return cls(2.0 * weights, 2.0 * config.num_layers * channels)

    @classmethod
    def balancing(cls, balance: Balance, config: Any, vocab_size: int) -> SampleCost:
        """Derive the cost that `--balance` balances. For arguments see `of_model`."""
        return cls.of_model(config, vocab_size) if balance == "time" else TOKENS

    def of_lengths(self, lengths: ArrayLike) -> NDArray[np.float64]:
        """Compute the cost [sequences] of sequences with these lengths."""
        sizes = np.asarray(lengths, dtype=np.float64)
        return sizes * (self.per_token + self.per_square * sizes)


TOKENS = SampleCost(1.0)
"""The same cost for every token."""
