"""`megatron-pg migrate` on files: words of a shell as bash passes them, and whose file it is."""

import argparse
import os
import re
import subprocess
from pathlib import Path

import pytest

from megatron_pg import add_critic_args, add_policy_loss_args
from megatron_pg.migrate import main
from megatron_pg.migrate.line import OTHERS, read
from megatron_pg.migrate.rows import TRAINERS
from megatron_pg.migrate.shell import read_script

VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo"
ACTOR = "actor_rollout_ref.actor."
SLIME = "python3 train.py --advantage-estimator grpo"

SCRIPTS = [
    "A=1; B=2; A=3\necho $A ${B:-9} ${C:-d e} ${C:+f} ${A:+g}",
    "A='x y'\necho $A \"$A\" '$A' a$A\"b\"",
    'A=(p "q r")\nA+=(s)\nA[0]=o\necho "${A[@]}" ${#A[@]} "${A[*]}" "${E[@]}" ${A[1]}',
    "A=(\n  --a 1 # a comment\n  # another\n  --b 2\n)\necho ${A[@]}",
    "echo --a 1 \\\n  --b 2 \\\n  # a comment\n  --c 3",
    "N=8\necho $((N * 2 + 1)) ${M:-$((1024 / 2))} $((N % 3))",
    "f() { echo $1 $#; return; echo no; }\nf a b",
    'if [ -z "$X" ] && [[ a == a* ]]; then echo yes; elif true; then echo no; else echo no; fi',
    "if false; then echo no; elif [ 1 -eq 1 ]; then echo yes; else echo no; fi",
    "X=b\ncase $X in a) echo no ;; b | c) echo yes ;; *) echo no ;; esac",
    "for X in 1 2; do echo $X; done\nwhile [ 1 -gt 2 ]; do echo no; done",
    "[ 2 -gt 1 ] || echo no\nfalse || echo yes\ntrue && echo and\n! false && echo not",
    "eval 'echo a \"b c\"'\n",
    "X=a.sh\necho ${X%.sh} ${X#a} ${X##*.} ${X^^} don\\'t 'it''s' \"a\\\"b\"",
    'A="a.b=1 \\\n  c.d=2"\necho $A "$A"',
    'A=1\n(A=2; echo $A)\nset -- p q\nshift\necho $A $1 $# "$@"',
    "echo $(seq 3) $(seq 2 4) $(seq 16 8 40) $(seq 3 -1 1)",
    'echo "$(dirname /a/b)/$(basename c/d.sh .sh)"',
    'A=1 eval \'echo $A\'\nexport B=2 C="3 4"\necho $B "$C"\nunset B\necho ${B:-none}',
    "X=$(dirname a/b/a/c | sed 's#a/b#d#')\necho $X $(basename x/a.b.a | sed s/a/e/g)",
    "g() { exit 0; }\necho a\nif true; then g; fi\necho never",
    "X=1\nf() { local X=2 Y=3; declare Z=4; echo $X$Y$Z; }\nf\necho $X ${Y:-none} ${Z:-none}",
    "X=1\nX=2 eval 'echo $X'\necho $X\nf() { echo $X; }\nX=3 f\necho $X",
    "for X in 1 2 3; do if [ $X = 2 ]; then continue; fi; echo $X; done\nfor X in 1 2; do break; done\necho $X",
    "set -- --kl 0.1 --on --eps 2\nwhile [[ $# -gt 0 ]]; do case $1 in --on) ON=1; shift ;; *) echo $1 $2; shift 2 ;; esac; done\necho $ON",
    "N=3\nwhile (( N > 1 && N != 2 )); do N=$((N - 1)); done\necho $N\nuntil [ $N -ge 4 ]; do N=$((N + 1)); done\necho $N",
    'if test -n "$X" || test 2 -lt 1; then echo no; else echo yes; fi\ntest a = a && echo same',
    "if [ -n \"$X\" ]; then A=1; fi\necho ${A:-0} ${X:+b} ${X-c}\ncase $X in '') echo empty ;; *) echo no ;; esac",
]
PRINT = (
    """echo() { printf '%s\\0' "$@"; printf '\\1'; }; command_not_found_handle() { echo "$@"; }"""
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_words_are_those_of_bash(script: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(script)
    ours = [command.words for command in read_script(path).commands]
    command = ["bash", "-c", f"{PRINT}\n{script}"]
    printed = subprocess.run(
        command, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True
    )
    bash = [line.split("\0")[:-1] for line in printed.stdout.split("\1")[:-1]]
    assert bash and [words[words[0] == "echo" :] for words in ours] == bash


def settings(tmp_path: Path, text: str, name: str = "run.sh") -> tuple[dict, str]:
    path = tmp_path / name
    path.write_text(text)
    line = read(path, [])
    return dict(line.settings), "\n".join(line.notes)


def test_quoted_variables_and_the_last_assignment(tmp_path: Path) -> None:
    text = f'C=0.1\nOPTIONS="{ACTOR}use_kl_loss=True \\\n {ACTOR}kl_loss_coef=$C"\nC=0.2\n'
    text += f"{VERL} $OPTIONS {ACTOR}clip_ratio_high=$C {ACTOR}clip_ratio_high=0.3\n"
    found, _ = settings(tmp_path, text)
    assert found[f"{ACTOR}use_kl_loss"] and found[f"{ACTOR}kl_loss_coef"] == 0.1
    assert found[f"{ACTOR}clip_ratio_high"] == 0.3


NOTES = {
    f"A=\nif [ -f x ]; then A=--use-kl-loss; fi\n{SLIME} $A": "line 2, `[ -f x ]`: where it holds, --use-kl-loss is True.",
    f'if [ "$RANK" -eq 0 ]; then {SLIME}; fi': 'line 1, `[ "$RANK" -eq 0 ]`: taken to hold.',
    f"source models/none.sh\n{SLIME}": "models/none.sh is not here: settings in it are not read.",
    f"[ -f x ] && A=--use-kl-loss\n{SLIME} $A": "line 1, `[ -f x ]`: where it holds, --use-kl-loss is True.",
    f"grep -q x y && A=--use-kl-loss\n{SLIME} $A": "line 1, `! grep -q x y`: where it holds, --use-kl-loss is False.",
    f"A=\nif [ -f x ]; then if [ -f y ]; then A=--use-kl-loss; fi; fi\n{SLIME} $A": "line 2, `[ -f x ]` and line 2, `[ -f y ]`: where it holds, --use-kl-loss is True.",
    f"A=0.1\nif [ -f x ]; then A=0.3; fi\nif [ -f y ]; then B='--eps-clip '$A; fi\n{SLIME} ${{B:-}}": "line 2, `[ -f x ]` and line 3, `[ -f y ]`: where it holds, --eps-clip is 0.3.",
    f"{SLIME} ${{KL:+--use-kl-loss}}": 'line 1, `[ -n "$KL" ]`: where it holds, --use-kl-loss is True.',
    f"KL=$(cat x)\n{SLIME} ${{KL:+--use-kl-loss}}": 'line 2, `! [ -n "$KL" ]`: where it holds, --use-kl-loss is False.',
    f'case "$HOW" in kl) A=--use-kl-loss ;; esac\n{SLIME} ${{A:-}}': "line 1, `kl) A=--use-kl-loss ;;`: where it holds, --use-kl-loss is True.",
    f"case $(uname) in L) A=--use-kl-loss ;; *) A= ;; esac\n{SLIME} $A": "line 1, `*) A= ;;`: where it holds, --use-kl-loss is False.",
    f'if [ -z "$MODEL" ]; then exit 1; fi\n{SLIME}': 'line 1, `! [ -z "$MODEL" ]`: taken to hold.',
    f"if [ -f x ]; then A=$KL; fi\n{SLIME} ${{A:+--kl-loss-coef $A}}": "--kl-loss-coef is $KL: $KL is not set",
    f"{SLIME} $EXTRA_ARGS": "$EXTRA_ARGS is not set",
    f"{SLIME} --eval-prompt-data a $DIR/b": "",
    f'{SLIME} "$@"': "",
    f"{VERL} \\\n  # a comment\n  {ACTOR}use_kl_loss=True": f"line 3: {ACTOR}use_kl_loss=True is a command of its own",
    f"{VERL} --config-name=ppo_megatron_trainer": "",
    f"python3 -m recipe.sppo.main_sppo {VERL.split()[-1]}": "recipe.sppo.main_sppo is launched",
}


@pytest.mark.parametrize("text", NOTES)
def test_what_a_script_leaves_open_is_said(text: str, tmp_path: Path) -> None:
    notes = settings(tmp_path, text)[1]
    assert NOTES[text] in notes if NOTES[text] else not notes


def test_what_the_caller_gives_a_script(tmp_path: Path, capsys) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"{SLIME} --kl-loss-coef $COEF ${{COEF:+--use-kl-loss}} --eps-clip $1\n")
    assert main([str(path)]) == 2
    error = capsys.readouterr().err
    assert "$COEF is not set" in error and "$1 is not set" in error
    path.write_text(f"{SLIME} --kl-loss-coef $COEF ${{COEF:+--use-kl-loss}} --eps-clip $1 $2\n")
    line = read(path, ["COEF=0.5", "0.1", "--calculate-per-token-loss"])
    wanted = {"--kl-loss-coef": 0.5, "--eps-clip": 0.1, "--use-kl-loss": True}
    assert not line.notes and {key: line.settings[key] for key in wanted} == wanted
    assert line.settings["--calculate-per-token-loss"]
    path.write_text(f'M=${{1:-}}\nif [ -z "$M" ]; then\n  exit 1\nfi\n{SLIME}\n')
    assert main([str(path)]) == 2
    assert "line 3 ends the script before a launch" in capsys.readouterr().err


def test_more_combinations_than_are_read_are_said(tmp_path: Path) -> None:
    tests = "".join(f"if [ -f x{i} ]; then A{i}=1; fi\n" for i in range(8))
    assert "combinations: the others are not read" in settings(tmp_path, tests + SLIME)[1]


def test_two_launch_lines_are_not_mixed(tmp_path: Path, capsys) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"{SLIME} --eps-clip 0.1\n{SLIME} --eps-clip 0.2\n")
    assert main([str(path)]) == 2
    assert "lines 1 and 2 launch with another --eps-clip" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "whose"), [("miles", "miles"), ("slime", "slime"), ("verl", "slime")]
)
def test_a_fork_is_told_by_its_checkout(package: str, whose: str, tmp_path: Path) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    path = tmp_path / "run.sh"
    path.write_text(f"{SLIME} --train-backend megatron" if package == "slime" else SLIME)
    assert read(path, []).trainer.name == whose


