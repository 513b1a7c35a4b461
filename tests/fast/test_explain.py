"""`megatron-pg explain`: its numbers against the oracle's gradients, its warnings, its outputs; the
command line.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
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
from megatron_pg.rollout_files import RolloutFiles, StepCollector
from tests import oracle
from tests.fast.refusals import assert_words
from tests.random_steps import plain_sample

DIVISOR = 6.0


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The text of a command line that ends with a status: standard error alone where it fails."""

    def run(line: str, status: int = 0) -> str:
        assert explain(line.split()) == status
        out, err = capsys.readouterr()
        assert not status or out == ""
        return err if status else out

    return run


@pytest.fixture
def explained(printed: Callable[..., str]) -> Callable[[str], dict[str, Any]]:
    return lambda line: json.loads(printed(f"{line} --json"))


def step_of(line: str) -> ExplainedStep:
    return explained_step(parse_options(line.split()))


def lengths_of(step: ExplainedStep) -> list[int]:
    return [sample.num_active_tokens for sample in step.samples]


def test_coefficients_are_the_oracles_gradients(explained):
    lengths, group_size = [2, 4, 1, 0, 3, 7], 2
    found = explained(f"--lengths 2,4,1,0,3,7 --group-size 2 --pg-loss-divisor {DIVISOR}")
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


def test_the_aggregation_of_kl_and_entropy(explained, printed):
    """Beside a token mean of 10 tokens a sample mean of 2 has 10 / (N D_i) times the
    coefficient.
    """
    line = "--lengths 2,8 --loss-aggregation token_mean --kl-loss-coef 0.1"
    terms = explained(line)["regularizers"]
    assert terms["aggregation"] == "sample_mean"
    assert terms["relative_coefficient"] == pytest.approx([2.5, 0.625])
    line += " --regularizer-aggregation loss"
    terms = explained(line)["regularizers"]
    assert terms == {"aggregation": "token_mean", "relative_coefficient": [1.0, 1.0]}
    assert "KL and entropy terms: token_mean (--regularizer-aggregation loss)" in printed(line)
    assert explained("--lengths 2,8")["regularizers"] is None


def test_counts_quantiles_and_learning_rate_ratio(explained):
    found = explained("--lengths 1,2,3,4,5,6,7,12 --pg-loss-divisor 20")
    expected = {"num_rollouts": 8, "num_prompt_groups": 8, "num_skipped": 0, "num_samples": 8}
    expected |= {"num_active_tokens": 40, "kept_sets": None}
    assert expected.items() <= found["step"].items()
    quarters = found["aggregations"]["token_mean"]["quantile_shares"]
    ranges = [(part["shortest"], part["longest"]) for part in quarters]
    assert ranges == [(1, 2), (3, 4), (5, 6), (7, 12)]
    assert [part["share"] for part in quarters] == pytest.approx([3 / 40, 7 / 40, 11 / 40, 19 / 40])
    assert found["aggregations"]["constant"]["learning_rate_ratio"] == pytest.approx(40 / 160)
    assert found["loss_aggregation"] == "constant"


@pytest.mark.parametrize(
    ("aggregation", "expected"),  # the token mean turns per-token mode on
    [("token_mean", (8.0, 1.0, 1 / 8)), ("sample_mean", (12.0, 2 / 3, 1 / 8))],
)
def test_megatrons_factors_cancel(explained, aggregation, expected):
    sizes = "--data-parallel-size 4 --context-parallel-size 2 --num-microbatches 3"
    found = explained(f"--lengths 3,5 --loss-aggregation {aggregation} {sizes}")
    assert found["parallelism"]["calculate_per_token_loss"] is (aggregation == "token_mean")
    scale = found["aggregations"]["sample_mean"]["megatron_scale"]
    assert (scale["returned"], scale["schedule"], scale["gradients"]) == pytest.approx(expected)
    assert scale["net"] == pytest.approx(1.0)


