"""`megatron-pg explain`: its numbers against the oracle's gradients, its warnings, its outputs; the command line."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_pg
from megatron_pg import cli
from megatron_pg.config import (
    add_planning_args,
    add_policy_loss_args,
    validate_planning_args,
    validate_policy_loss_args,
)
from megatron_pg.explain import _misspelled, build_parser, parse_options, show
from megatron_pg.explain import main as explain
from megatron_pg.explain.step import ExplainedStep, explained_step
from megatron_pg.rollout_files import StepCollector
from tests import oracle
from tests.lanes import in_both_lanes
from tests.random_steps import plain_sample

pytestmark = in_both_lanes

DIVISOR = 6.0


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON of a command line that succeeds."""
    assert explain([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def step_of(*arguments: str) -> ExplainedStep:
    return explained_step(parse_options(arguments))


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


def test_the_aggregation_of_kl_and_entropy(capsys):
    """Beside a token mean of 10 tokens a sample mean of 2 has 10 / (N D_i) times the coefficient."""
    flags = ["--lengths", "2,8", "--loss-aggregation", "token_mean", "--kl-loss-coef", "0.1"]
    terms = explained(capsys, *flags)["regularizers"]
    assert terms["aggregation"] == "sample_mean"
    assert terms["relative_coefficient"] == pytest.approx([2.5, 0.625])
    flags += ["--regularizer-aggregation", "loss"]
    terms = explained(capsys, *flags)["regularizers"]
    assert terms == {"aggregation": "token_mean", "relative_coefficient": [1.0, 1.0]}
    assert explain(flags) == 0
    assert (
        "KL and entropy terms: token_mean (--regularizer-aggregation loss)"
        in capsys.readouterr().out
    )
    assert explained(capsys, "--lengths", "2,8")["regularizers"] is None


def test_counts_quantiles_and_learning_rate_ratio(capsys):
    found = explained(capsys, "--lengths", "1,2,3,4,5,6,7,12", "--pg-loss-divisor", "20")
    counts = {
        name: found["step"][f"num_{name}"] for name in ("rollouts", "prompt_groups", "skipped")
    }
    assert counts == {"rollouts": 8, "prompt_groups": 8, "skipped": 0}
    assert (found["step"]["num_samples"], found["step"]["num_active_tokens"]) == (8, 40)
    assert found["step"]["kept_sets"] is None
    quarters = found["aggregations"]["token_mean"]["quantile_shares"]
    ranges = [(part["shortest"], part["longest"]) for part in quarters]
    assert ranges == [(1, 2), (3, 4), (5, 6), (7, 12)]
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
    step = step_of("--lengths", "5,6,7", "--group-size", "2")
    assert [sample.num_active_tokens for sample in step.samples] == [5, 6, 7, 5, 6, 7]
    assert [sample.group_index for sample in step.samples] == [0, 0, 1, 1, 2, 2]


def test_log_normal_lengths_have_their_median_and_are_reproducible():
    flags = ["--log-normal", "2000,0.5", "--group-size", "8", "--docs-per-step", "4096"]
    lengths = [sample.num_active_tokens for sample in step_of(*flags, "--seed", "3").samples]
    again = step_of(*flags, "--seed", "3")
    assert lengths == [sample.num_active_tokens for sample in again.samples]
    assert lengths != [sample.num_active_tokens for sample in step_of(*flags).samples]
    assert sorted(lengths)[2048] == pytest.approx(2000, rel=0.05)


def write_rollouts(path: Path) -> str:
    """Two prompt groups of three rollouts; the second rollout of each has two samples, one token is masked."""
    pytest.importorskip("pyarrow")
    rows = []
    for group in range(2):
        for rollout, lengths in enumerate(([3], [2, 4], [5])):
            for length in lengths:
                fields = {
                    "group_index": group,
                    "rollout_id": 10 * group + rollout,
                    "advantages": 1.0,
                }
                fields |= {"prompt_ids": [1, 2], "response_ids": [3] * length}
                fields |= {"loss_mask": [1] * (length - 1) + [int(length != 5)]}
                rows.append(fields | {"log_probs": [-1.0] * length})
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


def write_groups(path: Path, *, spoiled: dict[int, dict[str, Any]] | None = None) -> str:
    """Four prompt groups of four rollouts of 1 to 16 tokens; the fields of some rows are replaced."""
    pytest.importorskip("pyarrow")
    rows: list[dict[str, Any]] = [
        {
            "prompt_ids": [1],
            "response_ids": [1] * length,
            "log_probs": [-1.0] * length,
            "reward": 1.0,
            "group_index": (length - 1) // 4,
        }
        for length in range(1, 17)
    ]
    for index, fields in (spoiled or {}).items():
        rows[index] |= fields
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


EXACT = ("--docs-per-step-mode", "exact")
KEEP = "--keep-prompt-groups"
PROMPT_MEAN = ("--loss-aggregation", "prompt_mean")


@pytest.mark.parametrize(
    ("flags", "num_samples"),
    [
        (["--docs-per-step", "6", *EXACT, KEEP, *PROMPT_MEAN], 8),
        (["--docs-per-step", "6", *EXACT, KEEP], 8),
        (["--docs-per-step", "6", KEEP], 8),
        (["--docs-per-step", "6", *PROMPT_MEAN], 8),
        (["--docs-per-step", "6", *EXACT], 6),
        (["--docs-per-step", "6"], 6),
        (["--docs-per-step", "8", *EXACT, *PROMPT_MEAN], 8),
        (["--docs-per-step", "100", *EXACT, KEEP], 16),
        ([], 16),
    ],
)
def test_the_step_is_the_first_that_training_takes(tmp_path, capsys, flags, num_samples):
    path = write_groups(tmp_path / "groups.jsonl")
    found = explained(capsys, "--rollout-files", path, *flags)
    assert found["step"]["active_tokens"] == list(range(1, num_samples + 1))
    cut = [w for w in found["warnings"] if "ends inside prompt group 1: 2 of its 4 samples" in w]
    assert found["warnings"] == cut and len(cut) == (num_samples == 6)
    if flags:
        assert found["step"]["active_tokens"] == trained_first(path, flags)


def trained_first(path: str, flags: list[str]) -> list[int]:
    """Active tokens of the first step, of the classes and flags that a training script has."""
    from megatron_pg.rollout_files import RolloutFiles

    parser = add_policy_loss_args(add_planning_args(argparse.ArgumentParser()))
    args = parser.parse_args([*flags, "--max-tokens-per-microbatch", "64"])
    step = StepCollector(
        RolloutFiles([path]),
        docs_per_step=args.docs_per_step,
        mode=args.docs_per_step_mode,
        keep_prompt_groups=args.keep_prompt_groups,
        refuse_cut_groups=args.loss_aggregation == "prompt_mean",
    ).collect()
    assert step is not None
    return [sample.num_active_tokens for sample in step.samples]


def test_prompt_groups_of_lengths_are_kept_too():
    flags = ["--lengths", "1,2,3", "--group-size", "4", "--docs-per-step", "6"]
    assert len(step_of(*flags).samples) == 6
    kept = step_of(*flags, KEEP)
    assert [sample.num_active_tokens for sample in kept.samples] == [1, 2, 3, 1, 2, 3, 1, 2]
    assert kept.cut_groups == {}


@pytest.mark.parametrize("from_file", [True, False])
def test_a_group_that_training_refuses_to_cut(tmp_path, capsys, from_file):
    source = ["--lengths", "1", "--group-size", "4"]
    if from_file:
        source = ["--rollout-files", write_groups(tmp_path / "groups.jsonl")]
    assert explain([*source, "--docs-per-step", "6", *EXACT, *PROMPT_MEAN]) == 2
    printed = capsys.readouterr()
    assert "prompt group 1 (group_index) is cut by the end of a step" in printed.err
    assert KEEP in printed.err and printed.out == ""


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        ({"prompt_ids": []}, []),
        ({"prompt_ids": [99]}, ["--vocab-size", "50"]),
        ({"group_index": None}, PROMPT_MEAN),
    ],
)
def test_bad_rows_are_refused_or_counted(tmp_path, capsys, fields, flags):
    path = write_groups(tmp_path / "groups.jsonl", spoiled={1: fields, 3: fields})
    line = ["--rollout-files", path, "--docs-per-step", "4", KEEP, *flags]
    assert explain(line) == 2
    printed = capsys.readouterr()
    assert f"groups.jsonl row 1: {next(iter(fields))}" in printed.err and printed.out == ""
    found = explained(capsys, *line, "--on-bad-row", "skip")
    assert found["step"]["active_tokens"] == [1, 3, 5, 6, 7, 8]
    assert found["step"]["num_skipped"] == 2
    assert explain([*line, "--on-bad-row", "skip"]) == 0
    assert "skipped (--on-bad-row skip): 2\n" in capsys.readouterr().out


