"""A value head in the place of a Megatron model's output layer: one number a token."""

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from megatron_pg.megatron.groups import unwrapped


class ValueHead(nn.Module):
    """A linear layer [s, b, h] -> [s, b, 1], called as Megatron's `ColumnParallelLinear` is.

    Every tensor-parallel rank holds all of it and computes the same numbers, as it does of the
    final norm, so no gradient needs a reduction. Under sequence parallelism a rank computes the
    values of its own tokens and gathers the others. The parameters are then marked
    `sequence_parallel`: `finalize_model_grads` sums their gradients over tensor parallelism
    (`distributed/finalize_model_grads.py` of 0.16.1 and 0.19.2).

    The parameters begin at 0 on every rank, so that the first advantages are those of the rewards
    alone. Values are float32 (float64 for a float64 model), whatever the model's precision.
    `config` and `tensor_parallel_group` are the model's; None takes the group of `parallel_state`.
    """

    def __init__(self, config: Any, tensor_parallel_group: Any = None) -> None:
        super().__init__()
        self.group, self.sequence_parallel = tensor_parallel_group, config.sequence_parallel
        like: dict[str, Any] = {"dtype": config.params_dtype, "device": "cpu"}
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, **like))
        self.bias = nn.Parameter(torch.zeros(1, **like))
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Map hidden_states [s, b, h], [s/tp, b, h] under sequence parallelism, to (values [s, b,
        1], no bias to add).
        """
        dtype = torch.float64 if hidden_states.dtype == torch.float64 else torch.float32
        values = nn.functional.linear(
            hidden_states.to(dtype), self.weight.to(dtype), self.bias.to(dtype)
        )
        if self.sequence_parallel:
            # Every rank computes the loss of all tokens: its backward keeps the gradient of its own
            # and sums nothing.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.group
            )
        return values, None


def add_value_head(model: Any) -> Any:
    """Make a critic of a model in place: put a `ValueHead` where its output layer is. Return the
    model.

    Every rank calls it, for each chunk of a virtual pipeline, before DDP wraps the model. A chunk
    without an output layer only stops sharing its embedding with one. `forward` then returns [b, s,
    1] in place of logits.

    Args:
        model: a GPTModel or HybridModel on its device, which the policy does not share.

    Raises:
        ValueError: the model is wrapped already, has multi-token prediction, or has no output layer
            on its last stage.
    """
    if unwrapped(model) is not model:
        raise ValueError(
            f"the model is a {type(model).__name__}: add the value head before it is wrapped: a "
            f"wrapper takes note of "
            "every parameter"
        )
    if getattr(model.config, "mtp_num_layers", None):
        raise ValueError(
            "--mtp-num-layers: a critic has no token to predict: build it without multi-token "
            "prediction"
        )
    model.share_embeddings_and_output_weights = False
    if not model.post_process:
        return model
    if not hasattr(model, "output_layer"):
        raise ValueError(
            f"a {type(model).__name__} has no output_layer on its last stage, which a value head "
            f"replaces"
        )
    head = ValueHead(model.config, getattr(getattr(model, "pg_collection", None), "tp", None))
    model.output_layer = head.to(next(model.parameters()).device)
    return model
