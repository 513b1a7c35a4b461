"""``megatron-pg check``: it passes where the package is right, names what is wrong, and never
hangs.
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers
from torch import Tensor

from megatron_pg.check import cases, main, report
from megatron_pg.check import options as check_options
from megatron_pg.check import step as check
from megatron_pg.check.compare import CheckRow
from megatron_pg.check.diagnosis import diagnoses
from megatron_pg.check.model import model_config
from megatron_pg.check.samples import samples_of
from megatron_pg.config.versions import derives_multi_token_labels
from megatron_pg.loss.objectives import OBJECTIVES, Outcome
from megatron_pg.loss.resolved import resolve
from megatron_pg.megatron import policy_step
from tests import progress

from . import wrong_check
from .launch import free_port, run_ranks
from .test_mutants import MUTANTS
from .trainer_run import output_of, start_script, wait_until_ended

ROOT = Path(__file__).parents[2]
CP2 = "--context-parallel-size 2"


def start(*arguments: str, processes: int = 2) -> Any:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, "-m", *arguments]
    return progress.run(command, cwd=ROOT, env=environment)


def run_check_command(
    port: int, mistake: str | None, flags: str, one_aggregation: bool = False
) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of the command; a rank of `run_ranks`."""
    if one_aggregation:
        check.AGGREGATIONS = {"sample_mean": check.AGGREGATIONS["sample_mean"]}
    dist.destroy_process_group()  # the command makes its own
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    words = ["--device", "cpu", *flags.split()]
    kept = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        os.dup2(output.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        try:
            status = main(words) if mistake is None else wrong_check.check(mistake, words)
            sys.stderr.flush()
        finally:
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        output.seek(0)
        errors.seek(0)
        return status, output.read(), errors.read()


def report_of(processes: int, flags: str, *rest: Any, mistake: str | None = None) -> dict[str, Any]:
    """The report of rank 0, which alone has one, as every rank's exit status says."""
    ranks = run_ranks(run_check_command, processes, free_port(), mistake, f"--json {flags}", *rest)
    assert not any(output for _, output, _ in ranks[1:])
    found: dict[str, Any] = json.loads(ranks[0][1])
    assert {status for status, _, _ in ranks} == {int(not found["passed"])}, ranks[0][2]
    return {**found, "errors": [errors for *_, errors in ranks]}


CHECKED = {
    "end to end": (
        *(
            "gradient",
            "gspo",
            "dis",
            "kept set",
            "centering",
            "loss scale",
            "recompute",
            "every token",
            "update",
        ),
    ),
    "tied": ("gradient", "update"),
    "loss only": ("gradient", "gspo"),
}


def assert_all_rows_pass(found: dict[str, Any], processes: int) -> None:
    """And that there are as many as there should be, of every kind that the flags leave."""
    assert found["passed"] is True and found["world_size"] == processes
    assert len(found["rows"]) == 28
    for row in found["rows"]:
        assert row["passed"] and row["diagnosis"] == ""
        assert 0.0 < row["gradient_error"] <= row["tolerance"] == 1e-6
        assert row["replica_error"] <= row["tolerance"]
        assert (row["gradient_norm"] is not None) == (row["what"] == "update")
    rows = {(row["model"], row["what"]) for row in found["rows"]}
    assert rows == {(model, what) for model in CHECKED for what in CHECKED[model]}
    assert "router losses and bias" not in found["not_checked"]
    assert {row["aggregation"] for row in found["rows"]} == set(check.AGGREGATIONS)


@pytest.mark.full
def test_right_loss_passes_under_torchrun_on_a_sample() -> None:
    flags = f"--device cpu --json --sample-groups 1 {CP2}"
    done = start("megatron_pg", "check", *flags.split(), processes=4)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert_all_rows_pass(found, 2)
    assert found["sampled_data_ranks"] == [0]
    assert any("outside the sample" in name for name in found["not_checked"])


SP = "--tensor-model-parallel-size 2 --sequence-parallel"


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        pytest.param(1, "", id="1 process", marks=pytest.mark.full),
        pytest.param(4, f"{SP} {CP2} --use-distributed-optimizer", id="TP2+SP CP2"),
    ],
)
def test_right_loss_passes(processes, flags) -> None:
    found = report_of(processes, flags)
    assert_all_rows_pass(found, processes)


