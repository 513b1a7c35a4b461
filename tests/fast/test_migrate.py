"""`megatron-pg migrate`: launch lines as their trainers take them, what they compute, and what is refused by name.

The numbers are compared with plain float64 loops (`tests.oracle`); `tests/trainers/test_launch_scripts.py` reads the
trainers' own scripts.
"""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest
import torch

from megatron_pg import add_policy_loss_args, validate_policy_loss_args
from megatron_pg.migrate import main, trainer_of
from megatron_pg.migrate.read import read_file, read_line
from megatron_pg.migrate.report import effective, weights
from megatron_pg.migrate.rows import TRAINERS, Term, holds
from tests import oracle

SLIME = "ray job submit -- python3 train.py --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --num-layers 36 "
MILES = "python /root/miles/train.py --rollout-batch-size 32 --advantage-estimator gspo "
VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.actor.optim.lr=1e-6 trainer.nnodes=2 "
ACTOR = "actor_rollout_ref.actor."
NEMO_RL = (
    "uv run examples/run_grpo.py policy.train_global_batch_size=512 grpo.num_prompts_per_step=32 "
)
LENGTHS, GROUP_SIZE = [3, 1, 8, 2, 5, 7], 2


def terms(line: str) -> list[tuple[str, float, float | None]]:
    words = shlex.split(line)
    given = read_line(words)
    trainer = trainer_of(given, words)
    return [(t.aggregation, t.coefficient, t.divisor) for t in trainer.terms(trainer.read(given))]


LINES = {
    SLIME: [("sample_mean", 1.0, None), ("sample_mean", 0.0, None), ("sample_mean", 0.0, None)],
    SLIME + "--calculate-per-token-loss --use-kl-loss --kl-loss-coef 1e-3 --entropy-coef 0.01": [
        ("token_mean", 1.0, None),
        ("token_mean", 0.001, None),
        ("token_mean", -0.01, None),
    ],
    SLIME + "--rollout-data-postprocess-path megatron_pg.integrations.slime.prompt_mean": [
        ("prompt_mean", 1.0, None),
        ("prompt_mean", 0.0, None),
        ("prompt_mean", 0.0, None),
    ],
    SLIME + "--kl-loss-coef=0.1 --custom-pg-loss-reducer-function-path=mine.reducer": [
        ("unknown", 1.0, None),
        ("sample_mean", 0.0, None),  # no --use-kl-loss
        ("sample_mean", 0.0, None),
    ],
    SLIME + "--loss-type sft_loss --use-kl-loss --kl-loss-coef 1": [
        ("unknown", 1.0, None),
        ("sample_mean", 0.0, None),
        ("sample_mean", 0.0, None),
    ],
    MILES + "--train-backend fsdp --use-kl-loss --kl-loss-coef 0.5": [
        ("sample_mean", 1.0, None),
        ("sample_mean", 0.5, None),
        ("sample_mean", 0.0, None),
    ],
    VERL: [("token_mean", 1.0, None), ("token_mean", 0.0, None), ("token_mean", 0.0, None)],
    VERL
    + f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm data.max_response_length=2048 {ACTOR}use_kl_loss=True {ACTOR}entropy_coeff=0.1": [
        ("constant", 1.0, 2048.0),
        ("constant", 0.001, 2048.0),
        ("constant", -0.1, 2048.0),
    ],
    VERL + f"{ACTOR}loss_agg_mode='seq-mean-token-sum'": [
        ("constant", 1.0, 1.0),
        ("constant", 0.0, 1.0),
        ("constant", 0.0, 1.0),
    ],
    VERL + f"{ACTOR}policy_loss.loss_mode=sapo {ACTOR}use_kl_loss=true": [
        ("sample_mean", 1.0, None),
        ("token_mean", 0.001, None),
        ("token_mean", 0.0, None),
    ],
    VERL
    + f"++{ACTOR}policy_loss.loss_mode=megatron_pg_constant {ACTOR}loss_scale_factor=4096 {ACTOR}loss_agg_mode=seq-mean-token-mean": [
        ("constant", 1.0, 4096.0),
        ("sample_mean", 0.0, None),
        ("sample_mean", 0.0, None),
    ],
    NEMO_RL: [("token_mean", 1.0, None), ("token_mean", 0.01, None)],
    NEMO_RL + "loss_fn.token_level_loss=false loss_fn.use_kl_in_reward=true": [
        ("sample_mean", 1.0, None),
        ("sample_mean", 0.0, None),
    ],
}


