"""A failed row among the rows of its check: its properties, and its numbers in words."""

import itertools
import math
from collections.abc import Iterator, Sequence

from megatron_pg.check.cases import LOSS_SCALE
from megatron_pg.check.compare import CheckRow
from megatron_pg.check.options import CheckOptions
from megatron_pg.check.places import AXES
from megatron_pg.check.samples import make_samples


class Finding:
    """A failed row, all rows, and the check's options."""

    def __init__(
        self, row: CheckRow, rows: Sequence[CheckRow], options: CheckOptions, data_size: int
    ) -> None:
        self.row, self.rows, self.options, self.data_size = row, rows, options, data_size
        self.slack = min(10 * row.tolerance, 0.05)
        """The tolerance of a ratio's match with a number."""
        # Gradients are the reference's times one number other than 1: all of them, or the wrong
        # ones.
        self.all_have_factor = row.scaled_error <= self.slack < abs(row.common_ratio - 1.0)
        self.wrong_have_factor = row.wrong_scaled_error <= self.slack < abs(row.wrong_ratio - 1.0)
        self.is_part = 0 < len(row.wrong) < row.num_parameters
        counts = [options.num_microbatches(rank) for rank in range(data_size)]
        self.micro_batches = few, many = min(counts), max(counts)
        """The fewest and the most micro-batches of a data-parallel rank."""
        self.sizes = {
            "CP": options.context_parallel_size,
            "DP": data_size,
            "M": few if few == many else 1,
            "TP": options.tensor_model_parallel_size,
            "PP": options.pipeline_model_parallel_size,
            "EP": options.expert_model_parallel_size,
        }

    def same(self, model: str) -> CheckRow | None:
        """Find a model's gradient row in this row's loss mode, with this row's aggregation if there
        is one.
        """
        kind = (model, self.row.calculate_per_token_loss, "gradient")
        rows = (r for r in self.rows if (r.model, r.calculate_per_token_loss, r.what) == kind)
        aggregation = self.row.aggregation
        return min(rows, key=lambda r: (r.aggregation != aggregation, r.passed), default=None)

    def passes(self, model: str) -> bool:
        passed = [row.passed for row in self.rows if row.model == model]
        return bool(passed) and all(passed)

    def fails(self, what: str) -> bool:
        kind = (self.row.model, what)
        return any((row.model, row.what) == kind and not row.passed for row in self.rows)

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
        """The values of `calculate_per_token_loss` with failed gradient rows; none if the check has
        one mode.
        """
        rows = [row for row in self.rows if row.what == "gradient"]
        failed = {row.calculate_per_token_loss for row in rows if not row.passed}
        return failed if len({row.calculate_per_token_loss for row in rows}) > 1 else set()

    def mode(self) -> str:
        """Name the likely cause where one loss mode fails alone."""
        if self.failed_modes == {False}:
            return (
                "; rows per micro-batch alone: look at CP / M of the schedule and 1 / (DP CP) of "
                "DDP"
            )
        if self.failed_modes == {True}:
            return (
                "; per-token rows alone: look at the token count (num_tokens) that "
                "finalize_model_grads divides by, and at "
                "DDP's scaling, 1 in this mode"
            )
        return ""

    def where(self) -> str:
        """Name the stages and the ranks with wrong gradients; "" for all."""
        stages, places = self.row.wrong_stages, self.row.wrong_places
        if 0 < len(stages) < self.sizes["PP"]:
            rest = " ..." if len(stages) > 4 else ""
            named = f" on pipeline stage {', '.join(map(str, stages[:4]))}{rest} alone"
            return f"{named} ({places})" if places else named
        return f" on {places} alone" if places else ""

    def worst(self) -> str:
        """Name the worst gradient and its tensor-parallel rank and pipeline stage."""
        names = {"TP": "tensor-parallel rank", "PP": "pipeline stage"}
        places = [
            f"{names[axis]} {place}"
            for axis, place in zip(AXES, self.row.worst_place, strict=True)
            if axis in names and self.sizes[axis] > 1
        ]
        on = f" on {', '.join(places)}" if places else ""
        return f"worst in {self.row.worst_parameter}{on}"

    def factors(self, ratio: float) -> str:
        """Name the sizes or counts whose product, or its inverse, is a ratio: ": 2 = CP or 2 = DP";
        "" for none.
        """
        for numbers in self._candidates():
            matches = []
            for name, number in numbers.items():
                if math.isclose(ratio, number, rel_tol=self.slack):
                    matches.append(f"{number:.6g} = {name}")
                if math.isclose(ratio * number, 1.0, rel_tol=self.slack):
                    matches.append(f"1/{number:.6g} = 1/{f'({name})' if ' ' in name else name}")
            if matches:
                return f": {' or '.join(matches)}"
        return ""

    def _candidates(self) -> Iterator[dict[str, float]]:
        """Yield the products of one, two and three sizes, then the step's counts and T over its
        ranks' parts.
        """
        sizes = {name: size for name, size in self.sizes.items() if size > 1}
        for count in (1, 2, 3):
            yield {
                " * ".join(names): math.prod(sizes[name] for name in names)
                for names in itertools.combinations(sizes, count)
            }
        samples = make_samples(self.options, self.data_size)
        active = [sample.num_active_tokens for sample in samples]
        total = sum(active)
        yield {
            "T": total,
            "N": len({sample.rollout_id for sample in samples}),
            "P": len({sample.group_index for sample in samples}),
            "the loss scale": LOSS_SCALE,
            "all tokens over T": sum(sample.total_length for sample in samples) / total,
        } | {
            f"T over that of data-parallel rank {rank}": total / sum(active[rank :: self.data_size])
            for rank in range(min(self.data_size, 8) if self.data_size > 1 else 0)
        }

    def times(self) -> str:
        """Put the wrong gradients' common factor in words: "are 2 times the reference: 2 = CP", or
        "differ".
        """
        if not self.wrong_have_factor:
            return "differ"
        ratio = self.row.wrong_ratio
        return f"are {ratio:.4g} times the reference{self.factors(ratio)}"


def named(names: Sequence[str]) -> str:
    """List three names, and count the others."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def instead(found: float, expected: float) -> str:
    """Write `2 and not 1 (2 times)`."""
    ratio = found / expected if expected else math.nan
    return f"{found:.6g} and not {expected:.6g} ({ratio:.4g} times)"
