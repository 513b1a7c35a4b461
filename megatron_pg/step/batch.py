"""One packed micro-batch on one context-parallel rank."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_pg.head.ragged import Ragged, offsets_of
from megatron_pg.head.ragged import to_device as to_device
from megatron_pg.step.routed_experts import routed_experts_of_tokens
from megatron_pg.step.sample import VALUE_FIELDS, Sample, check_samples
from megatron_pg.step.sampler_top_k import TopK
from megatron_pg.step.token_window import TokenWindow

_NO_INTEGER = torch.zeros(0, dtype=torch.int64, device="cpu")
RESPONSE_FIELDS = {
    "loss_mask": _NO_INTEGER.bool(),
    **dict.fromkeys((*VALUE_FIELDS, "loss_weights"), _NO_INTEGER.float()),
    **dict.fromkeys(("policy_version", "turn_ids"), _NO_INTEGER),
}
"""The fields of a sample with one value per response token, or one for all, and their empty
values."""


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Input of the model and the loss: one micro-batch on one rank, built by `pack`.

    The model takes `tokens[None]` and `position_ids[None]`, each `[1, local_tokens]`.
    """

    window: TokenWindow
    """The layout. Its index tensors stay on the host, and `cu_seqlens` moves with the batch."""
    samples: tuple[Sample, ...]
    """The samples, on the host."""
    tokens: Tensor
    """The token ids [local_tokens] int64, 0 for padding."""
    position_ids: Tensor
    """The positions [local_tokens] int64 within each sequence, 0 for padding."""
    targets: Tensor
    """The token that each row scores, [local_tokens] int64, or 0 if it scores none."""
    row_mask: Tensor
    """The rows that score an active token, [local_tokens] bool."""
    logit_rows: Tensor
    """The rows that score a response token, [window] int64."""
    window_segment_ids: Tensor
    """The sample of each response token, [window] int64."""
    loss_mask: Tensor
    """The active tokens, [window] bool. The `Sample` fields below are [window] float32, or None if
    samples lack them."""
    advantages: Tensor
    old_log_probs: Tensor | None
    ref_log_probs: Tensor | None
    rollout_log_probs: Tensor | None
    loss_weights: Tensor | None
    """The loss weights, 1 for samples without. None if no sample has any."""
    policy_version: Tensor | None
    """The version of the policy that generated each token, [window] int64."""
    turn_ids: Tensor | None
    """The turn of each token, [window] int64."""
    old_values: Tensor | None
    returns: Tensor | None
    num_tokens: int
    """Tokens on this rank without padding (a host number)."""
    num_active_tokens: int
    """Active tokens in this rank's window (a host number)."""
    largest_token: int
    """The largest token id in the micro-batch, including prompts (a host number)."""
    largest_target: int
    """The largest id in `targets`, sampling sets and a teacher's top-k tokens (a host number)."""
    kept_tokens: Ragged | None = None
    """The sampling set of each token, [window] rows on the host, empty for masked tokens and for
    the whole vocabulary."""
    sampler_top_k_ids: Tensor | None = None
    """The engine's most likely tokens, [window, k] int32, -1 beyond the end of a row."""
    sampler_top_k_log_probs: Tensor | None = None
    """The log-probs of `sampler_top_k_ids`, [window, k] float32."""
    kept_set_size: Tensor | None = None
    """Sizes of the sampling sets, [window] float32, 0 for an empty row."""
    routed_experts: Tensor | None = None
    """The experts that the engine chose, [local_tokens, layers, k] uint8 or int16, or
    `no_choice`."""
    side_channels: Mapping[str, Tensor | Ragged] = field(default_factory=dict)
    """The side channels by name: [window, ...] for response tokens, [local_tokens, ...] for all
    tokens."""

    @property
    def kept_tokens_of_rows(self) -> Ragged | None:
        """`kept_tokens` by local row, [local_tokens] rows on the host."""
        if self.kept_tokens is None:
            return None
        sizes = torch.zeros(self.window.local_tokens, dtype=torch.int64, device="cpu")
        sizes[self.window.logit_rows] = self.kept_tokens.sizes
        return Ragged(self.kept_tokens.values, offsets_of(sizes))

    @property
    def sampler_top_k(self) -> tuple[Tensor, Tensor] | None:
        """The engine's most likely tokens and their log-probs, [window, k] each."""
        if self.sampler_top_k_ids is None or self.sampler_top_k_log_probs is None:
            return None
        return self.sampler_top_k_ids, self.sampler_top_k_log_probs

    def to(self, device: torch.device | str) -> PackedBatch:
        """Move the tensors to `device` as `to_device` does."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        experts = tensors.pop("routed_experts", None)
        cu_seqlens, *moved = _moved([self.window.cu_seqlens, *tensors.values()], device)
        changes: dict[str, Any] = dict(zip(tensors, moved, strict=True))
        if experts is not None:  # megabytes, and usually pinned already
            changes["routed_experts"] = to_device(experts, device)
        changes["window"] = dataclasses.replace(self.window, cu_seqlens=cu_seqlens)
        changes["side_channels"] = {
            name: to_device(value, device) if isinstance(value, Tensor) else value.to(device)
            for name, value in self.side_channels.items()
        }
        return dataclasses.replace(self, **changes)


def _moved(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Move tensors. From the host to CUDA they take one copy through pinned memory, each at a
    multiple of 16 bytes.
    """
    is_upload = torch.device(device).type == "cuda"
    if not is_upload or any(tensor.device.type != "cpu" for tensor in tensors):
        return [to_device(tensor, device) for tensor in tensors]
    parts = []
    for content in map(_bytes_of, tensors):
        parts += [content, _PADDING[: -content.numel() % 16]]
    sizes = [part.numel() for part in parts]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=True)
    pieces = torch.cat(parts, out=buffer).to(device, non_blocking=True).split(sizes)  # type: ignore[no-untyped-call]
    pairs = zip(pieces[::2], tensors, strict=True)
    return [piece.view(tensor.dtype).view(tensor.shape) for piece, tensor in pairs]