def test_files_of_bad_rows_alone(tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text("{}\n{}\n")
    pytest.importorskip("pyarrow")
    line = ["--rollout-files", str(tmp_path / "bad.jsonl"), "--on-bad-row", "skip"]
    assert explain(line) == 2
    assert "no sample in them (2 bad rows skipped" in capsys.readouterr().err


def test_a_bad_row_after_the_step_is_none_of_it(tmp_path, capsys):
    path = write_groups(tmp_path / "groups.jsonl", spoiled={7: {"prompt_ids": []}})
    found = explained(capsys, "--rollout-files", path, "--docs-per-step", "6", *EXACT)
    assert found["step"]["num_samples"] == 6
    assert ["group 1: 2 of its 3 samples" in warning for warning in found["warnings"]] == [True]


def test_rows_without_what_the_flags_need_are_pointed_out(tmp_path, capsys):
    without = dict.fromkeys((2, 5, 9), {"log_probs": None})
    path = write_groups(tmp_path / "groups.jsonl", spoiled=without)
    line = ["--rollout-files", path, "--docs-per-step", "8"]
    (warning,) = explained(capsys, *line)["warnings"]
    assert warning.startswith("2 of 8 samples have no old_log_probs, needed by --policy-loss ppo.")
    assert explained(capsys, *line, "--policy-loss", "reinforce")["warnings"] == []


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        (["--docs-per-step", "8", KEEP], True),
        (["--docs-per-step", "7"], True),
        (["--docs-per-step", "8"], False),
        (["--docs-per-step", "8", KEEP, *EXACT], False),
        ([], False),
    ],
)
def test_steps_that_depend_on_the_number_of_ranks(tmp_path, capsys, flags, warned):
    path = write_groups(tmp_path / "groups.jsonl")
    line = ["--rollout-files", path, "--data-parallel-size", "4", *flags]
    warnings = explained(capsys, *line)["warnings"]
    assert any("With --docs-per-step-mode at_least, 4 ranks" in w for w in warnings) is warned