def test_log_normal_lengths_have_their_median_and_are_reproducible():
    line = "--log-normal 2000,0.5 --group-size 8 --docs-per-step 4096"
    lengths = lengths_of(step_of(f"{line} --seed 3"))
    assert lengths == lengths_of(step_of(f"{line} --seed 3")) != lengths_of(step_of(line))
    assert sorted(lengths)[2048] == pytest.approx(2000, rel=0.05)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    pytest.importorskip("pyarrow")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_rollouts(path: Path) -> Path:
    """Two prompt groups of three rollouts; the second rollout of each has two samples, one token is
    masked.
    """
    rows = [
        {"prompt_ids": [1, 2], "response_ids": [3] * length, "log_probs": [-1.0] * length}
        | {"group_index": group, "rollout_id": 10 * group + rollout, "advantages": 1.0}
        | {"loss_mask": [1] * (length - 1) + [int(length != 5)]}
        for group in range(2)
        for rollout, length in ((0, 3), (1, 2), (1, 4), (2, 5))
    ]
    return write_rows(path / "rollouts.jsonl", rows)


def test_a_rollout_file(tmp_path, explained):
    found = explained(f"--rollout-files {write_rollouts(tmp_path)}")
    assert found["step"]["active_tokens"] == [3, 2, 4, 4] * 2
    assert (found["step"]["num_rollouts"], found["step"]["num_prompt_groups"]) == (6, 2)
    weights = found["aggregations"]["sample_mean"]["token_weight"]
    assert weights == pytest.approx([1 / 3, 1 / 6, 1 / 6, 1 / 4] * 2)
    assert found["warnings"] == []


def test_the_first_rollouts_of_a_file_cut_a_group(tmp_path, explained):
    line = f"--rollout-files {write_rollouts(tmp_path)} --docs-per-step"
    found = explained(f"{line} 5")
    assert (found["step"]["num_rollouts"], found["step"]["num_samples"]) == (5, 7)
    assert any("has 2 of the 3 rollouts in prompt group 1" in w for w in found["warnings"])
    assert explained(f"{line} 3")["warnings"] == []


def test_a_rollout_of_several_samples_counts_once(tmp_path, explained):
    """Two groups of two rollouts; one has three samples, of which one is masked."""
    rows = [
        {"prompt_ids": [1, 2], "response_ids": [3] * length, "loss_mask": [mask] * length}
        | {"log_probs": [-1.0] * length, "reward": 1.0, "group_index": group, "rollout_id": rollout}
        for group, rollout, length, mask in (
            *((0, 0, 3, 1), (0, 0, 5, 1), (0, 0, 2, 0), (0, 1, 8, 1)),
            *((1, 2, 8, 1), (1, 3, 8, 1)),
        )
    ]
    found = explained(f"--rollout-files {write_rows(tmp_path / 'rows.jsonl', rows)}")
    assert found["warnings"] == []
    constant = found["aggregations"]["constant"]
    assert (constant["divisor"], constant["learning_rate_ratio"]) == (8, 1)
    rows[-1]["loss_mask"] = [0] * 8
    rows.append(rows[-1] | {"rollout_id": 4, "loss_mask": [1] * 8})
    warnings = explained(f"--rollout-files {write_rows(tmp_path / 'rows.jsonl', rows)}")["warnings"]
    assert [warning.split(". ")[0] for warning in warnings] == [
        "Prompt groups have 2 to 3 rollouts",
        "1 of 5 rollouts have no active token",
    ]


@pytest.mark.parametrize(("rows", "words"), [
    (None, "rollouts.jsonl"),
    ([], "no sample"),
    ([{}, {}], "no sample in them (2 bad rows skipped"),
])  # fmt: skip
def test_files_without_a_sample(tmp_path, printed, rows, words):
    path = tmp_path / "rollouts.jsonl"
    if rows is not None:
        write_rows(path, rows)
    assert words in printed(f"--rollout-files {path} --on-bad-row skip", 2)