BY_NAME = {
    (
        "rlvr.yaml",
        "actor_train: {model_args: {}}\npg_clip: 0.2\n",
    ): "ROLL is not read: a worker class",
    (
        "run.sh",
        "python open_instruct/grpo_fast.py --loss_denominator token",
    ): "loss_denominator=token: --loss-aggregation token_mean",
    (
        "run.sh",
        "python open_instruct/grpo_fast.py --masked_mean_denominator 8",
    ): "masked_mean_denominator=8: as loss_denominator",
    (
        "fast.yaml",
        "model: {head: {losses: {grpo: {epsilon_low: 0.1}}}}\n",
    ): "epsilon_low=0.1: --eps-clip",
    ("fast.yaml", "schedule: {docs_per_step: 64}\n"): "docs_per_step=64: no flag",
    ("run.sh", "trl grpo --loss_type luspo"): "loss_type=luspo: --policy-loss gspo --loss-agg",
    ("run.sh", "trl grpo --loss_type vespo"): "loss_type=vespo: --policy-loss vespo",
    ("run.sh", "megatron rlhf --loss_type fipo"): "loss_type=fipo: no flag",
    (
        "run.sh",
        "uv run examples/run_ppo.py ppo.adv_estimator.gae_lambda_value=1.0",
    ): "gae_lambda_value=1.0: --value-lam",
    (
        "run.sh",
        "uv run -m skyrl.main trainer.algorithm.policy_loss_type=rollout_is",
    ): "rollout_is: --policy-loss dis",
    (
        "run.sh",
        "uv run -m skyrl.main trainer.algorithm.policy_loss_type=kl_cov",
    ): "none: depends on packing",
    (
        "roll.yaml",
        "actor_train: {a: {}}\nratio_type: segment\n",
    ): "segment: --policy-loss gspo --sequence-unit turn",
    ("run.sh", "python3 -m openrlhf.cli.train_ppo_ray --actor.x 1"): "OpenRLHF is not read",
    (
        "run.sh",
        "uv run -m skyrl.train.entrypoints.main_base trainer.algorithm.x=1",
    ): "SkyRL is not read",
    (
        "run.sh",
        "torchrun -m verl.trainer.sft_trainer data.x=1",
    ): "verl's SFT, evaluation or generation is not read",
    ("run.py", "print()"): "is a Python launcher, and no Python is read: give the command",
    ("run.sh", "echo hello"): "(found: nothing): give --trainer with one of miles",
}