@pytest.mark.parametrize(("data_size", "warned"), [(4, True), (5, False), (1, False)])
def test_steps_of_lengths_that_depend_on_the_number_of_ranks(capsys, data_size, warned):
    line = ["--lengths", "200,4000", "--docs-per-step", "5", "--data-parallel-size", str(data_size)]
    warnings = explained(capsys, *line)["warnings"]
    assert any("With --docs-per-step-mode at_least" in w for w in warnings) is warned


TOKEN_MEAN = ("--loss-aggregation", "token_mean")


@pytest.mark.parametrize(
    ("flags", "per_token"),
    [
        ("--num-experts 8", True),
        ("--num-experts 8 --moe-aux-loss-coeff 0.01", False),
        ("--num-experts 8 --moe-aux-loss-coeff 0 0.01", False),
        ("--num-experts 8 --moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type none", True),
        ("--num-experts 8 --moe-z-loss-coeff 0.001", False),
        ("--moe-aux-loss-coeff 0.01", True),
        ("--mtp-num-layers 1", False),
        ("--use-torch-fsdp2", False),
        ("--ddp-average-in-collective", False),
    ],
)
def test_megatrons_flags_settle_per_token_mode(capsys, flags, per_token):
    found = explained(capsys, "--lengths", "3,5", *TOKEN_MEAN, *flags.split())
    assert found["parallelism"]["calculate_per_token_loss"] is per_token
    assert found["unused_flags"] == []


