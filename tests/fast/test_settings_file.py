"""Flags in a YAML file: the same namespace as on the command line, and a file again that means the same."""

import argparse
import json

import pytest

from megatron_pg.config import PolicyLossConfig, add_policy_loss_args
from megatron_pg.config.program import ProgramParser
from megatron_pg.config.settings_file import add_settings_file_args, settings_of_words
from megatron_pg.explain import main as explain
from tests.fast.refusals import assert_words


def parser():
    made = ProgramParser(prog="program", allow_abbrev=False)
    add_settings_file_args(made)
    made.add_argument("--lengths", type=int, nargs="+")
    made.add_argument("--generator", type=json.loads)
    made.add_argument("--shuffle", action=argparse.BooleanOptionalAction, default=True)
    made.add_argument("--no-bias", action="store_false", dest="bias")
    return add_policy_loss_args(made)


WORDS = (
    "--loss-aggregation constant --loss-aggregation-divisor 4096 --eps-clip 0.20 --kl-loss-coef 1e-3 --use-tis "
    '--lengths 3 5 --generator {"words":{"least":3}} --no-shuffle --no-bias --lengths 7 8 9'
).split()
TEXT = """
loss_aggregation: constant
loss-aggregation-divisor: 4096
eps-clip: 0.20
kl-loss-coef: 1e-3
use-tis: true
lengths: [7, 8, 9]
generator: {words: {least: 3}}
shuffle: false
no-bias: true
"""


def settings(words):
    args = vars(parser().parse_args(words))
    return {name: value for name, value in args.items() if "config" not in name}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)
    return path


def test_a_file_means_what_its_flags_mean(file):
    expected = settings(WORDS)
    assert expected["lengths"] == [7, 8, 9] and not expected["bias"] and not expected["shuffle"]
    assert settings(["--config", str(file)]) == expected
    assert settings([f"--config={file}"]) == expected


def test_flags_win_on_both_sides_of_the_file(file):
    args = settings(["--eps-clip", "0.3", "--config", str(file), "--shuffle", "--lengths", "1"])
    changed = {"eps_clip": 0.3, "shuffle": True, "lengths": [1]}
    assert args == settings(WORDS) | changed


@pytest.mark.parametrize("undo", ["--no-use-tis", "--use-tis=false"])
def test_a_flag_undoes_a_switch_of_the_file(undo, file, tmp_path):
    """Also where it stands before the file; and the file that is written does not have it."""
    target = tmp_path / "resolved.yaml"
    expected = settings(WORDS) | {"use_tis": False, "bias": True, "shuffle": True}
    undone = [undo, "--no-bias=false", "--no-shuffle=false"]
    for words in (["--config", str(file), *undone], [*undone, "--config", str(file)]):
        assert settings([*words, "--write-config", str(target)]) == expected
        assert settings(["--config", str(target)]) == expected
        assert "use-tis" not in target.read_text()
    assert settings([*undone, "--use-tis", "--config", str(file)])["use_tis"]


def test_a_flag_that_takes_a_value_is_not_undone(file, capsys):
    for words in ("--no-eps-clip", "--no-use-tis=true"):
        with pytest.raises(SystemExit):
            parser().parse_args(["--config", str(file), *words.split()])
        assert_words(f"unrecognized arguments: {words}", capsys.readouterr().err)


def test_what_is_written_means_the_same(file, tmp_path):
    target = tmp_path / "resolved.yaml"
    flags = ["--eps-clip", "0.3", "--lengths", "4"]
    given = settings(["--config", str(file), *flags, "--write-config", str(target)])
    assert settings(["--config", str(target)]) == given
    assert "config" not in target.read_text()


def test_numbers_are_written_as_numbers_and_words_as_words():
    words = "--lr 1e-5 --eps-clip 0.2 --steps 100 --name 007 --tag=true --use-tis".split()
    expected = {"lr": "1e-5", "eps-clip": 0.2, "steps": 100, "name": "007", "tag": "true"}
    assert settings_of_words(words) == expected | {"use-tis": True}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "loss-agregation: constant",
            "--loss-agregation=constant | did you mean --loss-aggregation?",
        ),
        ("use-tis: 2", "use-tis takes no value: expected true or false, found '2'"),
        ("fused-lm-heed: false", "--fused-lm-heed=false | did you mean --fused-lm-head?"),
        ("kl-loss-coef: false", "--kl-loss-coef: invalid"),
        ("policy-loss:", "policy-loss has no value"),
        ("config: other.yaml", "config belongs on the command line"),
        ("eps-clip: wide", "--eps-clip: invalid"),
        ("loss_aggregation", "holds str | expected lines such as"),
        ("a: [", "run.yaml cannot be read"),
    ],
)
def test_a_fault_of_a_file_is_one_line(text, words, file, capsys):
    file.write_text(text)
    with pytest.raises(SystemExit) as end:
        parser().parse_args(["--config", str(file)])
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert_words(words, said)


def test_explain_reads_a_file_and_leaves_out_what_it_does_not_know(file, capsys):
    def explained(*words):
        assert explain([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    file.write_text("lengths: 200,4000\nloss-aggregation: token_mean\nnum_layers: 4\n")
    launch_line = "--lengths 200,4000 --loss-aggregation token_mean --num_layers=4"
    assert explained("--config", str(file)) == explained(*launch_line.split())
    file.write_text("lengths: 200,4000\nloss-agregation: token_mean\n")
    assert explain(["--config", str(file)]) == 2
    assert_words("did you mean --loss-aggregation?", capsys.readouterr().err)


def test_words_are_read_as_they_are_written(file):
    made = parser()
    for flag in ("--seed", "--name", "--prompt"):
        made.add_argument(flag)
    file.write_text("seed: 010\nname: 2026_11_24\nprompt: -xy\n")
    args = made.parse_args(["--config", str(file)])
    assert (args.seed, args.name, args.prompt) == ("010", "2026_11_24", "-xy")


def test_defaults_are_those_of_the_config(file):
    file.write_text("{}")
    assert settings(["--config", str(file)])["eps_clip"] == PolicyLossConfig().eps_clip
