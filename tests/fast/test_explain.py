"""`megatron-pg explain`: its numbers against the oracle's gradients, its warnings, its outputs; the command line."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_pg
from megatron_pg import cli
from megatron_pg.explain import main as explain
from megatron_pg.explain import text
from megatron_pg.explain.options import LengthSource
from megatron_pg.explain.step import explained_step
from tests import oracle
from tests.random_steps import plain_sample

DIVISOR = 6.0


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON of a command line that succeeds."""
    assert explain([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_coefficients_are_the_oracles_gradients(capsys):
    lengths, group_size = [2, 4, 1, 0, 3, 7], 2
    found = explained(
        capsys, "--lengths", "2,4,1,0,3,7", "--group-size", "2", "--pg-loss-divisor", str(DIVISOR)
    )
    step = [plain_sample([1] * n, group=i // group_size) for i, n in enumerate(lengths)]
    for aggregation in oracle.AGGREGATIONS:
        losses = [torch.ones(n, dtype=torch.float64, requires_grad=True) for n in lengths]
        value = oracle.aggregate(step, losses, aggregation, DIVISOR)
        active = [loss for loss in losses if loss.numel()]
        gradients = torch.autograd.grad(value, active)
        report = found["aggregations"][aggregation]
        coefficients = [c for c, n in zip(report["token_coefficient"], lengths, strict=True) if n]
        assert coefficients == pytest.approx([g[0].item() for g in gradients], rel=1e-12)
        assert report["total_weight"] == pytest.approx(value.item(), rel=1e-12)
        parts = [gradient.sum().item() / value.item() for gradient in gradients]
        shares = [s for s, n in zip(report["sample_share"], lengths, strict=True) if n]
        assert shares == pytest.approx(parts, rel=1e-12)
        of_groups = [shares[0] + shares[1], shares[2], shares[3] + shares[4]]
        assert list(report["group_shares"].values()) == pytest.approx(of_groups, rel=1e-12)


def test_counts_quantiles_and_learning_rate_ratio(capsys):
    found = explained(capsys, "--lengths", "1,2,3,4,5,6,7,12", "--pg-loss-divisor", "20")
    assert found["step"] | {"active_tokens": 0, "group_index": 0, "rollout_id": 0} == {
        "num_samples": 8,
        "num_rollouts": 8,
        "num_prompt_groups": 8,
        "num_active_tokens": 40,
        "active_tokens": 0,
        "group_index": 0,
        "rollout_id": 0,
    }
    quarters = found["aggregations"]["token_mean"]["quantile_shares"]
    assert [(part["shortest"], part["longest"]) for part in quarters] == [
        (1, 2),
        (3, 4),
        (5, 6),
        (7, 12),
    ]
    assert [part["share"] for part in quarters] == pytest.approx([3 / 40, 7 / 40, 11 / 40, 19 / 40])
    assert found["aggregations"]["constant"]["learning_rate_ratio"] == pytest.approx(40 / 160)
    assert found["loss_aggregation"] == "constant"


@pytest.mark.parametrize("per_token", [False, True])
def test_megatrons_factors_cancel(capsys, per_token):
    aggregation = "token_mean" if per_token else "sample_mean"  # the token mean turns the mode on
    found = explained(
        capsys,
        *("--lengths", "3,5", "--loss-aggregation", aggregation),
        *("--data-parallel-size", "4", "--context-parallel-size", "2", "--num-microbatches", "3"),
    )
    assert found["parallelism"]["calculate_per_token_loss"] is per_token
    scale = found["aggregations"]["sample_mean"]["megatron_scale"]
    expected = (8.0, 1.0, 1 / 8) if per_token else (12.0, 2 / 3, 1 / 8)
    assert (scale["returned"], scale["schedule"], scale["gradients"]) == pytest.approx(expected)
    assert scale["net"] == pytest.approx(1.0)


def test_the_step_of_lengths_and_groups():
    step = explained_step(LengthSource(lengths=(5, 6, 7), group_size=2))
    assert [sample.num_active_tokens for sample in step.samples] == [5, 6, 7, 5, 6, 7]
    assert [sample.group_index for sample in step.samples] == [0, 0, 1, 1, 2, 2]


def test_log_normal_lengths_have_their_median_and_are_reproducible():
    source = LengthSource(log_normal=(2000.0, 0.5), group_size=8, docs_per_step=4096, seed=3)
    lengths = [sample.num_active_tokens for sample in explained_step(source).samples]
    assert lengths == [sample.num_active_tokens for sample in explained_step(source).samples]
    assert sorted(lengths)[2048] == pytest.approx(2000, rel=0.05)


def write_rollouts(path: Path) -> str:
    """Two prompt groups of three rollouts; the second rollout of each has two samples, one token is masked."""
    pytest.importorskip("pyarrow")
    rows = []
    for group in range(2):
        for rollout, lengths in enumerate(([3], [2, 4], [5])):
            for length in lengths:
                mask = [1] * (length - 1) + [int(length != 5)]
                rows.append(
                    {
                        "prompt_ids": [1, 2],
                        "response_ids": [3] * length,
                        "loss_mask": mask,
                        "advantages": 1.0,
                        "group_index": group,
                        "rollout_id": 10 * group + rollout,
                    }
                )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_rollout_file(tmp_path, capsys):
    path = write_rollouts(tmp_path / "rollouts.jsonl")
    found = explained(capsys, "--rollout-files", path)
    assert found["step"]["active_tokens"] == [3, 2, 4, 4] * 2
    assert (found["step"]["num_rollouts"], found["step"]["num_prompt_groups"]) == (6, 2)
    weights = found["aggregations"]["sample_mean"]["token_weight"]
    assert weights == pytest.approx([1 / 3, 1 / 6, 1 / 6, 1 / 4] * 2)
    assert found["warnings"] == []


def test_the_first_rollouts_of_a_file_cut_a_group(tmp_path, capsys):
    path = write_rollouts(tmp_path / "rollouts.jsonl")
    found = explained(capsys, "--rollout-files", path, "--docs-per-step", "5")
    assert found["step"]["num_rollouts"] == 5
    assert found["step"]["num_samples"] == 7
    assert any("ends inside prompt group 1: 3 of its 4 samples" in w for w in found["warnings"])
    assert explained(capsys, "--rollout-files", path, "--docs-per-step", "3")["warnings"] == []


def test_a_rollout_file_that_is_not_there_or_empty(tmp_path, capsys):
    pytest.importorskip("pyarrow")
    assert explain(["--rollout-files", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err
    (tmp_path / "empty.jsonl").write_text("")
    assert explain(["--rollout-files", str(tmp_path / "empty.jsonl")]) == 2
    assert "no sample" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "10,20", "--pg-loss-divisor", "1000"], "far from the lengths seen"),
        (["--lengths", "10,20", "--pg-loss-divisor", "1"], "far from the lengths seen"),
        (
            ["--lengths", "10", "--group-size", "4", "--docs-per-step", "6"],
            "ends inside prompt group 1: 2 of its 4 samples",
        ),
        (["--lengths", "10,0"], "1 of 2 samples have no active token"),
    ],
)
def test_warnings(capsys, arguments, message):
    found = explained(capsys, *arguments)
    assert any(message in warning for warning in found["warnings"]), found["warnings"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--lengths", "10,20", "--pg-loss-divisor", "20"],
        ["--lengths", "10,20", "--group-size", "2"],
        ["--log-normal", "100,1", "--group-size", "4"],
    ],
)
def test_no_warning_without_a_cause(capsys, arguments):
    assert explained(capsys, *arguments)["warnings"] == []


def test_plain_text_when_piped(capsys):
    arguments = ["--lengths", "200,4000,12000", "--group-size", "8", "--lr", "1e-6"]
    assert explain(arguments) == 0
    printed = capsys.readouterr().out
    assert "N = 24 rollouts, P = 3 prompt groups, T = 129600 active tokens" in printed
    assert "* sample_mean" in printed
    assert "not used: --lr 1e-6" in printed
    assert "\x1b" not in printed and "━" not in printed
    for aggregation in oracle.AGGREGATIONS:
        assert printed.count(aggregation) >= 4


def test_tables_in_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    assert explain(["--lengths", "200,4000,12000", "--group-size", "2"]) == 0
    printed = capsys.readouterr().out
    assert "──────" in printed
    for aggregation in oracle.AGGREGATIONS:
        assert printed.count(aggregation) == 4, "one table each: no header is folded"


def test_many_samples_are_picked_over_the_range():
    assert text._picked(list(range(100)))[0] == 0
    assert text._picked(list(range(100)))[-1] == 99
    assert len(text._picked(list(range(100)))) == text.MAX_ROWS


def test_plot_writes_a_picture(tmp_path: Path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "weights.png"
    assert explain(["--log-normal", "100,1", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of --lengths, --log-normal and --rollout-files"),
        (
            ["--lengths", "1", "--log-normal", "5,1"],
            "give one of --lengths, --log-normal and --rollout-files",
        ),
        (["--lengths", "1", "--loss-aggregation", "constant"], "--loss-aggregation-divisor"),
        (
            ["--lengths", "1", "--loss-aggregation", "prompt_mean", "--calculate-per-token-loss"],
            "--calculate-per-token-loss",
        ),
        (
            ["--lengths", "1", "--qkv-format", "bshd", "--context-parallel-size", "2"],
            "--qkv-format thd",
        ),
        (["--lengths", "1,2", "--plot", "weights.unknown"], "unknown"),
        (["--lengths", "1,2", "--plot", "/no/such/folder/weights.png"], "/no/such/folder"),
    ],
)
def test_what_cannot_be_explained_is_said(capsys, arguments, message):
    assert explain(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--lengths", "1,x"],
        ["--lengths", "-1"],
        ["--log-normal", "5"],
        ["--log-normal", "0,1"],
        ["--lengths", "1", "--group-size", "0"],
        ["--lengths", "1", "--docs-per-step", "-3"],
    ],
)
def test_malformed_values_are_refused_by_the_parser(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        explain(arguments)
    assert stopped.value.code == 2
    assert arguments[-2] in capsys.readouterr().err


def test_version_and_help(capsys):
    for arguments, expected in (
        (["--version"], megatron_pg.__version__),
        (["--help"], "megatron-pg explain --lengths"),
        (["explain", "--help"], "--docs-per-step"),
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        assert stopped.value.code == 0
        assert expected in capsys.readouterr().out


def test_no_command_and_an_unknown_one(capsys):
    assert cli.main([]) == 2
    assert "examples:" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        cli.main(["explode"])
    assert stopped.value.code == 2


def test_check_gets_its_arguments_and_gives_its_status(monkeypatch):
    seen: list[list[str]] = []
    module = types.ModuleType("megatron_pg.check")
    module.main = lambda arguments: seen.append(list(arguments)) or 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron_pg.check", module)
    assert cli.main(["check", "--json"]) == 1
    assert seen == [["--json"]]


def test_the_module_runs_without_megatron():
    script = (
        "import runpy, sys; sys.modules['megatron'] = None\n"
        "sys.argv = ['megatron-pg', 'explain', '--lengths', '2,4']\n"
        "runpy.run_module('megatron_pg', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "T = 6 active tokens" in done.stdout
