"""``megatron-pg check``: what is said of rows that fail. Nothing is trained here."""

import math
from dataclasses import replace
from typing import Any

import pytest

from megatron_pg.check.compare import CheckRow, Fault
from megatron_pg.check.diagnosis import diagnoses
from megatron_pg.check.options import CheckOptions
from megatron_pg.check.samples import make_samples

from .test_check_report import RIGHT

MODEL = replace(RIGHT, model="end to end", worst_parameter="decoder.layers.0.mlp.linear_fc1.weight")
UPDATE = replace(MODEL, what="update", gradient_norm=1.0, reference_norm=1.0)
ALL = ("a", "b", "c", "d")


def scaled(ratio: float, row: CheckRow = RIGHT) -> CheckRow:
    return replace(
        row,
        gradient_error=abs(ratio - 1),
        worst_ratio=ratio,
        common_ratio=ratio,
        wrong=ALL,
        wrong_ratio=ratio,
    )


def off(row: CheckRow, *wrong: str, ratio: float | None = None, **changes: Any) -> CheckRow:
    """Wrong in these parameters, without a common factor where none is given."""
    return replace(
        replace(row, gradient_error=0.5, common_ratio=0.9, scaled_error=0.2, wrong=wrong or ALL),
        wrong_ratio=0.8 if ratio is None else ratio,
        wrong_scaled_error=0.3 if ratio is None else 1e-7,
        **changes,
    )


def per_token(row: CheckRow) -> CheckRow:
    return replace(row, calculate_per_token_loss=True)


OPTIONS = CheckOptions(context_parallel_size=2, tensor_model_parallel_size=4)
NOT_FINITE = replace(RIGHT, gradient_error=math.inf, common_ratio=math.nan, worst_rank=3)


@pytest.mark.parametrize(("row", "expected"), [
    (RIGHT, ""),
    (scaled(2.0), "gradient is 2 times the reference: 2 = CP"),
    (scaled(0.5), "gradient is 0.5 times the reference: 1/2 = 1/CP"),
    (scaled(5.0), "gradient is 5 times the reference: 5 = M"),
    (scaled(10.0), "gradient is 10 times the reference: 10 = CP * M"),
    (scaled(1 / 20), "gradient is 0.05 times the reference: 1/20 = 1/(M * TP)"),
    (scaled(1.37), "gradient is 1.37 times the reference"),
    (scaled(2.0**16), "gradient is 6.554e+04 times the reference: 65536 = the loss scale"),
    (NOT_FINITE, "not finite in table on rank 3"),
    (
        replace(RIGHT, loss=-3.0),
        "gradients agree; the reported loss is -3 instead of -1.5 (2 times)",
    ),
    (
        replace(RIGHT, checksum=2.0),
        "gradients agree; the sample weights in the loss add up to 2 instead of 1 "
        "(aggregation_checksum)",
    ),
    (
        replace(RIGHT, gradient_error=3e-6, wrong=ALL),
        "4 of 4 gradients differ (a, b, c and 1 more); table is off by 3e-06",
    ),
])  # fmt: skip
def test_diagnosis_of_a_row(row, expected):
    assert diagnoses([row], OPTIONS, 8) == [expected]


@pytest.mark.parametrize("divided_by", ["T", "N", "P"])
def test_a_factor_that_is_a_count_of_the_step_is_named(divided_by):
    samples = make_samples(OPTIONS, 1)
    count = {
        "T": sum(sample.num_active_tokens for sample in samples),
        "N": len({sample.rollout_id for sample in samples}),
        "P": len({sample.group_index for sample in samples}),
    }[divided_by]
    if divided_by == "P":  # 5, as M is
        count, divided_by = 5, "M"
    (found,) = diagnoses([scaled(1 / count)], OPTIONS, 8)
    assert found.endswith(f": 1/{count} = 1/{divided_by}")


def test_token_counts_of_one_rank_are_named():
    options = CheckOptions()
    active = [sample.num_active_tokens for sample in make_samples(options, 2)]
    ratio = sum(active) / sum(active[1::2])
    (found,) = diagnoses([scaled(ratio)], options, 2)
    assert found.endswith(f": {ratio:.6g} = T over data-parallel rank 1's T")


