"""One row of a table is all there is to an objective or a correction: whatever depends on a
property reads the row.
"""

import argparse
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from megatron_pg import PolicyLossConfig, add_policy_loss_args, validate_policy_loss_args
from megatron_pg.config.command_line import ProgramParser
from megatron_pg.config.tables import add_rows
from megatron_pg.loss import CORRECTIONS, OBJECTIVES
from megatron_pg.loss.corrections import Corrected, Correction
from megatron_pg.loss.metrics import metric_names
from megatron_pg.loss.objectives import Objective, Outcome
from megatron_pg.loss.resolved import resolve
from tests.fast.one_step import loss_of
from tests.fast.sequences import flat_log_probs, package_batch, random_sequences


def sequence_score(config, tokens, sums):
    """-A s, s the ratio of the sequence, with the gradient of REINFORCE."""
    log_ratio = sums.mean("policy")
    is_clipped = log_ratio > 0
    loss = -tokens.advantages * log_ratio.exp() * tokens.log_probs
    return Outcome(loss, log_ratio, is_clipped, is_clipped)


def drop_long_mismatch(config, tokens, sums, loss):
    """Drops the sequences whose log-probs add up to less than the rollout engine's."""
    total = sums.total("mismatch")
    return Corrected(loss, tokens.loss_mask & (total >= 0), {"mismatch_sum": total})


OBJECTIVE = Objective(
    name="sequence_score",
    formula="-sg(s) A log_prob",
    function=sequence_score,
    inputs=("old_log_probs",),
    options=("eps_clip_c",),
    ratio="sequence",
    sequence_sums=("policy",),
    zero_advantage_is_zero_gradient=True,
)
CORRECTION = Correction(
    name="drop_long_mismatch",
    formula="sequences drop where sum_t d < 0",
    flag="--opsm-delta 7",
    options=("opsm_delta", "rejection_denominator"),
    when=lambda config: config.opsm_delta == 7.0,
    function=drop_long_mismatch,
    inputs=("old_log_probs", "rollout_log_probs"),
    sequence_sums=("mismatch",),
    rejects=True,
    metrics=("mismatch_sum",),
)


@pytest.fixture(autouse=True)
def rows(request: pytest.FixtureRequest) -> Iterator[None]:
    changes: dict[str, Any] = getattr(request, "param", {})
    add_rows(OBJECTIVES, replace(OBJECTIVE, **changes.get("objective", {})))
    add_rows(CORRECTIONS, replace(CORRECTION, **changes.get("correction", {})))
    yield
    del OBJECTIVES[OBJECTIVE.name]
    del CORRECTIONS[CORRECTION.name]


def parsed(line: str) -> argparse.Namespace:
    return add_policy_loss_args(argparse.ArgumentParser()).parse_args(line.split())


def refusal(line: str, **keywords: Any) -> str:
    with pytest.raises(ValueError) as error:
        validate_policy_loss_args(parsed(line), **keywords)
    return str(error.value)


def everything_follows() -> None:
    line = "--policy-loss sequence_score --opsm-delta 7"
    text = " ".join(add_policy_loss_args(argparse.ArgumentParser()).format_help().split())
    assert "sequence_score: -sg(s) A log_prob." in text
    args = validate_policy_loss_args(parsed(line + " --eps-clip-c 3"))
    config = PolicyLossConfig.from_args(args)
    assert config.required_sample_fields == ("old_log_probs", "rollout_log_probs")
    message = refusal(line, sample_fields=[])
    assert "old_log_probs for --opsm-delta 7 and --policy-loss sequence_score" in message
    assert "must have rollout_log_probs for --opsm-delta 7" in message
    accepted = refusal(line + " --rejection-denominator accepted")
    assert "cannot count what --opsm-delta 7 rejects" in accepted
    assert "ppo and gspo and sequence_score" in refusal("--policy-loss sft --eps-clip-c 3")
    assert resolve(config).scope == ("micro_batch", True)
    assert resolve(PolicyLossConfig()).scope.tokens == "token"

    names = {"ratio_new_old", "clipped_ratio_fraction", "mismatch_sum", "rejected_fraction"}
    assert names <= set(metric_names(config))
    sequences = random_sequences(6)
    loss, metrics = loss_of(config, package_batch(sequences), flat_log_probs(sequences))
    loss.backward()
    assert set(metrics) == set(metric_names(config))
    # One number a sequence, of several.
    total, means = (float(metrics[name][0]) for name in ("ratio_new_old_sum", "ratio_new_old"))
    assert total == pytest.approx(means)
    assert len([sequence for sequence in sequences if sum(sequence.loss_mask)]) > 1


