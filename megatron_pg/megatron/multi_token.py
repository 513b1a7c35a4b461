"""Multi-token prediction with the policy loss, as a mean over the step's active tokens.

Megatron computes its loss inside the model, from labels made of the input: a mean over the tokens
of one micro-batch on one context-parallel rank, prompts and padding included (`process_mtp_loss` in
transformer/multi_token_prediction.py of 0.19.2). The average of these means depends on how the step
is split. Megatron multiplies the tokens by a loss mask, and divides by the mask's sum if it is
above 1. A mask of m / T, with T the step's active tokens, sums to at most 1 and so avoids the
division. The schedule divides by the M micro-batches and data parallelism by its DP * CP ranks.
`mtp_grad_scale_func` multiplies by both. The result is `scaling factor / layers * 1/T sum m x`,
with x the cross-entropy of a token two or more positions ahead.

Up to 0.19.2, Megatron has no factor CP here. Pull request 7498 of NVIDIA/Megatron-LM, open in
September 2026, adds one, so `context_parallel_factor` measures the installed Megatron.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import schedules
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.config.versions import derives_multi_token_labels
from megatron_pg.step.batch import PackedBatch, to_device
from megatron_pg.step.values import host_tensor


@dataclass
class MultiTokenScale:
    """The `mtp_grad_scale_func` of a model's config, which multiplies by the divisors of schedule
    and data parallelism.
    """

    config: Any
    factor: float  # DP * CP * M of the step that runs
    before: Any  # the function that the trainer had set, or None
    device: (
        torch.device
    )  # of model and loss scale: a factor on a different device would make the host wait

    def __call__(self) -> Tensor:
        if self.before is not None:
            return host_tensor(self.before()) * self.factor
        one = torch.ones(1, dtype=torch.float32, device=self.device)
        scale = self.config.grad_scale_func
        return host_tensor(one if scale is None else scale(one)) * self.factor


def scale_multi_token_loss(
    chunk: Any, factor: float, context_group: ProcessGroup | None = None
) -> bool:
    """Set the scale, DP * CP * M, of a step's multi-token prediction on a chunk's config. Return
    False if the model trains none.

    All ranks of the context-parallel group must call. None is a group of one.
    """
    model_config: Any = getattr(chunk, "config", None)
    if not getattr(model_config, "mtp_num_layers", None) or not derives_multi_token_labels():
        return False
    device = next(chunk.parameters()).device
    factor /= context_parallel_factor(model_config, context_group, device)
    before = model_config.mtp_grad_scale_func
    if isinstance(before, MultiTokenScale):
        before = before.before
    model_config.mtp_grad_scale_func = MultiTokenScale(model_config, factor, before, device)
    return True


def multi_token_mask(batch: PackedBatch, num_active_tokens: float) -> Tensor:
    """Make the `loss_mask=` [1, local_tokens] float32 of multi-token prediction: 1 / T at active
    tokens, else 0.
    """
    masks = []
    for sample in batch.samples:
        masks += [sample.loss_mask.new_zeros(sample.prompt_length), sample.loss_mask]
    padding = torch.zeros(1, dtype=torch.bool, device="cpu")
    weights = torch.cat([*masks, padding]).float() / max(num_active_tokens, 1)
    return to_device(weights[batch.window.token_indices], batch.tokens.device)[None]


_measured: dict[int, float] = {}
"""The results of `context_parallel_factor` by context-parallel size."""


def context_parallel_factor(
    model_config: Any, context_group: ProcessGroup | None, device: torch.device
) -> float:
    """Measure the factor by which Megatron multiplies multi-token prediction under context
    parallelism: 1 or CP.

    Megatron's functions run over four tokens per rank, once per context-parallel size in a process.
    All ranks of the group must call. Raises NotImplementedError if the factor is neither, or if
    these functions have different arguments.
    """
    if context_group is None or (size := context_group.size()) == 1:
        return 1.0
    try:
        if size not in _measured:
            _measured[size] = _measure(model_config, context_group, device)
        if _measured[size] not in (1.0, size):
            raise TypeError(f"it multiplies by {_measured[size]} instead of 1 or {size}")
    except (AttributeError, TypeError) as error:
        raise NotImplementedError(
            f"--mtp-num-layers with --context-parallel-size {size}: unknown scale of the "
            f"multi-token loss in this megatron-core ({error}). Use megatron-core 0.19, or leave "
            "out multi-token prediction or context parallelism"
        ) from error
    return _measured[size]


def _measure(model_config: Any, context_group: Any, device: torch.device) -> float:
    """Compute the gradient of a loss with equal weights, and return it over the weight, rounded to
    five digits.
    """
    from megatron.core.transformer import multi_token_prediction

    config, size, tokens = copy.copy(model_config), context_group.size(), 4
    config.mtp_num_layers, config.mtp_loss_scaling_factor, config.mtp_detach_heads = 1, 1.0, False
    config.grad_scale_func = config.mtp_grad_scale_func = config.num_moe_experts = None
    config.calculate_per_token_loss, config.timers = False, None
    bounds = torch.tensor([0, tokens * size], dtype=torch.int32, device=device)
    like: dict[str, Any] = {"dtype": torch.float32, "device": device}
    hidden_states = torch.zeros(2 * tokens, 1, 1, **like, requires_grad=True)
    # The weights of all ranks add up to less than 1: Megatron divides by a sum above 1.
    weight = 0.5 / (tokens * size)
    scaler: Any = multi_token_prediction.MTPLossAutoScaler
    before = scaler.main_loss_backward_scale
    try:
        schedules.forward_step_calc_loss(
            model=None,
            output_tensor=torch.zeros(1, **like),
            loss_func=None,
            config=config,
            vp_stage=None,
            collect_non_loss_data=False,
            num_microbatches=1,
            forward_data_store=[],
            cp_group_size=size,
            is_last_stage=True,
        )
        with torch.enable_grad():
            output = multi_token_prediction.process_mtp_loss(
                hidden_states=hidden_states,
                labels=None,
                loss_mask=torch.full((1, tokens), weight, **like),
                output_layer=lambda hidden, **_: (hidden, None),
                output_weight=None,
                runtime_gather_output=None,
                is_training=False,
                compute_language_model_loss=lambda _, logits: logits[..., 0].T,
                config=config,
                cp_group=context_group,
                packed_seq_params=PackedSeqParams(
                    qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds
                ),
                input_ids=torch.zeros(1, tokens, dtype=torch.int64, device=device),
            )
            (gradient,) = torch.autograd.grad(output.sum(), hidden_states)
    finally:
        scaler.set_loss_scale(before)
    return float(round(gradient[tokens:].max().item() / weight, 5))
