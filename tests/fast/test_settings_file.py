"""Flags in a YAML file: the same namespace as on the command line, and a file again that means the
same.
"""

import argparse
import json

import pytest

from megatron_pg.config import PolicyLossConfig, add_policy_loss_args
from megatron_pg.config.command_line import ProgramParser, text_of_words
from megatron_pg.explain import main as explain
from tests.fast.refusals import assert_words


def parser():
    made = ProgramParser(prog="program", allow_abbrev=False)
    made.add_config_args()
    made.add_argument("--lengths", type=int, nargs="+")
    made.add_argument("--generator", type=json.loads)
    made.add_argument("--shuffle", action=argparse.BooleanOptionalAction, default=True)
    made.add_argument("--no-bias", action="store_false", dest="bias")
    return add_policy_loss_args(made)


WORDS = (
    "--loss-aggregation constant --loss-aggregation-divisor 4096 --eps-clip 0.20 --kl-loss-coef "
    "1e-3 --use-tis "
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


def test_a_flag_undoes_a_switch_of_the_file(file, tmp_path):
    """Also if it is before the file, and in the file that is written."""
    target = tmp_path / "resolved.yaml"
    expected = settings(WORDS) | {"use_tis": False, "shuffle": True}
    undone = ["--no-use-tis", "--shuffle"]
    for words in (["--config", str(file), *undone], [*undone, "--config", str(file)]):
        assert settings([*words, "--write-config", str(target)]) == expected
        assert settings(["--config", str(target)]) == expected
    assert settings([*undone, "--use-tis", "--config", str(file)])["use_tis"]


def test_a_file_takes_back_what_presets_have(file):
    file.write_text("use-tis: false\nno-bias: false\nshuffle: false\n")
    made = parser()
    made.presets = "--use-tis --no-bias --eps-clip 0.4".split()
    args = made.parse_args(["--config", str(file)])
    assert (args.use_tis, args.bias, args.shuffle, args.eps_clip) == (False, True, False, 0.4)
    assert made.words == ["--no-use-tis", "--no-no-bias", "--no-shuffle", "--config", str(file)]
    assert made.get_default("eps_clip") == 0.2  # what is not given can still be told


def test_a_file_gives_a_flag_that_is_required(file):
    made = parser()
    made.add_argument("--run-dir", required=True)
    file.write_text("run-dir: here")
    assert made.parse_args(["--config", str(file)]).run_dir == "here"


def test_a_flag_that_takes_a_value_is_not_undone(file, capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["--config", str(file), "--no-eps-clip"])
    assert_words("unrecognized arguments: --no-eps-clip", capsys.readouterr().err)


def test_what_is_written_means_the_same(file, tmp_path):
    target = tmp_path / "resolved.yaml"
    flags = ["--eps-clip", "0.3", "--lengths", "4"]
    given = settings(["--config", str(file), *flags, "--write-config", str(target)])
    assert settings(["--config", str(target)]) == given
    assert "config" not in target.read_text()


def test_words_are_written_as_they_are():
    words = "--lr 1e-5 --eps-clip 0.2 --eps-clip=0.3 --name 007 --lengths 1 2 --use-tis".split()
    expected = "lr: 1e-5\neps-clip: 0.3\nname: 007\nlengths:\n- 1\n- 2\nuse-tis: true\n"
    assert text_of_words(words) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "loss-agregation: constant",
            "--loss-agregation=constant | Did you mean --loss-aggregation?",
        ),
        ("use-tis: 2", "use-tis must be true or false, not '2'"),
        ("fused-lm-heed: false", "--fused-lm-heed=false | Did you mean --fused-lm-head?"),
        ("kl-loss-coef: false", "--kl-loss-coef: invalid"),
        ("policy-loss:", "policy-loss has no value"),
        ("config: other.yaml", "config belongs on the command line"),
        ("eps-clip: wide", "--eps-clip: invalid"),
        ("eps-clip: [1, 2]", "unrecognized arguments: 2"),
        ("loss-aggregation: tokn_mean", "Did you mean token_mean?"),
        ("loss_aggregation", "run.yaml: contains str | not lines such as"),
        ("a: [", "run.yaml: cannot read the file"),
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
    assert_words("Did you mean --loss-aggregation?", capsys.readouterr().err)


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