def test_a_row_of_ones_own_is_all_that_it_takes() -> None:
    everything_follows()


DROPPED = [
    {kind: {name: default}}
    for kind, row, names in (
        ("objective", OBJECTIVE, ("inputs", "options", "ratio", "sequence_sums")),
        ("objective", OBJECTIVE, ("zero_advantage_is_zero_gradient",)),
        ("correction", CORRECTION, ("inputs", "sequence_sums", "rejects", "metrics", "when")),
    )
    for name in names
    for default in [next(f.default for f in fields(row) if f.name == name)]
] + [
    {"objective": {"is_sum_over_tokens": True}, "correction": {"is_sum_over_tokens": True}},
    {"objective": {"formula": "another"}},
    {"correction": {"flag": "--another"}},
]


@pytest.mark.parametrize("rows", DROPPED, ids=str, indirect=True)
def test_mutant_a_row_that_lacks_a_property_is_caught(rows: None) -> None:
    with pytest.raises((AssertionError, KeyError, ValueError, pytest.fail.Exception)):
        everything_follows()


VIOLATIONS = (
    "--eps-clip must be a finite number > 0 and <= 1, not 5.0",
    "--tis-clip must be a finite number >= 2.06115e-09, not -1.0",
    "not 'token-mean'. Did you mean token_mean?",
    "--policy-loss must be one of ppo, ",
    "--cispo-lower-bound belongs to --policy-loss cispo",
    "Did you mean group_index?",
    "every sample must have old_log_probs for",
)


def test_every_violation_is_said_at_once_with_the_nearest_right_word() -> None:
    args = parsed("--eps-clip 5 --tis-clip -1 --cispo-lower-bound --loss-aggregation constant")
    args.loss_aggregation = "token-mean"
    args.policy_loss = "gpo"
    with pytest.raises(ValueError) as error:
        validate_policy_loss_args(args, sample_fields=["group_indx"])
    message = str(error.value)
    assert all(part in message for part in VIOLATIONS)
    assert message.startswith("7 invalid settings")


MEANT = {
    "DAPO": "prompt_mean",
    "grpo": "sample_mean",
    "Dr.GRPO": "constant, with dr_grpo's advantages",
    "tokn_mean": "token_mean",
}


@pytest.mark.parametrize(("word", "meant"), MEANT.items())
def test_the_parser_names_the_aggregation_that_is_meant(word: str, meant: str, capsys) -> None:
    with pytest.raises(SystemExit):
        parsed(f"--loss-aggregation {word}")
    assert f"Did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("--loss-agregation token_mean", ". Did you mean --loss-aggregation?"),
        ("--lr 1", ""),  # it has no flag but --help near it
    ],
)
def test_a_parser_of_ours_refuses_in_one_line_with_the_nearest_flag(line, hint, capsys) -> None:
    parser = add_policy_loss_args(ProgramParser(prog="ours"))
    with pytest.raises(SystemExit) as end:
        parser.parse_args(line.split())
    assert end.value.code == 2
    assert capsys.readouterr().err == f"ours: error: unrecognized arguments: {line}{hint}\n"


def test_a_parser_of_ours_prints_its_help_once_on_a_node(capsys, monkeypatch) -> None:
    for rank in "01":
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit):
            add_policy_loss_args(ProgramParser()).parse_args(["--help"])
        assert ("--eps-clip" in capsys.readouterr().out) == (rank == "0")
