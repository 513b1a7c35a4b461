"""One prompt and its response, checked while it is still on the host."""

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
"""A per-token field as a caller gives it: a host tensor or a sequence of numbers, None where
masked."""
CRITIC_FIELDS = ("old_values", "returns")
VALUE_FIELDS = ("advantages", *LOG_PROB_FIELDS, *CRITIC_FIELDS)
"""The fields that hold a float32 per response token and that a trainer may fill later."""
_count = itertools.count()


@functools.cache
def _first_number(process_id: int) -> int:
    """Draw where the numbers of a process's samples begin: other processes draw others, forks
    too.
    """
    return secrets.randbits(62)


class NumberedName(str):
    """The name of a sample that was given none: a number, which `number_samples` replaces."""

    __slots__ = ()


@dataclass(frozen=True, eq=False)
class Sample:
    """One sequence of the step: `total_length = prompt_length + response_length` tokens.

    The constructor converts and checks every field on the host, so that a step checks nothing. It
    takes per-token fields as tensors or as sequences of numbers, and `advantages` also as one
    number for all response tokens. Fields are stored with the types below.

    Raises:
        ValueError: naming the sample (`name`), the field, what was found and what was expected.
    """

    tokens: Tensor
    """The token ids [total_length] int64: the prompt's tokens, then the response's."""
    response_length: int
    """Response tokens; 0 is legal and contributes nothing, `total_length` is not (the prompt has a
    token)."""
    loss_mask: Tensor
    """The loss mask [response_length] bool, given as 0 and 1: which response tokens the objective
    counts."""
    advantages: Tensor = torch.zeros((), dtype=torch.float32, device="cpu")
    """The advantages [response_length] float32."""
    old_log_probs: Tensor | None = None
    """Log-probs [response_length] float32, in nats, under the policy that the step starts from."""
    ref_log_probs: Tensor | None = None
    """Log-probs [response_length] float32, in nats, under the reference policy of the KL term."""
    rollout_log_probs: Tensor | None = None
    """Log-probs [response_length] float32, in nats, that the rollout engine reported."""
    group_index: int | None = None
    """The prompt group, any int64: all samples of one prompt in the step share it."""
    rollout_id: int | None = None
    """Samples with the same id, any int64, are one rollout; None makes this sample a rollout of its
    own."""
    name: str = ""
    """Name of this sample in messages. An empty name becomes a number: among the samples of this
    process, with the ids, and later the place in the list that `step_totals` or `plan_step`
    gets."""
    id_source: str | None = None
    """The source that numbered the ids, such as a file; None is the data-parallel rank that trains
    on the sample. The samples of a rollout that lies on several ranks have the same name here."""
    loss_weights: Tensor | None = None
    """Factors of the tokens' losses, [response_length] float32, 0 or more, beside the loss mask;
    stored as 0 where the mask is
    0. None is 1 for every token."""
    policy_version: int | Tensor | None = None
    """Updates of the policy that generated the response, or each of its tokens [response_length]
    int64 (a partial rollout goes on after an update), for staleness and `--old-log-probs
    interpolated`. A masked token may have any."""
    temperature: float | None = None
    """The temperature that the response was sampled at. If given, it has to be that of the step,
    `--rollout-temperature`."""
    old_values: Tensor | None = None
    """The critic's values [response_length] float32 that the advantages were made of, for the value
    loss."""
    returns: Tensor | None = None
    """The returns [response_length] float32 that the critic is trained to, for the value loss."""
    kept_tokens: Ragged | None = None
    """The ids that each response token was sampled from (top-p, top-k), itself among them, for
    `--replay-sampling-set`; an empty set where all were kept."""
    sampler_top_k: TopK | None = None
    """The engine's likeliest tokens for each response token, with their log-probs, for
    `--score-centering`; given as a pair (ids, log_probs) of rows, which may differ in length."""
    routed_experts: Tensor | None = None
    """The experts that the engine chose, [layers, total_length, k] integers, for
    `--replay-routing`; stored as uint8 or int16. -1 in all of a row (255 in uint8): the model's
    router chooses, as for the last token, which an engine never runs."""
    turn_ids: Tensor | None = None
    """The turn of each response token, masked ones included, [response_length] int64, for
    `--sequence-unit turn`. The tokens of a turn lie side by side: ids never fall."""
    side_channels: Mapping[str, Tensor | Ragged] = dataclasses.field(default_factory=dict)
    """Other values that travel with the tokens through `pack`, by a name of your own:
    [response_length, ...] or [total_length, ...] of any dtype, or a `Ragged` of as many rows."""
    accepted_mask: Tensor | None = None
    """The active tokens that no rejection drops, [response_length] bool; `accepted_samples` fills
    it for `--rejection-denominator accepted`."""
    accepted_size: float | None = None
    """What these tokens add to D, G and T: their number or, under `--loss-weight-denominator
    weights`, the sum of their loss weights; `accepted_samples` fills it."""
    number: int | None = None
    """The number that the checksum tells samples apart by. A new sample gets its own, and
    `dataclasses.replace` keeps it."""

    if TYPE_CHECKING:
        # A caller may give more types than are stored; the dataclass makes the code.
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
        # Counted here, where the tokens are in the processor's cache: a step has many samples.
        for field in ("num_active_tokens", "prompt_hash"):
            getattr(self, field)

    @property
    def total_length(self) -> int:
        """Tokens of prompt and response."""
        return self.tokens.numel()

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return self.total_length - self.response_length

    @functools.cached_property
    def num_active_tokens(self) -> int:
        """Response tokens that the loss mask keeps; counted once, as every micro-batch asks for
        it.
        """
        return int(np.count_nonzero(self.loss_mask.numpy()))

    @functools.cached_property
    def loss_weight(self) -> float | None:
        """The sum of the loss weights over the active tokens; None without `loss_weights`."""
        return None if self.loss_weights is None else float(self.loss_weights.double().sum())

    @functools.cached_property
    def prompt_hash(self) -> int | None:
        """A 64-bit hash of the prompt's tokens; None without `group_index` and `rollout_id`."""
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
        values = given.to(dtype, copy=True)  # the caller may fill its buffer again
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
                    f"{where} is {reprlib.repr(value)}, expected a number that float32 holds"
                ) from error
        try:
            vector = host_tensor(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"{where} is no sequence of numbers ({error})") from error
        if vector.dim() != 1:
            raise ValueError(f"{where} has shape {list(vector.shape)}, expected one dimension")
        if vector.device.type != "cpu":
            raise ValueError(
                f"{where} is on {vector.device}, expected a host tensor: samples are checked and "
                f"packed on the host, "
                "and the packed micro-batch is moved with PackedBatch.to(device)"
            )
        if vector.is_complex():
            raise ValueError(f"{where} has dtype {vector.dtype}, expected real numbers")
        if field != "tokens" and length != vector.numel():
            raise ValueError(
                f"{where} is of {vector.numel()} values, expected one per response token ({length})"
            )
        if dtype == torch.int64 and vector.numel() and not has_integers(vector):
            raise ValueError(f"{where} has dtype {vector.dtype}, expected integers")
        return vector.detach()


