"""A failed row among the rows of its check: its properties, and its numbers in words."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_pg.check.cases import LOSS_SCALE
from megatron_pg.check.compare import AXES, CheckRow
from megatron_pg.check.options import CheckOptions
from megatron_pg.check.samples import make_samples


@dataclass(frozen=True)
class Finding:
    """A failed row, all rows, and the check's options."""

    row: CheckRow
    rows: Sequence[CheckRow]
    options: CheckOptions
    data_size: int

    def same(self, model: str) -> CheckRow | None:
        """Find a model's gradient row in this row's loss mode, with this row's aggregation if there is one."""
        kind = (model, self.row.calculate_per_token_loss, "gradient")
        return min(
            (
                row
                for row in self.rows
                if (row.model, row.calculate_per_token_loss, row.what) == kind
            ),
            key=lambda row: (row.aggregation != self.row.aggregation, row.passed),
            default=None,
        )

    def passes(self, model: str) -> bool:
        found = [row.passed for row in self.rows if row.model == model]
        return bool(found) and all(found)

    def fails(self, what: str) -> bool:
        kind = (self.row.model, what)
        return any((row.model, row.what) == kind and not row.passed for row in self.rows)

    @property
    def slack(self) -> float:
        """The tolerance of a ratio's match with a number."""
        return min(10 * self.row.tolerance, 0.05)

    @property
    def all_have_factor(self) -> bool:
        """Return whether all gradients are the reference's times one number other than 1."""
        return self.row.scaled_error <= self.slack < abs(self.row.common_ratio - 1.0)

    @property
    def wrong_have_factor(self) -> bool:
        """Return whether the wrong gradients are the reference's times one number other than 1."""
        return self.row.wrong_scaled_error <= self.slack < abs(self.row.wrong_ratio - 1.0)

    @property
    def is_part(self) -> bool:
        return 0 < len(self.row.wrong) < self.row.num_parameters

    @property
    def micro_batches(self) -> tuple[int, int]:
        """The fewest and the most micro-batches of a data-parallel rank."""
        counts = [self.options.num_microbatches(rank) for rank in range(self.data_size)]
        return min(counts), max(counts)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes by their short names."""
        options, (few, many) = self.options, self.micro_batches
        return {
            "CP": options.context_parallel_size,
            "DP": self.data_size,
            "M": few if few == many else 1,
            "TP": options.tensor_model_parallel_size,
            "PP": options.pipeline_model_parallel_size,
            "EP": options.expert_model_parallel_size,
        }

    @property
    def is_left_over(self) -> bool:
        """Return whether every built model's first row passes and its later rows fail."""
        built: dict[tuple[str, bool], list[bool]] = {}
        for row in self.rows:
            built.setdefault((row.model, row.calculate_per_token_loss), []).append(row.passed)
        later = [passed for results in built.values() for passed in results[1:]]
        return all(first for first, *_ in built.values()) and len(later) > 2 and not any(later)

    @property
    def failed_modes(self) -> set[bool]:
        """The values of `calculate_per_token_loss` with failed gradient rows; none if the check has one mode."""
        rows = [row for row in self.rows if row.what == "gradient"]
        is_one = len({row.calculate_per_token_loss for row in rows}) == 1
        failed = {row.calculate_per_token_loss for row in rows if not row.passed}
        return set() if is_one else failed

    def mode(self) -> str:
        """Name the likely cause where one loss mode fails alone."""
        if self.failed_modes == {False}:
            return "; rows per micro-batch alone: look at CP / M of the schedule and 1 / (DP CP) of DDP"
        if self.failed_modes == {True}:
            return (
                "; per-token rows alone: look at the token count (num_tokens) that finalize_model_grads divides by, and at "
                "DDP's scaling, 1 in this mode"
            )
        return ""

    def where(self) -> str:
        """Name the stages or ranks with wrong gradients; "" for all."""
        row = self.row
        for name, numbers, size in (
            ("pipeline stage", row.wrong_stages, self.sizes["PP"]),
            ("rank", row.wrong_ranks, self.data_size * self.options.model_parallel_size),
        ):
            if 0 < len(numbers) < size:
                rest = " ..." if len(numbers) > 4 else ""
                return f" on {name} {', '.join(map(str, numbers[:4]))}{rest} alone"
        return ""

    def worst(self) -> str:
        """Name the worst gradient and its tensor-parallel rank and pipeline stage."""
        place_by_axis = dict(zip(AXES, self.row.worst_place, strict=True))
        places = [
            f"{name} {place_by_axis[axis]}"
            for axis, name in (("TP", "tensor-parallel rank"), ("PP", "pipeline stage"))
            if self.sizes[axis] > 1
        ]
        on = f" on {', '.join(places)}" if places else ""
        return f"worst in {self.row.worst_parameter}{on}"

    def factors(self, ratio: float) -> str:
        """Name the sizes or counts whose product, or its inverse, is a ratio: ": 2 = CP or 2 = DP"; "" for none."""
        sizes = {name: size for name, size in self.sizes.items() if size > 1}
        for count in (1, 2, 3):
            products = {
                " * ".join(chosen): math.prod(sizes[name] for name in chosen)
                for chosen in itertools.combinations(sizes, count)
            }
            if matches := self._matches(ratio, products):
                return matches
        return self._matches(ratio, self._counts())

    def _matches(self, ratio: float, numbers: Mapping[str, float]) -> str:
        found = []
        for name, number in numbers.items():
            if math.isclose(ratio, number, rel_tol=self.slack):
                found.append(f"{number:.6g} = {name}")
            if math.isclose(ratio * number, 1.0, rel_tol=self.slack):
                found.append(f"1/{number:.6g} = 1/{f'({name})' if ' ' in name else name}")
        return f": {' or '.join(found)}" if found else ""

    def _counts(self) -> dict[str, float]:
        """Return possible denominators: the step's counts, and T over its ranks' parts."""
        samples = make_samples(self.options, self.data_size)
        active = [sample.num_active_tokens for sample in samples]
        total, ranks = sum(active), min(self.data_size, 8)
        errors_by_rank = {
            f"T over that of data-parallel rank {rank}": total / sum(active[rank :: self.data_size])
            for rank in range(ranks if ranks > 1 else 0)
        }
        return {
            "T": total,
            "N": len({sample.rollout_id for sample in samples}),
            "P": len({sample.group_index for sample in samples}),
            "the loss scale": LOSS_SCALE,
            "all tokens over T": sum(sample.total_length for sample in samples) / total,
            **errors_by_rank,
        }

    def times(self) -> str:
        """Put the wrong gradients' common factor in words: "are 2 times the reference: 2 = CP", or "differ"."""
        ratio = self.row.wrong_ratio
        if not self.wrong_have_factor:
            return "differ"
        return f"are {ratio:.4g} times the reference{self.factors(ratio)}"


def named(names: Sequence[str]) -> str:
    """Join the first names."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def instead(found: float, expected: float) -> str:
    """Write `2 and not 1 (2 times)`."""
    ratio = found / expected if expected else math.nan
    return f"{found:.6g} and not {expected:.6g} ({ratio:.4g} times)"
