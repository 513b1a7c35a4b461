"""The reducer factory: loss masks and a context-parallel token window become a closure that sums a
loss, weighted.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.config.custom import check_returned, load_custom_function, named_keywords
from megatron_pg.config.model import layout_violation
from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.loss.aggregation import AGGREGATIONS, Aggregation, checked_aggregation
from megatron_pg.loss.corrections import drops_tokens
from megatron_pg.step.batch import PackedBatch, to_device
from megatron_pg.step.token_window import TokenWindow
from megatron_pg.step.values import check_mask, host_float64, host_tensor, refuse_values

Reducer = Callable[[Tensor], Tensor]
"""A function reducer(x): x [window], the per-token loss of this rank's window -> 0-d inner sum of
this rank."""
Reduction = Callable[..., Tensor]
"""A function (x, weights, loss mask that corrections leave or None), [window] each -> 0-d inner sum
of this rank."""


def get_pg_loss_reducer(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    calculate_per_token_loss: bool = False,
    *,
    aggregation: str = "sample_mean",
    divisor: float | None = None,
    denominators: Sequence[float] | Tensor | None = None,
    cp_rank: int | None = None,
    cp_size: int | None = None,
    qkv_format: str = "thd",
) -> Reducer:
    """Build the reducer of one micro-batch on one rank.

    `reducer(x)` is `sum over the window of weight * x` with the weights of
    `megatron_pg.loss.aggregation`, without communication or host synchronisation. Summed over ranks
    and micro-batches and divided by the outer count of the step it is the objective. Neither a
    value nor a gradient of a masked position reaches it, NaN and infinity included.

    Args:
        total_lengths: prompt and response tokens of each sample of the micro-batch, over its
            context-parallel group.
        response_lengths: response tokens of each sample.
        loss_masks: one `[response_length]` tensor of 0 and 1 per sample, any dtype, all on one
            device.
        calculate_per_token_loss: the masked token sum instead, whatever the aggregation.
        aggregation: `sample_mean`, `prompt_mean`, `token_mean` or `constant`.
        divisor: L of `constant`; refused with any other aggregation.
        denominators: `[samples]` active tokens of each sample's rollout (`sample_mean`) or prompt
            group (`prompt_mean`) over the whole step. None means the sample's own, and is refused
            for `prompt_mean`.
        cp_rank: rank in the context-parallel group; None means 0.
        cp_size: None means 1, never a global.
        qkv_format: `thd`; `bshd` has no window under context parallelism.

    Raises:
        ValueError: lengths and masks that do not fit, an unknown aggregation, a divisor or
            denominators missing or not wanted. The reducer raises one when its argument is not as
            long as the window.
        NotImplementedError: `bshd` with `cp_size` above 1.
    """
    cp_size = 1 if cp_size is None else cp_size
    if cp_rank is None and cp_size > 1:
        raise ValueError(
            f"cp_size is {cp_size} and cp_rank is not given: every rank would take the window of "
            f"rank 0"
        )
    mode = checked_aggregation(aggregation, divisor, qkv_format)
    if violation := layout_violation(qkv_format, cp_size):
        raise NotImplementedError(violation)
    window = TokenWindow.build(
        total_lengths, response_lengths, cp_rank=cp_rank or 0, cp_size=cp_size
    )
    mask = _flat_mask(window.response_lengths, loss_masks)
    if denominators is not None:
        denominators = _checked_denominators(denominators, mode, window.num_samples)
        denominators = to_device(denominators, mask.device)
    if calculate_per_token_loss:
        mode, divisor, denominators = AGGREGATIONS["token_mean"], None, None
    elif denominators is None and mode.defaults_to_own_tokens:
        lengths = torch.tensor(window.response_lengths, dtype=torch.int64, device="cpu")
        sample_ids = torch.arange(window.num_samples, device="cpu").repeat_interleave(lengths)
        own = mask.new_zeros(window.num_samples)
        denominators = own.index_add_(0, to_device(sample_ids, mask.device), mask)
    elif denominators is None and mode.denominator:
        raise ValueError(
            f"denominators is None, and --loss-aggregation {aggregation} needs one per sample, "
            f"counted over the whole step: "
            f"the divisor of its tokens in {mode.formula}"
        )
    divisors = mode.divisors(denominators, divisor)
    if isinstance(divisors, Tensor):
        divisors = divisors[to_device(window.window_segment_ids, mask.device)]
    weights = mask[to_device(window.response_indices, mask.device)] / divisors

    def reducer(x: Tensor) -> Tensor:
        if x.shape != weights.shape:
            raise ValueError(
                f"the reducer got {list(x.shape)} per-token losses, and this rank's token window "
                f"has "
                f"{len(weights)}: pass the losses of the window's response tokens, one dimension, "
                f"in its order"
            )
        return weighted_sum(x, to_device(weights, x.device))

    return reducer


def weighted_sum(x: Tensor, weights: Tensor, loss_mask: Tensor | None = None) -> Tensor:
    """Sum weights * x over the positions of non-zero weight, [window] each -> 0-d, in float32 or,
    for float64, float64.

    The mask is not read: weights are 0 at masked positions, and losses 0 where a correction drops
    the token.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    weights = weights.to(dtype)
    # masked_fill and not a product: 0 * NaN is NaN.
    return (x.to(dtype).masked_fill(weights == 0, 0.0) * weights).sum()


