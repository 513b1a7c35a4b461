"""The schema of a rollout file: what a row may hold, the sample that it becomes, and advantages from its reward."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import numbers
import reprlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_pg.head.ragged import Ragged
from megatron_pg.step.advantages import GroupAdvantages, group_advantages
from megatron_pg.step.agreement import compute_and_gather
from megatron_pg.step.ids import NUM_IDS, check_ids, distinct_id
from megatron_pg.step.sample import LOG_PROB_FIELDS, Sample, as_integer
from megatron_pg.step.side_channels import LARGEST_VOCABULARY, WrongSet, checked_kept_tokens
from megatron_pg.step.totals import sample_counts
from megatron_pg.step.values import LARGEST_LOG_PROB, LOG_PROB

INTEGERS, NUMBERS = "a list of integers", "a list of numbers"
INTEGER_LISTS = "a list of lists of integers"
INTEGER, NUMBER, NUMBER_OR_NUMBERS = "an integer", "a number", "a number or a list of numbers"

COLUMNS: Mapping[str, str] = {
    "prompt_ids": INTEGERS,
    "response_ids": INTEGERS,
    "loss_mask": NUMBERS,
    "loss_weights": NUMBERS,
    "reward": NUMBER,
    "advantages": NUMBER_OR_NUMBERS,
    "log_probs": NUMBERS,
    "rollout_log_probs": NUMBERS,
    "ref_log_probs": NUMBERS,
    "group_index": INTEGER,
    "rollout_id": INTEGER,
    "policy_version": INTEGER,
    "kept_tokens": INTEGER_LISTS,
}
"""The content of each column; every other column is ignored."""

ENGINE_COLUMNS: Mapping[str, str] = {
    "prompt_ids": "prompt_token_ids",
    "response_ids": "token_ids",
    "rollout_log_probs": "logprobs",
}
"""vLLM's names of three columns; read from a row that has the first two, and neither `prompt_ids` nor `response_ids`."""

READ = (*COLUMNS, *ENGINE_COLUMNS.values())
"""Columns that are read."""

OPTIONAL_FIELDS: Mapping[str, str] = {
    field: field.removeprefix("old_")
    for field in (
        *LOG_PROB_FIELDS,
        *("group_index", "rollout_id", "loss_weights", "policy_version", "kept_tokens"),
    )
}
"""Optional fields of `Sample`, and the column that fills each of them."""

LOG_PROB_COLUMNS = frozenset(OPTIONAL_FIELDS[field] for field in LOG_PROB_FIELDS)

Row = Mapping[str, Any]
"""One row by column: an array of integers or numbers, a `Ragged` of integers, any Python value, or None where the row has no
value."""


ParseRow = Callable[[], Row]
"""Parser of one row, which raises a `RowError`: a rank calls it for its own rows alone."""


class RowError(ValueError):
    """A row of a rollout file that is no sample."""

    def __init__(self, field: str, found: str, expected: str) -> None:
        self.file, self.row = "", -1  # the row, counted from 0; set where both are known
        self.field, self.found, self.expected = field, found, expected
        super().__init__(field, found, expected)

    def __str__(self) -> str:
        return f"{self.file} row {self.row}: {self.field} is {self.found}, expected {self.expected}"


@dataclass(frozen=True, eq=False)
class RewardedSample(Sample):
    """A sample of a rollout file, with its reward where the file has one."""

    reward: float | None = None
    """Reward of the answer. Without advantages in the file, `advantages` are 0 until `with_group_advantages` makes
    them of the rewards of the step."""
    has_advantages: bool = True
    """Presence of `advantages` in the file."""


