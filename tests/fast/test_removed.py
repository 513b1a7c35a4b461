"""Removed flags and words are refused by name with what to do instead, wherever they are given."""

import argparse

import pytest

from megatron_pg.check.options import parse_options
from megatron_pg.config import PolicyLossConfig, add_policy_loss_args, validate_policy_loss_args
from megatron_pg.config.command_line import ProgramParser
from megatron_pg.config.removed import REMOVED_FLAGS


def parsers():
    """One of our own, and one of a trainer's."""
    own = ProgramParser(prog="program", allow_abbrev=False)
    own.add_config_args()
    return add_policy_loss_args(own), add_policy_loss_args(argparse.ArgumentParser())


@pytest.mark.parametrize("flag", REMOVED_FLAGS)
def test_what_was_removed_is_refused_with_what_to_do_instead(flag, tmp_path, capsys):
    said, (name, _, word) = [], flag.removeprefix("--").partition(" ")
    file = tmp_path / "run.yaml"
    file.write_text(f"{name}: {word or 1}")
    own, theirs = parsers()
    for parser, words in (
        *((parser, [f"--{name}", word or "1"]) for parser in (own, theirs)),
        *((parser, [f"--{name}={word or 1}"]) for parser in (own, theirs)),
        (own, ["--config", str(file)]),
        *(((own, [flag]), (theirs, [flag])) if not word else ()),
    ):
        with pytest.raises(SystemExit) as end:
            parser.parse_args(words)
        assert end.value.code == 2
        said.append(capsys.readouterr().err)
    with pytest.raises(ValueError) as refused:
        PolicyLossConfig(**{name.replace("-", "_"): word or 1})
    said.append(str(refused.value))
    assert all(f"{flag} was removed: {REMOVED_FLAGS[flag]}" in text for text in said), said


def test_a_removed_flag_of_the_trainers_own_stays_its_own():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cp-partition-mode", default="zigzag")
    args = add_policy_loss_args(parser).parse_args(["--cp-partition-mode", "contiguous"])
    assert validate_policy_loss_args(args).cp_partition_mode == "contiguous"
    assert PolicyLossConfig.from_args(args) == PolicyLossConfig()


def test_a_parser_without_removed_flags_has_no_attribute_of_theirs():
    args = parsers()[1].parse_args([])
    assert not [f for f in REMOVED_FLAGS if hasattr(args, f[2:].replace("-", "_"))]


def test_check_refuses_them_too(capsys):
    with pytest.raises((SystemExit, ValueError)) as end:
        parse_options(["--cp-partition-mode", "contiguous"])
    assert "--cp-partition-mode was removed" in capsys.readouterr().err + str(end.value)