def _bytes_of(tensor: Tensor) -> Tensor:
    # One element is contiguous at any stride, but a view in a different dtype needs stride 1.
    if not tensor.is_contiguous() or tensor.stride(-1) != 1:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.flatten().view(torch.uint8)


_PADDING = torch.zeros(15, dtype=torch.uint8, device="cpu")


def pack(
    samples: Sequence[Sample], *, cp_rank: int = 0, cp_size: int = 1, pad_to_multiple: int = 1
) -> PackedBatch:
    """Pack samples into one THD micro-batch on the host and take this context-parallel rank's part.

    Args:
        samples: the samples of the micro-batch, the same on every rank of the context-parallel,
            tensor-parallel and pipeline-parallel groups. An empty list gives one dummy segment that
            no objective counts.
        cp_rank: rank in the context-parallel group. See `TokenWindow.build`.
        cp_size: size of the context-parallel group.
        pad_to_multiple: `cp_size * tp_size` under sequence parallelism.

    Raises:
        ValueError: the argument is not a list of samples, only some samples have a field (the
            message names one of each), or sizes are not integers or out of range.
        RuntimeError: under `torch.inference_mode`.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "pack() under torch.inference_mode() makes tensors that a later backward cannot use. "
            "Use torch.no_grad() instead."
        )
    check_samples("pack", samples)
    window = TokenWindow.build(
        [sample.total_length for sample in samples],
        [sample.response_length for sample in samples],
        cp_rank=cp_rank,
        cp_size=cp_size,
        pad_to_multiple=pad_to_multiple,
    )
    tokens = torch.cat([_NO_INTEGER, *(s.tokens for s in samples)])
    response_fields: dict[str, Any] = {
        name: _field_in_window(name, _response_values(name, samples), samples, window, empty)
        for name, empty in RESPONSE_FIELDS.items()
    }
    channels = {}
    for name in dict.fromkeys(itertools.chain(*(sample.side_channels for sample in samples))):
        parts = [sample.side_channels.get(name) for sample in samples]
        channels[name] = _field_in_window(f"side_channels[{name!r}]", parts, samples, window)
    loss_mask = response_fields["loss_mask"]
    sets = [sample.kept_tokens for sample in samples]
    kept = _field_in_window("kept_tokens", sets, samples, window, _NO_ROW.slice(slice(0, 0)))
    if kept is not None:
        kept = kept.only(loss_mask)
    top_k = [sample.sampler_top_k for sample in samples]
    top_k_ids = _field_in_window(
        "sampler_top_k", [None if x is None else x.ids for x in top_k], samples, window
    )
    top_k_tensors: tuple[Tensor | None, Tensor | None] = None, None
    if top_k_ids is not None:
        log_probs = [None if x is None else x.log_probs for x in top_k]
        top_k_log_probs = _field_in_window("sampler_top_k", log_probs, samples, window)
        top_k_tensors = TopK(top_k_ids, top_k_log_probs).padded()
    experts: list[Any] = [sample.routed_experts for sample in samples]
    has_experts = _all_have("routed_experts", experts, samples)
    targets = _gather_or_zero(tokens, window.target_indices)
    ids = [targets] if kept is None else [targets, kept.values]
    if top_k_ids is not None:
        ids.append(top_k_ids.values)
    if "teacher_ids" in channels:
        ids.append(channels["teacher_ids"][loss_mask])
    row_mask = loss_mask.new_zeros(window.local_tokens)
    row_mask.index_copy_(0, window.logit_rows, loss_mask)
    return PackedBatch(
        window=window,
        samples=tuple(samples),
        tokens=_gather_or_zero(tokens, window.token_indices),
        # Padding must not index past the model's last learned position.
        position_ids=torch.where(window.token_indices >= 0, window.position_ids, 0),
        targets=targets,
        row_mask=row_mask,
        logit_rows=window.logit_rows,
        window_segment_ids=window.window_segment_ids,
        **response_fields,
        num_tokens=int((window.token_indices >= 0).sum()),
        num_active_tokens=int(loss_mask.sum()),
        largest_token=int(tokens.max()) if len(tokens) else 0,
        largest_target=max(int(each.max()) for each in ids if each.numel()),
        kept_tokens=kept,
        sampler_top_k_ids=top_k_tensors[0],
        sampler_top_k_log_probs=top_k_tensors[1],
        kept_set_size=None if kept is None else kept.sizes.float(),
        routed_experts=routed_experts_of_tokens(experts, window.token_indices)
        if has_experts
        else None,
        side_channels=channels,
    )


def _response_values(field: str, samples: Sequence[Sample]) -> list[Tensor | None]:
    """List each sample's values of a field in `RESPONSE_FIELDS`, one per response token."""
    values = [getattr(sample, field) for sample in samples]
    if field == "loss_weights" and any(value is not None for value in values):
        values = [1.0 if value is None else value for value in values]
    return [
        RESPONSE_FIELDS[field].new_full((s.response_length,), x)
        if isinstance(x, (int, float))
        else x
        for s, x in zip(samples, values, strict=True)
    ]


