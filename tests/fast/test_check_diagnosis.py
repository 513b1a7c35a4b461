"""``megatron-pg check``: what is said of rows that fail. Nothing is trained here."""

from __future__ import annotations

import math
import re
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


def words(*rows: CheckRow, options: CheckOptions = OPTIONS, world_size: int = 8) -> list[str]:
    return diagnoses(rows, options, world_size)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (RIGHT, ""),
        (scaled(2.0), "gradient is 2 times the reference: 2 = CP"),
        (scaled(0.5), "gradient is 0.5 times the reference: 1/2 = 1/CP"),
        (scaled(5.0), "gradient is 5 times the reference: 5 = M"),
        (scaled(10.0), "gradient is 10 times the reference: 10 = CP * M"),
        (scaled(1 / 20), "gradient is 0.05 times the reference: 1/20 = 1/(M * TP)"),
        (scaled(1.37), "gradient is 1.37 times the reference"),
        (scaled(2.0**16), "gradient is 6.554e+04 times the reference: 65536 = the loss scale"),
        (
            replace(RIGHT, gradient_error=math.inf, common_ratio=math.nan, worst_rank=3),
            "not finite in table on rank 3",
        ),
        (
            replace(RIGHT, loss=-3.0),
            "gradients agree; the reported loss is -3 and not -1.5 (2 times)",
        ),
        (
            replace(RIGHT, checksum=2.0),
            "gradients agree; the weights that reached the loss are 2 times those of the step's totals "
            "(aggregation_checksum)",
        ),
        (
            replace(RIGHT, gradient_error=3e-6, wrong=ALL),
            "off by 3e-06 and by no factor, worst in table on tensor-parallel rank 0: rounding, or a mistake "
            "that small",
        ),
    ],
)
def test_diagnosis_of_a_row(row, expected):
    assert words(row) == [expected]


def test_sizes_that_are_equal_are_all_named():
    options = CheckOptions(context_parallel_size=2, pipeline_model_parallel_size=2)
    found = words(scaled(2.0), options=options)[0]
    assert found == "gradient is 2 times the reference: 2 = CP or 2 = DP or 2 = PP"


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
    assert words(scaled(1 / count))[0].endswith(f": 1/{count} = 1/{divided_by}")


def test_token_counts_of_one_rank_are_named():
    options = CheckOptions()
    active = [sample.num_active_tokens for sample in make_samples(options, 2)]
    ratio = sum(active) / sum(active[1::2])
    found = words(scaled(ratio), options=options, world_size=2)[0]
    assert found.endswith(f": {ratio:.6g} = T over that of data-parallel rank 1")


def test_right_numbers_are_never_a_factor():
    almost = replace(scaled(1.0), gradient_error=1e-2, scaled_error=1e-8)
    for row in (almost, replace(almost, dtype="bf16", gradient_error=0.03)):
        assert "times the reference" not in words(row)[0]


def test_wrong_weights_are_of_loss_only_rows_without_a_factor():
    wrong_loss = off(RIGHT, loss=-1.4)
    assert "tokens have wrong weights" in words(wrong_loss)[0]
    assert all(
        "tokens have wrong weights" in each for each in words(off(MODEL, loss=-1.4), wrong_loss)
    )
    for rows in ([off(MODEL, loss=-1.4), RIGHT], [off(MODEL), RIGHT], [off(RIGHT)], [scaled(2.0)]):
        assert not any("wrong weights" in each for each in words(*rows))


def test_right_loss_with_a_wrong_gradient_is_a_micro_batch():
    found = words(off(MODEL), off(RIGHT))
    assert all("the backward of a micro-batch is missing or done twice" in each for each in found)
    options = replace(OPTIONS, use_distributed_optimizer=True, overlap_grad_reduce=True)
    found = words(off(RIGHT), options=options)
    assert "(without --overlap-grad-reduce or --use-distributed-optimizer)" in found[0]