class RecordedArguments(dict[str, Any]):
    """Arguments that record which of them are asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def test_every_argument_that_validation_reads_is_a_flag_here():
    """The rank is the launcher's; the weight's shards are a setting of models alone in 0.19."""
    args = build_parser().parse_args([*TOKEN_MEAN, "--fused-lm-head"])
    flags = set(vars(args))
    args.__dict__ = arguments = RecordedArguments(vars(args))
    validate_planning_args(args)
    validate_policy_loss_args(args)
    read = arguments.names
    assert {"num_experts", "use_torch_fsdp2", "expert_model_parallel_size", "use_mup"} <= read
    assert read - {"rank", "gtp_weight_remat_size"} <= flags


@pytest.mark.filterwarnings("ignore")
def test_megatrons_flags_have_megatrons_types(monkeypatch):
    megatron = pytest.importorskip("megatron.training.arguments", exc_type=ImportError)
    parsers: list[argparse.ArgumentParser] = []
    monkeypatch.setattr("sys.argv", ["train.py"])
    megatron.parse_args(extra_args_provider=lambda parser: parsers.append(parser) or parser)
    theirs = parsers[0]._option_string_actions
    (group,) = (g for g in build_parser()._action_groups if g.title == "flags of Megatron")
    assert len(group._group_actions) == 12
    for ours in group._group_actions:
        their = theirs[ours.option_strings[0]]
        assert (ours.dest, ours.nargs, ours.default) == (their.dest, their.nargs, their.default)
        assert (
            ours.dest == "vocab_size"
            or (ours.type or str) is (their.type or str)
            or ours.nargs == 0
        )
        assert set(their.choices or ()) <= set(ours.choices or ())
    unread = [flag for flag in theirs if flag not in build_parser()._option_string_actions]
    assert list(_misspelled(unread, build_parser())) == [], "a flag of Megatron's is left alone"


def test_flags_that_are_not_used_are_in_the_json(capsys):
    found = explained(capsys, "--lengths", "3,5", "--test-mode", "--num-layers", "2")
    assert found["loss_aggregation"] == "sample_mean"
    assert found["unused_flags"] == ["--test-mode", "--num-layers", "2"]


def test_a_flag_that_is_nearly_one_is_refused(capsys):
    line = ["--lengths", "3,5", "--loss-agregation=prompt_mean", "--num-layers", "2"]
    assert explain([*line, "--eps-clip-hi", "0.3"]) == 2
    printed = capsys.readouterr().err
    assert "--loss-agregation is no flag; did you mean --loss-aggregation?" in printed
    assert "did you mean --eps-clip-high?" in printed
    assert "--num-layers" not in printed


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--lengths 10,20 --pg-loss-divisor 1000", "far from the lengths seen"),
        ("--lengths 10,20 --pg-loss-divisor 1", "far from the lengths seen"),
        (
            "--lengths 10 --group-size 4 --docs-per-step 6",
            "inside prompt group 1: 2 of its 4 samples",
        ),
        ("--lengths 10,0", "1 of 2 samples have no active token"),
    ],
)
def test_warnings(capsys, line, message):
    found = explained(capsys, *line.split())
    assert any(message in warning for warning in found["warnings"]), found["warnings"]


@pytest.mark.parametrize(
    "line",
    [
        "--lengths 10,20 --pg-loss-divisor 20",
        "--lengths 10,20 --group-size 2",
        "--log-normal 100,1 --group-size 4",
    ],
)
def test_no_warning_without_a_cause(capsys, line):
    assert explained(capsys, *line.split())["warnings"] == []


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


def test_a_terminal_shows_names_as_they_are(tmp_path, capsys, monkeypatch):
    path = write_groups(tmp_path / "a[train] -> :100:.jsonl")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    line = ["--rollout-files", path, "--docs-per-step", "3", KEEP]
    assert explain([*line, "--save", "[bold]:100:"]) == 0
    printed = capsys.readouterr().out
    assert "a[train] -> :100:.jsonl row 0 " in printed
    assert "not used: --save [bold]:100:" in printed


def test_many_samples_are_picked_over_the_range():
    picked, how_many = show._picked(range(100), None, ", by length")
    assert (picked[0], picked[-1], len(picked)) == (0, 99, show.MAX_ROWS)
    assert how_many == f" ({show.MAX_ROWS} of 100, by length)"


def test_plot_writes_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "weights.png"
    assert explain(["--log-normal", "100,1", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "give one of --lengths, --log-normal and --rollout-files"),
        ("--lengths 1 --log-normal 5,1", "give one of --lengths, --log-normal and --rollout-files"),
        ("--lengths 1 --loss-aggregation constant", "--loss-aggregation-divisor"),
        (
            "--lengths 1 --loss-aggregation prompt_mean --calculate-per-token-loss",
            "--calculate-per-token-loss",
        ),
        ("--lengths 1 --qkv-format bshd --context-parallel-size 2", "--qkv-format thd"),
        (
            "--lengths 1 --calculate-per-token-loss --use-torch-fsdp2",
            "--calculate-per-token-loss does not work with --use-torch-fsdp2",
        ),
        (
            "--lengths 1 --ragged-microbatches --expert-model-parallel-size 2",
            "drop --ragged-microbatches",
        ),
        ("--lengths 1 --keep-prompt-groups", "give --docs-per-step"),
        ("--log-normal 1e12,1", "--log-normal 1e+12,1 has drawn a length of"),
        ("--lengths 1,2,3 --group-size 1000000", "give a smaller --group-size"),
        ("--lengths 1 --docs-per-step 1048577", "--docs-per-step"),
        ("--lengths 1 --group-size 0", "--group-size must be an integer >= 1"),
        ("--lengths 1 --docs-per-step -3", "--docs-per-step must be an integer >= 1"),
        (f"--lengths 1 --num-microbatches {'9' * 400}", "must be an integer >= 1 and <="),
        ("--log-normal 9,1 --seed -1", "--seed must be an integer >= 0"),
        ("--lengths 1,2 --plot weights.unknown", "unknown"),
        ("--lengths 1,2 --plot /no/such/folder/weights.png", "/no/such/folder"),
    ],
)
def test_what_cannot_be_explained_is_said(capsys, line, message):
    assert explain(line.split()) == 2
    assert message in capsys.readouterr().err


def test_a_plot_of_nothing_is_refused_before_anything_is_written(tmp_path, capsys):
    path = tmp_path / "weights.png"
    assert explain(["--lengths", "0,0", "--plot", str(path)]) == 2
    printed = capsys.readouterr()
    assert f"--plot {path}: no sample of the step has an active token" in printed.err
    assert printed.out == "" and not path.exists()


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--lengths", "1,x", "'x': expected an integer from 0 to 1099511627776"),
        *(
            ("--lengths", value, "give token counts such as 200,4000")
            for value in ("-1", "99999999999999999999", f"5,{2**63 - 1}")
        ),
        *(("--log-normal", value, "expected MEDIAN,SIGMA") for value in ("5", "1,2,3", "a,b")),
        ("--log-normal", "0,1", "a median above 0"),
        ("--log-normal", "1e300,1", "a median above 0 and up to 1099511627776"),
        ("--log-normal", "nan,1", "a median above 0"),
        ("--log-normal", "2000,500", "Sigma is of the logarithm and not in tokens"),
        ("--log-normal", "2000,50", "a sigma from 0 to 10"),
        ("--group-size", "x", "invalid int value: 'x'"),
    ],
)
def test_malformed_values_are_refused_by_the_parser(capsys, flag, value, message):
    with pytest.raises(SystemExit) as stopped:
        explain([flag, value])
    assert stopped.value.code == 2
    printed = capsys.readouterr().err
    assert f"argument {flag}: " in printed and message in printed


def test_the_longest_lengths_add_up(capsys):
    found = explained(capsys, "--lengths", str(2**40), "--group-size", "1024")
    assert found["step"]["num_active_tokens"] == 2**50


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
    monkeypatch.setitem(cli.COMMANDS, "check", lambda words: seen.append(list(words)) or 1)
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


def test_kept_sets_of_files(capsys, tmp_path):
    path = tmp_path / "sets.jsonl"
    row = {"prompt_ids": [1], "response_ids": [2, 3, 4], "loss_mask": [1, 1, 0], "reward": 1.0}
    rows = [{**row, "kept_tokens": [[2, 5, 6], [], [4]]}, {**row, "kept_tokens": [[2], [3, 9], []]}]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    found = explained(capsys, "--rollout-files", str(path))
    assert found["step"]["kept_sets"] == {"num_tokens": 3, "mean_size": 2.0, "largest": 3}
    assert explain(["--rollout-files", str(path)]) == 0
    line = "kept sets: 3 of 4 active tokens have one, of 2 ids on average and 3 at most"
    assert f"{line}, which only --replay-sampling-set reads" in capsys.readouterr().out
    assert explained(capsys, "--lengths", "3")["step"]["kept_sets"] is None
