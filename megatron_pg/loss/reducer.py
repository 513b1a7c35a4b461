"""The reducer factory: loss masks and a context-parallel token window become a closure that sums a loss, weighted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_pg.loss.aggregation import checked_divisor, get_aggregation
from megatron_pg.step.batch import to_device
from megatron_pg.step.token_window import TokenWindow

Reducer = Callable[[Tensor], Tensor]
"""reducer(x): x ``[window]``, the per-token loss of this rank's window -> 0-d inner sum of this rank."""


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
    """Builds the reducer of one micro-batch on one rank.

    ``reducer(x)`` is ``sum over the window of weight * x`` with the weights of :mod:`megatron_pg.loss.aggregation`. It is
    local to the rank: no communication, no host synchronisation, and no more operators for many samples than for
    one. Summed over ranks and micro-batches and divided by the outer count of the step it is the objective. Neither
    a value nor a gradient of a masked position reaches it, NaN and infinity included.

    Args:
        total_lengths: prompt and response tokens of each sample of the micro-batch, over all of its context-parallel
            group.
        response_lengths: response tokens of each sample.
        loss_masks: one ``[response_length]`` tensor of 0 and 1 per sample, any dtype, all on one device.
        calculate_per_token_loss: the masked token sum instead, whatever the aggregation.
        aggregation: ``sample_mean``, ``prompt_mean``, ``token_mean`` or ``constant``.
        divisor: L of ``constant``; refused with any other aggregation.
        denominators: ``[samples]`` active tokens of each sample's rollout (``sample_mean``) or prompt group
            (``prompt_mean``) over the whole step. None means the sample's own, and is refused for ``prompt_mean``.
        cp_rank: rank in the context-parallel group; None means 0.
        cp_size: size of the context-parallel group; None means 1, never a global.
        qkv_format: ``thd``; ``bshd`` has no window under context parallelism.

    Raises:
        ValueError: lengths and masks that do not fit, an unknown aggregation, a divisor or denominators missing or
            not wanted. The reducer raises one when its argument is not as long as the window.
        NotImplementedError: ``bshd`` with ``cp_size`` above 1.
    """
    cp_size = 1 if cp_size is None else cp_size
    if cp_rank is None:
        if cp_size > 1:
            raise ValueError(
                f"cp_size is {cp_size} and cp_rank is not given: every rank would take the window of rank 0"
            )
        cp_rank = 0
    check_qkv_format(qkv_format, cp_size)
    check_divisor(aggregation, divisor)
    window = TokenWindow.build(total_lengths, response_lengths, cp_rank=cp_rank, cp_size=cp_size)
    loss_masks = _checked_masks(window.response_lengths, loss_masks)
    if calculate_per_token_loss:
        if denominators is not None:
            _checked_denominators(denominators, aggregation, window)
        aggregation, divisor, denominators = "token_mean", None, None
    weights = token_weights(
        window, loss_masks, aggregation=aggregation, divisor=divisor, denominators=denominators
    )
    return WeightedSum(weights)