def sample_of_row(
    row: Row,
    name: str,
    required_columns: Collection[str] = (),
    vocab_size: int | None = None,
    id_source: str | None = None,
) -> RewardedSample:
    """Make the sample of a row, if the row fills the required columns and has token ids below the size of the vocabulary.

    Raises:
        RowError: a value is missing, of the wrong type or length, or out of range.
    """
    row = _with_our_names(row)
    for column in ("prompt_ids", "response_ids", *required_columns):
        if row.get(column) is None:
            raise RowError(column, "missing", COLUMNS[column])
    if row.get("reward") is None and row.get("advantages") is None:
        raise RowError("reward", "missing", "a number (or advantages)")
    prompt, response = (_vector(column, row[column]) for column in ("prompt_ids", "response_ids"))
    limit = math.inf if vocab_size is None else vocab_size
    below = "" if vocab_size is None else f" and below {vocab_size}"
    for column, ids in (("prompt_ids", prompt), ("response_ids", response)):
        _check(column, ids, (ids >= 0) & (ids < limit), f"a token id of at least 0{below}")
    if not prompt.size:
        raise RowError("prompt_ids", "empty", "at least one token")
    is_active = np.ones(response.size, np.bool_)
    if row.get("loss_mask") is not None:
        mask = _vector("loss_mask", row["loss_mask"], response.size)
        _check("loss_mask", mask, (mask == 0) | (mask == 1), "0 or 1")
        is_active = mask.astype(np.bool_)
    values = {
        column: _value(column, row[column], is_active)
        for column in (*OPTIONAL_FIELDS.values(), "reward", "advantages")
        if row.get(column) is not None and column != "kept_tokens"
    }
    if row.get("kept_tokens") is not None:
        values["kept_tokens"] = _kept_sets(row["kept_tokens"], response, is_active, vocab_size)
    return RewardedSample(
        tokens=torch.from_numpy(np.concatenate([prompt, response])),
        response_length=response.size,
        loss_mask=torch.from_numpy(is_active),
        has_advantages="advantages" in values,
        old_log_probs=values.pop("log_probs", None),
        name=name,
        id_source=id_source,
        **values,
    )


def _with_our_names(row: Row) -> Row:
    given = {name: value for name, value in row.items() if value is not None}
    has_theirs = {"prompt_token_ids", "token_ids"} <= given.keys()
    if has_theirs and not {"prompt_ids", "response_ids"} & given.keys():
        return {name: row.get(engine) for name, engine in ENGINE_COLUMNS.items()} | given
    return row


def with_distinct_ids_of_file(row: Row, number: int) -> Row:
    """Give a row ids that no file of another number has; ids that are no integers stay as they are.

    Raises:
        RowError: an id below 0 or from 2^40 on.
    """
    ids = {}
    for column in ("group_index", "rollout_id"):
        if (identifier := as_integer(row.get(column))) is not None:
            try:
                ids[column] = distinct_id(column, number, identifier)
            except ValueError:
                expected = f"0 or more and below {NUM_IDS}, for --distinct-ids file"
                raise RowError(column, shown(identifier), expected) from None
    return {**row, **ids}


def _value(column: str, value: Any, is_active: NDArray[np.bool_]) -> Any:
    """Return an integer, a finite number, or [response_length] float32, finite at active tokens; null elsewhere becomes NaN."""
    if COLUMNS[column] == INTEGER:
        number = as_integer(value)
        if number is None:
            raise RowError(column, shown(value), "a 64-bit integer")
        return number
    if column == "reward":
        return _finite(column, value, sys.float_info.max, "finite")
    if column == "advantages" and not isinstance(value, (list, np.ndarray)):
        return _finite(column, value, float(np.finfo(np.float32).max), "finite in float32")
    values = _vector(column, value, is_active.size)
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    expected = "a number that is finite in float32, as loss_mask keeps the token"
    _check(column, values, np.isfinite(single) | ~is_active, expected)
    if column == "loss_weights":
        _check(
            column, values, ~(values < 0) | ~is_active, "0 or more, as loss_mask keeps the token"
        )
    if column in LOG_PROB_COLUMNS:
        _check(column, values, ~(single > LARGEST_LOG_PROB) | ~is_active, LOG_PROB)
    return torch.from_numpy(single)


def _kept_sets(
    value: Any, response: NDArray[Any], is_active: NDArray[np.bool_], vocab_size: int | None
) -> Ragged:
    """Check the sets of the response tokens; an empty set, or null, where all tokens were kept."""
    if not isinstance(value, (list, Ragged)):
        raise RowError("kept_tokens", shown(value), INTEGER_LISTS)
    if isinstance(value, list):
        for at, ids in enumerate(value):
            if not isinstance(ids, (list, type(None))):
                raise RowError(f"kept_tokens[{at}]", shown(ids), INTEGERS)
            _typed(f"kept_tokens[{at}]", ids or [], INTEGER)
        value = [ids or [] for ids in value]
    tokens, mask = torch.tensor(response), torch.tensor(is_active)
    try:
        return checked_kept_tokens(value, "the row", tokens, mask, vocab_size or LARGEST_VOCABULARY)
    except WrongSet as error:
        raise RowError(error.field, error.found, error.expected) from None