@pytest.mark.full
@pytest.mark.parametrize("flags", [CP2, SP], ids=["CP2", "TP2+SP"])
def test_fused_head_passes(flags) -> None:
    found = report_of(2, f"--fused-lm-head --num-layers 1 {flags}")
    assert found["passed"] is True
    assert found["accelerations"]["fused output layer"] == "checked"
    assert [row["model"] for row in found["rows"]] == ["end to end"] * 15 + ["tied"] * 3
    assert found["not_checked"]["loss-only rows"] == "--fused-lm-head"


PP2 = "--pipeline-model-parallel-size 2"
SHARDINGS = {
    "PP2 VPP2": f"{PP2} --virtual-pipeline-model-parallel-size 2 --overlap-grad-reduce",
    "EP2 DP2": "--num-experts 4 --expert-model-parallel-size 2",
    "TP2+SP ETP2": f"--num-experts 4 --expert-tensor-parallel-size 2 {SP}",
    "CP2 bf16": f"--dtype bf16 {CP2}",
    "PP2 DP2": f"{PP2} --use-distributed-optimizer",
    "DP2 average in collective": "--average-in-collective",
}


@pytest.mark.full
@pytest.mark.parametrize("name", SHARDINGS)
def test_other_shardings_pass(name) -> None:
    """Of the aggregations one, as all are above: they differ in the weights of tokens, before the
    model. A layer a chunk.
    """
    flags, processes = SHARDINGS[name], 4 if name == "PP2 DP2" else 2
    found = report_of(processes, f"{flags} --num-layers {4 if PP2 in flags else 1}", True)
    assert found["passed"] is True, found
    has_experts = "--num-experts" in flags
    for what in (*(case.name for case in cases.ROUTER_LOSSES), "expert bias", "routing replay"):
        assert (what in {row["what"] for row in found["rows"]}) == has_experts


def checked(flags: str) -> list[tuple[CheckRow, str]]:
    options, _ = check_options.parse_options(["--device", "cpu", *flags.split()])
    rows = check.run_check(options)
    return list(zip(rows, diagnoses(rows, options, dist.get_world_size()), strict=True))


def rows_of_local_denominators() -> list[tuple[CheckRow, str]]:
    """The gradient rows of the loss alone."""
    wrong_check.loss_alone(check)
    mutant = MUTANTS["denominators of the micro-batch, sample_mean"]
    wrong_check.replace_loss(check, mutant.loss)
    return [(row, said) for row, said in checked(CP2) if row.what == "gradient"]


@pytest.mark.full
def test_a_wrong_loss_without_one_factor_is_named() -> None:
    rows = run_ranks(rows_of_local_denominators, 2)[0]
    assert len(rows) == 8
    for row, said in rows:
        assert not row.passed and re.fullmatch(r".* differ \(table\); table is off by .*", said)
        # The KL term is a sample mean under every aggregation.
        in_checksum = row.aggregation in ("sample_mean", "prompt_mean")
        assert said.endswith("(aggregation_checksum)") == in_checksum


def test_failed_row_sets_the_exit_status() -> None:
    mistake = "extra_context_parallel_factor"
    ranks = run_ranks(run_check_command, 2, free_port(), mistake, CP2)
    assert [status for status, _, _ in ranks] == [1, 1]
    text = ranks[0][1]
    assert text.count("gradient is 2 times the reference: 2 = CP") == 8, ranks[0][2]
    assert text.count("follows the gradient rows") == 1
    assert text.startswith("FAIL: 9 of 9 rows")
    assert ranks[1][1] == ""


@pytest.mark.full
def test_breakages_on_a_sampled_copy_are_seen_and_those_elsewhere_are_not() -> None:
    """Of three copies of one rank, the first and the last are sampled."""
    flags = "--json --sample-groups 2"
    for mistake, statuses in (
        ("gradient_of_rank_2_is_doubled", [1, 0, 1]),
        ("gradient_of_rank_1_is_doubled", [0] * 3),
    ):
        ranks = run_ranks(run_check_command, 3, free_port(), mistake, flags)
        assert [status for status, _, _ in ranks] == statuses
        found = json.loads(ranks[0][1])
        assert found["sampled_data_ranks"] == [0, 2] and found["world_size"] == 2
        wrong = [row for row in found["rows"] if not row["passed"]]
        assert len(wrong) == (len(found["rows"]) if statuses[0] else 0)
        assert all(row["wrong_ranks"] == [2] for row in wrong)
        for row in wrong:
            said = row["diagnosis"]
            assert said.startswith("follows the gradient rows") == (row["what"] != "gradient")
            assert row["what"] != "gradient" or re.search(r"on rank 2 \(host .*DP 2\)", said), said