class WeightedSum:
    """A reducer: ``x -> sum(weights * x)`` over the positions of non-zero weight, in float32 or, for float64, float64."""

    def __init__(self, weights: Tensor) -> None:
        """Args: weights: [window] float64 on any device; 0 at masked positions."""
        self._weights = weights
        self._moved: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    @property
    def weights(self) -> Tensor:
        """[window] float64: the weight of each token, before the outer count."""
        return self._weights

    def weights_like(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """([window] weights, [window] bool that is True where they are 0) on x's device, in x's precision."""
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        key = (x.device, dtype)
        if key not in self._moved:
            # Kept for calls to come: built under inference mode they could not take part in a backward pass.
            with torch.inference_mode(False):
                weights = to_device(self._weights.to(dtype), x.device)
                self._moved[key] = (weights, weights == 0)
        return self._moved[key]

    def __call__(self, x: Tensor) -> Tensor:
        """x [window] floating -> 0-d inner sum of this rank, attached to x's graph also where the window is empty."""
        if x.shape != self._weights.shape:
            raise ValueError(
                f"the reducer got {list(x.shape)} per-token losses, and this rank's token window has "
                f"{self._weights.numel()}: pass the losses of the window's response tokens, one dimension, in its order"
            )
        weights, is_masked = self.weights_like(x)
        # masked_fill and not a product: 0 * NaN is NaN.
        return (x.to(weights.dtype).masked_fill(is_masked, 0.0) * weights).sum()


def token_weights(
    window: TokenWindow,
    loss_masks: Sequence[Tensor],
    *,
    aggregation: str,
    divisor: float | None = None,
    denominators: Sequence[float] | Tensor | None = None,
) -> Tensor:
    """[window] float64 on the masks' device: ``mask / divisor of the token's sample``, for one aggregation."""
    mode = get_aggregation(aggregation)
    flat_mask = torch.cat(list(loss_masks)) if loss_masks else torch.zeros(0)
    device = flat_mask.device
    mask = flat_mask.to(torch.float64)
    if denominators is not None:
        denominators = to_device(_checked_denominators(denominators, aggregation, window), device)
    elif aggregation == "sample_mean":
        sample_ids = torch.repeat_interleave(
            torch.arange(window.num_samples),
            torch.tensor(window.response_lengths, dtype=torch.int64),
        )
        own = torch.zeros(window.num_samples, dtype=torch.float64, device=device)
        denominators = own.index_add_(0, to_device(sample_ids, device), mask)
    divisors = mode.divisors(denominators, divisor)
    window_mask = mask[to_device(window.response_indices, device)]
    if isinstance(divisors, Tensor):
        return window_mask / divisors[to_device(window.window_segment_ids, device)]
    return window_mask / divisors


def check_qkv_format(qkv_format: str, cp_size: int) -> None:
    """Refuses the layouts that have no token window."""
    if qkv_format not in ("thd", "bshd"):
        raise ValueError(f"--qkv-format is {qkv_format!r}: expected thd or bshd")
    if qkv_format == "bshd" and cp_size > 1:
        raise NotImplementedError(
            f"--qkv-format bshd with --context-parallel-size {cp_size}: BSHD chunks every sequence by the padded maximum "
            "length of the micro-batch, which the reducer is not told; use --qkv-format thd"
        )


def check_divisor(aggregation: str, divisor: float | None) -> None:
    """Refuses a divisor without ``constant`` and ``constant`` without one."""
    get_aggregation(aggregation)
    if aggregation == "constant":
        checked_divisor(divisor)
    elif divisor is not None:
        raise ValueError(
            f"--loss-aggregation-divisor {divisor} with --loss-aggregation {aggregation}: only constant divides by "
            "it; drop the divisor or choose constant"
        )


def _checked_denominators(
    denominators: Sequence[float] | Tensor, aggregation: str, window: TokenWindow
) -> Tensor:
    """[num_samples] float64. Values are read only where they lie on the host."""
    if aggregation in ("token_mean", "constant"):
        raise ValueError(
            f"denominators are given and the aggregation is {aggregation}, which divides by none: leave them out, or "
            "choose sample_mean or prompt_mean"
        )
    values = torch.as_tensor(denominators, dtype=torch.float64)
    if values.shape != (window.num_samples,):
        raise ValueError(
            f"denominators has shape {list(values.shape)}, expected one per sample ({window.num_samples})"
        )
    if values.device.type == "cpu":
        wrong = (~(values >= 0) | values.isinf()).nonzero()
        if wrong.numel():
            sample = int(wrong[0])
            raise ValueError(
                f"denominators[{sample}] is {float(values[sample])}, expected a count of active tokens"
            )
    return values


def _checked_masks(response_lengths: Sequence[int], loss_masks: Sequence[Tensor]) -> list[Tensor]:
    """One tensor per sample. Values are read only where they lie on the host."""
    if len(loss_masks) != len(response_lengths):
        raise ValueError(
            f"loss_masks has {len(loss_masks)} samples and response_lengths {len(response_lengths)}: give one of each "
            "per sample"
        )
    masks = [torch.as_tensor(mask) for mask in loss_masks]
    for sample, (mask, length) in enumerate(zip(masks, response_lengths, strict=True)):
        if mask.dim() != 1 or mask.numel() != length:
            raise ValueError(
                f"loss_masks[{sample}] has shape {list(mask.shape)}, expected [{length}], its response_length"
            )
    _check_mask_values(masks)
    return masks


def _check_mask_values(masks: Sequence[Tensor]) -> None:
    """All masks in one look. On a device it would make the host wait; there the samples were checked when built."""
    if not masks or masks[0].device.type != "cpu":
        return
    values = torch.cat(list(masks))
    wrong = ((values != 0) & (values != 1)).nonzero()
    if wrong.numel():
        position = int(wrong[0])
        for sample, mask in enumerate(masks):
            if position < mask.numel():
                raise ValueError(
                    f"loss_masks[{sample}][{position}] is {float(mask[position])}, expected 0 or 1"
                )
            position -= mask.numel()
