"""From rollout files examples/train.py takes the same steps however Megatron shards the model.

A run in one process takes three steps. Each sharding goes on from its checkpoint after the first,
with parameters and moments cut anew, and takes the other two.
"""

from pathlib import Path
from typing import Any

import pytest

from .trainer_run import WHOLE_GROUPS, copy_after_step, run, steps_of, without_log_probs

pytestmark = pytest.mark.full

STEPS = WHOLE_GROUPS + (
    "--num-layers 4 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --swiglu "
    "--ffn-hidden-size 32 "
    "--qk-layernorm --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights "
    "--position-embedding-type rope --lr-decay-style constant --train-iters 3 --save-interval 1 "
    # Adam's first steps go by the signs of the gradients: one that is rounding alone would move its
    # parameter. Not with a large epsilon.
    "--lr 0.1 --adam-eps 0.1 "
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none "

SHARDINGS = {
    "TP2 SP": "--tensor-model-parallel-size 2 --sequence-parallel",
    "PP2": "--pipeline-model-parallel-size 2",
    "PP2 VPP2": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "CP2 recompute": "--context-parallel-size 2 --recompute-granularity full --recompute-method "
    "uniform "
    "--recompute-num-layers 1",
}
UNLIKE = {"seconds_rollouts", "seconds_scoring", "seconds_training", "skipped_rows"}
"""How far ahead of a step the files are read depends on the number of data-parallel ranks."""


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of every second row the run makes the log-probs itself."""
    return without_log_probs(tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl", 2)


def in_one_process(rollouts: Path, name: str, flags: str) -> Path:
    folder = rollouts.with_name(name)
    run(rollouts, folder, flags, world_size=1)
    return folder


@pytest.fixture(scope="module")
def dense(rollouts: Path) -> Path:
    return in_one_process(rollouts, "dense", STEPS)


def assert_same_steps(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """To float32 rounding, metrics of sums of a few hundred terms."""
    assert len(found) == len(expected) == 3
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert one["grad_norm"] > 0.0
        for name in one.keys() - UNLIKE:
            assert one[name] == pytest.approx(other[name], rel=2e-5, abs=2e-6), name


def go_on(rollouts: Path, first: Path, folder: Path, flags: str) -> None:
    """Steps 2 and 3 on two processes, after the first step of `first`."""
    copy = copy_after_step(1, first, folder / "run")
    run(rollouts, copy, flags)
    assert_same_steps(steps_of(copy), steps_of(first))


@pytest.mark.parametrize("name", SHARDINGS)
def test_every_sharding_takes_the_same_steps(rollouts, dense, tmp_path, name):
    go_on(rollouts, dense, tmp_path, STEPS + SHARDINGS[name])


def test_the_distributed_optimizer_takes_the_same_steps(rollouts, dense, tmp_path):
    flags = STEPS + "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    run(rollouts, tmp_path / "run", flags)
    assert_same_steps(steps_of(tmp_path / "run"), steps_of(dense))


def test_a_bfloat16_run_goes_on_bit_for_bit(rollouts: Path, tmp_path: Path) -> None:
    """Its optimizer has float32 copies of the parameters."""
    flags = f"{STEPS} --bf16"
    run(rollouts, tmp_path / "uninterrupted", flags)
    copy = copy_after_step(1, tmp_path / "uninterrupted", tmp_path / "run")
    run(rollouts, copy, flags)
    assert steps_of(copy) == steps_of(tmp_path / "uninterrupted")


def test_expert_parallelism_takes_the_same_steps(rollouts: Path, tmp_path: Path) -> None:
    """From the beginning: Megatron keeps one optimizer more where experts are parallel."""
    found = {}
    for size in (1, 2):
        folder = tmp_path / f"EP{size}"
        flags = f"{STEPS}{EXPERTS}--expert-model-parallel-size {size}"
        run(rollouts, folder, flags, world_size=size, prepare=_begin_alike)
        found[size] = steps_of(folder)
    assert_same_steps(found[2], found[1])


def _begin_alike(rank: int) -> None:
    """Parameters that depend on their names alone."""
    import train

    from megatron_pg.check.weights import set_parameters

    provide_model: Any = train.provide_model

    def provide_same_model(*args: Any, **named: Any) -> Any:
        model = provide_model(*args, **named)
        set_parameters(model)
        return model

    train.provide_model = provide_same_model
