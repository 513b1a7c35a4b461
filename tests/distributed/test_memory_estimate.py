"""The memory estimate of a dry run against the peaks of whole steps in
docs/records/benchmarks.md.
"""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from trainer.arguments import parse_arguments
from trainer.dry_run import GIB, estimate_memory

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]

MODEL = (
    "train.py --device cuda --bf16 --use-distributed-optimizer --num-layers 16 --hidden-size 2048 "
    "--ffn-hidden-size 5632 --num-attention-heads 16 --group-query-attention --num-query-groups 8 "
    "--swiglu "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope --vocab-size "
    "151936 "
    "--seq-length 65536 --max-position-embeddings 65536 --attention-dropout 0 --hidden-dropout 0 "
    "--lr 1e-6 "
    "--train-iters 1 --rollout-files rollouts --docs-per-step 4"
)
MEASURED = {  # (TP, CP, tokens of a micro-batch): GiB with float32 logits, with the fused head
    (1, 1, 8192): (32.8, 26.9),
    (1, 1, 16384): (47.6, 34.8),
    (1, 1, 32768): (77.1, 50.7),
    (1, 2, 8192): (19.4, 17.1),
    (1, 2, 32768): (41.6, 29.0),
    (2, 1, 8192): (16.6, 14.1),
    (2, 1, 32768): (39.0, 26.3),
    (2, 2, 32768): (21.1, 15.4),
    (2, 2, 65536): (36.0, 23.5),
}


def estimate(tensor: int, context: int, tokens: int, flags: str = "--sequence-parallel"):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(tensor * context))
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        sizes = f"--tensor-model-parallel-size {tensor} --context-parallel-size {context}"
        line = f"{MODEL} {sizes} --max-tokens-per-microbatch {tokens} {flags}"
        patch.setattr(sys, "argv", line.split())
        return estimate_memory(parse_arguments())


def test_it_lies_within_3_percent_of_what_was_measured() -> None:
    """Measured with chunks of 1.25 GiB, all of the default of that time."""
    flags = "--sequence-parallel"
    names = {(1, 1): "1", (1, 2): "2, CP 2", (2, 1): "2, TP 2", (2, 2): "4, TP 2 CP 2"}
    lines = []
    for case, measured in MEASURED.items():
        tensor, context, tokens = case
        memory = estimate(*case, flags)
        chunk = min(tokens // context * 151936 // tensor * 2, 1.25 * GIB)
        memory = replace(memory, fused_head=chunk + tokens // context * 2048 * 4)
        found = [memory.total(fused=fused) / GIB for fused in (False, True)]
        assert found == pytest.approx(measured, rel=0.03), case
        cells = [f"{value} | {ours:.1f}" for value, ours in zip(measured, found, strict=True)]
        lines.append(f"| {names[case[:2]]} | {case[2]} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    assert table in (ROOT / "docs/records/benchmarks.md").read_text(), table


def test_the_measured_numbers_are_those_of_the_benchmarks() -> None:
    """Of its columns: float32 logits with our kernels, and fused."""
    page = (ROOT / "docs/records/benchmarks.md").read_text()
    rows = re.findall(r"^\|(?: \|)? GiB \|(.*)\|$", page, re.M)
    found = {(float(cells.split("|")[2]), float(cells.split("|")[4])) for cells in rows}
    assert set(MEASURED.values()) <= found


def test_recomputation_leaves_the_inputs_of_the_layers() -> None:
    kept = estimate(1, 1, 32768)
    flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    recomputed = estimate(1, 1, 32768, flags)
    one_layer = kept.activations / 16
    inputs = 16 * 32768 * 2048 * 2
    assert recomputed.activations == pytest.approx(inputs + one_layer, rel=0.02)
    assert recomputed.states == kept.states and recomputed.logits == kept.logits


def test_float32_logits_of_the_plain_layer_are_no_copy() -> None:
    plain, wide = (estimate(1, 1, 32768, flags) for flags in ("", "--fp32-lm-head"))
    assert plain.logits == 32768 * 151936 * 6
    assert wide.logits == 32768 * 151936 * 4 + 8192 * 151936 * 2
    assert plain.fused_head < wide.fused_head < wide.logits


@pytest.mark.parametrize(
    "tensor, flags, rows",
    [
        (1, "", 8192),
        # Twice 2.5 GiB hold 17666 rows of 151936 columns.
        (1, "--use-opsm", 17666),
        (1, "--fused-lm-head --fused-lm-head-memory-gib 1.25", 4096),
        # Of a shard of 18992 columns the budget holds more rows than a chunk has; a sequence may
        # have all.
        (8, "", 8192),
        (8, "--use-opsm", 32768),
        # Half of the rows, twice.
        (1, "--distill-coef 1 --distill-teacher top_k", 8192),
    ],
)
def test_the_head_holds_the_rows_of_its_chunk(tensor: int, flags: str, rows: int) -> None:
    head = estimate(tensor, 1, 32768, f"--sequence-parallel {flags}").fused_head
    assert head == rows * 151936 // tensor * 2 + 32768 * 2048 * 4


def test_without_sequence_parallelism_ranks_hold_more() -> None:
    flags = ("--sequence-parallel", "", "--ffn-hidden-size 22528")
    split, whole, wide = (estimate(2, 1, 32768, each).activations for each in flags)
    inputs = 16 * 32768 * 2048 * 8  # of 16 layers, 8 bytes each
    assert whole - split == pytest.approx(inputs / 2, rel=1e-6)
    assert wide > 2 * whole


def test_every_axis_divides_what_it_shards() -> None:
    whole, tensor, context = (estimate(*sizes, 8192) for sizes in ((1, 1), (2, 1), (1, 2)))
    assert whole.parameters == tensor.parameters == pytest.approx(1.07e9, rel=0.01)
    assert whole.states == pytest.approx(18 * whole.parameters, rel=1e-6)
    assert tensor.states == pytest.approx(9 * whole.parameters, rel=0.01)
    # The optimizer's 12 bytes lie on 2 ranks.
    assert context.states == pytest.approx(12 * whole.parameters, rel=0.01)
    for half in (tensor, context):
        assert half.logits == whole.logits / 2
        assert half.activations == pytest.approx(whole.activations / 2, rel=0.01)