@pytest.mark.parametrize("line", LINES)
def test_what_a_line_computes(line: str) -> None:
    assert terms(line) == LINES[line]


OFF = {
    SLIME + "--calculate-per-token-loss": ["T / (T + Z)"],
    SLIME
    + "--calculate-per-token-loss --rollout-data-postprocess-path megatron_pg.integrations.slime.constant": [
        "slime.constant, --calculate-per-token-loss is refused at start"
    ],
    SLIME + "--kl-loss-coef 0.001": ["--kl-loss-coef 0.001 has no effect without --use-kl-loss"],
    SLIME + "--use-kl-loss --kl-loss-coef 0.001": ["k1, the default, has zero expected gradient"],
    MILES + "--train-backend fsdp --calculate-per-token-loss": ["T / DP times", "N D_i / T"],
    SLIME
    + "--custom-pg-loss-reducer-function-path megatron_pg.integrations.constant --entropy-coef 0.01": [
        "entropy is sample_mean, the policy loss constant",
        "0.01 * L / D_i",
    ],
    SLIME + "--custom-pg-loss-reducer-function-path mine.reducer": [
        "mine.reducer is not known here"
    ],
    VERL + f"{ACTOR}megatron.context_parallel_size=8": ["n / (CP (n // CP)) too large"],
    VERL + f"{ACTOR}loss_agg_mode=token-sum": ["T times the token mean"],
    VERL + f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm": [
        "the longest response of each micro-batch"
    ],
    NEMO_RL + "loss_fn.token_level_loss=false grpo.overlong_filtering=true": ["N / N_kept"],
    NEMO_RL + "loss_fn.positive_example_nll_weight=0.1": ["0.1 is multiplied by the right answers"],
}


