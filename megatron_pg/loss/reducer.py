"""Reducers: weighted sums of a per-token loss, from loss masks and a context-parallel token
window.
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
"""Function of x [window], the per-token loss in this rank's window -> this rank's 0-d inner sum."""
Reduction = Callable[..., Tensor]
"""Function of (x, weights, loss mask after corrections or None), [window] each -> this rank's 0-d
inner sum."""


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
    `megatron_pg.loss.aggregation`, without communication or host synchronization. Summed over ranks
    and micro-batches and divided by the step's normalizer it is the objective. Values and gradients
    at masked positions, even NaN and infinity, do not reach it.

    Args:
        total_lengths: prompt and response tokens per sample in the micro-batch, over its
            context-parallel group.
        response_lengths: response tokens per sample.
        loss_masks: one `[response_length]` tensor of 0 and 1 per sample, any dtype, all on one
            device.
        calculate_per_token_loss: return the masked token sum instead, for any aggregation.
        aggregation: `sample_mean`, `prompt_mean`, `token_mean` or `constant`.
        divisor: L of `constant`. An error with any other aggregation.
        denominators: `[samples]` active tokens in each sample's rollout (`sample_mean`) or prompt
            group (`prompt_mean`) over the whole step. None: the sample's own, an error for
            `prompt_mean`.
        cp_rank: rank in the context-parallel group. None: 0.
        cp_size: size of the context-parallel group. None: 1, never a global.
        qkv_format: `thd`, or `bshd` without context parallelism.

    Raises:
        ValueError: lengths and masks do not match, the aggregation is unknown, or a divisor or
            denominators are missing or superfluous. The reducer raises one if its argument is not
            as long as the window.
        NotImplementedError: `bshd` with `cp_size` above 1.
    """
    cp_size = 1 if cp_size is None else cp_size
    if cp_rank is None and cp_size > 1:
        raise ValueError(
            f"cp_size is {cp_size}, but cp_rank is missing. Pass it, or every rank takes rank 0's "
            "window."
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
            f"denominators is None, but --loss-aggregation {aggregation} requires one per sample, "
            f"counted over the whole step: the divisor of its tokens in {mode.formula}"
        )
    divisors = mode.divisors(denominators, divisor)
    if isinstance(divisors, Tensor):
        divisors = divisors[to_device(window.window_segment_ids, mask.device)]
    weights = mask[to_device(window.response_indices, mask.device)] / divisors

    def reducer(x: Tensor) -> Tensor:
        if x.shape != weights.shape:
            raise ValueError(
                f"the reducer got per-token losses of shape {list(x.shape)}, expected "
                f"[{len(weights)}]. Pass the losses of this rank's token window, in its order."
            )
        return weighted_sum(x, to_device(weights, x.device))

    return reducer


def weighted_sum(x: Tensor, weights: Tensor, loss_mask: Tensor | None = None) -> Tensor:
    """Sum weights * x over positions with non-zero weight, [window] each -> 0-d, in float32 or, for
    float64, float64.

    The mask is not read: weights are 0 at masked positions, and losses 0 at dropped tokens.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    weights = weights.to(dtype)
    # masked_fill instead of a product, because 0 * NaN is NaN.
    return (x.to(dtype).masked_fill(weights == 0, 0.0) * weights).sum()


@dataclass(frozen=True)
class OwnReducer:
    """Reducer of `--custom-pg-loss-reducer-function-path`."""

    path: str
    per_token: bool
    follows_rejections: bool  # it sums over the tokens that corrections keep

    @classmethod
    def of(cls, config: PolicyLossConfig) -> Self | None:
        """Return the config's reducer, or None without one."""
        path = config.custom_pg_loss_reducer_function_path
        if path is None:
            return None
        # Under score centering a dropped token keeps its centering term.
        follows = drops_tokens(config) and not config.score_centering
        return cls(path, config.calculate_per_token_loss, follows)

    def reduction(
        self, batch: PackedBatch, context_parallel_group: dist.ProcessGroup | None = None
    ) -> Reduction:
        """Return the reduction of one micro-batch.

        The function gets whole loss masks: the samples' masks or, if corrections may drop tokens,
        the masks after corrections, assembled by one all-reduce over the context-parallel group.
        Only settings and samples decide whether it is needed. An empty micro-batch returns 0
        without a call, because a loop over no samples would return an int.
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
                    f"{where} returned a {type(reducer).__name__}, expected a function of x "
                    "[window] that returns its 0-d sum"
                )
            return reducer

        @functools.cache
        def own_reducer() -> Reducer:
            return reducer_of(torch.cat([sample.loss_mask.float() for sample in batch.samples]))

        def inner_sum(x: Tensor, weights: Tensor, loss_mask: Tensor | None = None) -> Tensor:
            if loss_mask is None or not self.follows_rejections:
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
    """Sum over the context-parallel ranks, in place. Every rank of the group must call it, even
    with an empty window.
    """
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(sums, group=group)
    return sums


def _checked_denominators(
    denominators: Sequence[float] | Tensor, mode: Aggregation, num_samples: int
) -> Tensor:
    """Return the denominators [num_samples] float64, with values checked only on the host."""
    if mode.denominator is None:
        raise ValueError(
            f"the aggregation {mode.name} does not use denominators. Remove them, or choose "
            "sample_mean or prompt_mean."
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
    """Concatenate the masks in float64, with values checked only on the host."""
    if len(loss_masks) != len(response_lengths):
        raise ValueError(
            f"loss_masks has {len(loss_masks)} samples and response_lengths "
            f"{len(response_lengths)}: pass one of each per sample"
        )
    masks = list(map(host_tensor, loss_masks))
    for sample, (mask, length) in enumerate(zip(masks, response_lengths, strict=True)):
        if mask.shape != (length,):
            raise ValueError(
                f"loss_masks[{sample}] has shape {list(mask.shape)}, expected [{length}], its "
                "response_length"
            )
        if mask.device.type == "cpu":
            check_mask(f"loss_masks[{sample}]", mask)
    return torch.cat(masks or [host_float64([])]).to(torch.float64)
