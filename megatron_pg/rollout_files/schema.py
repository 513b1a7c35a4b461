"""Schema of a rollout file: columns, conversion of rows to samples, and advantages from rewards."""

import contextlib
import dataclasses
import math
import numbers
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_pg.config.tables import LOG_PROB_FIELDS
from megatron_pg.head.ragged import Ragged
from megatron_pg.step.advantages import (
    OF_PROMPT_GROUPS,
    GroupAdvantages,
    advantages_of_rollouts,
    check_rewards,
)
from megatron_pg.step.counts import SampleCounts, StepCounts
from megatron_pg.step.ids import check_ids
from megatron_pg.step.sample import Sample, as_integer, check_numbers
from megatron_pg.step.totals import sample_counts
from megatron_pg.step.values import refuse_values

INTEGERS, NUMBERS = "a list of integers", "a list of numbers"
INTEGER_LISTS = "a list of lists of integers"
NUMBER_LISTS = "a list of lists of numbers"
INTEGER_ARRAY = "lists [layers][total_length][k] of integers"
INTEGER, INTEGER_OR_INTEGERS = "an integer", "an integer or a list of integers"
NUMBER, NUMBER_OR_NUMBERS = "a number", "a number or a list of numbers"

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
    "new_log_probs": NUMBERS,
    "group_index": INTEGER,
    "rollout_id": INTEGER,
    "policy_version": INTEGER_OR_INTEGERS,
    "temperature": NUMBER,
    "kept_tokens": INTEGER_LISTS,
    "sampler_top_k_ids": INTEGER_LISTS,
    "sampler_top_k_log_probs": NUMBER_LISTS,
    "routed_experts": INTEGER_ARRAY,
    "turn_ids": INTEGERS,
}
"""Content of each column. All other columns are ignored."""

ENGINE_COLUMNS: Mapping[str, str] = {
    "prompt_ids": "prompt_token_ids",
    "response_ids": "token_ids",
    "rollout_log_probs": "logprobs",
}
"""vLLM's names of three columns, read if a row has the first two, but neither `prompt_ids` nor
`response_ids`."""

READ = (*COLUMNS, *ENGINE_COLUMNS.values())

NUMBERS_OF_SAMPLE = ("group_index", "rollout_id", "policy_version", "temperature")
NUMBERS_OF_TOKENS = ("loss_weights", "kept_tokens", "routed_experts", "turn_ids")
OPTIONAL_FIELDS: Mapping[str, str] = {
    field: field.removeprefix("old_")
    for field in (*LOG_PROB_FIELDS, *NUMBERS_OF_SAMPLE, *NUMBERS_OF_TOKENS)
} | {"sampler_top_k": "sampler_top_k_ids"}
"""Optional fields of `Sample`, and the columns that fill them."""

Row = Mapping[str, Any]
"""One row by column: an array of integers or numbers, a `Ragged` of integers, any Python value, or
None without a value."""
ParseRow = Callable[[], Row]
"""Parser of one row, which may raise a ValueError. A rank calls it only for its own rows."""


class RowError(ValueError):
    """Error for an invalid row of a rollout file, with `file`, `row` (from 0) and `problem`."""

    def __init__(self, file: str, row: int, problem: str) -> None:
        self.file, self.row, self.problem = file, row, problem
        super().__init__(file, row, problem)

    def __str__(self) -> str:
        return f"{self.file} row {self.row}: {self.problem}"