def write_groups(path: Path, *, spoiled: dict[int, dict[str, Any]] | None = None) -> Path:
    """Four prompt groups of four rollouts of 1 to 16 tokens; the fields of some rows are
    replaced.
    """
    rows: list[dict[str, Any]] = [
        {"prompt_ids": [1], "response_ids": [1] * length, "log_probs": [-1.0] * length}
        | {"reward": 1.0, "group_index": (length - 1) // 4}
        for length in range(1, 17)
    ]
    for index, fields in (spoiled or {}).items():
        rows[index] |= fields
    return write_rows(path / "groups.jsonl", rows)


EXACT = "--docs-per-step-mode exact"
KEEP = "--keep-prompt-groups"
PROMPT_MEAN = "--loss-aggregation prompt_mean"


@pytest.mark.parametrize(("flags", "num_samples"), [
    (f"--docs-per-step 6 {EXACT} {KEEP} {PROMPT_MEAN}", 8),
    (f"--docs-per-step 6 {EXACT} {KEEP}", 8),
    (f"--docs-per-step 6 {KEEP}", 8),
    (f"--docs-per-step 6 {PROMPT_MEAN}", 8),
    (f"--docs-per-step 6 {EXACT}", 6),
    ("--docs-per-step 6", 6),
    (f"--docs-per-step 8 {EXACT} {PROMPT_MEAN}", 8),
    (f"--docs-per-step 100 {EXACT} {KEEP}", 16),
    ("", 16),
])  # fmt: skip
def test_the_step_is_the_first_that_training_takes(tmp_path, explained, flags, num_samples):
    path = write_groups(tmp_path)
    found = explained(f"--rollout-files {path} {flags}")
    assert found["step"]["active_tokens"] == list(range(1, num_samples + 1))
    cut = [w for w in found["warnings"] if "has 2 of the 4 rollouts in prompt group 1" in w]
    assert found["warnings"] == cut and len(cut) == (num_samples == 6)
    if flags:
        assert found["step"]["active_tokens"] == trained_first(path, flags)


def trained_first(path: Path, flags: str) -> list[int]:
    """Active tokens of the first step, of the classes and flags that a training script has."""
    parser = add_policy_loss_args(add_planning_args(argparse.ArgumentParser()))
    args = parser.parse_args([*flags.split(), "--max-tokens-per-microbatch", "64"])
    step = StepCollector(
        RolloutFiles([str(path)]),
        docs_per_step=args.docs_per_step,
        mode=args.docs_per_step_mode,
        keep_prompt_groups=args.keep_prompt_groups,
        refuse_cut_groups=args.loss_aggregation == "prompt_mean",
    ).collect()
    assert step is not None
    return [sample.num_active_tokens for sample in step.samples]


def test_the_step_of_lengths_and_groups():
    line = "--lengths 1,2,3 --group-size 2"
    step = step_of(line)
    assert lengths_of(step) == [1, 2, 3, 1, 2, 3]
    assert [sample.group_index for sample in step.samples] == [0, 0, 1, 1, 2, 2]
    assert lengths_of(step_of(f"{line} --docs-per-step 3")) == [1, 2, 3]
    kept = step_of(f"{line} --docs-per-step 3 {KEEP}")
    assert lengths_of(kept) == [1, 2, 3, 1] and kept.cut_groups == {}


@pytest.mark.parametrize("from_file", [True, False])
def test_a_group_that_training_refuses_to_cut(tmp_path, printed, from_file):
    source = "--lengths 1 --group-size 4"
    if from_file:
        source = f"--rollout-files {write_groups(tmp_path)}"
    words = f"prompt group 1 (group_index) is split by the end of a step | {KEEP}"
    assert_words(words, printed(f"{source} --docs-per-step 6 {EXACT} {PROMPT_MEAN}", 2))


@pytest.mark.parametrize(("fields", "flags"), [
    ({"prompt_ids": []}, ""),
    ({"prompt_ids": [99]}, "--vocab-size 50"),
    ({"group_index": None}, PROMPT_MEAN),
])  # fmt: skip
def test_bad_rows_are_refused_or_counted(tmp_path, explained, printed, fields, flags):
    path = write_groups(tmp_path, spoiled={1: fields, 3: fields})
    line = f"--rollout-files {path} --docs-per-step 4 {KEEP} {flags}"
    assert f"groups.jsonl row 1: {next(iter(fields))}" in printed(line, 2)
    line += " --on-bad-row skip"
    found = explained(line)["step"]
    assert found["active_tokens"] == [1, 3, 5, 6, 7, 8] and found["num_skipped"] == 2
    assert "skipped (--on-bad-row skip): 2\n" in printed(line)


def test_a_bad_row_after_the_step_is_none_of_it(tmp_path, explained):
    path = write_groups(tmp_path, spoiled={7: {"prompt_ids": []}})
    found = explained(f"--rollout-files {path} --docs-per-step 6 {EXACT}")
    assert found["step"]["num_samples"] == 6
    assert [
        "2 of the 3 rollouts in prompt group 1" in warning for warning in found["warnings"]
    ] == [True]


def test_rows_without_what_the_flags_need_are_pointed_out(tmp_path, explained):
    path = write_groups(tmp_path, spoiled=dict.fromkeys((2, 5, 9), {"log_probs": None}))
    line = f"--rollout-files {path} --docs-per-step 8"
    (warning,) = explained(line)["warnings"]
    assert warning.startswith(
        "2 of 8 samples have no old_log_probs, required by --policy-loss ppo."
    )
    assert explained(f"{line} --policy-loss reinforce")["warnings"] == []


FILES = "--rollout-files groups.jsonl --data-parallel-size 4"
LENGTHS = "--lengths 200,4000 --docs-per-step 5"


@pytest.mark.parametrize(("line", "warned"), [
    (f"{FILES} --docs-per-step 8 {KEEP}", True),
    (f"{FILES} --docs-per-step 7", True),
    (f"{FILES} --docs-per-step 8", False),
    (f"{FILES} --docs-per-step 8 {KEEP} {EXACT}", False),
    (f"{FILES}", False),
    (f"{LENGTHS} --data-parallel-size 4", True),
    (f"{LENGTHS} --data-parallel-size 5", False),
    (f"{LENGTHS} --data-parallel-size 1", False),
])  # fmt: skip
def test_steps_that_depend_on_the_number_of_ranks(tmp_path, monkeypatch, explained, line, warned):
    write_groups(tmp_path)
    monkeypatch.chdir(tmp_path)
    warnings = explained(line)["warnings"]
    assert any("With --docs-per-step-mode at_least" in w for w in warnings) is warned


TOKEN_MEAN = "--loss-aggregation token_mean"


@pytest.mark.parametrize(("flags", "per_token"), [
    ("--num-experts 8 --moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type none", True),
    ("--use-torch-fsdp2", False),
])  # fmt: skip
def test_megatrons_flags_settle_per_token_mode(explained, flags, per_token):
    found = explained(f"--lengths 3,5 {TOKEN_MEAN} {flags}")
    assert found["parallelism"]["calculate_per_token_loss"] is per_token
    assert found["unused_flags"] == []


class RecordedArguments(dict[str, Any]):
    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def test_every_argument_that_validation_reads_is_a_flag_here():
    """The rank is the launcher's; the weight's shards are a setting of models alone in 0.19."""
    args = build_parser().parse_args([*TOKEN_MEAN.split(), "--fused-lm-head"])
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
    (group,) = (g for g in build_parser()._action_groups if g.title == "Megatron flags")
    assert len(group._group_actions) == 12
    for ours in group._group_actions:
        their = theirs[ours.option_strings[0]]
        assert (ours.dest, ours.nargs, ours.default) == (their.dest, their.nargs, their.default)
        has_type = ours.dest != "vocab_size" and ours.nargs != 0
        assert not has_type or (ours.type or str) is (their.type or str)
        assert set(their.choices or ()) <= set(ours.choices or ())
    unread = [flag for flag in theirs if flag not in build_parser()._option_string_actions]
    assert list(_misspelled(unread, build_parser())) == [], "a flag of Megatron's is left alone"


def test_flags_that_are_not_used_are_in_the_json(explained):
    found = explained("--lengths 3,5 --test-mode --num-layers 2")
    assert found["loss_aggregation"] == "sample_mean"
    assert found["unused_flags"] == ["--test-mode", "--num-layers", "2"]


def test_a_flag_that_is_nearly_one_is_refused(printed):
    line = "--lengths 3,5 --loss-agregation=prompt_mean --num-layers 2 --eps-clip-hi 0.3"
    text = printed(line, 2)
    assert "--loss-agregation is not a flag. Did you mean --loss-aggregation?" in text
    assert "Did you mean --eps-clip-high?" in text and "--num-layers" not in text


@pytest.mark.parametrize(("line", "message"), [
    ("--lengths 10,20 --pg-loss-divisor 1000", "far from the mean length"),
    ("--lengths 10,20 --pg-loss-divisor 1", "far from the mean length"),
    ("--lengths 10 --group-size 4 --docs-per-step 6", "has 2 of the 4 rollouts in prompt group 1"),
    ("--lengths 10,0", "1 of 2 rollouts have no active token"),
    ("--lengths 10,20 --pg-loss-divisor 20", None),
    ("--lengths 10,20 --group-size 2", None),
    ("--log-normal 100,1 --group-size 4", None),
])  # fmt: skip
def test_warnings_and_none_without_a_cause(explained, line, message):
    found = explained(line)["warnings"]
    assert any(message in warning for warning in found) if message else found == []


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that makes standard output a terminal of so many columns."""

    def of_width(columns: int) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        monkeypatch.setenv("COLUMNS", str(columns))

    return of_width


def test_tables_in_a_terminal(terminal, printed):
    terminal(80)
    text = printed("--lengths 200,4000,12000 --group-size 2")
    assert "──────" in text
    for aggregation in oracle.AGGREGATIONS:
        assert text.count(aggregation) == 4, "one table each: no header is folded"


def test_a_terminal_shows_names_as_they_are(tmp_path, terminal, printed):
    path = write_groups(tmp_path).rename(tmp_path / "a[train]->:100:.jsonl")
    terminal(160)
    text = printed(f"--rollout-files {path} --docs-per-step 3 {KEEP} --save [bold]:100:")
    assert_words("a[train]->:100:.jsonl row 0  | not used: --save [bold]:100:", text)


def test_many_samples_are_picked_over_the_range():
    picked, how_many = show._picked(range(100), None, ", by length")
    assert (picked[0], picked[-1], len(picked)) == (0, 99, show.MAX_ROWS)
    assert how_many == f" ({show.MAX_ROWS} of 100, by length)"


def test_plot_writes_a_picture(tmp_path, printed):
    pytest.importorskip("matplotlib")
    path = tmp_path / "weights.png"
    printed(f"--log-normal 100,1 --plot {path}")
    assert path.read_bytes().startswith(b"\x89PNG")


ONE_SOURCE = "Use one of --lengths, --log-normal and --rollout-files"
FSDP2 = "--calculate-per-token-loss does not work with --use-torch-fsdp2"


@pytest.mark.parametrize(("line", "message"), [
    ("", ONE_SOURCE),
    ("--lengths 1 --log-normal 5,1", ONE_SOURCE),
    ("--lengths 1 --calculate-per-token-loss --use-torch-fsdp2", FSDP2),
    ("--lengths 1 --ragged-microbatches "
     "--expert-model-parallel-size 2", "Remove --ragged-microbatches"),
    ("--lengths 1 --keep-prompt-groups", "Add --docs-per-step"),
    ("--log-normal 1e12,1", "--log-normal 1e+12,1 has drawn a length of"),
    ("--lengths 1,2,3 --group-size 1000000", "Use a smaller --group-size"),
    ("--lengths 1 --docs-per-step 1048577", "--docs-per-step"),
    ("--lengths 1 --group-size 0", "--group-size must be an integer >= 1"),
    ("--lengths 1 --docs-per-step -3", "--docs-per-step must be an integer >= 1"),
    (f"--lengths 1 --num-microbatches {'9' * 400}", "must be an integer >= 1 and <="),
    ("--log-normal 9,1 --seed -1", "--seed must be an integer >= 0"),
    ("--lengths 1,2 --plot weights.unknown", "unknown"),
    ("--lengths 1,2 --plot /no/such/folder/weights.png", "/no/such/folder"),
])  # fmt: skip
def test_what_cannot_be_explained_is_said(capsys, line, message):
    assert explain(line.split()) == 2
    assert message in capsys.readouterr().err


def test_a_plot_of_nothing_is_refused_before_anything_is_written(tmp_path, printed):
    path = tmp_path / "weights.png"
    text = printed(f"--lengths 0,0 --plot {path}", 2)
    assert f"--plot {path} has no points to draw: no sample in the step has an active token" in text
    assert not path.exists()


@pytest.mark.parametrize(("flag", "value", "message"), [
    ("--lengths", "1,x", "'x' is not an integer from 0 to 1099511627776"),
    ("--lengths", "-1", "Use token counts such as 200,4000"),
    ("--lengths", "99999999999999999999", "Use token counts such as 200,4000"),
    ("--lengths", f"5,{2**63 - 1}", "Use token counts such as 200,4000"),
    *(("--log-normal", value, "is not MEDIAN,SIGMA") for value in ("5", "1,2,3", "a,b")),
    ("--log-normal", "0,1", "a median above 0"),
    ("--log-normal", "1e300,1", "a median above 0 and up to 1099511627776"),
    ("--log-normal", "nan,1", "a median above 0"),
    ("--log-normal", "2000,500", "Sigma is the logarithm's, not in tokens"),
    ("--log-normal", "2000,50", "a sigma from 0 to 10"),
    ("--group-size", "x", "invalid int value: 'x'"),
])  # fmt: skip
def test_malformed_values_are_refused_by_the_parser(capsys, flag, value, message):
    with pytest.raises(SystemExit) as stopped:
        explain([flag, value])
    assert stopped.value.code == 2
    assert_words(f"argument {flag}:  | {message}", capsys.readouterr().err)


def test_the_longest_lengths_add_up(explained):
    found = explained(f"--lengths {2**40} --group-size 1024")
    assert found["step"]["num_active_tokens"] == 2**50


@pytest.mark.parametrize(("line", "status", "words"), [
    ("--version", 0, megatron_pg.__version__),
    ("--help", 0, "megatron-pg explain --lengths"),
    ("explain --help", 0, "--docs-per-step"),
])  # fmt: skip
def test_version_and_help(capsys, line, status, words):
    with pytest.raises(SystemExit) as stopped:
        cli.main(line.split())
    assert stopped.value.code == status
    assert words in "".join(capsys.readouterr())


def test_no_command_shows_examples(capsys):
    assert cli.main([]) == 2
    assert "examples:" in capsys.readouterr().out


def test_check_gets_its_arguments_and_gives_its_status(monkeypatch):
    seen: list[list[str]] = []
    command = SimpleNamespace(main=lambda words: seen.append(list(words)) or 1)
    monkeypatch.setitem(cli.COMMANDS, "check", lambda: command)
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


def test_kept_sets_of_files(explained, printed, tmp_path):
    row = {"prompt_ids": [1], "response_ids": [2, 3, 4], "loss_mask": [1, 1, 0], "reward": 1.0}
    sets = ([[2, 5, 6], [], [4]], [[2], [3, 9], []])
    path = write_rows(tmp_path / "sets.jsonl", [{**row, "kept_tokens": kept} for kept in sets])
    found = explained(f"--rollout-files {path}")
    assert found["step"]["kept_sets"] == {"num_tokens": 3, "mean_size": 2.0, "largest": 3}
    line = "sampling sets: 3 of 4 active tokens have one, with 2 ids on average and at most 3"
    text = printed(f"--rollout-files {path}")
    assert f"{line}, which only --replay-sampling-set reads" in text
    assert explained("--lengths 3")["step"]["kept_sets"] is None
