"""A value head in the place of a Megatron model's output layer: one number a token."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from megatron_pg.megatron.groups import unwrapped


class ValueHead(nn.Module):
    """A linear layer [s, b, h] -> [s, b, 1], called as Megatron's `ColumnParallelLinear` is.

    Every tensor-parallel rank holds all of it and computes the same, as it does of the final norm: no factor or reduction is
    needed. Under sequence parallelism each computes its own tokens and gathers the values; its parameters are then marked
    `sequence_parallel`, so that `finalize_model_grads` sums their gradients over tensor parallelism
    (`distributed/finalize_model_grads.py` of 0.16.1 and 0.19.2).

    It begins at 0, on every rank alike, so that the first advantages are those of the rewards alone. Values are computed in
    float32 (float64 stays), whatever the model's precision.

    Args:
        config: the model's.
        tensor_parallel_group: the model's; None takes `parallel_state`'s.
    """

    def __init__(self, config: Any, tensor_parallel_group: Any = None) -> None:
        super().__init__()
        self.group, self.sequence_parallel = tensor_parallel_group, config.sequence_parallel
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype))
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """hidden_states [s, b, h], [s/tp, b, h] under sequence parallelism -> (values [s, b, 1], no bias left to add)."""
        dtype = torch.float64 if hidden_states.dtype == torch.float64 else torch.float32
        factors = (each.to(dtype) for each in (hidden_states, self.weight, self.bias))
        values = nn.functional.linear(*factors)
        if self.sequence_parallel:
            # Every rank computes the loss of all tokens: backward takes its own part of them and adds nothing up.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.group
            )
        return values, None


def add_value_head(model: Any) -> Any:
    """Makes a critic of a model, in place: a `ValueHead` takes the place of its output layer. Returns the model.

    Called on every rank, for each chunk of a virtual pipeline, before the model is wrapped by DDP; pipeline stages without
    an output layer are changed in no more than that a tied one is forgotten. `forward` then returns [b, s, 1] where it
    returned logits.

    Args:
        model: a GPTModel or HybridModel of its own, none that the policy shares; on its device.

    Raises:
        ValueError: the model is wrapped already, has multi-token prediction, or no output layer where one is due.
    """
    if unwrapped(model) is not model:
        raise ValueError(
            f"the model is a {type(model).__name__}: add the value head before it is wrapped, which takes note of every parameter"
        )
    if getattr(model.config, "mtp_num_layers", None):
        raise ValueError(
            "--mtp-num-layers: multi-token prediction has no value of a token to predict: build the critic without it"
        )
    model.share_embeddings_and_output_weights = False
    if not model.post_process:
        return model
    if not hasattr(model, "output_layer"):
        raise ValueError(
            f"a {type(model).__name__} has no output_layer on its last stage, in whose place a value head goes"
        )
    head = ValueHead(model.config, getattr(getattr(model, "pg_collection", None), "tp", None))
    model.output_layer = head.to(next(model.parameters()).device)
    return model