@pytest.mark.full
def test_exception_in_a_custom_reducer_ends_all() -> None:
    done = start("tests.distributed.wrong_check", "rank_raises_in_reducer", *CP2.split())
    assert done.returncode == 1
    assert done.stdout == ""
    assert "rank 1 failed: ValueError: this reducer does not know the sample" in done.stderr


@pytest.mark.full
def test_failed_rank_ends_all_without_a_launcher_that_looks(tmp_path: Path) -> None:
    """As under srun, whose other tasks live on when one ends."""
    mistake = "rank_raises_while_others_wait"
    tasks = start_script([mistake], tmp_path / "run", program="tests.distributed.wrong_check")
    wait_until_ended(tasks)
    assert [task.exitcode for task in tasks] == [1, 1]
    said = output_of(tmp_path / "run").read_text()
    for rank in (0, 1):
        assert f"rank {rank} ends: rank 1 failed: ValueError: only here" in said
    assert said.count("Traceback") == 1, "of the one that failed"


def rows_of_models(
    models: list[str], flags: str, mistakes: list[str]
) -> list[list[tuple[CheckRow, str]]]:
    check.MODELS = {name: check.MODELS[name] for name in models}
    found = []
    for mistake in mistakes:
        name, wrong = MULTI_TOKEN_MISTAKES[mistake]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(policy_step, name, wrong(getattr(policy_step, name)))
            found.append(checked(flags))
    return found


def own_share(mask: torch.Tensor) -> torch.Tensor:
    """Of the tokens of the micro-batch."""
    return mask / mask.sum().clamp(1e-9)


SCALE, MASK = "scale_multi_token_loss", "multi_token_mask"
MULTI_TOKEN_MISTAKES: dict[str, tuple[str, Any]] = {
    "none": (MASK, lambda right: right),
    # The mean over a rank's own tokens, prompts and padding included.
    "left to Megatron": (SCALE, lambda right: lambda *step: False),
    "without CP": (SCALE, lambda right: lambda c, factor, *_: right(c, factor / 2)),
    "mask of the next token": (MASK, lambda right: lambda *step: right(*step).roll(-1, 1)),
    "tokens of the micro-batch": (MASK, lambda right: lambda *step: own_share(right(*step))),
}
needs_multi_token = pytest.mark.skipif(
    not derives_multi_token_labels(), reason="needs megatron-core 0.19"
)


@pytest.mark.full
@needs_multi_token
def test_further_models_pass_and_mistakes_of_multi_token_prediction_are_seen() -> None:
    flags, models = f"{CP2} --mtp-num-layers 2 --hybrid-model", ["hybrid", "multi-token"]
    found = run_ranks(rows_of_models, 2, models, flags, [*MULTI_TOKEN_MISTAKES])[0]
    for mistake, rows in zip(MULTI_TOKEN_MISTAKES, found, strict=True):
        of_models, (last, _) = [(r.model, r.calculate_per_token_loss) for r, _ in rows], rows[-1]
        assert of_models == [("hybrid", False), ("hybrid", True), ("multi-token", False)]
        assert all(row.passed and 0.0 < row.gradient_error <= 1e-6 for row, _ in rows[:-1])
        assert last.passed == (mistake == "none"), mistake
        assert 0.0 < last.gradient_error <= 1e-6 if last.passed else last.gradient_error > 1e-3


@pytest.mark.full
@needs_multi_token
def test_multi_token_prediction_passes_beside_the_fused_head() -> None:
    flags = f"{SP} --fused-lm-head --mtp-num-layers 1"
    (((row, _),),) = run_ranks(rows_of_models, 2, ["multi-token"], flags, ["none"])[0]
    assert row.model == "multi-token" and row.passed and not row.calculate_per_token_loss


def summary_of_every_sharding() -> str:
    """Of the loss-only rows; every rank runs it."""
    wrong_check.loss_alone(check)
    options, _ = check_options.parse_options(["--device", "cpu", "--all"])
    checked = list(check.check_every_sharding(options))
    return "\n".join([*(report.summary(each, 2) for each in checked), report.verdict(checked, 2)])