def _field_in_window(
    field: str,
    parts: Sequence[Tensor | Ragged | None],
    samples: Sequence[Sample],
    window: TokenWindow,
    empty: Tensor | Ragged | None = None,
) -> Any:
    """Take this rank's rows, [window, ...] or [local_tokens, ...], from a field of all samples.
    Return None if all lack it.

    `parts` has each sample's rows, for response tokens or for all tokens. `empty` is the result
    without samples. Padding gets zeros or an empty row.
    """
    if not _all_have(field, parts, samples):
        return None if samples else empty
    given: list[Any] = [*parts]
    lengths = tuple(map(len, given))
    if lengths == window.response_lengths:
        indices = window.response_indices
    elif lengths == window.total_lengths:
        indices = window.token_indices
    else:
        raise _unlike(field, given, samples)
    try:
        if all(isinstance(part, Ragged) for part in given):
            rows = Ragged.concatenate([*given, _NO_ROW])
            return rows.select(torch.where(indices < 0, len(rows) - 1, indices))
        dtypes = {part.dtype for part in given if isinstance(part, Tensor)}
        if len(dtypes) > 1:  # the common dtype would depend on the packing
            raise TypeError
        whole = torch.cat(given)
    except (RuntimeError, TypeError) as error:
        raise _unlike(field, given, samples) from error
    if indices is window.token_indices:
        return _gather_or_zero(whole, indices)
    # Indices ascend, so that a window with all of them has this order.
    return whole if len(window) == len(whole) else whole.index_select(0, indices)


def _unlike(field: str, parts: Sequence[Any], samples: Sequence[Sample]) -> ValueError:
    """Make the error for parts that differ in more than their numbers of rows, with two names."""
    kinds = []
    for part, sample in zip(parts, samples, strict=True):
        values = part.values if isinstance(part, Ragged) else part
        rows = "all tokens" if len(part) == sample.total_length else "response tokens"
        shape = ", ".join(map(str, (rows, *values.shape[1:])))
        kinds.append(f"a {type(part).__name__} [{shape}] of {values.dtype}")
    other = next((number for number, kind in enumerate(kinds) if kind != kinds[0]), 0)
    return ValueError(
        f"{field} is {kinds[0]} in {samples[0].name} and {kinds[other]} in {samples[other].name}: "
        "they must be equal in every sample"
    )


def _all_have(field: str, parts: Sequence[object], samples: Sequence[Sample]) -> bool:
    """Return whether all samples have a field. Raise a ValueError if only some have it."""
    lacks = [part is None for part in parts]
    if any(lacks) and not all(lacks):
        without, with_them = lacks.index(True), lacks.index(False)
        raise ValueError(
            f"{samples[without].name} (number {without} of the micro-batch) has no {field} and "
            f"{samples[with_them].name} (number {with_them}) has it. Set it for every sample or "
            "for none."
        )
    return bool(parts) and not any(lacks)


def _gather_or_zero(values: Tensor, indices: Tensor) -> Tensor:
    """Take the rows of values [n, ...] at the indices, with 0 for index -1."""
    # `index_select` takes a quarter of the time of an index in brackets, but no negative indices.
    padded = torch.cat([values.new_zeros(1, *values.shape[1:]), values])
    return padded.index_select(0, indices + 1)


_NO_ROW = Ragged(_NO_INTEGER, torch.zeros(2, dtype=torch.int64, device="cpu"))