@pytest.mark.parametrize("file", BY_NAME)
def test_what_is_not_read_is_said_by_name(file: tuple[str, str], tmp_path: Path, capsys) -> None:
    path = tmp_path / file[0]
    path.write_text(file[1])
    assert main([str(path)]) == 2
    error = capsys.readouterr().err
    assert BY_NAME[file] in error and "Traceback" not in error


def test_their_words_name_flags_of_this_package() -> None:
    parser = add_critic_args(add_policy_loss_args(argparse.ArgumentParser()))
    # The training scripts have the first.
    flags = {"--advantage", *parser._option_string_actions}
    meanings = " ".join(" ".join(other["words"].values()) for other in OTHERS.values())
    assert set(re.findall(r"--[a-z0-9-]+", meanings)) <= flags


MODE = f"{ACTOR}policy_loss.loss_mode"
AGG = f"{ACTOR}loss_agg_mode"
RECIPES = {
    ("vanilla", "prompt_mean"): f"{MODE}=megatron_pg_prompt_mean",
    ("gspo", "prompt_mean"): f"{MODE}=megatron_pg_prompt_mean_gspo",
    (
        "gpg",
        "prompt_mean",
    ): "(no lines: this package's prompt_mean in verl is that of vanilla or gspo",
    ("gspo", "sample_mean"): f"{AGG}=seq-mean-token-mean",
    ("cispo", "token_mean"): f"{AGG}=token-mean",
    ("dppo_tv", "constant"): f"{AGG}=seq-mean-token-sum-norm",
    ("sapo", "token_mean"): "(no lines: verl gives sapo seq-mean-token-mean",
    ("geo_mean", "sample_mean"): "(no lines: geo_mean reads no aggregation)",
}


