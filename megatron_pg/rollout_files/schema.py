"""The schema of a rollout file: what a row may hold, and the sample that it becomes. Needs no pyarrow."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_pg.step.sample import Sample, as_integer

INTEGERS, NUMBERS = "a list of integers", "a list of numbers"
INTEGER, NUMBER, NUMBER_OR_NUMBERS = "an integer", "a number", "a number or a list of numbers"

COLUMNS: Mapping[str, str] = {
    "prompt_ids": INTEGERS,
    "response_ids": INTEGERS,
    "loss_mask": NUMBERS,
    "reward": NUMBER,
    "advantages": NUMBER_OR_NUMBERS,
    "log_probs": NUMBERS,
    "rollout_log_probs": NUMBERS,
    "ref_log_probs": NUMBERS,
    "group_index": INTEGER,
    "rollout_id": INTEGER,
}
"""What each column holds; every other column is ignored."""

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)

SAMPLE_FIELDS: Mapping[str, str] = {
    "log_probs": "old_log_probs",
    "rollout_log_probs": "rollout_log_probs",
    "ref_log_probs": "ref_log_probs",
    "group_index": "group_index",
    "rollout_id": "rollout_id",
}
"""The optional field of ``Sample`` that each of these columns fills."""

Row = Mapping[str, Any]
"""By column: a NumPy array or list, a number, or None where the row has no value."""


class RowError(ValueError):
    """A row of a rollout file that is no sample."""

    def __init__(self, field: str, found: str, expected: str) -> None:
        self.file, self.row = "", -1
        self.field, self.found, self.expected = field, found, expected
        super().__init__()

    def at(self, file: str, row: int) -> RowError:
        """The same error, of row `row` (counted from 0) of a file."""
        self.file, self.row = file, row
        return self

    def __str__(self) -> str:
        return f"{self.file} row {self.row}: {self.field} is {self.found}, expected {self.expected}"

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (self.field, self.found, self.expected)
        return (RowError, arguments, {"file": self.file, "row": self.row})


@dataclass(frozen=True, eq=False)
class RewardedSample(Sample):
    """A sample of a rollout file, with its reward where the file has one."""

    reward: float | None = None
    """What the answer earned. Without advantages in the file, ``advantages`` are 0 until
    :func:`megatron_pg.rollout_files.with_group_advantages` makes them of the rewards of the step."""
    has_advantages: bool = True
    """Whether the file gives ``advantages``."""


@dataclass(frozen=True)
class RowChecks:
    """What is asked of a row beyond the schema."""

    required_fields: frozenset[str] = frozenset()
    """Optional fields of ``Sample`` that every row must fill."""
    vocab_size: int | None = None
    """Token ids must be below it."""

    @classmethod
    def of(cls, required_fields: Collection[str], vocab_size: int | None) -> RowChecks:
        """
        Raises:
            ValueError: a field that no column fills, or a vocabulary without tokens.
        """
        for field in required_fields:
            if field not in SAMPLE_FIELDS.values():
                raise ValueError(
                    f"required_fields: no column fills {field!r}; expected some of "
                    + ", ".join(SAMPLE_FIELDS.values())
                )
        if vocab_size is not None and vocab_size < 1:
            raise ValueError(f"vocab_size is {vocab_size}: expected 1 or more")
        return cls(frozenset(required_fields), vocab_size)


def sample_of_row(row: Row, checks: RowChecks, name: str) -> RewardedSample:
    """The sample that a row holds. It shares no memory with the row.

    Raises:
        RowError: a value is missing, of the wrong type or length, or out of range.
    """
    prompt, response = (_token_ids(row, field, checks) for field in ("prompt_ids", "response_ids"))
    if not prompt.size:
        raise RowError("prompt_ids", "empty", "at least one token")
    loss_mask = _loss_mask(row, response.size)
    reward = _reward(row)
    fields: dict[str, Any] = {}
    for column, field in SAMPLE_FIELDS.items():
        value = row.get(column)
        if value is None:
            if field in checks.required_fields:
                raise RowError(column, "missing", COLUMNS[column])
        elif COLUMNS[column] == INTEGER:
            fields[field] = _identifier(column, value)
        else:
            fields[field] = torch.from_numpy(_per_token(column, value, loss_mask))
    return RewardedSample(
        tokens=torch.from_numpy(np.concatenate([prompt, response])),
        response_length=response.size,
        loss_mask=torch.from_numpy(loss_mask),
        advantages=_advantages(row, loss_mask),
        name=name,
        reward=reward,
        has_advantages=row.get("advantages") is not None,
        **fields,
    )


def _token_ids(row: Row, field: str, checks: RowChecks) -> NDArray[np.int64]:
    value = row.get(field)
    if value is None:
        raise RowError(field, "missing", INTEGERS)
    ids = _vector(field, value, INTEGERS)
    limit = math.inf if checks.vocab_size is None else checks.vocab_size
    wrong = np.flatnonzero((ids < 0) | (ids >= limit))
    if wrong.size:
        below = "" if checks.vocab_size is None else f" and below {checks.vocab_size}"
        raise RowError(
            f"{field}[{wrong[0]}]", str(ids[wrong[0]]), f"a token id of at least 0{below}"
        )
    return ids.astype(np.int64)


def _loss_mask(row: Row, response_length: int) -> NDArray[np.bool_]:
    value = row.get("loss_mask")
    if value is None:
        return np.ones(response_length, dtype=np.bool_)
    mask = _vector("loss_mask", value, NUMBERS)
    _check_size("loss_mask", mask, response_length)
    wrong = np.flatnonzero((mask != 0) & (mask != 1))
    if wrong.size:
        raise RowError(f"loss_mask[{wrong[0]}]", _shown(mask[wrong[0]]), "0 or 1")
    return mask.astype(np.bool_)


def _reward(row: Row) -> float | None:
    value = row.get("reward")
    if value is not None:
        return _finite_number("reward", value)
    if row.get("advantages") is None:
        raise RowError("reward", "missing", "a number (or advantages)")
    return None


def _advantages(row: Row, loss_mask: NDArray[np.bool_]) -> Any:
    value = row.get("advantages")
    if value is None:
        return 0.0
    if isinstance(value, (list, np.ndarray)):
        return torch.from_numpy(_per_token("advantages", value, loss_mask))
    number = _finite_number("advantages", value)
    if abs(number) > LARGEST_FLOAT32:
        raise RowError("advantages", _shown(value), f"{NUMBER_OR_NUMBERS}, finite in float32")
    return number


def _per_token(field: str, value: Any, loss_mask: NDArray[np.bool_]) -> NDArray[np.float32]:
    """[response_length], finite at every active token; null elsewhere becomes NaN."""
    values = _vector(field, value, NUMBERS)
    _check_size(field, values, loss_mask.size)
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    wrong = np.flatnonzero(loss_mask & ~np.isfinite(single))
    if wrong.size:
        at = int(wrong[0])
        expected = "a number that is finite in float32, as loss_mask keeps the token"
        raise RowError(f"{field}[{at}]", _shown(values[at]), expected)
    return single


def _vector(field: str, value: Any, expected: str) -> NDArray[Any]:
    """A one-dimensional array; every element is looked at where the reader has not settled their type."""
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, list):
        raise RowError(field, _shown(value), expected)
    for index, element in enumerate(value):
        is_integer = isinstance(element, numbers.Integral) and not isinstance(element, bool)
        is_number = isinstance(element, (numbers.Real, bool)) or element is None
        if not (is_integer if expected == INTEGERS else is_number):
            expected_one = INTEGER if expected == INTEGERS else NUMBER
            raise RowError(f"{field}[{index}]", _shown(element), expected_one)
        if is_integer and not -(2**63) <= int(element) < 2**63:
            raise RowError(f"{field}[{index}]", _shown(element), "a 64-bit integer")
    if expected == INTEGERS:
        return np.array(value, dtype=np.int64)
    return np.array([math.nan if element is None else element for element in value], np.float64)


def _check_size(field: str, values: NDArray[Any], response_length: int) -> None:
    if values.size != response_length:
        expected = f"{response_length}, one per token of response_ids"
        raise RowError(field, f"of {values.size} values", expected)


def _identifier(field: str, value: Any) -> int:
    number = as_integer(value)
    if number is None:
        raise RowError(field, _shown(value), "a 64-bit integer")
    return number


def _finite_number(field: str, value: Any) -> float:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    number = _as_float(value) if is_number else math.nan
    if not math.isfinite(number):
        expected = NUMBER_OR_NUMBERS if field == "advantages" else NUMBER
        raise RowError(field, _shown(value), f"{expected}, finite")
    return number


def _as_float(value: Any) -> float:
    """An integer beyond float64 is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _shown(value: Any) -> str:
    """A value as an error message shows it: short."""
    try:
        text = "null" if value is None else repr(value.item() if hasattr(value, "item") else value)
    except RecursionError:
        text = "nested too deeply"
    return text if len(text) <= 40 else text[:37] + "..."