@dataclass(frozen=True)
class OwnReducer:
    """The function of `--custom-pg-loss-reducer-function-path`."""

    path: str
    per_token: bool
    drops_tokens: bool  # corrections may drop tokens

    @classmethod
    def of(cls, config: PolicyLossConfig) -> Self | None:
        """Return None for a loss without one."""
        path = config.custom_pg_loss_reducer_function_path
        if path is None:
            return None
        return cls(path, config.calculate_per_token_loss, drops_tokens(config))

    def reduction(
        self, batch: PackedBatch, context_parallel_group: dist.ProcessGroup | None = None
    ) -> Reduction:
        """Return the reduction of one micro-batch.

        The function gets whole loss masks: those of the samples, or, where corrections may drop
        tokens, those that the corrections leave, put together by one all-reduce over the
        context-parallel group. The settings and the samples alone decide if there is one. An empty
        micro-batch has the sum 0 without a call, as a loop over no samples would make an int.
        """
        window, loss_weights = batch.window, batch.loss_weights
        where = f"--custom-pg-loss-reducer-function-path {self.path}"
        function = load_custom_function("custom_pg_loss_reducer_function_path", self.path)
        if not batch.samples:
            return lambda x, weights, loss_mask=None: x.sum()
        total_lengths, lengths = list(window.total_lengths), list(window.response_lengths)
        place = {"cp_rank": window.cp_rank, "cp_size": window.cp_size}
        named = {name: place[name] for name in named_keywords(function, tuple(place))}

        def reducer_of(masks: Tensor) -> Reducer:
            loss_masks = list(torch.split(to_device(masks, batch.loss_mask.device), lengths))
            reducer: Reducer = function(total_lengths, lengths, loss_masks, self.per_token, **named)
            if not callable(reducer):
                raise ValueError(
                    f"{where} returned a {type(reducer).__name__}, expected a function: x [window] "
                    f"-> its sum, 0-d"
                )
            return reducer

        @functools.cache
        def own_reducer() -> Reducer:
            return reducer_of(torch.cat([sample.loss_mask.float() for sample in batch.samples]))

        def inner_sum(x: Tensor, weights: Tensor, loss_mask: Tensor | None = None) -> Tensor:
            if loss_mask is None or not self.drops_tokens:
                reducer = own_reducer()
            else:
                masks = window.in_responses(loss_mask.float())
                reducer = reducer_of(add_over_group(masks, context_parallel_group))
            result: Tensor = reducer(x if loss_weights is None else x * loss_weights.to(x.dtype))
            meaning = "the weighted sum of x over this rank's window"
            check_returned(result, (), f"{where}: the reducer", meaning, differentiable_in=x)
            return result

        return inner_sum


def add_over_group(sums: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Add up the sums of every context-parallel rank, in place. Every rank of the group must call
    it, empty windows included.
    """
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(sums, group=group)
    return sums


def _checked_denominators(
    denominators: Sequence[float] | Tensor, mode: Aggregation, num_samples: int
) -> Tensor:
    """Return the denominators [num_samples] float64. Their values are read only where they lie on
    the host.
    """
    if mode.denominator is None:
        raise ValueError(
            f"denominators are given and the aggregation is {mode.name}, which divides by none: "
            f"leave them out, or "
            "choose sample_mean or prompt_mean"
        )
    values = host_tensor(denominators).to(torch.float64)
    if values.shape != (num_samples,):
        raise ValueError(
            f"denominators has shape {list(values.shape)}, expected one per sample ({num_samples})"
        )
    if values.device.type == "cpu":
        is_wrong = ~(values >= 0) | values.isinf()
        refuse_values("denominators", values, is_wrong, ", expected a count of active tokens")
    return values


def _flat_mask(response_lengths: Sequence[int], loss_masks: Sequence[Tensor]) -> Tensor:
    """Lay the masks end to end, float64. Their values are read only where they lie on the host."""
    if len(loss_masks) != len(response_lengths):
        raise ValueError(
            f"loss_masks has {len(loss_masks)} samples and response_lengths "
            f"{len(response_lengths)}: give one of each "
            "per sample"
        )
    masks = list(map(host_tensor, loss_masks))
    for sample, (mask, length) in enumerate(zip(masks, response_lengths, strict=True)):
        if mask.shape != (length,):
            raise ValueError(
                f"loss_masks[{sample}] has shape {list(mask.shape)}, expected [{length}], its "
                f"response_length"
            )
        if mask.device.type == "cpu":
            check_mask(f"loss_masks[{sample}]", mask)
    return torch.cat(masks or [host_float64([])]).to(torch.float64)