@pytest.mark.parametrize("mode", [*TRAINERS["verl"].settings[MODE]["choices"]])
@pytest.mark.parametrize("aggregation", ["sample_mean", "prompt_mean", "token_mean", "constant"])
@pytest.mark.parametrize("bypass", ["", "algorithm.rollout_correction.bypass_mode=True"])
def test_no_recipe_changes_the_objective_of_a_token(mode, aggregation, bypass) -> None:
    line = read(None, [*VERL.split(), f"{MODE}={mode}", *bypass.split()])
    recipe = line.trainer.recipe(aggregation, line.settings)
    found = re.findall(rf"{re.escape(MODE)}=(megatron_pg\w*)", recipe)
    is_gspo, is_ours = mode.endswith("gspo"), mode.startswith("megatron_pg")
    has_one = is_ours or mode == "vanilla" or (is_gspo and aggregation != "sample_mean")
    name = f"megatron_pg_{aggregation}" + "_gspo" * is_gspo
    assert found == [name] * (has_one and not bypass)
    if not bypass and (mode, aggregation) in RECIPES:
        assert RECIPES[mode, aggregation] in recipe


ACCEPTED = {
    "verl": f"{ACTOR}pad_to_length=True {ACTOR}engine.a.b=1 async_training.x_ratio=2 new_section.y=1",
    "nemo-rl": "grpo.penalize_empty_final_answer=true loss_fn.ratio_clip_max=0.2",
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_newer_key_that_is_not_about_the_loss_is_accepted(name: str) -> None:
    assert read(None, ["run.py", *ACCEPTED[name].split()], name).passed


PULL_REQUESTS = {
    "--loss-aggregation prompt_mean": "prompt_mean None",
    "--loss-aggregation constant --loss-aggregation-divisor 4096": "constant 4096.0",
    "--pg-loss-divisor 1000": "constant 1000.0",
    "--custom-pg-loss-reducer-function-path a.b": "unknown None",
}


@pytest.mark.parametrize("flags", PULL_REQUESTS)
def test_the_flags_of_pull_requests(flags: str) -> None:
    line = read(None, [*SLIME.split(), "--use-kl-loss", "--kl-loss-coef", "1", *flags.split()])
    policy, kl, _ = line.trainer.terms(line.settings)
    assert f"{policy.aggregation} {policy.divisor}" == PULL_REQUESTS[flags]
    assert kl.aggregation == "sample_mean"
    limits = "\n".join(line.trainer.limits(line.settings, [policy, kl]))
    assert ("pull requests" in limits) == ("custom" not in flags)


TOP_P = {
    ("python3 train.py", ""): ("renormalised to the nucleus", "--replay-sampling-set"),
    ("python3 train.py", "--entropy-coef 0.1"): (
        "renormalised",
        "no counterpart here: --rollout-top-p=0.9",
    ),
    ("python3 miles/train.py", ""): ("training scores the whole vocabulary", ""),
}


@pytest.mark.parametrize("case", TOP_P)
def test_the_nucleus_is_about_the_loss(case: tuple[str, str], capsys) -> None:
    words = f"{case[0]} --advantage-estimator grpo --rollout-top-p 0.9 {case[1]}".split()
    assert main(["--", *words]) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in TOP_P[case])
    assert ("replay-sampling-set\n" in printed) == (not case[1] and "miles" not in case[0])