def _check_tokens(where: str, sample: Sample, given: Tensor, tokens: Tensor) -> None:
    lengths = sample.response_length, "total_length", sample.total_length
    check_lengths(f"{sample.name}: response_length", *lengths)
    # A prompt may hold placeholders below 0; a response token is looked up in the vocabulary.
    is_wrong = tokens < 0
    is_wrong[: sample.prompt_length] = False
    problem = ", a response token: expected an id of the vocabulary, 0 or more"
    refuse_values(where, tokens, is_wrong, problem)


def _check_mask(where: str, sample: Sample, given: Tensor, mask: Tensor) -> None:
    given = given.double()
    check_mask(where, given)
    problem = ", and the loss mask is 0 there: call accepted_samples after the mask has changed"
    refuse_values(where, given, mask & ~sample.loss_mask, problem)


def _accept(where: str, sample: Sample, given: Tensor, values: Tensor) -> None:
    """Accept all values of the stored type."""


def _check_turns(where: str, sample: Sample, given: Tensor, turns: Tensor) -> None:
    is_wrong = torch.cat([turns[:1] != turns[:1], turns[1:] < turns[:-1]])
    problem = ", less than before it: expected turns in their order"
    refuse_values(where, turns, is_wrong, problem)


def check_numbers(
    where: str, sample: Sample, given: Tensor, values: Tensor, least: float = -math.inf
) -> None:
    """Refuse values that are not finite, or less than the least, at an active token."""
    is_wrong = sample.loss_mask & ~(torch.isfinite(values) & (values >= least))
    expected = "a finite number in float32" + ", 0 or more" * (least == 0)
    refuse_values(where, given, is_wrong, f" at an active token, expected {expected}")


