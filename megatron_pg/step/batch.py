"""One packed micro-batch on one context-parallel rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_pg.config.policy_loss import CpPartitionMode
from megatron_pg.head.ragged import Ragged, offsets_of
from megatron_pg.head.ragged import to_device as to_device
from megatron_pg.step.identity import VALUE_FIELDS, coefficients_of_positions
from megatron_pg.step.sample import Sample, check_samples
from megatron_pg.step.token_window import Layout, TokenWindow

RESPONSE_FIELDS = {
    "loss_mask": torch.bool,
    **dict.fromkeys((*VALUE_FIELDS, "loss_weights"), torch.float32),
    "policy_version": torch.int64,
}
"""The fields of a sample that have one value per response token, or one for all of them."""


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Input of the model and the loss: one micro-batch on one rank. Built by `pack`.

    The model is fed `tokens[None]` and `position_ids[None]`, each `[1, local_tokens]`.
    """

    window: TokenWindow
    """The layout; its index tensors stay on the host, `cu_seqlens` moves with the batch."""
    samples: tuple[Sample, ...]
    """The samples, on the host."""
    tokens: Tensor
    """The token ids [local_tokens] int64; padding is token 0."""
    position_ids: Tensor
    """The positions [local_tokens] int64 within each sequence; 0 for padding."""
    targets: Tensor
    """The token that each row scores, [local_tokens] int64; 0 where it scores none."""
    row_mask: Tensor
    """The rows that score an active token, [local_tokens] bool."""
    logit_rows: Tensor
    """The rows that score a response token, [window] int64."""
    window_segment_ids: Tensor
    """The sample of each response token, [window] int64."""
    loss_mask: Tensor
    """The active tokens, [window] bool."""
    advantages: Tensor
    """The advantages [window] float32."""
    old_log_probs: Tensor | None
    """Log-probs [window] float32 under the policy that the step starts from; None where the samples carry none."""
    ref_log_probs: Tensor | None
    """Log-probs [window] float32 under the reference policy, or None."""
    rollout_log_probs: Tensor | None
    """Log-probs [window] float32 that the rollout engine reported, or None."""
    loss_weights: Tensor | None
    """The loss weights [window] float32, 1 for samples that have none; None where no sample has any."""
    policy_version: Tensor | None
    """The version of the policy that generated each token, [window] int64, or None."""
    old_values: Tensor | None
    """The critic's values [window] float32 that the advantages were made of, or None."""
    returns: Tensor | None
    """The returns [window] float32 that the critic is trained to, or None."""
    num_active_tokens: int
    """Active tokens of this rank's window (a host number)."""
    largest_token: int
    """The largest token id of the micro-batch, prompts included; known on the host."""
    largest_target: int
    """The largest id among `targets`, kept sets and a teacher's likeliest tokens (a host number), to be held against the size of
    the vocabulary."""
    coefficients: Tensor
    """The numbers [window] float64 that tokens count by their position in the response, in the sums that tell samples apart."""

    kept_tokens: Ragged | None = None
    """The ids that each token was sampled from, [window] rows; empty where masked and where all were kept. Stays on the host.
    None where the samples carry none."""
    kept_set_size: Tensor | None = None
    """Sizes of the kept sets, [window] float32; 0 for an empty row."""
    kept_set_mass: Tensor | None = None
    """The probability [window] float32 that the policy in training gives the set, where it was asked for; 1 for an empty row."""
    divergence: Tensor | None = None
    """The divergence [window] from a teacher, with gradient, once the head has computed it; None without distillation."""
    side_channels: Mapping[str, Tensor | Ragged] = field(default_factory=dict)
    """The side channels of the samples by name: [window, ...] of those of response tokens, [local_tokens, ...] of those of all
    tokens."""

    @property
    def kept_tokens_of_rows(self) -> Ragged | None:
        """The sets of `kept_tokens` by local row, [local_tokens] rows on the host."""
        if self.kept_tokens is None:
            return None
        sizes = torch.zeros(self.window.local_tokens, dtype=torch.int64)
        sizes[self.window.logit_rows] = self.kept_tokens.sizes
        return Ragged(self.kept_tokens.values, offsets_of(sizes))

    def to(self, device: torch.device | str) -> PackedBatch:
        """Move the tensors to `device` as `to_device` does."""
        tensors = {
            field.name: value
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        cu_seqlens, *moved = _moved([self.window.cu_seqlens, *tensors.values()], device)
        window = dataclasses.replace(self.window, cu_seqlens=cu_seqlens)
        changes: dict[str, Any] = dict(zip(tensors, moved, strict=True))
        changes["side_channels"] = {
            name: to_device(value, device) if isinstance(value, Tensor) else value.to(device)
            for name, value in self.side_channels.items()
        }
        return dataclasses.replace(self, window=window, **changes)


def _moved(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Move tensors; from the host to CUDA in one copy through pinned memory, each tensor at a multiple of 16 bytes."""
    is_upload = torch.device(device).type == "cuda"
    if not is_upload or any(tensor.device.type != "cpu" for tensor in tensors):
        return [to_device(tensor, device) for tensor in tensors]
    parts = []
    for content in map(_bytes_of, tensors):
        parts += [content, _PADDING[: -content.numel() % 16]]
    sizes = [part.numel() for part in parts]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    pieces = torch.cat(parts, out=buffer).to(device, non_blocking=True).split(sizes)  # type: ignore[no-untyped-call]
    return [piece.view(tensor.dtype) for piece, tensor in zip(pieces[::2], tensors, strict=True)]


def _bytes_of(tensor: Tensor) -> Tensor:
    # One element counts as contiguous whatever its stride, and a view in another dtype asks for a stride of 1.
    if not tensor.is_contiguous() or tensor.stride(-1) != 1:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(torch.uint8)


_PADDING = torch.zeros(15, dtype=torch.uint8)


def pack(
    samples: Sequence[Sample],
    *,
    cp_rank: int = 0,
    cp_size: int = 1,
    pad_to_multiple: int = 1,
    cp_partition_mode: CpPartitionMode = "zigzag",
) -> PackedBatch:
    """Pack samples into one THD micro-batch and take the part of this context-parallel rank, on the host.

    Args:
        samples: the samples of the micro-batch, the same on every rank of the context-parallel, tensor-parallel and
            pipeline-parallel groups. Empty gives one dummy segment that no objective counts.
        cp_rank: rank in the context-parallel group.
        cp_size: its size.
        pad_to_multiple: see `TokenWindow.build`; `cp_size * tp_size` under sequence parallelism.
        cp_partition_mode: which tokens of the pack this rank takes; that of the model's attention.

    Raises:
        ValueError: an argument that is no list of samples; a field that some samples have and others lack, naming one of
            each; sizes that are no integers or out of range.
        RuntimeError: under `torch.inference_mode`.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "pack() under torch.inference_mode() makes tensors that no later backward may use: pack before it, or score "
            "under torch.no_grad()"
        )
    check_samples("pack", samples)
    window = TokenWindow.cut(
        [sample.total_length for sample in samples],
        [sample.response_length for sample in samples],
        Layout(cp_rank, cp_size, cp_partition_mode, pad_to_multiple),
    )
    tokens = torch.cat([torch.zeros(0, dtype=torch.int64), *(s.tokens for s in samples)])
    response_fields: dict[str, Any] = {
        field: _field_in_window(field, dtype, samples, window)
        for field, dtype in RESPONSE_FIELDS.items()
    }
    loss_mask = response_fields["loss_mask"]
    beside = _beside_the_numbers(samples, window, loss_mask)
    targets = _gather_or_zero(tokens, window.target_indices)
    row_mask = torch.zeros(window.local_tokens, dtype=torch.bool)
    row_mask.index_copy_(0, window.logit_rows, loss_mask)
    return PackedBatch(
        window=window,
        samples=tuple(samples),
        tokens=_gather_or_zero(tokens, window.token_indices),
        # Padding past a sequence's end must not index past the model's last learned position.
        position_ids=torch.where(window.token_indices >= 0, window.position_ids, 0),
        targets=targets,
        row_mask=row_mask,
        logit_rows=window.logit_rows,
        window_segment_ids=window.window_segment_ids,
        **response_fields,
        num_active_tokens=int(loss_mask.sum()),
        largest_token=int(tokens.max()) if len(tokens) else 0,
        largest_target=max([int(targets.max()), *beside.pop("largest_ids")]),
        coefficients=coefficients_of_window(window),
        **beside,
    )


def _beside_the_numbers(
    samples: Sequence[Sample], window: TokenWindow, loss_mask: Tensor
) -> dict[str, Any]:
    """Collect kept sets and side channels by the fields of `PackedBatch`.

    `largest_ids` lists the largest id of the kept sets and of the teacher's likeliest tokens, where there are any.
    """
    names = dict.fromkeys(name for sample in samples for name in sample.side_channels)
    channels = {}
    for name in names:
        parts: Any = [sample.side_channels.get(name) for sample in samples]
        if not _all_lack(where := f"side_channels[{name!r}]", parts, samples):
            channels[name] = _channel_in_window(where, parts, window)
    largest = []
    if isinstance(ids := channels.get("teacher_ids"), Tensor) and loss_mask.any():
        largest.append(int(ids[loss_mask].max()))
    sets: Any = [sample.kept_tokens for sample in samples]
    if _all_lack("kept_tokens", sets, samples):
        return {"side_channels": channels, "largest_ids": largest}
    kept: Any = _channel_in_window("kept_tokens", sets, window)
    kept = kept.only(loss_mask)
    return {
        "side_channels": channels,
        "kept_tokens": kept,
        "kept_set_size": kept.sizes.float(),
        "largest_ids": largest + ([int(kept.values.max())] if kept.values.numel() else []),
    }


def coefficients_of_window(window: TokenWindow) -> Tensor:
    """Compute `PackedBatch.coefficients`."""
    starts = torch.tensor([0, *window.response_lengths]).cumsum(0)
    positions = window.response_indices - starts.index_select(0, window.window_segment_ids)
    table = coefficients_of_positions(max(window.response_lengths, default=0))
    return table.index_select(0, positions)


def _field_in_window(
    field: str, dtype: torch.dtype, samples: Sequence[Sample], window: TokenWindow
) -> Tensor | None:
    """Take the values [window] of a field of `RESPONSE_FIELDS`; None where no sample has it."""
    responses = [getattr(sample, field) for sample in samples]
    if field == "loss_weights" and any(weights is not None for weights in responses):
        responses = [
            torch.ones(s.response_length) if s.loss_weights is None else s.loss_weights
            for s in samples
        ]
    if _all_lack(field, responses, samples):
        return None
    lengths = window.response_lengths
    responses = [
        torch.full((length,), value) if isinstance(value, int) else value
        for value, length in zip(responses, lengths, strict=True)
    ]
    whole = torch.cat([torch.zeros(0, dtype=dtype), *responses])
    # Indices ascend: a window that has all of them has them in this order.
    return whole if len(window) == len(whole) else whole.index_select(0, window.response_indices)


def _all_lack(field: str, values: Sequence[object], samples: Sequence[Sample]) -> bool:
    """Return True where there are samples and all lack a field; refuse a field that only some have."""
    lacks = [value is None for value in values]
    if any(lacks) and not all(lacks):
        without, with_them = lacks.index(True), lacks.index(False)
        raise ValueError(
            f"{samples[without].name} (number {without} of the micro-batch) has no {field} and "
            f"{samples[with_them].name} (number {with_them}) has: give them for every sample or for none"
        )
    return any(lacks)


def _gather_or_zero(values: Tensor, indices: Tensor) -> Tensor:
    """Take the values [n] at the indices, and 0 where the index is -1."""
    # `index_select` takes a quarter of the time of an index in brackets, and no negative ones.
    padded = torch.cat([values.new_zeros(1), values])
    return padded.index_select(0, indices + 1)


def _channel_in_window(
    where: str, parts: Sequence[Tensor | Ragged], window: TokenWindow
) -> Tensor | Ragged:
    """Take the rows of this rank from one side channel of all samples.

    Returns:
        [window, ...] of a channel of response tokens; [local_tokens, ...] of one of all tokens, zeros or an empty row for
        padding.

    Raises:
        ValueError: some samples have it for their responses and others for all tokens, or of other shapes or dtypes.
    """
    lengths = list(map(len, parts))
    if lengths == list(window.response_lengths):
        indices = window.response_indices
    elif lengths == list(window.total_lengths):
        indices = window.token_indices
    else:
        raise ValueError(f"{where} is of response tokens in some samples and of all in others")
    try:
        if all(isinstance(part, Ragged) for part in parts):
            rows = Ragged.concatenate([*parts, _NO_ROW])  # type: ignore[list-item]
            return rows.select(torch.where(indices < 0, len(rows) - 1, indices))
        dtypes = {part.dtype for part in parts if isinstance(part, Tensor)}
        if len(dtypes) > 1:  # what they become together would depend on the packing
            raise TypeError(f"dtypes {' and '.join(sorted(map(str, dtypes)))}")
        whole = torch.cat(parts)  # type: ignore[arg-type]
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"{where} differs from sample to sample in more than its rows: {error}"
        ) from error
    return torch.cat([whole, whole.new_zeros(1, *whole.shape[1:])])[indices]


_NO_ROW = Ragged(torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0]))