def _finite(column: str, value: Any, limit: float, expected: str) -> float:
    try:
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        number = float(value) if is_number else math.nan
    except OverflowError:  # an integer beyond float64
        number = math.inf
    if not abs(number) <= limit:
        raise RowError(column, shown(value), f"{COLUMNS[column]}, {expected}")
    return number


def _vector(field: str, value: Any, size: int | None = None) -> NDArray[Any]:
    """Return the values [size], integers or numbers as the column holds; null among numbers becomes NaN."""
    is_integers = COLUMNS[field] == INTEGERS
    if isinstance(value, np.ndarray) and value.dtype.kind not in ("i" if is_integers else "iufb"):
        value = value.tolist()
    if isinstance(value, list):
        value = _typed(field, value, INTEGER if is_integers else NUMBER)
    if not isinstance(value, np.ndarray):
        raise RowError(field, shown(value), COLUMNS[field])
    if size not in (None, value.size):
        raise RowError(field, f"of {value.size} values", f"{size}, one per token of response_ids")
    return value


def _typed(field: str, values: list[Any], expected: str) -> NDArray[Any]:
    others = () if expected == INTEGER else (float, bool, type(None))
    if {int, *others}.issuperset(map(type, values)):
        with contextlib.suppress(OverflowError):
            return np.array(values, np.int64 if expected == INTEGER else np.float64)
    is_right = [isinstance(value, others) or as_integer(value) is not None for value in values]
    at = is_right.index(False)
    raise RowError(f"{field}[{at}]", shown(values[at]), f"{expected} of 64 bits")


def _check(field: str, values: NDArray[Any], is_right: NDArray[Any], expected: str) -> None:
    """Name the first element that is wrong."""
    if not is_right.all():
        at = int(np.flatnonzero(~is_right)[0])
        raise RowError(f"{field}[{at}]", shown(values[at]), expected)


def shown(value: Any) -> str:
    """Shorten a value for an error message."""
    value = value.item() if hasattr(value, "item") else value
    return "null" if value is None else reprlib.repr(value)


def with_group_advantages(
    samples: Sequence[Sample],
    *,
    method: str = "grpo",
    data_parallel_group: dist.ProcessGroup | None = None,
    allow_different_prompts: bool = False,
) -> tuple[list[Sample], GroupAdvantages]:
    """Compute the advantages of a step's samples from their rewards within their prompt groups.

    Every data-parallel rank must call it with its samples of the step; a group may be spread over ranks. One exchange.

    Args:
        samples: this rank's samples of the step, from rollout files.
        method: see `megatron_pg.step.advantages.group_advantages`.
        data_parallel_group: the data-parallel group *without* context parallelism; None is this rank alone.
        allow_different_prompts: the samples of a prompt group may have different prompts
            (`--allow-different-prompts-in-group`).

    Returns:
        The samples, and the advantages of the whole step in rank order, for its report.

    Raises:
        ValueError: a sample without a reward or a `group_index`, an unknown method, or ids that stand for two things (see
            `megatron_pg.step.ids.check_ids`); on all ranks alike.
    """
    _, shared = compute_and_gather(
        lambda: samples,
        lambda mine: (list(map(_reward_and_group, mine)), sample_counts(mine)),
        data_parallel_group,
    )
    everyone: list[list[tuple[float, int]]] = [pairs for pairs, _ in shared]
    check_ids([counts for _, counts in shared], allow_different_prompts=allow_different_prompts)
    rank = 0 if data_parallel_group is None else dist.get_rank(data_parallel_group)
    pairs = [pair for part in everyone for pair in part]
    step = group_advantages([r for r, _ in pairs], [g for _, g in pairs], method=method)
    first = sum(map(len, everyone[:rank]))
    mine = zip(samples, step.advantages[first : first + len(samples)].tolist(), strict=True)
    return [dataclasses.replace(sample, advantages=value) for sample, value in mine], step


def _reward_and_group(sample: Sample) -> tuple[float, int]:
    reward = sample.reward if isinstance(sample, RewardedSample) else None
    if reward is None or sample.group_index is None:
        field = "reward" if reward is None else "group_index"
        raise ValueError(
            f"{sample.name} has no {field}: an advantage is a reward against those of the same prompt group"
        )
    return reward, sample.group_index