SHARDINGS_OF_TWO = [
    *("TP 1, PP 1, CP 1, DP 2", "TP 1, PP 1, CP 2, DP 1", "TP 1, PP 2, CP 1, DP 1"),
    *("TP 1, PP 2, VPP 2, CP 1, DP 1", "TP 2, PP 1, CP 1, DP 1", "TP 2 + SP, PP 1, CP 1, DP 1"),
]


@pytest.mark.full
def test_every_sharding_of_two_processes() -> None:
    lines = run_ranks(summary_of_every_sharding, 2)[0].splitlines()
    assert [line.split(" s  ")[1] for line in lines[:-2]] == SHARDINGS_OF_TWO
    assert all(line.startswith("PASS ") and " 9 rows" in line for line in lines[:-2])
    assert lines[-1] == "PASS: every gradient is the unsharded one in 6 shardings"


@pytest.mark.full
def test_shardings_that_share_references_have_one_step_and_one_model() -> None:
    options, _ = check_options.parse_options(["--device", "cpu", "--all", "--num-experts", "4"])
    shared: dict[Any, list[Any]] = {}
    for sharding in check_options.shardings(options, 4):
        data_size = 4 // sharding.model_parallel_size
        place = check._SIZES(sharding), check._reference_key("", sharding, data_size)
        step = [
            [
                (s.tokens.tolist(), s.loss_mask.tolist(), s.group_index, s.rollout_id)
                for s in samples
            ]
            for case in cases.CASES
            for samples in [samples_of(sharding, data_size, case)]
        ]
        counts = [sharding.num_microbatches(rank) for rank in range(data_size)]
        config = model_config(sharding, sharded=False)
        model = {name: value for name, value in vars(config).items() if not callable(value)}
        shared.setdefault(place, []).append((step, counts, model))
    assert max(map(len, shared.values())) > 1
    for first, *others in shared.values():
        assert all(other == first for other in others)


def dis_of(
    weight: Callable[[Tensor], Tensor] | None = None, source: str = "rollout_log_probs"
) -> Callable[..., Outcome]:
    """DIS with another weight than q inside its band, or of a ratio to other log-probs."""

    def formula(config: Any, tokens: Any, _: Any) -> Outcome:
        ratio = (tokens.log_probs - tokens.given(source)).exp()
        inside = ratio.detach() * ((ratio > 0.8) & (ratio < 1.2))
        return Outcome(
            -(inside if weight is None else weight(ratio)) * tokens.advantages * tokens.log_probs
        )

    return formula


WRONG_DIS = {
    "": dis_of(),
    "no band": dis_of(lambda ratio: ratio.detach()),
    "held at the bounds": dis_of(lambda ratio: ratio.detach().clamp(0.8, 1.2)),
    "a band above alone": dis_of(lambda ratio: ratio.detach() * (ratio < 1.2)),
    "a weight with a gradient": dis_of(lambda ratio: ratio * ((ratio > 0.8) & (ratio < 1.2))),
    "the old log-probs": dis_of(source="old_log_probs"),
}


def rows_of_dis(mistakes: list[str]) -> list[list[tuple[CheckRow, str]]]:
    """The end-to-end rows of a plain step and of dis under each mistake."""
    check.MODELS = {"end to end": check.MODELS["end to end"]}
    check.AGGREGATIONS = {"sample_mean": check.AGGREGATIONS["sample_mean"]}
    cases.CASES = [case for case in cases.CASES if case.name in ("gradient", "dis")]
    found = []
    for mistake in mistakes:
        with pytest.MonkeyPatch.context() as patch:
            row = replace(OBJECTIVES["dis"], ratio="none", function=WRONG_DIS[mistake])
            patch.setitem(OBJECTIVES, "dis", row)
            resolve.cache_clear()
            found.append(checked("--num-layers 1"))
    return found


@pytest.mark.full
def test_a_wrong_weight_of_dis_is_seen() -> None:
    for mistake, rows in zip(WRONG_DIS, run_ranks(rows_of_dis, 1, [*WRONG_DIS])[0], strict=True):
        assert [row.what for row, _ in rows] == ["gradient", "dis", "gradient"]
        for row, said in rows:
            assert row.passed == (row.what != "dis" or not mistake), (mistake, row)
            assert row.passed or "gradients" in said


