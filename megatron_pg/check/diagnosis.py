"""The diagnosis of failed rows: what is wrong, where, and by which factor.

The rules see all rows. The first one that fits a row is its diagnosis.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

from megatron_pg.check.cases import LOSS_SCALE
from megatron_pg.check.compare import CheckRow
from megatron_pg.check.options import CheckOptions
from megatron_pg.check.samples import make_samples

OWN_ORDER = (
    "first weights",
    "noise",
    "pack",
    "pack reversed",
    "log-probs",
    "gradient",
    "fused head",
    "update",
    "frozen",
)
"""The rows of the user's model, in order. If one fails, the later failures follow from it."""
AXIS_NAMES = {
    "TP": "tensor-parallel ranks",
    "CP": "context-parallel ranks",
    "DP": "data-parallel ranks",
    "PP": "pipeline stages",
}


def diagnoses(rows: Sequence[CheckRow], options: CheckOptions, world_size: int) -> list[str]:
    """Return what is wrong in each failed row, "" for a passed one."""
    data_size = world_size // options.model_parallel_size
    return ["" if row.passed else _Finding(row, rows, options, data_size).words() for row in rows]


class _Finding:
    """A failed row among all rows of the check."""

    def __init__(
        self, row: CheckRow, rows: Sequence[CheckRow], options: CheckOptions, data_size: int
    ) -> None:
        self.row, self.rows, self.options, self.data_size = row, rows, options, data_size
        tolerance = 1e-3 if row.limit is not None else row.tolerance
        self.slack = min(10 * tolerance, 0.05)
        """The relative tolerance for a ratio to match a number."""
        # All gradients, or the wrong ones, have one common factor that is not 1.
        self.all_have_factor = row.scaled_error <= self.slack < abs(row.common_ratio - 1.0)
        self.wrong_have_factor = row.wrong_scaled_error <= self.slack < abs(row.wrong_ratio - 1.0)
        counts = [options.num_microbatches(rank) for rank in range(data_size)]
        self.micro_batches = few, many = min(counts), max(counts)
        """The smallest and largest number of micro-batches of a data-parallel rank."""
        self.sizes = {
            "CP": options.context_parallel_size,
            "DP": data_size,
            "M": few if few == many else 1,
            "TP": options.tensor_model_parallel_size,
            "PP": options.pipeline_model_parallel_size,
            "EP": options.expert_model_parallel_size,
        }

    def words(self) -> str:
        words = self._what()
        if not self.row.samples_counted_once:
            words += (
                f"; the sample weights in the loss add up to {self.row.checksum:.4g} instead of 1 "
                "(aggregation_checksum)"
            )
        return words

    def _what(self) -> str:
        row = self.row
        order = OWN_ORDER.index(row.what) if row.limit is not None else 0
        for what in OWN_ORDER[:order]:
            if any(each.what == what and not each.passed for each in self.rows):
                return f"follows the row `{what}`"
        if row.limit is not None and row.words:
            return row.words + ("" if row.ratio is None else self._factors(row.ratio))
        if not (math.isfinite(row.gradient_error) and math.isfinite(row.common_ratio)):
            place = row.worst_name or f"rank {row.worst_rank}"
            return f"not finite in {row.worst_parameter} on {place}"
        if row.what not in ("gradient", "first weights") and self._is_wrong("gradient"):
            return "follows the gradient rows of this model and loss mode"
        if row.gradients_agree:
            return f"gradients agree{self._loss_or_norm()}"
        if row.replica_error > row.tolerance:
            axes = ", and over ".join(AXIS_NAMES[axis] for axis in row.replica_axes)
            places = self._where()
            return (
                f"replicas disagree over {axes or 'some group'}: "
                f"{_named(row.replica_parameters)}{places}{self._kind()}{self._mode()}"
            )
        if self.all_have_factor:
            ratio = row.common_ratio
            return f"gradient is {self._times(ratio)}{self._mode()}"
        few, many = self.micro_batches
        if few < many and few / many <= row.common_ratio <= many / few and row.loss_agrees:
            beside = f"; the data-parallel ranks have {few} and {many} micro-batches"
        else:
            beside = "" if row.loss_agrees else "; the loss differs too"
        count = f"{len(row.wrong)} of {row.num_parameters} "
        what = "updates" if row.what == "update" else "gradients"
        how = f"are {self._times(row.wrong_ratio)}" if self.wrong_have_factor else "differ"
        worst = f"{row.worst_parameter} is off by {row.gradient_error:.2g}"
        return (
            f"{count}{what} {how}{self._where()} ({_named(row.wrong)}); {worst}{beside}"
            f"{self._mode()}"
        )

    def _is_wrong(self, what: str) -> bool:
        kind = (self.row.model, self.row.calculate_per_token_loss, what)
        rows = (r for r in self.rows if (r.model, r.calculate_per_token_loss, r.what) == kind)
        return any(not row.passed for row in rows)

    def _loss_or_norm(self) -> str:
        row, words = self.row, ""
        if not row.loss_agrees:
            words += f"; the reported loss is {_instead(row.loss, row.reference_loss)}"
        if not row.norm_agrees:
            found, expected = row.gradient_norm or 0.0, row.reference_norm or 1.0
            words += f"; the gradient norm is {_instead(found, expected)}"
        return words

    def _kind(self) -> str:
        """Name the fault of the first parameter, if it is more than a difference between copies."""
        kinds = [fault.kind for fault in self.row.faults if not fault.kind.startswith("its copies")]
        return f" ({kinds[0]})" if kinds else ""

    def _mode(self) -> str:
        """Name the loss mode that fails, if the other one passes."""
        rows = [row for row in self.rows if row.what == "gradient"]
        failed = {row.calculate_per_token_loss for row in rows if not row.passed}
        if len(failed) != 1 or len({row.calculate_per_token_loss for row in rows}) == 1:
            return ""
        return "; per-token rows only" if failed == {True} else "; rows per micro-batch only"

    def _where(self) -> str:
        """Name the stages and ranks with wrong gradients, or "" for all."""
        stages, places = self.row.wrong_stages, self.row.wrong_places
        if 0 < len(stages) < self.sizes["PP"]:
            rest = " ..." if len(stages) > 4 else ""
            named = f" on pipeline stage {', '.join(map(str, stages[:4]))}{rest} only"
            return f"{named} ({places})" if places else named
        return f" on {places} only" if places else ""

    def _times(self, ratio: float) -> str:
        return f"{ratio:.4g} times the reference{self._factors(ratio)}"

    def _factors(self, ratio: float) -> str:
        """Name the sizes or counts whose product or its inverse is a ratio, as in ": 2 = CP or 2 =
        DP", or "" for none.
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
        """Yield the products of one, two and three sizes, then the step's counts and T over each
        rank's T.
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
        few, many = self.micro_batches
        yield {
            "T": total,
            "N": len({sample.rollout_id for sample in samples}),
            "P": len({sample.group_index for sample in samples}),
            "the loss scale": LOSS_SCALE,
            "all tokens over T": sum(sample.total_length for sample in samples) / total,
            "M of one rank over M of a different rank": many / few if many > few else math.inf,
        } | {
            f"T over data-parallel rank {rank}'s T": total / sum(active[rank :: self.data_size])
            for rank in range(min(self.data_size, 8) if self.data_size > 1 else 0)
        }


def _named(names: Sequence[str]) -> str:
    """List three names and count the rest."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def _instead(found: float, expected: float) -> str:
    """Write `2 instead of 1 (2 times)`."""
    ratio = found / expected if expected else math.nan
    return f"{found:.6g} instead of {expected:.6g} ({ratio:.4g} times)"
