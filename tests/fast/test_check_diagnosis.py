"""``megatron-pg check``: what is said of rows that fail. Nothing is trained here."""

import math
from dataclasses import replace
from typing import Any

import pytest

from megatron_pg.check.compare import CheckRow
from megatron_pg.check.diagnosis import diagnoses
from megatron_pg.check.options import CheckOptions
from megatron_pg.check.samples import make_samples

from .test_check_report import RIGHT

MODEL = replace(RIGHT, model="end to end", worst_parameter="decoder.layers.0.mlp.linear_fc1.weight")
TIED = replace(MODEL, model="tied")
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
    (replace(RIGHT, loss=-3.0), "gradients agree; the reported loss is -3 and not -1.5 (2 times)"),
    (
        replace(RIGHT, checksum=2.0),
        "gradients agree; the weights that reached the loss are 2 times those of the step's totals "
        "(aggregation_checksum)",
    ),
    (
        replace(RIGHT, gradient_error=3e-6, wrong=ALL),
        "off by 3e-06 and by no factor, worst in table on tensor-parallel rank 0: rounding, or a "
        "mistake that small",
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
    assert found.endswith(f": {ratio:.6g} = T over that of data-parallel rank 1")


def changed(**options: Any) -> tuple[CheckOptions, int]:
    return replace(OPTIONS, **options), 8


def on_two_ranks(**options: int) -> tuple[CheckOptions, int]:
    return CheckOptions(**options), 2


def replicas(*axes: str) -> list[CheckRow]:
    disagreement = {"replica_error": 0.5, "replica_axes": axes, "replica_parameters": ("a.norm",)}
    return [off(MODEL, "a.norm", **disagreement), RIGHT]


def alone(what: str) -> list[CheckRow]:
    return [MODEL, off(MODEL, what=what), RIGHT]


def step(row: CheckRow) -> list[CheckRow]:
    return [MODEL, row]


PIPELINE = on_two_ranks(pipeline_model_parallel_size=2)
WRONG = off(RIGHT, loss=-1.4)
ALMOST = replace(scaled(1.0), gradient_error=1e-2, scaled_error=1e-8)
TO_BF16 = [replace(off(MODEL), gradient_error=3.2e-3), replace(off(RIGHT), gradient_error=2.5e-3)]
OTHER_M = replace(off(RIGHT), common_ratio=1.1024, scaled_error=0.08, gradient_error=0.117)
"""The numbers of two ranks with 5 and 6 micro-batches, both divided by 5."""
LOST, AUXILIARY = (off(MODEL, what=what) for what in ("every token", "auxiliary loss"))
STALE = off(UPDATE, "a", ratio=1.25, gradient_norm=3.42691)
STALE = replace(STALE, reference_norm=3.42682, gradient_error=0.25)
STAGE = off(MODEL, "a", "b", ratio=2.0, wrong_stages=(0,), wrong_ranks=(0,))
TOKENS_OF_STAGE = off(MODEL, "a", ratio=107.0, wrong_stages=(0,), calculate_per_token_loss=True)
BACKWARD = "the backward of a micro-batch is missing or done twice"
WEIGHTS = "tokens have wrong weights"
HARDLY = "backward, or what hardly moves the loss"
LEFT_OVER = "step before are left over"

CASES: dict[str, tuple[Any, ...]] = {
    # name: (rows, options and processes if others, words of the diagnosis of a row, "!" before
    # those that it lacks and "^" before its first)
    "almost right": ([ALMOST], {0: "!times the reference"}),
    "almost right in "
    "bf16": ([replace(ALMOST, dtype="bf16", gradient_error=0.03)], {0: "!times the reference"}),
    "sizes that are equal": (
        [scaled(2.0)], (CheckOptions(context_parallel_size=2, pipeline_model_parallel_size=2), 8),
        {0: "gradient is 2 times the reference: 2 = CP or 2 = DP or 2 = PP"},
    ),
    "wrong weights": ([WRONG], {0: f"{WEIGHTS} | vocabulary shards"}),
    "wrong weights in both models": ([off(MODEL, loss=-1.4), WRONG], {0: WEIGHTS, 1: WEIGHTS}),
    "a wrong backward": ([off(RIGHT)], {0: f"!{WEIGHTS}"}),
    "a factor": ([scaled(2.0)], {0: f"!{WEIGHTS}"}),
    "a micro-batch lost": (
        [off(MODEL), off(RIGHT)], {0: f"{BACKWARD} | !rounding", 1: f"{BACKWARD} | !rounding"}
    ),
    "a micro-batch lost beside an overlap": (
        [off(RIGHT)], changed(use_distributed_optimizer=True, overlap_grad_reduce=True),
        {0: "(without --overlap-grad-reduce or --use-distributed-optimizer)"},
    ),
    "replicas of TP": (replicas("TP"), {0: "replicas disagree over tensor-parallel ranks | : "
                                           "a.norm; a reduction over that group"}),
    "replicas of CP and DP": (
        replicas("CP", "DP"),
        {0: "replicas disagree over context-parallel ranks | , and over data-parallel ranks | : "
            "a.norm; a reduction over that group"},
    ),
    "replicas of PP": (
        replicas("PP"),
        {0: "replicas disagree over pipeline stages | tied embeddings | : a.norm; a reduction over "
            "that group"},
    ),
    "per-token mode alone": (
        [MODEL, per_token(scaled(2.0, MODEL)), RIGHT, per_token(scaled(2.0))],
        {0: "", 1: "per-token rows alone: look at the token count", 2: ""},
    ),
    "the other mode alone": ([scaled(2.0), per_token(RIGHT)], {0: "rows per micro-batch alone: "
                                                                  "look at CP / M"}),
    "a factor of the model": ([scaled(2.0, MODEL), RIGHT], {0: "the loss-only rows pass: it arises "
                                                               "in the model"}),
    "gspo": (alone("gspo"), {1: "^this row alone | a sum over a whole sequence"}),
    "kept set": (alone("kept set"), {1: "^this row alone | kept sets are scored wrongly"}),
    "loss scale": (alone("loss scale"), {1: "^this row alone | the loss scale of fp16"}),
    "recompute": (alone("recompute"), {1: "^this row alone | activations are not recomputed"}),
    "auxiliary loss": (alone("auxiliary loss"), {1: "^this row alone | the auxiliary loss of the "
                                                    "experts"}),
    "two losses of routers": (
        [*alone("sequence loss"), off(MODEL, what="global loss")],
        {1: "^the rows sequence loss, global loss alone | seq_aux_loss", 3: "global_aux_loss | "
                                                                            "!this row alone"},
    ),
    "gspo beside a wrong gradient": (
        [off(MODEL), off(MODEL, what="gspo"), RIGHT],
        {1: "follows the gradient rows of this model and loss mode"},
    ),
    "a norm counted twice": (step(replace(UPDATE, gradient_norm=2.0)), {1: "is 2 and not 1 (2 "
                                                                           "times):  | twice"}),
    "a norm of one shard": (step(replace(UPDATE, gradient_norm=0.5)), {1: "not summed over the "
                                                                          "tensor-parallel ranks"}),
    "no update": (step(off(UPDATE, "a", ratio=0.0)), {1: "were not updated"}),
    "updates of a factor": (step(scaled(2.0, UPDATE)), {1: "are 2 times the reference: the "
                                                           "learning rate"}),
    "half updates": (step(scaled(0.5, UPDATE)), {1: "the learning rate, the weight decay"}),
    "updates of a distributed "
    "optimizer": (step(off(UPDATE)), changed(use_distributed_optimizer=True), {1: "all-gather"}),
    "a stale gradient": (step(STALE), {1: "3.42691 and not 3.42682 | stale | !twice"}),
    "gradients reduced in bf16 over two ranks": (
        TO_BF16, dict.fromkeys((0, 1), "rounding to bf16, in the reduction or the accumulation")
    ),
    "M of another rank": (
        [OTHER_M, per_token(RIGHT)], on_two_ranks(),
        {0: "5 and 6 micro-batches: a rank's loss is divided by the M of another rank"},
    ),
    "both modes wrong": (
        [OTHER_M, per_token(OTHER_M)], on_two_ranks(),
        {0: "!another rank | or the reduction leaves the gradients of one rank"},
    ),
    "a chunk of its own scale": (
        [off(MODEL, "a", "b", ratio=2.0), scaled(2.0)],
        on_two_ranks(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
        {0: "or in another chunk of the virtual pipeline", 1: "so is a part of the end-to-end "
                                                              "model's | != PP"},
    ),
    "weights and checksum": ([replace(WRONG, checksum=0.5)], {0: f"!vocabulary | {WEIGHTS}"}),
    "weights without shards": (
        [WRONG], (CheckOptions(context_parallel_size=2), 8), {0: f"!vocabulary | {WEIGHTS}"}
    ),
    "multi-token": (
        [MODEL, off(replace(MODEL, model="multi-token")), RIGHT],
        {1: "multi-token prediction: | !attention"},
    ),
    "hybrid": (
        [MODEL, off(replace(MODEL, model="hybrid")), RIGHT], {1: "HybridModel | !attention"}
    ),
    "dropout": ([off(MODEL, loss=-1.4), RIGHT], on_two_ranks(), {0: "dropout | a data-parallel "
                                                                    "rank with other parameters"}),
    "a token that is lost": (
        [MODEL, AUXILIARY, LOST, RIGHT], {1: "follows the row `every "
                                             "token`", 2: "the last token of a sequence"}
    ),
    "gradients left over": (
        [MODEL, *(off(replace(MODEL, aggregation=name)) for name in "ab"), RIGHT,
         off(replace(RIGHT, aggregation="a"))],
        {0: "", 1: LEFT_OVER, 2: LEFT_OVER, 3: "", 4: LEFT_OVER},
    ),
    "rotary positions": ([off(MODEL, loss=-1.4), TIED, RIGHT], {0: "forward is wrong | look at "
                                                                   "rotary positions"}),
    "position ids of one model": ([off(TIED, loss=-1.4), MODEL, RIGHT], {0: "forward is wrong | "
                                                                            "look at position "
                                                                            "ids"}),
    "attention": (
        [off(MODEL, loss=-1.4), RIGHT],
        {0: f"attention over several ranks (--context-parallel-size 1 | "
            f"!{WEIGHTS}", 1: f"!{WEIGHTS}"},
    ),
    "backward of the model": (
        [off(MODEL), RIGHT],
        {0: f"{HARDLY} | tensor-parallel ranks exchange,  | --tensor-model-parallel-size 1 | "
            f"!{WEIGHTS}", 1: f"!{WEIGHTS}"},
    ),
    "a norm": ([off(MODEL, "layers.0.norm"), RIGHT], {0: "1 of 4 gradients differ | norms, which "
                                                         "finalize"}),
    "experts": (
        [off(MODEL, "mlp.experts.1", "mlp.experts.2", ratio=2.0), RIGHT],
        {0: "2 of 4 gradients are 2 times the reference: 2 = CP | experts have a data-parallel "
            "group"},
    ),
    "no loss-only rows": ([off(MODEL)], {0: "no loss-only rows | without --fused-lm-head"}),
    "a stage": (
        [STAGE, RIGHT], PIPELINE,
        {0: "are 2 times the reference: 2 = PP on pipeline stage 0 alone | sends back | "
            "!micro-batch"},
    ),
    "three ranks of many": (
        [replace(off(MODEL, "a", ratio=2.0), wrong_places="rank 17 (host node2, DP 2)"), RIGHT],
        {0: "on rank 17 (host node2, DP 2) alone"},
    ),
    "a stage by no factor": (
        [replace(STAGE, wrong_scaled_error=0.3), RIGHT], PIPELINE, {0: "backward of a micro-batch"}
    ),
    "tokens of a stage": (
        [MODEL, TOKENS_OF_STAGE, per_token(RIGHT)], PIPELINE, {1: "the token count | !micro-batch"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_said_of_a_failure(case):
    rows, *where, expected = CASES[case]
    said = diagnoses(rows, *(where[0] if where else (OPTIONS, 8)))
    for place, words in expected.items():
        for word in words.split(" | "):
            match word[:1]:
                case "!":
                    assert word[1:] not in said[place]
                case "^":
                    assert said[place].startswith(word[1:])
                case _:
                    assert word in said[place]
        assert words or not said[place]