@dataclass(frozen=True, eq=False)
class RewardedSample(Sample):
    """Sample from a rollout file, with its reward if the file has one."""

    reward: float | None = None
    """Reward of the rollout, equal in all its samples. Without advantages in the file, `advantages`
    are 0 until `with_group_advantages` computes them."""
    has_advantages: bool = False
    """Whether the file has `advantages`, which `with_group_advantages` then keeps."""
    new_log_probs: Tensor | None = None
    """Log-probs [response_length] float32 under the policy at the start of the step, only for the
    page of rollouts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward is not None:
            vars(self)["reward"] = _finite_number(f"{self.name}: reward", self.reward, NUMBER)
        if self.new_log_probs is not None:
            self._store("new_log_probs", torch.float32, check_numbers)


def sample_of_row(
    row: Row, *, required: Collection[str], vocab_size: int | None, **names: Any
) -> RewardedSample:
    """Make a sample from a row. `names` has its `name` and `id_source`.

    Raises:
        ValueError: a value is missing, has the wrong type or length, or is out of range (see also
            `Sample`).
    """
    row = {name: value for name, value in row.items() if value is not None}
    is_ours = "prompt_ids" in row or "response_ids" in row
    if not is_ours and "prompt_token_ids" in row and "token_ids" in row:
        row = {name: row[theirs] for name, theirs in ENGINE_COLUMNS.items() if theirs in row} | row
    for column in ("prompt_ids", "response_ids", *required):
        if column not in row:
            raise ValueError(f"{column} is missing, expected {COLUMNS[column]}")
    if not {"reward", "advantages"} & row.keys():
        raise ValueError("reward is missing, expected a number (or advantages)")
    values = {column: _value(column, row[column]) for column in COLUMNS if column in row}
    if "sampler_top_k_ids" in values:
        names["sampler_top_k"] = (
            values.pop("sampler_top_k_ids"),
            values.pop("sampler_top_k_log_probs", []),
        )
    limit = math.inf if vocab_size is None else vocab_size
    below = "" if vocab_size is None else f" and below {vocab_size}"
    tokens = []
    for column in ("prompt_ids", "response_ids"):
        ids = torch.from_numpy(values.pop(column))
        problem = f", expected a token id of at least 0{below}"
        refuse_values(column, ids, (ids < 0) | (ids >= limit), problem)
        tokens.append(ids)
    prompt, response = tokens
    if not prompt.numel():
        raise ValueError("prompt_ids is empty, expected at least one token")
    sample = RewardedSample(
        tokens=torch.cat(tokens),
        response_length=response.numel(),
        loss_mask=values.pop("loss_mask", np.ones(response.numel())),
        has_advantages="advantages" in values,
        old_log_probs=values.pop("log_probs", None),
        **names,
        **values,
    )
    if (kept := sample.kept_tokens) is not None and (kept.values >= limit).any():
        at = int((kept.values >= limit).nonzero()[0])
        raise ValueError(
            f"kept_tokens[{int(kept.row_of_element()[at])}] is a set with id "
            f"{int(kept.values[at])}, expected ids of at least 0{below}"
        )
    return sample


def _value(column: str, value: Any) -> Any:
    """Check the type of a value, and convert a number or a list of numbers. Null becomes NaN."""
    kind = COLUMNS[column]
    if kind in (INTEGER_LISTS, NUMBER_LISTS) and not isinstance(value, Ragged):
        if not isinstance(value, list):
            raise ValueError(f"{column} is {shown(value)}, expected {kind}")
        value = [[] if ids is None else ids for ids in value]
        for at, ids in enumerate(value):
            _vector(f"{column}[{at}]", ids, INTEGERS if kind == INTEGER_LISTS else NUMBERS)
    if kind == INTEGER_ARRAY:
        with contextlib.suppress(ValueError, OverflowError):  # lists of different lengths
            array = np.asarray(value)
            if array.dtype.kind in "iu":
                return array.astype(np.int64)
        raise ValueError(f"{column} is {shown(value)}, expected {kind}, all of the same lengths")
    if kind == INTEGER_OR_INTEGERS and isinstance(value, (list, np.ndarray)):
        return _vector(column, value, INTEGERS)
    if kind in (INTEGER, INTEGER_OR_INTEGERS, INTEGER_LISTS, NUMBER_LISTS):
        return value
    if kind in (INTEGERS, NUMBERS) or isinstance(value, (list, np.ndarray)):
        return _vector(column, value, kind)
    return _finite_number(column, value, kind)


def _finite_number(where: str, value: Any, kind: str) -> float:
    """Convert a Python or NumPy number, or a 0-d tensor. An error begins with `where`."""
    number = value.item() if getattr(value, "ndim", None) == 0 else value
    with contextlib.suppress(OverflowError):  # an integer beyond float64's range
        is_number = isinstance(number, numbers.Real) and not isinstance(number, bool)
        if is_number and math.isfinite(number):
            return float(number)
    raise ValueError(f"{where} is {shown(value)}, expected {kind}, finite")


def _vector(field: str, value: Any, kind: str) -> NDArray[Any]:
    """Copy a list or an array to an array, int64 for integers and float64 for numbers."""
    is_integers = kind == INTEGERS
    dtype = np.int64 if is_integers else np.float64
    if isinstance(value, np.ndarray):
        if value.dtype.kind in ("i" if is_integers else "iufb"):
            return value.astype(dtype)
        value = value.tolist()
    if not isinstance(value, list):
        raise ValueError(f"{field} is {shown(value)}, expected {kind}")
    others = () if is_integers else (float, bool, type(None))
    if {int, *others}.issuperset(map(type, value)):
        with contextlib.suppress(OverflowError):
            return np.array(value, dtype)
    at = [isinstance(v, others) or as_integer(v) is not None for v in value].index(False)
    expected = INTEGER if is_integers else NUMBER
    raise ValueError(f"{field}[{at}] is {shown(value[at])}, expected {expected} of 64 bits")


def shown(value: Any) -> str:
    """Format a value of a row for an error, shortened."""
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    return "null" if value is None else reprlib.repr(value)


_REWARD = np.dtype([("reward", np.float64), ("is_given", np.int64)])
"""Result of `_reward` on the wire."""


def with_group_advantages(
    samples: Sequence[Sample],
    *,
    method: str = "grpo",
    data_parallel_group: dist.ProcessGroup | None = None,
    allow_different_prompts: bool = False,
) -> tuple[list[Sample], GroupAdvantages]:
    """Compute the advantages of a step's samples from their rewards within their prompt groups.

    A rollout of several samples counts once: it has one reward, and all its samples get its
    advantage. Samples with `advantages` from their file keep them. Every data-parallel rank must
    call it with its samples of the step. Groups and rollouts may be split over ranks. One exchange.

    Args:
        samples: this rank's samples of the step, from rollout files.
        method: see `megatron_pg.step.advantages.group_advantages`. For `allow_different_prompts`
            see `step_totals`.
        data_parallel_group: the data-parallel group *without* context parallelism. None: only this
            rank.

    Returns:
        The samples, and the computed advantages of the whole step in rank order, for a report. If a
        sample has no `group_index`, each rollout is a group in the report.

    Raises:
        ValueError: a sample has no reward, or no `group_index` that the method needs, a rollout has
            different rewards, only some samples of a prompt group (with `step_rloo` of the step,
            with `reward` of a rollout) have advantages, the method is unknown, or ids are not
            unique (see `megatron_pg.step.ids.check_ids`). Raised on all ranks.
    """
    needed = ("reward", "group_index") if method in OF_PROMPT_GROUPS else ("reward",)

    def of_rank() -> tuple[SampleCounts, NDArray[Any], NDArray[Any]]:
        counts = sample_counts(samples)  # first, because it numbers the samples for errors
        mine = np.array([_reward(each, method, needed) for each in samples], dtype=_REWARD)
        return counts, mine, mine

    counts, mine, rewards_of_ranks = StepCounts.over_ranks(of_rank, data_parallel_group)
    check_ids(counts, allow_different_prompts=allow_different_prompts)
    everyone = np.concatenate(rewards_of_ranks)
    _check_given(counts, everyone["is_given"], method)
    rewards = everyone["reward"].copy()
    check_rewards(counts, rewards)
    computed = np.flatnonzero(everyone["is_given"] == 0)
    has_groups = counts.has("group_index")[computed].all()
    groups = counts.rows["group_index"] if has_groups else counts.first_of_rollout
    reward, group, is_counted = (
        torch.from_numpy(column[computed])
        for column in (rewards, groups, counts.is_first_of_rollout)
    )
    step = advantages_of_rollouts(reward, group, is_counted, method)
    values = torch.zeros(len(counts), dtype=torch.float32, device="cpu").index_put_(
        (torch.from_numpy(computed),), step.advantages
    )
    values_of_rank = values.split(list(counts.sizes))[counts.rank].tolist()  # type: ignore[no-untyped-call]
    replaced = [
        sample if is_given else dataclasses.replace(sample, advantages=value)
        for sample, value, is_given in zip(samples, values_of_rank, mine["is_given"], strict=True)
    ]
    return replaced, step


def _reward(sample: Any, method: str, needed: Sequence[str]) -> tuple[float, bool]:
    """Return a sample's reward, or 0 if it has advantages, and whether it has advantages."""
    if getattr(sample, "has_advantages", False):
        return 0.0, True
    for field in needed:
        if getattr(sample, field, None) is None:
            raise ValueError(f"{sample.name} has no {field}, which --advantage {method} requires")
    return sample.reward, False


def _check_given(counts: StepCounts, is_given: NDArray[np.int64], method: str) -> None:
    """Raise a ValueError if only some samples to be compared have advantages instead of rewards.

    All ranks that the counts were gathered from must call it.
    """
    units = {
        "step_rloo": (np.zeros(len(counts), dtype=np.int64), "the step"),
        "reward": (counts.first_of_rollout, "rollout_id {0.rollout_id}"),
    }
    of_group = counts.first_of_group, "prompt group {0.group_index}"
    first, unit = units.get(method, of_group)
    wrong = np.flatnonzero(is_given != is_given[first])
    if wrong.size:
        index = int(wrong[0])
        places = counts.places([int(first[index]), index])
        other, given = (place.ids for place in (places if is_given[index] else places[::-1]))
        raise ValueError(
            f"{given.name} has advantages and {other.name} only a reward, both of "
            f"{unit.format(given)}. --advantage {method} requires advantages for all its samples "
            "or for none."
        )