def _check_log_probs(where: str, sample: Sample, given: Tensor, values: Tensor) -> None:
    check_log_probs(where, values, sample.loss_mask)


Check = Callable[[str, Sample, Tensor, Tensor], None]
"""A check of where a field is, its sample, the values as given, and the values as stored."""
COLUMNS: dict[str, tuple[torch.dtype, Check]] = {
    "tokens": (torch.int64, _check_tokens),
    "loss_mask": (torch.bool, _check_mask),
    "accepted_mask": (torch.bool, _check_mask),
    "loss_weights": (torch.float32, functools.partial(check_numbers, least=0.0)),
    **dict.fromkeys(VALUE_FIELDS, (torch.float32, check_numbers)),
    **dict.fromkeys(LOG_PROB_FIELDS, (torch.float32, _check_log_probs)),
    "turn_ids": (torch.int64, _check_turns),
}
"""The fields with a number for each token, by the type that is stored and the check."""


def check_samples(function: str, samples: object) -> None:
    """Refuse an argument of the function that is no sequence of `Sample`."""
    expected = f"{function}: expected a list of Sample"
    if not isinstance(samples, Sequence):
        raise ValueError(f"{expected}, and got a {type(samples).__name__}")
    for number, sample in enumerate(samples):
        if not isinstance(sample, Sample):
            raise ValueError(
                f"{expected}, and number {number} is a {type(sample).__name__}: build it with "
                f"Sample(tokens=..., "
                "response_length=..., loss_mask=...)"
            )


def number_samples(samples: Sequence[object]) -> None:
    """Give the samples of a rank's step distinct numbers, and unnamed ones their places as names.

    A sample keeps its number, except copies of a sample that is earlier in the list.
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
        f"{sample.name}: {field} cannot be set, as a sample is checked when it is made; make "
        f"another: "
        f"sample = dataclasses.replace(sample, {field}=...)"
    )


Sample.__setattr__ = _refuse_change  # type: ignore[assignment, method-assign]


def _is_vector(value: object) -> bool:
    """Tell numbers of tokens from one number."""
    return bool(getattr(value, "ndim", isinstance(value, Sequence) and not isinstance(value, str)))


def as_integer(value: object) -> int | None:
    """Convert a Python, NumPy or 0-d tensor integer of 64 bits; None for anything else, 3.0 and
    True included.
    """
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        return None
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
    return number if -(2**63) <= number < 2**63 else None


def checked_integer(where: str, value: object) -> int:
    """Convert as `as_integer` does, or raise a ValueError that begins with `where`."""
    number = as_integer(value)
    if number is None:
        raise ValueError(f"{where} is {reprlib.repr(value)}, expected an integer of 64 bits")
    return number


def check_lengths(response_name: str, response: int, total_name: str, total: int) -> None:
    """Refuse lengths of one sample that leave no prompt; each comes with its name in an error."""
    if response < 0:
        raise ValueError(f"{response_name} is {response}, expected 0 or more")
    if total <= response:
        raise ValueError(
            f"{response_name} is {response} and {total_name} {total}, expected at least 1 more: "
            f"the prompt needs at least one "
            "token (a beginning-of-sequence token will do), whose logit predicts the response's "
            "first"
        )
