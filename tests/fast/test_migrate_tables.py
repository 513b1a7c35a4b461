"""`megatron-pg migrate`: whose line or file it is, and what its tables give for the line."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

from megatron_pg import add_critic_args, add_policy_loss_args
from megatron_pg.migrate import main
from megatron_pg.migrate.line import OTHERS, read
from megatron_pg.migrate.rows import TRAINERS

VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo"
ACTOR = "actor_rollout_ref.actor."
SLIME = "python3 train.py --advantage-estimator grpo"

NOTES = {
    f"{SLIME} $EXTRA_ARGS": "$EXTRA_ARGS is not set",
    f"{SLIME} --eval-prompt-data a $DIR/b": "",
    f"{VERL} --config-name=ppo_megatron_trainer": "",
    f"python3 -m recipe.sppo.main_sppo {VERL.split()[-1]}": "main_sppo is an unknown program",
}


@pytest.mark.parametrize("text", NOTES)
def test_what_a_line_leaves_open_is_said(text: str) -> None:
    notes = "\n".join(read(None, shlex.split(text)).notes)
    assert NOTES[text] in notes if NOTES[text] else not notes


FILES_BY_NAME = {
    (
        "rlvr.yaml",
        "actor_train: {model_args: {}}\npg_clip: 0.2\n",
    ): "migrate does not read ROLL: write an adapter",
    (
        "fast.yaml",
        "model: {head: {losses: {grpo: {epsilon_low: 0.1}}}}\n",
    ): "epsilon_low=0.1: --eps-clip",
    ("fast.yaml", "schedule: {docs_per_step: 64}\n"): "docs_per_step=64: no flag",
    (
        "roll.yaml",
        "actor_train: {a: {}}\nratio_type: segment\n",
    ): "segment: --policy-loss gspo --sequence-unit turn",
    ("run.py", "print()"): "run.py is not a YAML file: paste the command line that it runs",
    (
        "run.sh",
        "python train.py --use-kl-loss",
    ): "run.sh is not a YAML file: paste the expanded command line (`bash -x` or `set -x` prints "
    "it)",
}
LINES_BY_NAME = {
    "python open_instruct/grpo_fast.py --loss_denominator token": "loss_denominator=token: "
    "--loss-aggregation token_mean",
    "python open_instruct/grpo_fast.py --masked_mean_denominator 8": "masked_mean_denominator=8: "
    "as loss_denominator",
    "trl grpo --loss_type luspo": "loss_type=luspo: --policy-loss gspo --loss-agg",
    "trl grpo --loss_type vespo": "loss_type=vespo: --policy-loss vespo",
    "megatron rlhf --loss_type fipo": "loss_type=fipo: no flag: write a custom objective",
    "uv run examples/run_ppo.py ppo.adv_estimator.gae_lambda_value=1.0": "gae_lambda_value=1.0: "
    "--value-lam",
    "uv run -m skyrl.main "
    "trainer.algorithm.policy_loss_type=rollout_is": "rollout_is: --policy-loss dis",
    "uv run -m skyrl.main trainer.algorithm.policy_loss_type=kl_cov": "none: depends on packing",
    "python3 -m openrlhf.cli.train_ppo_ray --actor.x 1": "migrate does not read OpenRLHF",
    "uv run -m skyrl.train.entrypoints.main_base trainer.algorithm.x=1": "does not read SkyRL",
    "torchrun -m verl.trainer.sft_trainer data.x=1": "does not read verl's SFT, evaluation "
    "or generation",
    "echo hello": "because no settings are given. Add --trainer with one of miles",
}


@pytest.mark.parametrize("file", FILES_BY_NAME)
def test_what_is_not_read_is_said_by_name(file: tuple[str, str], tmp_path: Path, capsys) -> None:
    path = tmp_path / file[0]
    path.write_text(file[1])
    assert main([str(path)]) == 2
    error = capsys.readouterr().err
    assert FILES_BY_NAME[file] in error and "Traceback" not in error


@pytest.mark.parametrize("line", LINES_BY_NAME)
def test_a_line_of_another_trainer_is_answered_by_name(line: str, capsys) -> None:
    assert main(["--", *line.split()]) == 2
    assert LINES_BY_NAME[line] in capsys.readouterr().err


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
    ("gpg", "prompt_mean"): "(no lines: this package's prompt_mean in verl is for vanilla or gspo",
    ("gspo", "sample_mean"): f"{AGG}=seq-mean-token-mean",
    ("cispo", "token_mean"): f"{AGG}=token-mean",
    ("dppo_tv", "constant"): f"{AGG}=seq-mean-token-sum-norm",
    ("sapo", "token_mean"): "(no lines: verl always gives sapo seq-mean-token-mean",
    ("geo_mean", "sample_mean"): "(no lines: geo_mean ignores the aggregation)",
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
    "verl": f"{ACTOR}pad_to_length=True {ACTOR}engine.a.b=1 async_training.x_ratio=2 "
    f"new_section.y=1",
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
    ("python3 train.py", ""): ("renormalized over the nucleus", "--replay-sampling-set"),
    ("python3 train.py", "--entropy-coef 0.1"): (
        "renormalized",
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
