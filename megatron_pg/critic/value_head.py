"""Value head that replaces a Megatron model's output layer: one number per token."""

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from megatron_pg.megatron.groups import unwrapped


class ValueHead(nn.Module):
    """Linear layer [s, b, h] -> [s, b, 1] with the call signature of `ColumnParallelLinear`.

    Every tensor-parallel rank holds the whole layer and computes the same numbers, as with the
    final norm, so no gradient needs a reduction. Under sequence parallelism a rank computes the
    values of its own tokens and gathers the rest. The parameters are then marked
    `sequence_parallel`, and `finalize_model_grads` sums their gradients over tensor parallelism
    (`distributed/finalize_model_grads.py` in 0.16.1 and 0.19.2).

    The parameters start at 0 on every rank, so that the first advantages depend only on rewards.
    Values are float32 for any model precision except float64, which gives float64. `config` and
    `tensor_parallel_group` are the model's. None takes the group from `parallel_state`.
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
        """Map hidden_states [s, b, h], or [s/tp, b, h] under sequence parallelism, to values [s, b,
        1] and None for the bias.
        """
        dtype = torch.float64 if hidden_states.dtype == torch.float64 else torch.float32
        values = nn.functional.linear(
            hidden_states.to(dtype), self.weight.to(dtype), self.bias.to(dtype)
        )
        if self.sequence_parallel:
            # Every rank computes the loss of all tokens, so backward keeps the gradient of its own
            # tokens without a sum.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.group
            )
        return values, None


def add_value_head(model: Any) -> Any:
    """Turn a model into a critic in place: replace its output layer by a `ValueHead`. Return the
    model.

    Every rank calls it, for each chunk of a virtual pipeline, before DDP wraps the model. A chunk
    without an output layer only stops sharing its embedding. `forward` then returns [b, s, 1]
    instead of logits.

    Args:
        model: a GPTModel or HybridModel on its device, not shared with the policy.

    Raises:
        ValueError: the model is already wrapped, has multi-token prediction, or has no output layer
            on its last stage.
    """
    if unwrapped(model) is not model:
        raise ValueError(
            f"the model is a {type(model).__name__}. Add the value head before you wrap the model, "
            "because the wrapper registers every parameter."
        )
    if getattr(model.config, "mtp_num_layers", None):
        raise ValueError("a critic does not predict tokens. Build it without --mtp-num-layers.")
    model.share_embeddings_and_output_weights = False
    if not model.post_process:
        return model
    if not hasattr(model, "output_layer"):
        raise ValueError(
            f"a {type(model).__name__} has no output_layer on its last stage for the value head to "
            "replace"
        )
    head = ValueHead(model.config, getattr(getattr(model, "pg_collection", None), "tp", None))
    model.output_layer = head.to(next(model.parameters()).device)
    return model