@pytest.mark.parametrize(
    ("axes", "named"),
    [
        (("TP",), "tensor-parallel ranks"),
        (("CP", "DP"), "context-parallel ranks .*, and over data-parallel ranks"),
        (("PP",), "pipeline stages .*tied embeddings"),
    ],
)
def test_replicas_that_disagree_name_the_group(axes, named):
    row = off(MODEL, "a.norm", replica_error=0.5, replica_axes=axes, replica_parameters=("a.norm",))
    found = words(row, RIGHT)[0]
    assert re.search(
        f"replicas disagree over {named}.*: a.norm; a reduction over that group", found
    )
    assert not replace(RIGHT, replica_error=2e-6).passed


def test_one_loss_mode_alone_is_said():
    found = words(MODEL, per_token(scaled(2.0, MODEL)), RIGHT, per_token(scaled(2.0)))
    assert found[0] == found[2] == ""
    assert "per-token rows alone: look at the token count" in found[1]
    found = words(scaled(2.0), per_token(RIGHT))
    assert "rows per micro-batch alone: look at CP / M" in found[0]


def test_a_factor_of_the_model_is_not_the_losss():
    assert "the loss-only rows pass: it arises in the model" in words(scaled(2.0, MODEL), RIGHT)[0]


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("gspo", "a sum over a whole sequence"),
        ("kept set", "kept sets are scored wrongly"),
        ("loss scale", "the loss scale of fp16"),
        ("recompute", "activations are not recomputed"),
        ("auxiliary loss", "the auxiliary loss of the experts"),
    ],
)
def test_a_case_that_fails_alone_is_named(what, named):
    row = off(MODEL, what=what)
    found = words(MODEL, row, RIGHT)
    assert found[1].startswith("this row alone") and named in found[1]
    assert (
        words(off(MODEL), row, RIGHT)[1] == "follows the gradient rows of this model and loss mode"
    )


def test_optimizer_steps_are_told_apart():
    norm = replace(UPDATE, gradient_norm=2.0)
    assert re.search(r"is 2 and not 1 \(2 times\): .* twice", words(MODEL, norm)[1])
    norm = replace(UPDATE, gradient_norm=0.5)
    assert "not summed over the tensor-parallel ranks" in words(MODEL, norm)[1]
    assert "were not updated" in words(MODEL, off(UPDATE, "a", ratio=0.0))[1]
    assert "are 2 times the reference: the learning rate" in words(MODEL, scaled(2.0, UPDATE))[1]
    options = replace(OPTIONS, use_distributed_optimizer=True)
    assert "all-gather" in words(MODEL, off(UPDATE), options=options)[1]


def test_a_norm_that_does_not_explain_the_step_is_a_stale_gradient():
    stale = off(UPDATE, "a", ratio=1.25, gradient_norm=3.42691)
    stale = replace(stale, reference_norm=3.42682, gradient_error=0.25)
    found = words(MODEL, stale)[1]
    assert "3.42691 and not 3.42682" in found and "stale" in found and "twice" not in found
    decay = scaled(0.5, UPDATE)
    assert "the learning rate, the weight decay" in words(MODEL, decay)[1]


def test_rounding_to_bf16_is_no_missing_backward():
    """The numbers of gradients that are reduced in bf16 over two ranks."""
    model, table = (
        replace(off(row), gradient_error=error) for row, error in ((MODEL, 3.2e-3), (RIGHT, 2.5e-3))
    )
    for found in words(model, table):
        assert "rounding to bf16, in the reduction or the accumulation" in found
    for found in words(off(MODEL), off(RIGHT)):
        assert "rounding" not in found


def test_the_number_of_micro_batches_of_another_rank_is_named():
    """The numbers of two ranks with 5 and 6 micro-batches, both divided by 5."""
    wrong = replace(off(RIGHT), common_ratio=1.1024, scaled_error=0.08, gradient_error=0.117)
    options = CheckOptions()
    found = words(wrong, per_token(RIGHT), options=options, world_size=2)[0]
    assert "5 and 6 micro-batches: a rank's loss is divided by the M of another rank" in found
    found = words(wrong, per_token(wrong), options=options, world_size=2)[0]
    assert (
        "another rank" not in found and "or the reduction leaves the gradients of one rank" in found
    )


