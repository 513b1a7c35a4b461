"""A prompt and its response, checked on the host."""

import dataclasses
import functools
import itertools
import math
import numbers
import operator
import os
import reprlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megatron_pg.config.tables import LOG_PROB_FIELDS
from megatron_pg.head.ragged import Ragged
from megatron_pg.step.routed_experts import checked_routed_experts
from megatron_pg.step.sampler_top_k import TopK, checked_top_k
from megatron_pg.step.values import (
    check_log_probs,
    check_mask,
    checked_kept_tokens,
    checked_side_channels,
    has_integers,
    hash_of_tokens,
    host_tensor,
    refuse_values,
)

Values = Tensor | Sequence[float | None] | Sequence[int]
"""Per-token field as passed by a caller: a host tensor or a sequence of numbers, None if masked."""
CRITIC_FIELDS = ("old_values", "returns")
VALUE_FIELDS = ("advantages", *LOG_PROB_FIELDS, *CRITIC_FIELDS)
"""Fields with a float32 per response token that a trainer may fill later."""
_count = itertools.count()


@functools.cache
def _first_number(process_id: int) -> int:
    """Draw the first sample number of a process, different in every process and fork."""
    return secrets.randbits(62)


class NumberedName(str):
    """Name of an unnamed sample: a number, which `number_samples` replaces."""

    __slots__ = ()