def replicas(*axes: str) -> list[CheckRow]:
    disagreement = {"replica_error": 0.5, "replica_axes": axes, "replica_parameters": ("a.norm",)}
    kind = f"each {axes[0]} rank holds a partial sum, which is not reduced over them"
    return [off(MODEL, "a.norm", faults=(Fault("a.norm", kind),), **disagreement), RIGHT]


STAGE = off(MODEL, "a", "b", ratio=2.0, wrong_stages=(0,), wrong_ranks=(0,))
OTHER_M = replace(off(RIGHT), common_ratio=1.1024, scaled_error=0.08, gradient_error=0.117)
"""The numbers of two ranks with 5 and 6 micro-batches, both divided by 5."""
OWN = replace(MODEL, model="your model", limit=10.0, loss_limit=1.0)
OF_TWO = CheckOptions(), 2

CASES: dict[str, tuple[Any, ...]] = {
    # name: (rows, options and processes if others, words of the diagnosis of a row, "!" before
    # those that it lacks)
    "almost right": (
        [replace(scaled(1.0), gradient_error=1e-2, scaled_error=1e-8)],
        {0: "!times the reference"},
    ),
    "sizes that are equal": (
        [scaled(2.0)],
        (CheckOptions(context_parallel_size=2, pipeline_model_parallel_size=2), 8),
        {0: "gradient is 2 times the reference: 2 = CP or 2 = DP or 2 = PP"},
    ),
    "wrong weights": ([off(RIGHT, loss=-1.4)], {0: "gradients differ | the loss differs too"}),
    "a wrong backward": ([off(RIGHT)], {0: "gradients differ | !the loss"}),
    "replicas": (
        replicas("TP"),
        {0: "replicas disagree over tensor-parallel ranks: a.norm (each TP rank holds a partial"},
    ),
    "replicas of two axes": (
        replicas("CP", "DP"),
        {0: "over context-parallel ranks, and over data-parallel ranks: a.norm"},
    ),
    "per-token mode only": (
        [MODEL, per_token(scaled(2.0, MODEL)), RIGHT, per_token(scaled(2.0))],
        {0: "", 1: "; per-token rows only", 2: ""},
    ),
    "the other mode only": ([scaled(2.0), per_token(RIGHT)], {0: "; rows per micro-batch only"}),
    "a case": ([MODEL, off(MODEL, what="gspo"), RIGHT], {1: "gradients differ"}),
    "a case beside a wrong gradient": (
        [off(MODEL), off(MODEL, what="gspo"), RIGHT],
        {1: "follows the gradient rows of this model and loss mode"},
    ),
    "a norm": (
        [MODEL, replace(UPDATE, gradient_norm=2.0)],
        {1: "gradients agree; the gradient norm is 2 instead of 1 (2 times)"},
    ),
    "updates of a factor": (
        [MODEL, off(UPDATE, "a", ratio=2.0)],
        {1: "1 of 4 updates are 2 times the reference: 2 = CP (a)"},
    ),
    "M of another rank": ([OTHER_M], OF_TWO, {0: "data-parallel ranks have 5 and 6 micro-batches"}),
    "a stage": (
        [STAGE, RIGHT],
        (CheckOptions(pipeline_model_parallel_size=2), 2),
        {0: "2 of 4 gradients are 2 times the reference: 2 = PP on pipeline stage 0 only (a, b)"},
    ),
    "three ranks of many": (
        [replace(off(MODEL, "a", ratio=2.0), wrong_places="rank 17 (host node2, DP 2)"), RIGHT],
        {0: "on rank 17 (host node2, DP 2) only"},
    ),
    "weights and checksum": (
        [replace(off(RIGHT), checksum=0.5)],
        {0: "the sample weights in the loss add up to 0.5 instead"},
    ),
    "words of the user's model": (
        [replace(off(OWN, words="the gradient of a is wrong", gradient_error=50.0), ratio=2.0)],
        {0: "the gradient of a is wrong: 2 = CP"},
    ),
    "what follows a leak": (
        [replace(OWN, what=what, gradient_error=50.0, words="a") for what in ("pack", "gradient")],
        {0: "a", 1: "follows the row `pack`"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_said_of_a_failure(case):
    rows, *where, expected = CASES[case]
    said = diagnoses(rows, *(where[0] if where else (OPTIONS, 8)))
    for place, words in expected.items():
        for word in words.split(" | "):
            assert (word[1:] not in said[place]) if word[:1] == "!" else word in said[place]
        assert words or not said[place]