def test_a_chunk_of_its_own_scale_is_no_missing_backward():
    options = CheckOptions(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    found = words(off(MODEL, "a", "b", ratio=2.0), scaled(2.0), options=options, world_size=2)
    assert "or in another chunk of the virtual pipeline" in found[0]
    assert "so is a part of the end-to-end model's" in found[1] and "= PP" not in found[1]


def test_vocabulary_shards_are_named_where_the_weights_are_right():
    wrong = off(RIGHT, loss=-1.4)
    assert "vocabulary shards" in words(wrong)[0]
    for found in (
        words(replace(wrong, checksum=0.5))[0],
        words(wrong, options=CheckOptions(context_parallel_size=2))[0],
    ):
        assert "vocabulary" not in found and "tokens have wrong weights" in found


def test_what_fails_in_one_model_alone_is_not_attention():
    for model, named in (("multi-token", "multi-token prediction:"), ("hybrid", "HybridModel")):
        found = words(MODEL, off(replace(MODEL, model=model)), RIGHT)[1]
        assert named in found and "attention" not in found
    contiguous = replace(OPTIONS, cp_partition_mode="contiguous")
    found = words(off(MODEL, loss=-1.4), off(TIED, loss=-1.4), RIGHT, options=contiguous)
    assert all("position ids" in each for each in found[:2])
    found = words(off(MODEL, loss=-1.4), RIGHT, options=CheckOptions(), world_size=2)[0]
    assert "dropout" in found and "a data-parallel rank with other parameters" in found


def test_auxiliary_rows_follow_a_token_that_is_lost():
    lost, auxiliary = (off(MODEL, what=what) for what in ("every token", "auxiliary loss"))
    found = words(MODEL, auxiliary, lost, RIGHT)
    assert (
        found[1] == "follows the row `every token`" and "the last token of a sequence" in found[2]
    )


def test_gradients_left_over_are_named():
    rows = [MODEL, *[off(replace(MODEL, aggregation=name)) for name in ("a", "b")]]
    found = words(*rows, RIGHT, off(replace(RIGHT, aggregation="a")))
    assert [bool(each) for each in found] == [False, True, True, False, True]
    assert all("step before are left over" in each for each in found if each)


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([off(MODEL, loss=-1.4), TIED, RIGHT], "forward is wrong.*look at rotary positions"),
        ([off(TIED, loss=-1.4), MODEL, RIGHT], "forward is wrong.*look at position ids"),
        (
            [off(MODEL, loss=-1.4), RIGHT],
            r"attention over several ranks \(--context-parallel-size 1",
        ),
        ([off(MODEL), RIGHT], "backward, or what hardly moves the loss"),
        ([off(MODEL), RIGHT], "tensor-parallel ranks exchange, .*--tensor-model-parallel-size 1"),
        ([off(MODEL, "layers.0.norm"), RIGHT], "1 of 4 gradients differ .*norms, which finalize"),
        (
            [off(MODEL, "mlp.experts.1", "mlp.experts.2", ratio=2.0), RIGHT],
            "2 of 4 gradients are 2 times the reference: 2 = CP.*experts have a data-parallel group",
        ),
        ([off(MODEL)], "no loss-only rows.*without --fused-lm-head"),
    ],
)
def test_wrong_models_name_what_to_look_at(rows, named):
    assert re.search(named, words(*rows)[0]), words(*rows)[0]


def test_a_pipeline_stage_is_named():
    options = CheckOptions(pipeline_model_parallel_size=2)
    row = off(MODEL, "a", "b", ratio=2.0, wrong_stages=(0,), wrong_ranks=(0,))
    found = words(row, RIGHT, options=options, world_size=2)[0]
    assert "are 2 times the reference: 2 = PP on pipeline stage 0 alone" in found
    assert "sends back" in found and "micro-batch" not in found
    row = replace(row, wrong_scaled_error=0.3)
    assert "backward of a micro-batch" in words(row, RIGHT, options=options, world_size=2)[0]
    row = off(MODEL, "a", ratio=107.0, wrong_stages=(0,), calculate_per_token_loss=True)
    found = words(MODEL, row, per_token(RIGHT), options=options, world_size=2)[1]
    assert "the token count" in found and "micro-batch" not in found