@dataclass(frozen=True, eq=False)
class Sample:
    """One sequence of the step: `total_length = prompt_length + response_length` tokens.

    The constructor converts and checks every field on the host, so that the step needs no checks.
    It accepts per-token fields as tensors or sequences of numbers, and `advantages` also as one
    number for all response tokens. Fields are stored with the types below.

    Raises:
        ValueError: a field is invalid. The message names the sample (`name`), the field, the value
            found and the value expected.
    """

    tokens: Tensor
    """The token ids [total_length] int64: the prompt's tokens, then the response's."""
    response_length: int
    """Number of response tokens. 0 is legal and contributes nothing. It must be less than
    `total_length`, because the prompt has a token."""
    loss_mask: Tensor
    """The loss mask [response_length] bool, passed as 0 and 1: which response tokens the objective
    counts."""
    advantages: Tensor = torch.zeros((), dtype=torch.float32, device="cpu")
    """The advantages [response_length] float32."""
    old_log_probs: Tensor | None = None
    """Log-probs [response_length] float32, in nats, under the policy at the start of the step."""
    ref_log_probs: Tensor | None = None
    """Log-probs [response_length] float32, in nats, under the reference policy of the KL term."""
    rollout_log_probs: Tensor | None = None
    """Log-probs [response_length] float32, in nats, from the rollout engine."""
    group_index: int | None = None
    """The prompt group, any int64, shared by all samples with the same prompt in the step."""
    rollout_id: int | None = None
    """The rollout, any int64, shared by all its samples. None: this sample is a rollout."""
    name: str = ""
    """Name of this sample in messages. An empty name becomes the sample's number in this process,
    with the ids, and later its index in the list for `step_totals` or `plan_step`."""
    id_source: str | None = None
    """The source that numbered the ids, such as a file. None: the data-parallel rank that trains on
    the sample. If a rollout is on several ranks, its samples must have the same source."""
    loss_weights: Tensor | None = None
    """Factors on the tokens' losses in addition to the loss mask, [response_length] float32, 0 or
    more, stored as 0 for masked tokens. None: 1 for every token."""
    policy_version: int | Tensor | None = None
    """Number of updates of the policy that generated the response, or each token [response_length]
    int64 (a partial rollout continues after an update), for staleness and `--old-log-probs
    interpolated`. Masked tokens may have any version."""
    temperature: float | None = None
    """The sampling temperature of the response. If set, it must equal the step's
    `--rollout-temperature`."""
    old_values: Tensor | None = None
    """The critic's values [response_length] float32 behind the advantages, for the value loss."""
    returns: Tensor | None = None
    """The critic's targets [response_length] float32, for the value loss."""
    kept_tokens: Ragged | None = None
    """The sampling set of each response token (top-p, top-k), including the token, for
    `--replay-sampling-set`. An empty set means the whole vocabulary."""
    sampler_top_k: TopK | None = None
    """The engine's most likely tokens per response token, with their log-probs, for
    `--score-centering`, passed as a pair (ids, log_probs) of rows, which may differ in length."""
    routed_experts: Tensor | None = None
    """The experts that the engine chose, [layers, total_length, k] integers, for
    `--replay-routing`, stored as uint8 or int16. If a row is all -1 (255 in uint8), the model's
    router chooses, as for the last token, which an engine never runs."""
    turn_ids: Tensor | None = None
    """The turn of each response token, including masked ones, [response_length] int64, for
    `--sequence-unit turn`. Ids must not decrease, so that the tokens of a turn are contiguous."""
    side_channels: Mapping[str, Tensor | Ragged] = dataclasses.field(default_factory=dict)
    """Custom values, by name, that `pack` moves with the tokens: [response_length, ...] or
    [total_length, ...] of any dtype, or a `Ragged` with as many rows."""
    accepted_mask: Tensor | None = None
    """The active tokens that no rejection drops, [response_length] bool. `accepted_samples` sets it
    for `--rejection-denominator accepted`."""
    accepted_size: float | None = None
    """The contribution of the accepted tokens to D, G and T: their number or, with
    `--loss-weight-denominator weights`, the sum of their loss weights. `accepted_samples` sets
    it."""
    number: int | None = None
    """The sample's identity in the checksum. A new sample gets its own number, and
    `dataclasses.replace` keeps it."""
    trained_in: Any = dataclasses.field(default=None, repr=False, compare=False)
    """The totals of the step that trained on the sample. `--old-log-probs current` sets it."""

    if TYPE_CHECKING:
        # Callers may pass more types than are stored.
        def __init__(
            self,
            tokens: Values,
            response_length: int,
            loss_mask: Values,
            advantages: Values | float = 0.0,
            old_log_probs: Values | None = None,
            ref_log_probs: Values | None = None,
            rollout_log_probs: Values | None = None,
            group_index: int | None = None,
            rollout_id: int | None = None,
            name: str = "",
            id_source: str | None = None,
            loss_weights: Values | None = None,
            policy_version: int | Values | None = None,
            temperature: float | None = None,
            old_values: Values | None = None,
            returns: Values | None = None,
            kept_tokens: Ragged | Sequence[Sequence[int]] | None = None,
            sampler_top_k: TopK | tuple[Any, Any] | None = None,
            routed_experts: Tensor | Sequence[Sequence[Sequence[int]]] | None = None,
            turn_ids: Values | None = None,
            side_channels: Mapping[str, Tensor | Ragged] = MappingProxyType({}),
            accepted_mask: Values | None = None,
            accepted_size: float | None = None,
            number: int | None = None,
            trained_in: Any = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        stored, count = vars(self), next(_count)
        if self.number is None:
            stored["number"] = _first_number(os.getpid()) + count
        if not self.name:
            stored["name"] = self._numbered_name(count)
        for field in ("response_length", "group_index", "rollout_id", "policy_version", "number"):
            value = getattr(self, field)
            if field == "policy_version" and _is_vector(value):
                self._store(field, torch.int64, _accept)
            elif value is not None or field == "response_length":
                stored[field] = checked_integer(f"{self.name}: {field}", value)
        for field, column in COLUMNS.items():
            if field in ("tokens", "loss_mask") or getattr(self, field) is not None:
                self._store(field, *column)
        if self.temperature is not None:
            is_number = isinstance(self.temperature, numbers.Real)
            if not is_number or not 0 < self.temperature < math.inf:
                raise ValueError(
                    f"{self.name}: temperature is {self.temperature!r}, expected a finite number "
                    "above 0"
                )
        if self.loss_weights is not None:
            stored["loss_weights"] = self.loss_weights.masked_fill(~self.loss_mask, 0)
        if self.kept_tokens is not None:
            where, targets = f"{self.name}: kept_tokens", self.tokens[self.prompt_length :]
            stored["kept_tokens"] = checked_kept_tokens(
                where, self.kept_tokens, targets, self.loss_mask
            )
        if self.sampler_top_k is not None:
            stored["sampler_top_k"] = checked_top_k(
                f"{self.name}: sampler_top_k", self.sampler_top_k, self.loss_mask
            )
        if self.routed_experts is not None:
            where = f"{self.name}: routed_experts"
            stored["routed_experts"] = checked_routed_experts(
                where, self.routed_experts, self.total_length
            )
        stored["side_channels"] = checked_side_channels(
            self.name, self.side_channels, self.loss_mask, self.total_length
        )
        # Computed now because the tokens are in the processor's cache.
        for field in ("num_active_tokens", "prompt_hash"):
            getattr(self, field)

    @property
    def total_length(self) -> int:
        """Number of tokens in prompt and response."""
        return self.tokens.numel()

    @property
    def prompt_length(self) -> int:
        """Number of tokens in the prompt."""
        return self.total_length - self.response_length

    @functools.cached_property
    def num_active_tokens(self) -> int:
        """Number of response tokens that the loss mask keeps, cached for every micro-batch."""
        return int(np.count_nonzero(self.loss_mask.numpy()))

    @functools.cached_property
    def loss_weight(self) -> float | None:
        """The sum of the loss weights over the active tokens, or None without `loss_weights`."""
        return None if self.loss_weights is None else float(self.loss_weights.double().sum())

    @functools.cached_property
    def prompt_hash(self) -> int | None:
        """64-bit hash of the prompt's tokens, or None without `group_index` and `rollout_id`."""
        if self.group_index is None and self.rollout_id is None:
            return None
        return hash_of_tokens(self.tokens[: self.prompt_length])

    def _numbered_name(self, count: int) -> NumberedName:
        ids = {field: getattr(self, field) for field in ("group_index", "rollout_id")}
        given = ", ".join(f"{field} {value}" for field, value in ids.items() if value is not None)
        name = f"sample {count} of this process"
        return NumberedName(f"{name} ({given})" if given else name)

    def _store(self, field: str, dtype: torch.dtype, check: "Check") -> None:
        """Convert and check a per-token field."""
        given = self._given(field, dtype)
        values = given.to(dtype, copy=True)  # the caller may reuse its buffer
        vars(self)[field] = values
        check(f"{self.name}: {field}", self, given, values)

    def _given(self, field: str, dtype: torch.dtype) -> Tensor:
        """Convert a per-token field to a one-dimensional host tensor of real numbers, or raise an
        error that names the field.
        """
        where, length, value = f"{self.name}: {field}", self.response_length, getattr(self, field)
        is_number = isinstance(value, numbers.Real) or getattr(value, "ndim", None) == 0
        if field == "advantages" and is_number:
            try:
                return torch.full((length,), float(value), dtype=dtype, device="cpu")
            except (RuntimeError, OverflowError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{where} is {reprlib.repr(value)}, expected a number within float32's range"
                ) from error
        try:
            vector = host_tensor(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"{where} is not a sequence of numbers ({error})") from error
        if vector.dim() != 1:
            raise ValueError(f"{where} has shape {list(vector.shape)}, expected one dimension")
        if vector.device.type != "cpu":
            raise ValueError(
                f"{where} is on {vector.device}, expected a host tensor. Move the packed "
                "micro-batch with PackedBatch.to(device) instead."
            )
        if vector.is_complex():
            raise ValueError(f"{where} has dtype {vector.dtype}, expected real numbers")
        if field != "tokens" and length != vector.numel():
            raise ValueError(
                f"{where} has {vector.numel()} values, expected one per response token ({length})"
            )
        if dtype == torch.int64 and vector.numel() and not has_integers(vector):
            raise ValueError(f"{where} has dtype {vector.dtype}, expected integers")
        return vector.detach()


def _check_tokens(where: str, sample: Sample, given: Tensor, tokens: Tensor) -> None:
    lengths = sample.response_length, "total_length", sample.total_length
    check_lengths(f"{sample.name}: response_length", *lengths)
    # Prompts may contain negative placeholders, but response tokens index the vocabulary.
    is_wrong = tokens < 0
    is_wrong[: sample.prompt_length] = False
    problem = ", a response token, expected a vocabulary id of 0 or more"
    refuse_values(where, tokens, is_wrong, problem)


def _check_mask(where: str, sample: Sample, given: Tensor, mask: Tensor) -> None:
    given = given.double()
    check_mask(where, given)
    problem = ", but the loss mask is 0 there. Call accepted_samples again after mask changes."
    refuse_values(where, given, mask & ~sample.loss_mask, problem)


def _accept(where: str, sample: Sample, given: Tensor, values: Tensor) -> None:
    """Accept all values of the stored type."""


def _check_turns(where: str, sample: Sample, given: Tensor, turns: Tensor) -> None:
    is_wrong = torch.cat([turns[:1] != turns[:1], turns[1:] < turns[:-1]])
    problem = ", less than the id before it, expected turns in order"
    refuse_values(where, turns, is_wrong, problem)


def check_numbers(
    where: str, sample: Sample, given: Tensor, values: Tensor, least: float = -math.inf
) -> None:
    """Raise a ValueError for values that are not finite, or below `least`, at an active token."""
    is_wrong = sample.loss_mask & ~(torch.isfinite(values) & (values >= least))
    expected = "a finite number in float32" + ", 0 or more" * (least == 0)
    refuse_values(where, given, is_wrong, f" at an active token, expected {expected}")


def _check_log_probs(where: str, sample: Sample, given: Tensor, values: Tensor) -> None:
    check_log_probs(where, values, sample.loss_mask)


Check = Callable[[str, Sample, Tensor, Tensor], None]
"""Check of a field's name, its sample, the passed values, and the stored values."""
COLUMNS: dict[str, tuple[torch.dtype, Check]] = {
    "tokens": (torch.int64, _check_tokens),
    "loss_mask": (torch.bool, _check_mask),
    "accepted_mask": (torch.bool, _check_mask),
    "loss_weights": (torch.float32, functools.partial(check_numbers, least=0.0)),
    **dict.fromkeys(VALUE_FIELDS, (torch.float32, check_numbers)),
    **dict.fromkeys(LOG_PROB_FIELDS, (torch.float32, _check_log_probs)),
    "turn_ids": (torch.int64, _check_turns),
}
"""Fields with a number per token: stored type and check."""


def check_samples(function: str, samples: object) -> None:
    """Raise a ValueError if the function's argument is not a sequence of `Sample`."""
    expected = f"{function}: expected a list of Sample"
    if not isinstance(samples, Sequence):
        raise ValueError(f"{expected}, but found a {type(samples).__name__}")
    for number, sample in enumerate(samples):
        if not isinstance(sample, Sample):
            raise ValueError(
                f"{expected}, but number {number} is a {type(sample).__name__}. Build it with "
                "Sample(tokens=..., response_length=..., loss_mask=...)."
            )


def number_samples(samples: Sequence[object]) -> None:
    """Give a rank's samples distinct numbers, and name unnamed ones by their index.

    A sample keeps its number unless it is a copy of an earlier one in the list.
    """
    of_number: dict[int | None, Sample] = {}
    for place, sample in enumerate(samples):
        if not isinstance(sample, Sample):
            continue
        if isinstance(sample.name, NumberedName):
            vars(sample)["name"] = NumberedName(f"sample {place}")
        if of_number.setdefault(sample.number, sample) is not sample:
            vars(sample)["number"] = _first_number(os.getpid()) + next(_count)


def _refuse_change(sample: Sample, field: str, _: object) -> None:
    raise dataclasses.FrozenInstanceError(
        f"{sample.name}: {field} cannot be set, because samples are checked when constructed. Use "
        f"sample = dataclasses.replace(sample, {field}=...)."
    )


Sample.__setattr__ = _refuse_change  # type: ignore[assignment, method-assign]


def _is_vector(value: object) -> bool:
    """Return whether a value has one number per token."""
    return bool(getattr(value, "ndim", isinstance(value, Sequence) and not isinstance(value, str)))


def as_integer(value: object) -> int | None:
    """Convert a 64-bit Python, NumPy or 0-d tensor integer. Return None for anything else,
    including 3.0 and True.
    """
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        return None
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
    return number if -(2**63) <= number < 2**63 else None


def checked_integer(where: str, value: object) -> int:
    """Convert like `as_integer`, or raise a ValueError that begins with `where`."""
    number = as_integer(value)
    if number is None:
        raise ValueError(f"{where} is {reprlib.repr(value)}, expected an integer of 64 bits")
    return number


def check_lengths(response_name: str, response: int, total_name: str, total: int) -> None:
    """Raise a ValueError, with the given names, if a sample's lengths leave no prompt."""
    if response < 0:
        raise ValueError(f"{response_name} is {response}, expected 0 or more")
    if total <= response:
        raise ValueError(
            f"{response_name} is {response} and {total_name} {total}, expected at least 1 more. "
            "The prompt needs a token, such as a beginning-of-sequence token, to predict the first "
            "response token."
        )
