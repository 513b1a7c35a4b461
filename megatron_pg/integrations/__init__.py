"""Reducers for trainers that load one by import path, one path for each aggregation.

    --custom-pg-loss-reducer-function-path megatron_pg.integrations.constant

Trainers of the slime and miles family call the function once a micro-batch with `(total_lengths, response_lengths,
loss_masks, calculate_per_token_loss)` and scale what its reducer returns themselves;
`megatron_pg.integrations.call_site` derives what is exact there. Importing this needs nothing of theirs.
"""

from megatron_pg.integrations.call_site import (
    DIVISOR_VARIABLE,
    constant,
    prompt_mean,
    sample_mean,
    token_mean,
)

__all__ = ["DIVISOR_VARIABLE", "constant", "prompt_mean", "sample_mean", "token_mean"]