def custom_rows(reducers: list[str]) -> list[list[tuple[CheckRow, str]]]:
    """The rows of custom functions alone, which the check itself adds, under each reducer; every
    rank runs it.
    """
    check.AGGREGATIONS = {}
    check.MODELS = {name: check.MODELS[name] for name in ("end to end", "loss only")}
    check.cases_of = lambda model, options, names, per_token: [
        cases.Run(model, cases.GRADIENT, name, per_token) for name in names
    ]
    module, found = "tests.distributed.wrong_check", []
    for reducer in reducers:
        paths = f"--custom-pg-loss-reducer-function-path {module}:{reducer}"
        rows = checked(f"{paths} --custom-policy-loss-path {module}.squared_log_probs {CP2}")
        found.append([(row, said) for row, said in rows if row.aggregation == "custom"])
    return found


@pytest.mark.full
def test_custom_reducer_and_loss_are_compared_with_themselves_unsharded() -> None:
    right, wrong = run_ranks(custom_rows, 2, ["right_reducer", "local_reducer"])[0]
    # Two models in two modes.
    assert len(right) == len(wrong) == 4
    assert all(row.passed and row.gradient_error <= 1e-6 for row, _ in right)
    for row, said in wrong:
        assert not row.passed and row.gradient_error > 1e-2
        assert "gradients differ" in said or "times the reference" in said


@pytest.mark.full
def test_custom_function_that_is_not_there_is_refused() -> None:
    flags = "--custom-pg-loss-reducer-function-path tests.distributed.wrong_check:none"
    status, output, errors = run_ranks(run_check_command, 1, free_port(), None, flags)[0]
    assert status == 2 and output == "" and "no attribute 'none'" in errors


def part_in_a_thousand() -> dict[str, float]:
    """The least error of the loss-only rows where one term is wrong by 1/1000."""
    wrong_check.loss_alone(check)
    config_of, step = check.config_of, check.train_step

    def larger(values: Any, term: str) -> Any:
        return replace(values, **{term: 1.001 * getattr(values, term)})

    def train_step(chunks: Any, options: Any, samples: Any, *rest: Any) -> Any:
        samples = [larger(sample, "advantages") for sample in samples]
        return step(chunks, options, samples, *rest)

    mistakes = {
        "kl_loss_coef": ("config_of", lambda *args: larger(config_of(*args), "kl_loss_coef")),
        "entropy_coef": ("config_of", lambda *args: larger(config_of(*args), "entropy_coef")),
        "advantages": ("train_step", train_step),
    }
    found = {}
    for term, mistake in mistakes.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(check, *mistake)
            found[term] = min(row.gradient_error for row, _ in checked(""))
    return found


@pytest.mark.full
def test_a_part_in_a_thousand_of_a_term_is_seen() -> None:
    for term, error in run_ranks(part_in_a_thousand, 1)[0].items():
        assert error > 2e-6, f"{term}: {error}"


@pytest.mark.full
def test_nan_on_one_rank_is_reported_by_all() -> None:
    found = report_of(2, CP2, mistake="rank_has_nan")
    assert found["passed"] is False and len(found["rows"]) == 9
    for row in found["rows"]:
        assert row["loss"] is None and row["gradient_error"] is None
        assert row["diagnosis"].startswith("not finite in ")
    assert "active tokens on this rank have a NaN or infinite loss" in found["errors"][1]


def check_with_stand_in(port: int, accumulates: bool) -> tuple[int, str, str, int]:
    """The command with a torch product in the place of Apex's extension, and how often Megatron
    called it.
    """
    shapes = []

    def add_product(inputs: torch.Tensor, gradient: torch.Tensor, main_grad: torch.Tensor) -> None:
        shapes.append(inputs.shape)
        product = gradient.T @ inputs
        main_grad.copy_(main_grad + product if accumulates else product)

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add_product)
    layers._grad_accum_fusion_available = True
    check_options.has_gradient_accumulation_fusion = lambda _: True
    flags = "--gradient-accumulation-fusion --json"
    return *run_check_command(port, None, flags, one_aggregation=True), len(shapes)


@pytest.mark.full
@pytest.mark.parametrize("accumulates", [True, False])
def test_a_stand_in_for_the_extension_of_apex_is_called_and_checked(accumulates: bool) -> None:
    """Apex itself is not on PyPI and was never here; one that forgets the micro-batches before is
    seen.
    """
    ((status, output, errors, calls),) = run_ranks(check_with_stand_in, 1, free_port(), accumulates)
    found = json.loads(output)
    assert calls, errors
    assert (status, found["passed"]) == ((0, True) if accumulates else (1, False))