@pytest.mark.parametrize("line", OFF)
def test_where_a_line_is_off(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--", *shlex.split(line)]) == 0
    printed = capsys.readouterr().out
    for words in OFF[line]:
        assert words in printed


def test_a_line_that_is_right_has_nothing_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--", *shlex.split(SLIME)]) == 0
    assert "Where it is off\n  - nowhere that is known" in capsys.readouterr().out


BAD = {
    SLIME
    + "--kl-loss-coeff 0.1": "--kl-loss-coeff: no key of slime that is known here; the nearest is --kl-loss-coef",
    SLIME + "--loss-agg-mode token-mean": "--loss-agg-mode: no key of slime",
    SLIME + "--calculate-per-tokens-loss": "the nearest is --calculate-per-token-loss",
    SLIME + "--advantage-estimator grp": "--advantage-estimator is 'grp': expected grpo gspo",
    SLIME + "--entropy-coef nan": "--entropy-coef is 'nan': expected a number",
    SLIME + "--entropy-coef small": "--entropy-coef is 'small': expected a number",
    SLIME + "--use-kl-loss --kl-loss-coef $COEF": "shell variables filled in",
    VERL + f"{ACTOR}loss_agg_mod=token-mean": f"the nearest is {ACTOR}loss_agg_mode",
    VERL + f"{ACTOR}loss_agg_mode=token_mean": "expected token-mean token-sum",
    VERL + f"{ACTOR}use_kl_loss=maybe": "expected true or false",
    VERL + "actor_rollout.actor.optim.lr=1": "actor_rollout.actor.optim.lr: no key of verl",
    NEMO_RL + "loss_fn.ratio_clip_mx=0.3": "the nearest is loss_fn.ratio_clip_max",
    NEMO_RL + "dpo.sft_loss_weight=1": "dpo.sft_loss_weight: no key of nemo-rl",
    "python train.py": "no key of miles, nemo-rl, slime, verl among nothing",
    "": "give one of a file and",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_named(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--", *shlex.split(line)]) == 2
    printed = capsys.readouterr()
    assert BAD[line] in printed.err and not printed.out


def test_all_bad_keys_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--", *shlex.split(SLIME + "--kl-loss-coeff 1 --use-tiss --eps-clip wide")]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in ("--kl-loss-coeff", "--use-tiss", "--eps-clip is 'wide'"))


SCRIPT = """#!/bin/bash
coef=${coef:-0.01}
long=$((1024 * 2 + 48))
GRPO_ARGS=(
   --advantage-estimator grpo   # it's commented
   #--calculate-per-token-loss
   --use-kl-loss
   --kl-loss-coef ${coef}
   --kl-loss-type low_var_kl
)
PYTHONUNBUFFERED=1 python3 train.py --rollout-max-response-len $long "${GRPO_ARGS[@]}"
"""


def test_a_shell_script_is_read_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT + f"touch {tmp_path}/run\n")
    given = read_file(path)
    assert (
        given["--rollout-max-response-len"] == "2096" and "--calculate-per-token-loss" not in given
    )
    assert given["--kl-loss-coef"] == "0.01" and not (tmp_path / "run").exists()
    assert main([str(path)]) == 0


def test_yaml_with_defaults_and_settings_beside_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "base.yaml").write_text(
        "loss_fn: {token_level_loss: false, ratio_clip_max: 0.28}\n"
    )
    path = tmp_path / "run.yaml"
    path.write_text("defaults: base.yaml\nloss_fn:\n  reference_policy_kl_penalty: 0\n")
    assert main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert "sample_mean: 1/N" in printed and "--eps-clip-high 0.28" in printed
    assert re.search(r"KL +none", printed)
    (tmp_path / "settings.yaml").write_text("loss_aggregation_divisor: 8192\n")
    hook = "--rollout-data-postprocess-path megatron_pg.integrations.slime.constant"
    line = SLIME + f"{hook} --custom-config-path {tmp_path}/settings.yaml"
    assert terms(line)[0] == ("constant", 1.0, 8192.0)
    (tmp_path / "list.yaml").write_text("- 1\n")
    assert main([str(tmp_path / "list.yaml")]) == 2 and main([str(tmp_path / "none.yaml")]) == 2
    assert "holds a list" in capsys.readouterr().err


def oracle_weights(term: Term) -> list[float]:
    """What a token of each rollout weighs, by plain loops."""
    samples = [
        oracle.PlainSample(
            [0] * (1 + n), n, [1] * n, [0.0] * n, [0.0] * n, group_index=i // GROUP_SIZE
        )
        for i, n in enumerate(LENGTHS)
    ]
    losses = [torch.zeros(n, dtype=torch.float64, requires_grad=True) for n in LENGTHS]
    if term.aggregation == "token_sum":
        value = oracle.masked_sum(samples, losses, range(len(samples)))
    else:
        value = oracle.aggregate(samples, losses, term.aggregation, term.divisor)
    return [float(each[0]) for each in torch.autograd.grad(value, losses)]


ALL_TERMS = [
    *(
        Term("KL", name, 0.001)
        for name in ("sample_mean", "prompt_mean", "token_mean", "token_sum")
    ),
    Term("KL", "constant", 0.001, 16.0),
]


@pytest.mark.parametrize("term", ALL_TERMS, ids=lambda term: term.aggregation)
def test_weights_are_those_of_plain_loops(term: Term) -> None:
    assert weights(term, LENGTHS, GROUP_SIZE) == pytest.approx(oracle_weights(term), rel=1e-14)


@pytest.mark.parametrize("policy", ALL_TERMS, ids=lambda term: term.aggregation)
@pytest.mark.parametrize("term", ALL_TERMS, ids=lambda term: term.aggregation)
def test_effective_coefficients_are_those_of_plain_loops(term: Term, policy: Term) -> None:
    expected = [
        0.001 * own / other
        for own, other in zip(oracle_weights(term), oracle_weights(policy), strict=True)
    ]
    text = effective(term, policy, LENGTHS, GROUP_SIZE)
    if term == policy:
        assert text == "0.001 on every token" and expected == pytest.approx([0.001] * len(LENGTHS))
        return
    shown = [float(number) for number in text.split(" = ")[1].split(" for ")[0].split(", ")]
    assert shown == pytest.approx(expected, rel=5e-3)
    # A mutant: the two terms exchanged.
    assert [0.001**2 / value for value in expected] != pytest.approx(shown, rel=5e-3)


def test_sixteen_fold(capsys: pytest.CaptureFixture[str]) -> None:
    """KL as a sample mean beside the constant divisor: L / D times its coefficient."""
    reducer = "--custom-pg-loss-reducer-function-path megatron_pg.integrations.constant --use-kl-loss --kl-loss-coef 0.001"
    options = ["--lengths", "500", "--loss-aggregation-divisor", "8192"]
    line = (
        VERL + f"{ACTOR}policy_loss.loss_mode=megatron_pg_constant {ACTOR}loss_scale_factor=8192 "
    )
    line += f"{ACTOR}loss_agg_mode=seq-mean-token-mean {ACTOR}use_kl_loss=true"
    assert main([*options, "--", *shlex.split(line)]) == 0
    assert "0.001 * 8192 / D_i = 0.0164 for 500 tokens" in capsys.readouterr().out
    assert main([*options, "--", *shlex.split(SLIME + reducer)]) == 0
    assert "0.001 * 8192 / D_i = 0.0164" in capsys.readouterr().out  # L is not on the line itself
    assert main(["--group-size", "0", *options, "--", *shlex.split(line)]) == 2
    assert "--group-size is 0" in capsys.readouterr().err


@pytest.mark.parametrize("name", TRAINERS)
def test_tables_are_whole(name: str) -> None:
    """Every condition names settings that exist, every aggregation has its lines, every flag of this package is one."""
    trainer = TRAINERS[name]
    given = trainer.read({})
    assert set(trainer.exact) == set(oracle.AGGREGATIONS)
    assert trainer.limits(given, trainer.terms(given)) is not None
    parser = add_policy_loss_args(argparse.ArgumentParser())
    flags = {flag for action in parser._actions for flag in action.option_strings}
    for row in trainer.settings.values():
        here = row.get("here", "")
        words = (
            [here]
            if isinstance(here, str)
            else [word for each in here.values() for word in each.split()]
        )
        assert {word for word in words if word.startswith("--")} <= flags
        assert isinstance(here, str) or set(here) <= {*row.get("choices", []), "True"}
    with pytest.raises(KeyError):
        holds("no-such-setting", given)


HERE = "The same per-token loss in a training script of this package\n"


@pytest.mark.parametrize("line", LINES)
def test_the_line_of_this_package_is_taken_by_its_parser(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "--loss-aggregation",
                "constant",
                "--loss-aggregation-divisor",
                "64",
                "--",
                *shlex.split(line),
            ]
        )
        == 0
    )
    flags = capsys.readouterr().out.split(HERE)[1].splitlines()[0]
    args = add_policy_loss_args(argparse.ArgumentParser()).parse_args(shlex.split(flags))
    args = validate_policy_loss_args(args)
    assert (args.loss_aggregation, args.loss_aggregation_divisor) == ("constant", 64.0)
    assert args.eps_clip_high == {"slime": 0.28, "miles": None}.get(
        trainer_of(read_line(shlex.split(line)), [line]).name, 0.2
    )


@pytest.mark.parametrize("name", ["slime", "miles"])
def test_the_hooks_that_are_named_exist(name: str) -> None:
    module = pytest.importorskip(f"megatron_pg.integrations.{name}")
    paths = re.findall(rf"megatron_pg\.integrations\.{name}\.(\w+)", str(TRAINERS[name].exact))
    assert set(paths) == {"prompt_mean", "token_mean", "constant", "check"}
    assert all(callable(getattr(module, path)) for path in paths)
