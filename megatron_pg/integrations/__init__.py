"""This package inside existing trainers, which load it by import path, entry point or class name.

    --custom-pg-loss-reducer-function-path megatron_pg.integrations.constant

The import needs no trainer.
"""

from megatron_pg.integrations.reducers import (
    DIVISOR_VARIABLE,
    constant,
    prompt_mean,
    sample_mean,
    token_mean,
)

__all__ = ["DIVISOR_VARIABLE", "constant", "prompt_mean", "sample_mean", "token_mean"]
