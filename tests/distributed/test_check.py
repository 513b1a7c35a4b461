"""``megatron-pg check``: it passes where the package is right, names what is wrong, and never hangs."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_pg.config.versions import derives_multi_token_labels
from tests import progress
from tests.lanes import in_one_lane

from .launch import run_ranks
from .quickstart_run import output_of, start_script, wait_until_ended

ROOT = Path(__file__).parents[2]
"""Imports on a busy machine, not the end: a collective's own time-out would take five minutes."""


def free_port() -> int:
    """Below the ports that the kernel hands out: gloo's listeners, of the other worker too, cannot take it meanwhile."""
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port between 20000 and 30000 is free")


def environment(**variables: object) -> dict[str, str]:
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, **{name: str(value) for name, value in variables.items()}}


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A module under torchrun, on two ranks."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [sys.executable, *launcher, "-m", *arguments]
    return progress.run(command, cwd=ROOT, env=environment())


def run_check_command(
    port: int, mistake: str | None, flags: list[str], one_aggregation: bool = False
) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of the command; a rank of `run_ranks`."""
    from megatron_pg.check import main
    from megatron_pg.check import step as run

    from . import wrong_check

    if one_aggregation:
        run.AGGREGATIONS = {"sample_mean": run.AGGREGATIONS["sample_mean"]}
    dist.destroy_process_group()  # the command makes its own
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    flags = ["--device", "cpu", *flags]
    kept = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        os.dup2(output.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        try:
            status = main(flags) if mistake is None else wrong_check.check(mistake, flags)
            sys.stderr.flush()
        finally:
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        output.seek(0)
        errors.seek(0)
        return status, output.read(), errors.read()


def assert_all_rows_pass(report: dict[str, Any], processes: int) -> None:
    """And that there are as many as there should be, of every kind that the flags leave."""
    assert report["passed"] is True
    assert report["world_size"] == processes
    assert len(report["rows"]) == 26
    for row in report["rows"]:
        assert row["passed"] and row["diagnosis"] == ""
        assert 0.0 < row["gradient_error"] <= row["tolerance"] == 1e-6
        assert row["replica_error"] <= row["tolerance"]
        assert (row["gradient_norm"] is not None) == (row["what"] == "update")
    rows = {(row["model"], row["what"]) for row in report["rows"]}
    assert rows == {
        *(
            ("end to end", what)
            for what in ("gradient", "gspo", "kept set", "loss scale", "recompute", "every token")
        ),
        ("end to end", "update"),
        *(("tied", what) for what in ("gradient", "update")),
        *(("loss only", what) for what in ("gradient", "gspo")),
    }
    assert report["not_checked"]["auxiliary loss"] == "needs --num-experts 3 or more"
    assert {row["aggregation"] for row in report["rows"]} == {
        *("sample_mean", "prompt_mean", "token_mean", "constant")
    }


@in_one_lane
def test_right_loss_passes_under_torchrun() -> None:
    flags = ("--device", "cpu", "--json", "--context-parallel-size", "2")
    done = start("megatron_pg", "check", *flags)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert_all_rows_pass(report, 2)
    assert "--use-distributed-optimizer" in report["not_checked"]


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (1, ""),
        (
            4,
            "--tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel --use-distributed-optimizer",
        ),
    ],
    ids=["1 process", "TP2+SP CP2"],
)
def test_right_loss_passes(processes: int, flags: str) -> None:
    words = ["--json", *flags.split()]
    ranks = run_ranks(run_check_command, processes, free_port(), None, words)
    assert [status for status, _, _ in ranks] == [0] * processes, ranks[0][2]
    assert not any(output for _, output, _ in ranks[1:])
    report = json.loads(ranks[0][1])
    assert_all_rows_pass(report, processes)
    assert ("--use-distributed-optimizer" in report["not_checked"]) == (processes < 4)


@pytest.mark.parametrize(
    "flags",
    ["--context-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel"],
    ids=["CP2", "TP2+SP"],
)
def test_fused_head_passes(flags: str) -> None:
    words = f"--json --fused-lm-head --num-layers 1 {flags}".split()
    ranks = run_ranks(run_check_command, 2, free_port(), None, words)
    assert [status for status, _, _ in ranks] == [0, 0], ranks[0][2]
    report = json.loads(ranks[0][1])
    assert report["passed"] is True
    assert report["accelerations"]["fused output layer"] == "checked"
    assert [row["model"] for row in report["rows"]] == ["end to end"] * 13 + ["tied"] * 3
    assert report["not_checked"]["loss-only rows"] == "--fused-lm-head"


@pytest.mark.parametrize(
    "flags",
    [
        "--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2 --overlap-grad-reduce",
        "--num-experts 4 --expert-model-parallel-size 2",
        "--num-experts 4 --expert-tensor-parallel-size 2 --sequence-parallel --tensor-model-parallel-size 2",
        "--dtype bf16 --context-parallel-size 2",
        "--cp-partition-mode contiguous --context-parallel-size 2",
    ],
    ids=["PP2 VPP2", "EP2 DP2", "TP2+SP ETP2", "CP2 bf16", "CP2 contiguous"],
)
def test_other_shardings_pass(flags: str) -> None:
    """Of the aggregations one, as all are above: they differ in the weights of tokens, before the model. A layer a chunk."""
    layers = 4 if "--pipeline-model-parallel-size" in flags else 1
    words = f"--json {flags} --num-layers {layers}".split()
    ranks = run_ranks(run_check_command, 2, free_port(), None, words, True)
    report = json.loads(ranks[0][1])
    assert report["passed"] is True, ranks[0][1]
    found = {row["what"] for row in report["rows"]}
    assert ("auxiliary loss" in found) == ("--num-experts" in flags)
    assert ("router z loss" in found) == ("--num-experts" in flags)


def rows_of_mutants(names: list[str], flags: list[str]) -> list[list[tuple[str, bool, str]]]:
    """(aggregation, passed, diagnosis) of the loss-only rows under each mutant; every rank runs it."""
    from megatron_pg.check import step as run
    from megatron_pg.check.diagnosis import diagnoses
    from megatron_pg.check.options import parse_options

    from .mutants import MUTANTS
    from .wrong_check import loss_alone, replace_loss

    options, _ = parse_options(["--device", "cpu", *flags])
    loss_alone(run)
    found = []
    for name in names:
        replace_loss(run, MUTANTS[name].loss)
        rows = run.run_check(options)
        words = zip(rows, diagnoses(rows, options, 2), strict=True)
        found.append([(r.aggregation, r.passed, said) for r, said in words if r.what == "gradient"])
    return found


@pytest.fixture(scope="module")
def context_parallel_mutants() -> dict[str, list[tuple[str, bool, str]]]:
    names = [
        "extra context-parallel factor",
        "mean over context parallelism instead of a sum",
        "number of micro-batches dropped",
        "denominators of the micro-batch, sample_mean",
    ]
    rows = run_ranks(rows_of_mutants, 2, names, ["--context-parallel-size", "2"])[0]
    return dict(zip(names, rows, strict=True))


@in_one_lane
@pytest.mark.parametrize(
    ("mutant", "diagnosis"),
    [
        ("extra context-parallel factor", "gradient is 2 times the reference: 2 = CP"),
        (
            "mean over context parallelism instead of a sum",
            "gradient is 0.5 times the reference: 1/2 = 1/CP",
        ),
        ("number of micro-batches dropped", "gradient is 0.2 times the reference: 1/5 = 1/M"),
    ],
)
def test_wrong_factor_is_named(
    mutant: str, diagnosis: str, context_parallel_mutants: dict[str, list[tuple[str, bool, str]]]
) -> None:
    rows = context_parallel_mutants[mutant]
    assert len(rows) == 8
    assert [row[1:] for row in rows] == [(False, diagnosis)] * 8


@in_one_lane
def test_denominators_of_a_micro_batch_are_wrong_weights(
    context_parallel_mutants: dict[str, list[tuple[str, bool, str]]],
) -> None:
    rows = context_parallel_mutants["denominators of the micro-batch, sample_mean"]
    # The KL term is a sample mean under every aggregation.
    for aggregation, passed, diagnosis in rows:
        assert not passed, aggregation
        assert diagnosis.startswith("no common factor, table is "), diagnosis
        assert "totals of a micro-batch" in diagnosis
        in_checksum = aggregation in ("sample_mean", "prompt_mean")
        assert diagnosis.endswith("(aggregation_checksum)") == in_checksum


@in_one_lane
def test_uneven_micro_batches_are_named() -> None:
    names = ["data-parallel size dropped", "number of micro-batches dropped"]
    dropped_size, dropped_count = run_ranks(rows_of_mutants, 2, names, [])[0]
    for _, passed, diagnosis in dropped_size:
        assert not passed and diagnosis == "gradient is 0.5 times the reference: 1/2 = 1/DP"
    for _, passed, diagnosis in dropped_count:
        assert not passed
        assert diagnosis.endswith("1/M, the data-parallel ranks having 5 and 6 micro-batches")


def test_failed_row_sets_the_exit_status() -> None:
    flags = ["--context-parallel-size", "2"]
    mistake = "extra_context_parallel_factor"
    ranks = run_ranks(run_check_command, 2, free_port(), mistake, flags)
    assert [status for status, _, _ in ranks] == [1, 1]
    report = ranks[0][1]
    assert report.count("gradient is 2 times the reference: 2 = CP") == 8, ranks[0][2]
    assert report.count("follows the gradient rows") == 1
    assert report.rstrip().endswith("FAIL: 9 rows (9 rows)")
    assert ranks[1][1] == ""


@in_one_lane
def test_exception_in_a_custom_reducer_ends_all() -> None:
    flags = ("--context-parallel-size", "2")
    done = start("tests.distributed.wrong_check", "rank_raises_in_reducer", *flags)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "rank 1 failed: ValueError: this reducer does not know the sample" in done.stderr


@in_one_lane
def test_failed_rank_ends_all_without_a_launcher_that_looks(tmp_path: Path) -> None:
    """As under srun, whose other tasks live on when one ends."""
    mistake = "rank_raises_while_others_wait"
    tasks = start_script([mistake], tmp_path / "run", program="tests.distributed.wrong_check")
    wait_until_ended(tasks)
    assert [task.exitcode for task in tasks] == [1, 1]
    said = output_of(tmp_path / "run").read_text()
    assert "rank 0 ends: rank 1 failed: ValueError: only here" in said
    assert "rank 1 ends: rank 1 failed: ValueError: only here" in said
    assert said.count("Traceback") == 1, "of the one that failed"


def rows_of_models(
    models: list[str], flags: list[str], mistakes: list[str]
) -> list[list[tuple[str, bool, bool, float]]]:
    """(model, per token, passed, error) of the rows of some models, under each mistake; every rank runs it."""
    from megatron_pg.check import step as run
    from megatron_pg.check.options import parse_options
    from megatron_pg.megatron import policy_step

    run.MODELS = {name: run.MODELS[name] for name in models}
    options, _ = parse_options(["--device", "cpu", *flags])
    rights = {name: getattr(policy_step, name) for name in MULTI_TOKEN_PARTS}
    found = []
    for mistake in mistakes:
        for name, right in rights.items():
            wrong = MULTI_TOKEN_MISTAKES[mistake].get(name, lambda right: right)
            setattr(policy_step, name, wrong(right))
        rows = run.run_check(options)
        found.append(
            [(r.model, r.calculate_per_token_loss, r.passed, r.gradient_error) for r in rows]
        )
    return found


MULTI_TOKEN_PARTS = ("scale_multi_token_loss", "multi_token_mask")
MULTI_TOKEN_MISTAKES: dict[str, dict[str, Any]] = {
    "none": {},
    # The mean over a rank's own tokens, prompts and padding included.
    "left to Megatron": {"scale_multi_token_loss": lambda right: lambda *step: False},
    "without CP": {
        "scale_multi_token_loss": lambda right: lambda c, factor, *_: right(c, factor / 2)
    },
    "mask of the next token": {
        "multi_token_mask": lambda right: lambda *step: right(*step).roll(-1, 1)
    },
    "tokens of the micro-batch": {
        "multi_token_mask": lambda right: (
            lambda *step: right(*step) / right(*step).sum().clamp(1e-9)
        )
    },
}


@pytest.mark.skipif(not derives_multi_token_labels(), reason="needs megatron-core 0.19")
def test_further_models_pass_and_mistakes_of_multi_token_prediction_are_seen() -> None:
    flags = ["--context-parallel-size", "2", "--mtp-num-layers", "2", "--hybrid-model"]
    models, mistakes = ["hybrid", "multi-token"], list(MULTI_TOKEN_MISTAKES)
    right, *wrong = run_ranks(rows_of_models, 2, models, flags, mistakes)[0]
    assert [row[:2] for row in right] == [
        ("hybrid", False),
        ("hybrid", True),
        ("multi-token", False),
    ]
    assert all(passed and 0.0 < error <= 1e-6 for *_, passed, error in right)
    for mistake, rows in zip(mistakes[1:], wrong, strict=True):
        assert [passed for *_, passed, _ in rows] == [True, True, False], mistake
        assert rows[-1][-1] > 1e-3, mistake


@pytest.mark.skipif(not derives_multi_token_labels(), reason="needs megatron-core 0.19")
def test_multi_token_prediction_passes_beside_the_fused_head() -> None:
    flags = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--fused-lm-head"]
    flags += ["--mtp-num-layers", "1"]
    rows = run_ranks(rows_of_models, 2, ["multi-token"], flags, ["none"])[0][0]
    assert [row[:3] for row in rows] == [("multi-token", False, True)]


def summary_of_every_sharding() -> str:
    """Of the loss-only rows; every rank runs it."""
    from megatron_pg.check import report
    from megatron_pg.check import step as run
    from megatron_pg.check.options import parse_options

    from .wrong_check import loss_alone

    loss_alone(run)
    options, _ = parse_options(["--device", "cpu", "--all"])
    return report.summary(run.check_every_sharding(options), 2)


SHARDINGS_OF_TWO = [
    *("TP 1, PP 1, CP 1, DP 2", "TP 1, PP 1, CP 2, DP 1", "TP 1, PP 2, CP 1, DP 1"),
    *("TP 1, PP 2, VPP 2, CP 1, DP 1", "TP 2, PP 1, CP 1, DP 1", "TP 2 + SP, PP 1, CP 1, DP 1"),
]


@in_one_lane
def test_every_sharding_of_two_processes() -> None:
    lines = run_ranks(summary_of_every_sharding, 2)[0].splitlines()
    assert [line.split(" s  ")[1] for line in lines[:-2]] == SHARDINGS_OF_TWO
    assert all(line.startswith("PASS ") and " 9 rows" in line for line in lines[:-2])
    assert lines[-1] == "PASS: every gradient is the unsharded one in 6 shardings"


def custom_rows(reducers: list[str], flags: list[str]) -> list[list[tuple[bool, str, float]]]:
    """(passed, diagnosis, error) of the custom rows under each reducer; every rank runs it."""
    from megatron_pg.check import step as run
    from megatron_pg.check.cases import GRADIENT, Run
    from megatron_pg.check.diagnosis import diagnoses
    from megatron_pg.check.options import parse_options

    # The rows of the custom functions alone, which the check itself adds.
    run.AGGREGATIONS = {}
    run.MODELS = {name: run.MODELS[name] for name in ("end to end", "loss only")}
    run.cases_of = lambda model, options, names, per_token: [
        Run(model, GRADIENT, each, per_token) for each in names
    ]
    found = []
    module = "tests.distributed.wrong_check"
    for reducer in reducers:
        paths = ["--custom-pg-loss-reducer-function-path", f"{module}:{reducer}"]
        paths += ["--custom-policy-loss-path", f"{module}.squared_log_probs"]
        options, _ = parse_options(["--device", "cpu", *paths, *flags])
        rows = run.run_check(options)
        words = zip(rows, diagnoses(rows, options, 2), strict=True)
        found.append(
            [(r.passed, said, r.gradient_error) for r, said in words if r.aggregation == "custom"]
        )
    return found


def test_custom_reducer_and_loss_are_compared_with_themselves_unsharded() -> None:
    names = ["right_reducer", "local_reducer"]
    right, wrong = run_ranks(custom_rows, 2, names, ["--context-parallel-size", "2"])[0]
    # Two models in two modes.
    assert len(right) == len(wrong) == 4
    assert all(passed and error <= 1e-6 for passed, _, error in right)
    for passed, diagnosis, error in wrong:
        assert not passed and error > 1e-2
        assert "tokens have wrong weights" in diagnosis or "times the reference" in diagnosis


def test_custom_function_that_is_not_there_is_refused() -> None:
    flags = ["--custom-pg-loss-reducer-function-path", "tests.distributed.wrong_check:none"]
    status, output, errors = run_ranks(run_check_command, 1, free_port(), None, flags)[0]
    assert status == 2 and output == "" and "no attribute 'none'" in errors


def part_in_a_thousand() -> dict[str, float]:
    """The least error of the loss-only rows where one term is wrong by 1/1000."""
    from megatron_pg.check import step as run
    from megatron_pg.check.options import parse_options

    from .wrong_check import loss_alone

    loss_alone(run)
    options, _ = parse_options(["--device", "cpu"])
    right, right_step, found = run.config_of, run.train_step, {}
    for term in ("kl_loss_coef", "entropy_coef"):

        def config_of(*arguments: Any, term: str = term) -> Any:
            config = right(*arguments)
            return replace(config, **{term: 1.001 * getattr(config, term)})

        run.config_of = config_of
        found[term] = min(row.gradient_error for row in run.run_check(options))

    def train_step(chunks: Any, options: Any, samples: Any, *rest: Any) -> Any:
        larger = [replace(sample, advantages=1.001 * sample.advantages) for sample in samples]
        return right_step(chunks, options, larger, *rest)

    run.config_of, run.train_step = right, train_step
    found["advantages"] = min(row.gradient_error for row in run.run_check(options))
    return found


@in_one_lane
def test_a_part_in_a_thousand_of_a_term_is_seen() -> None:
    for term, error in run_ranks(part_in_a_thousand, 1)[0].items():
        assert error > 2e-6, f"{term}: {error}"


def test_nan_on_one_rank_is_reported_by_all() -> None:
    flags = ["--context-parallel-size", "2", "--json"]
    ranks = run_ranks(run_check_command, 2, free_port(), "rank_has_nan", flags)
    assert [status for status, _, _ in ranks] == [1, 1]
    report = json.loads(ranks[0][1])
    assert report["passed"] is False
    assert len(report["rows"]) == 9
    for row in report["rows"]:
        assert row["loss"] is None and row["gradient_error"] is None
        assert row["diagnosis"].startswith("not finite in ")
    assert "active tokens of this rank have a loss of NaN or infinity" in ranks[1][2]


def check_with_stand_in(port: int, accumulates: bool) -> tuple[int, str, str, int]:
    """The command with a torch product in the place of Apex's extension, and how often Megatron called it."""
    from megatron.core.tensor_parallel import layers

    from megatron_pg.check import cases, options

    shapes = []

    def add_product(inputs: torch.Tensor, gradient: torch.Tensor, main_grad: torch.Tensor) -> None:
        shapes.append(inputs.shape)
        product = gradient.T @ inputs
        main_grad.copy_(main_grad + product if accumulates else product)

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add_product)
    layers._grad_accum_fusion_available = True
    for module in (cases, options):
        module.has_gradient_accumulation_fusion = lambda _: True
    flags = ["--gradient-accumulation-fusion", "--json"]
    return *run_check_command(port, None, flags, one_aggregation=True), len(shapes)


@pytest.mark.parametrize("accumulates", [True, False])
def test_a_stand_in_for_the_extension_of_apex_is_called_and_checked(accumulates: bool) -> None:
    """Apex itself is not on PyPI and was never here; one that forgets the micro-batches before is seen."""
    ((status, output, errors, calls),) = run_ranks(check_with_stand_in, 1, free_port(), accumulates)
    report = json.loads(output)
    assert calls and "--gradient-accumulation-fusion" not in report["not_checked"], errors
    assert (status, report["passed"]) == ((0, True) if accumulates else (1, False))
