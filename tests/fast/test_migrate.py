"""`megatron-pg migrate`: launch lines as their trainers take them, what they compute, and what is
refused by name.

The numbers are compared with plain float64 loops (`tests.oracle`);
`tests/trainers/test_configurations.py` reads the trainers' own configurations.
"""

import argparse
import functools
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_pg import add_policy_loss_args, validate_policy_loss_args
from megatron_pg.config.command_line import ProgramParser
from megatron_pg.integrations import verl
from megatron_pg.integrations.miles import MILES as MILES_HOOKS
from megatron_pg.integrations.reducers import HOOKS
from megatron_pg.integrations.slime import SLIME as SLIME_HOOKS
from megatron_pg.migrate import main
from megatron_pg.migrate.line import Line, read
from megatron_pg.migrate.report import effective, weights
from megatron_pg.migrate.rows import TRAINERS, Term, holds, with_terms
from megatron_pg.step.advantages import METHODS, group_advantages
from tests import oracle
from tests.random_steps import plain_sample

SLIME = (
    "ray job submit -- python3 train.py --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high "
    "0.28 --num-layers 36"
)
MILES = "python /root/miles/train.py --rollout-batch-size 32 --advantage-estimator gspo"
VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "
    "actor_rollout_ref.actor.optim.lr=1e-6 trainer.nnodes=2"
)
NEMO_RL = (
    "uv run examples/run_grpo.py policy.train_global_batch_size=512 grpo.num_prompts_per_step=32"
)
ACTOR = "actor_rollout_ref.actor."
MODE = f"{ACTOR}policy_loss.loss_mode"
OURS = "megatron_pg.integrations"
REDUCER = "--custom-pg-loss-reducer-function-path"
HOOK = "--rollout-data-postprocess-path"
PER_TOKEN = "--calculate-per-token-loss"
NORM = f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm"
LENGTHS, GROUP_SIZE = [3, 1, 8, 2, 5, 7], 2


@pytest.fixture
def run(capsys):
    """Runs `migrate` on a launch line: what it prints, or what it refuses it with."""

    def run(line: str, options: str = "", code: int = 0) -> str:
        assert main([*shlex.split(options), "--", *shlex.split(line)]) == code
        printed = capsys.readouterr()
        assert not (code and printed.out)
        return printed.err if code else printed.out

    return run


def of_words(line: str) -> Line:
    return read(None, shlex.split(line))


def terms(line: str) -> str:
    """The aggregation, the coefficient and any divisor of the policy loss, the KL and the
    entropy.
    """
    found = []
    read_line = of_words(line)
    for term in read_line.trainer.terms(read_line.settings):
        divisor = f" {term.divisor:.15g}" if term.divisor else ""
        found.append(f"{term.aggregation} {term.coefficient + 0:.15g}{divisor}")
    return ", ".join(found)


MEANS = "sample_mean 1, sample_mean 0, sample_mean 0"
UNKNOWN = "unknown 1, sample_mean 0, sample_mean 0"
LINES = {
    SLIME: MEANS,
    f"{SLIME} {PER_TOKEN} --use-kl-loss --kl-loss-coef 1e-3 --entropy-coef "
    f"0.01": "token_mean 1, token_mean 0.001, token_mean -0.01",
    f"{SLIME} {HOOK} {OURS}.slime.prompt_mean": "prompt_mean 1, sample_mean 0, sample_mean 0",
    f"{SLIME} --kl-loss-coef=0.1 {REDUCER}=mine.reducer": UNKNOWN,  # no --use-kl-loss
    f"{SLIME} --loss-type sft_loss --use-kl-loss --kl-loss-coef 1": UNKNOWN,
    f"{MILES} --train-backend fsdp --use-kl-loss --kl-loss-coef 0.5": "sample_mean 1, sample_mean "
    "0.5, sample_mean 0",
    VERL: "token_mean 1, token_mean 0, token_mean 0",
    f"{VERL} {NORM} data.max_response_length=2048 {ACTOR}use_kl_loss=True "
    f"{ACTOR}entropy_coeff=0.1": "constant 1 2048, constant 0.001 2048, constant -0.1 2048",
    f"{VERL} {ACTOR}loss_agg_mode='seq-mean-token-sum'": "constant 1 1, constant 0 1, constant 0 1",
    f"{VERL} {MODE}=sapo {ACTOR}use_kl_loss=true": "sample_mean 1, token_mean 0.001, token_mean 0",
    f"{VERL} ++{MODE}=megatron_pg_constant {ACTOR}loss_scale_factor=4096 "
    f"{ACTOR}loss_agg_mode=seq-mean-token-mean": "constant 1 4096, sample_mean 0, sample_mean 0",
    # The plugin knows no padded length; KL and entropy of verl do.
    f"{VERL} {MODE}=megatron_pg_constant {NORM} {ACTOR}use_kl_loss=true": "constant 1, constant "
    "0.001 512, constant 0 "
    "512",
    f"{VERL} {MODE}=megatron_pg_constant "
    f"{ACTOR}loss_agg_mode=seq-mean-token-sum": "constant 1, constant 0 1, constant 0 1",
    # A colon is no path of slime's load_function.
    f"{SLIME} {REDUCER} {OURS}:constant": UNKNOWN,
    NEMO_RL: "token_mean 1, token_mean 0.01",
    f"{NEMO_RL} loss_fn.token_level_loss=false "
    f"loss_fn.use_kl_in_reward=true": "sample_mean 1, sample_mean 0",
}


@pytest.mark.parametrize("line", LINES)
def test_what_a_line_computes(line: str) -> None:
    assert terms(line) == LINES[line]


ADAPTIVE = (
    "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.type=adaptive "
    "algorithm.kl_ctrl.target_kl=0.05"
)
NO_STD = "algorithm.norm_adv_by_std_in_grpo=False"


@pytest.mark.parametrize("line", LINES)
def test_the_flags_of_a_line_are_written_as_a_settings_file(line, run, tmp_path) -> None:
    """The file means what the flags mean that are printed."""
    target = tmp_path / "run.yaml"
    run(line, f"--loss-aggregation-divisor 7 --write-config {target}")
    printed = run(line, "--loss-aggregation-divisor 7").split("script of this package\n")[1]
    parser = ProgramParser(allow_abbrev=False)
    parser.add_config_args()
    add_policy_loss_args(parser)
    parser.add_argument("--advantage")
    of_flags = vars(parser.parse_args(printed.splitlines()[0].split()))
    of_file = vars(parser.parse_args(["--config", str(target)]))
    assert of_file == of_flags | {"config": str(target)}


def test_a_settings_file_needs_the_divisor(run, tmp_path) -> None:
    said = run(f"{VERL} {MODE}=megatron_pg_constant", f"--write-config {tmp_path}/a.yaml", 2)
    assert "--write-config requires --loss-aggregation-divisor" in said
    assert not list(tmp_path.iterdir())


OFF = {
    SLIME: "Where it is off\n  - no known error",
    f"{SLIME} {PER_TOKEN}": "T / (T + Z)",
    f"{SLIME} {PER_TOKEN} {HOOK} {OURS}.slime.constant": "slime.constant, "
    "--calculate-per-token-loss is refused at "
    "start",
    f"{SLIME} --kl-loss-coef 0.001": "--kl-loss-coef 0.001 has no effect without --use-kl-loss",
    f"{SLIME} --use-kl-loss --kl-loss-coef 0.001": "k1, the default, has zero expected gradient",
    f"{MILES} --train-backend fsdp {PER_TOKEN}": ("T / DP times", "N D_i / T"),
    f"{SLIME} {REDUCER} {OURS}.constant --entropy-coef 0.01": (
        "entropy is sample_mean, the policy loss constant",
        "0.01 * L / D_i",
    ),
    f"{SLIME} {REDUCER} mine.reducer": "mine.reducer is unknown",
    f"{SLIME} --loss-aggregation constant": "<L> is the unknown divisor in tokens",
    f"{SLIME} --loss-aggregation constant --pg-loss-divisor 64": (
        "with L = 64",
        "loss_aggregation_divisor: 64",
        "no version has both",
    ),
    f"{SLIME} --loss-aggregation constant --loss-aggregation-divisor 8 "
    f"{PER_TOKEN}": "refuse --calculate",
    f"{SLIME} --loss-aggregation-divisor 8": "has no effect without --loss-aggregation constant",
    f"{SLIME} {PER_TOKEN} --pg-loss-divisor 64": ("not known here", "1/(T L) sum m x"),
    f"{SLIME} --pg-loss-divisor 64": "--loss-aggregation constant --loss-aggregation-divisor 64",
    f"{SLIME} $EXTRA_ARGS": "$EXTRA_ARGS is not set",
    f"{SLIME} --colocate $EXTRA_ARGS": "$EXTRA_ARGS is not set",
    f"{VERL} {ACTOR}megatron.context_parallel_size=8": "n / (CP (n // CP)) times too large",
    f"{VERL} {NORM} {ACTOR}loss_scale_factor=64": ("one half of Dr.GRPO", f"unless {NO_STD}"),
    f"{VERL} {NO_STD}": "the other is the constant divisor",
    f"{SLIME} {REDUCER} {OURS}.constant": "which --disable-grpo-std-normalization leaves out",
    f"{SLIME} --disable-grpo-std-normalization": "the other is the constant divisor",
    f"{VERL} {ACTOR}loss_agg_mode=token-sum": "T times the token mean",
    f"{VERL} {MODE}=megatron_pg_constant": (
        "no divisor: refused unless MEGATRON_PG_LOSS_AGGREGATION_DIVISOR is set",
        "--loss-aggregation-divisor <L>",
    ),
    f"{VERL} {NORM}": "Otherwise it is each micro-batch's longest response",
    f"{VERL} {MODE}=kl_cov": "ranked within a micro-batch: the loss depends on packing",
    f"{VERL} {ADAPTIVE}": "by --kl-target 0.05 --kl-horizon 10000",
    # Of verl's per-token losses geo_mean alone passes over loss_agg_mode and the totals of the
    # step.
    f"{VERL} {ACTOR}use_kl_loss=true {MODE}=geo_mean": "M times the mean over rollouts",
    f"{NEMO_RL} loss_fn.token_level_loss=false grpo.overlong_filtering=true": "N / N_kept",
    f"{NEMO_RL} loss_fn.positive_example_nll_weight=0.1": "0.1 is multiplied by the step's "
    "number of correct responses",
}


@pytest.mark.parametrize("line", OFF)
def test_where_a_line_is_off(line: str, run) -> None:
    printed, words = run(line), OFF[line]
    assert all(each in printed for each in ([words] if isinstance(words, str) else words))


KL = "--use-kl-loss --kl-loss-coef 0.1"
TERMS_HERE = {
    f"{SLIME} {KL}": "--loss-aggregation sample_mean --eps-clip-high",
    f"{SLIME} --loss-aggregation token_mean --entropy-coef "
    f"0.1": "token_mean --regularizer-aggregation loss --eps-clip-high",
    f"{SLIME} {PER_TOKEN} --entropy-coef 0.1": "--loss-aggregation token_mean "
    "--regularizer-aggregation loss ",
    f"{SLIME} {PER_TOKEN}": "--loss-aggregation token_mean --eps-clip-high",
    f"{VERL} {ACTOR}use_kl_loss=true": "--loss-aggregation token_mean --regularizer-aggregation "
    "loss ",
    f"{VERL} {NORM} {ACTOR}entropy_coeff=0.1": "--loss-aggregation-divisor 512 "
    "--regularizer-aggregation loss ",
    NEMO_RL: "--loss-aggregation token_mean --regularizer-aggregation loss ",
    f"{NEMO_RL} loss_fn.token_level_loss=false": "--loss-aggregation sample_mean --kl-loss-coef",
    # Terms that are sample means beside another policy loss, and those that are neither.
    f"{SLIME} {REDUCER} {OURS}.token_mean --entropy-coef 0.1": "--loss-aggregation token_mean "
    "--eps-clip-high",
    f"{VERL} {MODE}=sapo {ACTOR}use_kl_loss=true": "no counterpart here: aggregation of the "
    "KL=token_mean",
}


@pytest.mark.parametrize("line", TERMS_HERE)
def test_the_aggregation_of_kl_and_entropy_here(line: str, run) -> None:
    assert TERMS_HERE[line] in run(line).partition("per-token loss in a training script")[2]


def test_the_terms_go_with_an_aggregation_that_is_asked_for(run) -> None:
    printed = run(f"{SLIME} {KL}", "--loss-aggregation prompt_mean")
    assert "--loss-aggregation prompt_mean --regularizer-aggregation loss " in printed


BAD = {
    f"{SLIME} --kl-loss-coeff 0.1": "--kl-loss-coeff: unknown key of slime, the "
    "nearest is --kl-loss-coef",
    f"{SLIME} --loss-agg-mode token-mean": "--loss-agg-mode: unknown key of slime",
    f"{SLIME} --calculate-per-tokens-loss": "the nearest is --calculate-per-token-loss",
    f"{SLIME} --advantage-estimator grp": "--advantage-estimator is 'grp': expected grpo gspo",
    f"{SLIME} --entropy-coef nan": "--entropy-coef is 'nan': expected a number",
    f"{SLIME} --entropy-coef small": "--entropy-coef is 'small': expected a number",
    f"{SLIME} --use-kl-loss --kl-loss-coef $COEF": "--kl-loss-coef is $COEF: $COEF is not set",
    f"{SLIME} --advantage-estimator $HOW": "--advantage-estimator is $HOW: $HOW is not set",
    f"{SLIME} '$(cat flags)'": "$(cat flags) is known only to the shell",
    f"{NEMO_RL} --config none.yaml": "none.yaml was not found, and its settings affect the loss",
    f"{SLIME} --custom-config-path=none.yaml": "none.yaml was not found",
    f"{VERL} --config-name=mine": "mine.yaml was not found",
    "python train.py $EXTRA_ARGS": "$EXTRA_ARGS is not set",
    f"{VERL} {ACTOR}loss_agg_mod=token-mean": f"the nearest is {ACTOR}loss_agg_mode",
    f"{VERL} {ACTOR}loss_agg_mode=token_mean": "expected token-mean token-sum",
    f"{VERL} {ACTOR}use_kl_loss=maybe": "expected true or false",
    f"{VERL} actor_rollout.actor.entropy_coeff=1": "actor_rollout.actor.entropy_coeff: "
    "unknown key of verl",
    f"{NEMO_RL} loss_fn.ratio_clip_mx=0.3": "the nearest is loss_fn.ratio_clip_max",
    f"{VERL} +{ACTOR}policy_loss.tau_pos=2": f"the nearest is {ACTOR}tau_pos",
    f"{NEMO_RL} dpo.sft_loss_weight=1": "dpo.sft_loss_weight: unknown key of nemo-rl",
    "python -m verl.trainer.main_ppo actor.loss_agg_mode=x": f"the nearest is {ACTOR}loss_agg",
    "python train.py --lr 1": "cannot identify the trainer from the settings --lr",
    "python train.py": "cannot identify the trainer, because no settings are given",
    "": "give a file or, after `--`",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_named(line: str, run) -> None:
    assert BAD[line] in run(line, code=2)


def test_all_bad_keys_are_named_at_once(run) -> None:
    error = run(f"{SLIME} --kl-loss-coeff 1 --use-tiss --eps-clip wide", code=2)
    assert all(word in error for word in ("--kl-loss-coeff", "--use-tiss", "--eps-clip is 'wide'"))


WHOLE = (f"{NO_STD} {NORM} {ACTOR}loss_scale_factor=64", "--disable-grpo-std-normalization")


@pytest.mark.parametrize(
    "line",
    [SLIME, VERL, MILES, f"{VERL} {WHOLE[0]}", f"{SLIME} {WHOLE[1]} {REDUCER} {OURS}.constant"],
)
def test_both_halves_of_dr_grpo_and_none_are_no_remark(line: str, run) -> None:
    assert "Dr.GRPO" not in run(line)


def test_yaml_with_defaults_and_settings_beside_a_line(tmp_path: Path, capsys) -> None:
    pytest.importorskip("yaml")

    def written(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    written("base.yaml", "loss_fn: {token_level_loss: false, ratio_clip_max: 0.28}\n")
    text = "defaults: base.yaml\nloss_fn:\n  reference_policy_kl_penalty: 0\n"
    assert main([written("run.yaml", text)]) == 0
    printed = capsys.readouterr().out
    assert "sample_mean: 1/N" in printed and "--eps-clip-high 0.28" in printed
    assert re.search(r"KL +none", printed)
    path = written("settings.yaml", "loss_aggregation_divisor: 8192\n")
    line = f"{SLIME} {HOOK} {OURS}.slime.constant --custom-config-path {path}"
    assert terms(line).startswith("constant 1 8192,")
    path = written("over.yaml", "entropy_coef: 0.5\neps_clip: 0.1\n")  # in slime the file wins
    settings = of_words(f"{SLIME} --entropy-coef 0.1 --custom-config-path {path}").settings
    assert (settings["--entropy-coef"], settings["--eps-clip"]) == (0.5, 0.1)
    path = written("under.yaml", "loss_fn: {ratio_clip_min: 0.5, ratio_clip_max: '${grpo.x}'}\n")
    line = f"{NEMO_RL} --config {path} loss_fn.ratio_clip_min=0.1 ++grpo.x=0.3"
    settings = of_words(line).settings  # in NeMo-RL the line wins
    assert [settings[f"loss_fn.ratio_clip_{end}"] for end in ("min", "max")] == [0.1, 0.3]
    assert main([written("lost.yaml", "defaults: lost_base\nloss_fn: {ratio_clip_max: 1}\n")]) == 2
    assert "lost_base was not found" in capsys.readouterr().err
    assert main([written("list.yaml", "- 1\n")]) == 2 and main([str(tmp_path / "none.yaml")]) == 2
    assert "holds a list" in capsys.readouterr().err


def oracle_weights(term: Term) -> list[float]:
    """What a token of each rollout weighs, by plain loops."""
    samples = [plain_sample([1] * n, group=i // GROUP_SIZE) for i, n in enumerate(LENGTHS)]
    losses = [torch.zeros(n, dtype=torch.float64, requires_grad=True) for n in LENGTHS]
    if term.aggregation == "token_sum":
        value = oracle.masked_sum(samples, losses, range(len(samples)))
    else:
        value = oracle.aggregate(samples, losses, term.aggregation, term.divisor)
    return [float(gradient[0]) for gradient in torch.autograd.grad(value, losses)]


SUMS = ("sample_mean", "prompt_mean", "token_mean", "token_sum")
ALL_TERMS = [*(Term("KL", name, 0.001) for name in SUMS), Term("KL", "constant", 0.001, 16.0)]


@pytest.mark.parametrize("term", ALL_TERMS, ids=lambda term: term.aggregation)
def test_weights_are_those_of_plain_loops(term: Term) -> None:
    assert weights(term, LENGTHS, GROUP_SIZE) == pytest.approx(oracle_weights(term), rel=1e-14)


@pytest.mark.parametrize("policy", ALL_TERMS, ids=lambda term: term.aggregation)
@pytest.mark.parametrize("term", ALL_TERMS, ids=lambda term: term.aggregation)
def test_effective_coefficients_are_those_of_plain_loops(term: Term, policy: Term) -> None:
    pairs = zip(oracle_weights(term), oracle_weights(policy), strict=True)
    expected = [0.001 * own / other for own, other in pairs]
    text = effective(term, policy, LENGTHS, GROUP_SIZE)
    if term == policy:
        assert text == "0.001 for every token" and expected == pytest.approx([0.001] * len(LENGTHS))
        return
    shown = [float(number) for number in text.split(" = ")[1].split(" for ")[0].split(", ")]
    assert shown == pytest.approx(expected, rel=5e-3)
    # A mutant: the two terms exchanged.
    assert [0.001**2 / value for value in expected] != pytest.approx(shown, rel=5e-3)


def test_sixteen_fold(run) -> None:
    """KL as a sample mean beside the constant divisor: L / D times its coefficient."""
    options = "--lengths 500 --loss-aggregation-divisor 8192"
    line = f"{VERL} {MODE}=megatron_pg_constant {ACTOR}loss_scale_factor=8192 "
    line += f"{ACTOR}loss_agg_mode=seq-mean-token-mean {ACTOR}use_kl_loss=true"
    assert "0.001 * 8192 / D_i = 0.0164 for 500 tokens" in run(line, options)
    slime = f"{SLIME} {REDUCER} {OURS}.constant --use-kl-loss --kl-loss-coef 0.001"
    assert "0.001 * 8192 / D_i = 0.0164" in run(slime, options)  # L is not on the line itself
    assert "--group-size is 0" in run(line, f"--group-size 0 {options}", code=2)


@pytest.mark.parametrize("divisor", ["0", "-1", "nan", "inf"])
def test_the_divisor_is_finite_and_above_0(divisor: str, run) -> None:
    error = run(SLIME, f"--loss-aggregation-divisor={divisor}", code=2)
    assert f"--loss-aggregation-divisor is {divisor}: expected a finite" in error


WHOSE = {
    "python train.py --advantage-estimator=grpo": "slime",
    "python /root/slime/train.py --lr 1e-6": "slime",
    "python /home/miles/slime/train.py --advantage-estimator grpo": "slime",
    "python train.py --rollout-num-gpus 8 --save /data/miles/run": "slime",
    "python -m miles.train --lr 1e-6": "miles",
    "python /home/slime/miles/train_async.py --rollout-num-gpus 8": "miles",
    "python scripts/run_miles_grpo.py --rollout-num-gpus 8": "miles",
    "python train.py --train-backend fsdp --rollout-num-gpus 8": "miles",
    "python train.py --rollout-function-path miles.rollout.sglang.generate": "miles",
    f"python train.py --custom-convert-samples-to-train-data-path {OURS}.miles.constant": "miles",
    "python -m verl.trainer.main_ppo ++algorithm.adv_estimator=grpo": "verl",
    "run.py loss_fn.ratio_clip_max=0.3": "nemo-rl",
    "python pretrain_gpt.py --lr 1e-6 --calculate-per-token-loss": None,
    "python train.py --loss-aggregation token_mean --eps-clip 0.2": None,
}


@pytest.mark.parametrize("line", WHOSE)
def test_whose_line_it_is(line: str, run) -> None:
    if WHOSE[line] is not None:
        assert of_words(line).trainer.name == WHOSE[line]
        return
    assert "Add --trainer with one of" in run(line, code=2)
    run("train.py --lr 1e-6", "--trainer slime")


def with_advantages() -> argparse.ArgumentParser:
    """The flags of the policy loss, and those of the training scripts for advantages."""
    parser = add_policy_loss_args(argparse.ArgumentParser())
    parser.add_argument("--advantage", choices=METHODS)
    parser.add_argument("--whiten-advantages", action="store_true")
    return parser


@pytest.mark.parametrize("name", TRAINERS)
def test_tables_are_whole(name: str) -> None:
    """Every condition names settings that exist, every aggregation with a hook has its lines, every
    flag of this package is one.
    """
    trainer = TRAINERS[name]
    given = trainer.read({})
    assert set(trainer.exact) == set(HOOKS)
    assert trainer.limits(given, trainer.terms(given)) is not None
    parser = with_advantages()
    flags = {flag for action in parser._actions for flag in action.option_strings}
    for row in trainer.settings.values():
        here = row.get("here", "")
        words_of = [case[1] for case in here] if isinstance(here, list) else [here]
        for each in filter(None, words_of):
            words = " ".join([each] if isinstance(each, str) else each.values()).split()
            assert {word for word in words if word.startswith("--")} <= flags
            words = {*row.get("choices", []), "True", "False", "*"}
            assert isinstance(each, str) or set(each) <= words
        for condition, _ in here if isinstance(here, list) else []:
            holds(condition, with_terms(given, trainer.terms(given)))
    for mode, lines in trainer.exact.items():
        for condition, _ in [] if isinstance(lines, str) else lines:
            holds(condition, given)
        assert trainer.recipe(mode, given)
    assert trainer.steps(given) in (None, 1.0, 4.0)
    with pytest.raises(KeyError):
        holds("no-such-setting", given)


HERE = re.compile("The (same|nearest) per-token loss in a training script of this package\n")


def here(run, line: str, options: str = "") -> tuple[str, str, list[str]]:
    """Whether the loss is the same or the nearest, the flags of this package, and what has no
    counterpart.
    """
    _, which, rest = HERE.split(run(line, options))
    flags, *others = rest.splitlines()
    lost = [each.split("no counterpart here: ")[1] for each in others if "no counterpart" in each]
    return which, flags.strip(), lost


def beside(run, line: str, options: str = "") -> list[str]:
    """What the flags do not carry over, of other parts of the objective than the per-token loss."""
    return re.findall("  not carried over: (.*)", run(line, options))


@functools.cache  # most settings leave the flags as they are
def taken(flags: str) -> argparse.Namespace:
    """The flags as this package's parser and validation take them."""
    args = with_advantages().parse_args(shlex.split(flags))
    return validate_policy_loss_args(args)


@pytest.mark.parametrize("line", LINES)
def test_the_line_of_this_package_is_taken_by_its_parser(line: str, run) -> None:
    options = "--loss-aggregation constant --loss-aggregation-divisor 64"
    args = taken(here(run, line, options)[1])
    assert (args.loss_aggregation, args.loss_aggregation_divisor) == ("constant", 64.0)
    trainer = of_words(line).trainer.name
    assert args.eps_clip_high == {"slime": 0.28, "miles": None}.get(trainer, 0.2)


NO_KL = f"{NEMO_RL} loss_fn.reference_policy_kl_penalty=0"
TIS = f"{NO_KL} loss_fn.truncated_importance_sampling_type="
BOUNDS = (
    "loss_fn.truncated_importance_sampling_ratio=5 "
    "loss_fn.truncated_importance_sampling_ratio_min=0.5"
)
ON = "loss_fn.use_importance_sampling_correction=true"
VERL_KL = f"{VERL} {ACTOR}use_kl_loss=true {ACTOR}kl_loss_type="
ROLLOUT = "algorithm.rollout_correction"
SEQUENCE = "loss_fn.sequence_level_importance_ratios=true"
WHITENED = "--advantage reward --whiten-advantages"
SAME = {
    f"{TIS}tis {BOUNDS} {ON}": "--use-tis --tis-clip 5 --tis-clip-low 0.5",
    f"{TIS}icepop {BOUNDS} {ON}": "--use-tis --tis-mode mask --tis-clip 5 --tis-clip-low 0.5",
    f"{TIS}seq-mask-tis {BOUNDS} {ON}": "--use-tis --tis-clip 1e9 --use-geometric-rejection "
    "--geometric-rejection-high 5 --geometric-rejection-low 0.5",
    f"{TIS}tis {BOUNDS}": "",  # not switched on
    f"{NO_KL} {ON}": "--use-tis --tis-clip 1e9",
    f"{TIS}icepop {BOUNDS} {ON} {SEQUENCE}": "--policy-loss gspo "
    "--use-tis --tis-level sequence --tis-mode mask --tis-clip 5 --tis-clip-low 0.5",
    f"{NO_KL} loss_fn.disable_ppo_ratio=true": "--policy-loss reinforce",
    f"{VERL_KL}k3+": "--kl-loss-type low_var_kl --kl-loss-gradient k2",
    f"{VERL_KL}k1+": "--kl-loss-type k1 --kl-loss-gradient k2",
    f"{VERL_KL}k2+": "--kl-loss-type k2",
    f"{VERL_KL}mse+": "--kl-loss-type k2",
    f"{VERL} {MODE}=gspo": "--policy-loss gspo",
    f"{VERL} {MODE}=cispo": "--policy-loss cispo --cispo-lower-bound",
    f"{SLIME} --advantage-estimator cispo": "--policy-loss cispo --cispo-lower-bound",
    f"{VERL} {MODE}=gpg": "--policy-loss reinforce",
    f"{VERL} {MODE}=sapo {ACTOR}tau_neg=1.5": "--policy-loss sapo --sapo-tau-neg 1.5",
    f"{VERL} {ROLLOUT}.bypass_mode=true": "--ratio-anchor rollout",
    f"{SLIME} --use-rollout-logprobs": "--ratio-anchor rollout",
    f"{VERL} {MODE}=megatron_pg_token_mean": "",
    f"{VERL} {ROLLOUT}.rollout_is=sequence "
    f"{ROLLOUT}.rollout_is_threshold=4": "--use-tis --tis-level sequence --tis-clip 4",
    f"{SLIME} --use-tis --tis-clip 3": "--use-tis --tis-clip 3",
    f"{SLIME} --tis-clip 3 --opsm-delta 1 --kl-loss-type k2 --use-unbiased-kl": "",  # none is read
    f"{SLIME} --advantage-estimator reinforce_plus_plus": WHITENED,
    f"{MILES} --advantage-estimator reinforce_plus_plus_baseline --eps-clip-high "
    f"0.3": "--advantage dr_grpo --whiten-advantages",
    f"{VERL} algorithm.adv_estimator=reinforce_plus_plus": WHITENED,
    f"{VERL} algorithm.adv_estimator=rloo algorithm.kl_ctrl.type=adaptive": "--advantage rloo",
}
"""Lines with a counterpart: what is printed beyond aggregation, clip and the coefficient of KL."""


@pytest.mark.parametrize("line", SAME)
def test_the_same_loss(line: str, run) -> None:
    which, flags, lost = here(run, line)
    assert (which, lost) == ("same", [])
    taken(flags)
    clip = (
        r"--(loss|regularizer)-aggregation \w+|--eps-clip-high [\d.]+|--eps-clip-c "
        r"3|--kl-loss-coef [\d.]+"
    )
    assert " ".join(re.sub(clip, "", flags).split()) == SAME[line]


GROUP = [1.0, 0.0, 0.5, 0.0]
"""The rewards of a prompt group."""
MEAN = sum(GROUP) / 4
DEVIATION = (sum((r - MEAN) ** 2 for r in GROUP) / 3) ** 0.5
BY_GRPO = [(r - MEAN) / (DEVIATION + 1e-6) for r in GROUP]
CENTERED = [r - MEAN for r in GROUP]
BY_OTHERS = [r - (sum(GROUP) - r) / 3 for r in GROUP]
NO_NORM, NO_STD_SLIME = "grpo.normalize_rewards=false", "--disable-grpo-std-normalization"
ALL_IN_BASELINE = "grpo.use_leave_one_out_baseline=false"
PREFIXED = "algorithm.adv_estimator=megatron_pg_prompt_mean_"
ADVANTAGES: dict[str, list[float]] = {
    VERL: BY_GRPO,
    f"{VERL} {NO_STD} {NORM}": CENTERED,
    f"{VERL} {PREFIXED}grpo {NO_STD} {MODE}=megatron_pg_prompt_mean": CENTERED,
    f"{VERL} algorithm.adv_estimator=grpo_vectorized "
    f"{NO_STD}": BY_GRPO,  # verl passes it no such setting
    f"{VERL} algorithm.adv_estimator=rloo_vectorized": BY_OTHERS,
    SLIME: BY_GRPO,
    f"{SLIME} {NO_STD_SLIME}": CENTERED,
    f"{SLIME} {NO_STD_SLIME} {REDUCER} {OURS}.constant": CENTERED,
    f"{SLIME} --advantage-estimator cispo {NO_STD_SLIME}": CENTERED,
    f"{MILES} {NO_STD_SLIME}": CENTERED,
    f"{SLIME} {NO_STD_SLIME} --disable-rewards-normalization": GROUP,
    f"{NEMO_RL} {ALL_IN_BASELINE}": BY_GRPO,
    f"{NEMO_RL} {NO_NORM}": BY_OTHERS,
    f"{NEMO_RL} grpo.adv_estimator.normalize_rewards=false {ALL_IN_BASELINE}": CENTERED,
}
"""The advantages of a group, by the trainers' formulas."""


@pytest.mark.parametrize("line", ADVANTAGES)
def test_the_flags_make_the_advantages_of_the_line(line: str, run) -> None:
    args = taken(here(run, line, "--loss-aggregation-divisor 7")[1])
    found = group_advantages(GROUP, [5] * 4, method=args.advantage or "grpo").advantages
    assert found.tolist() == pytest.approx(ADVANTAGES[line], rel=1e-6)
    assert not args.whiten_advantages
    assert not [text for text in beside(run, line) if "optimizer steps" not in text]


def test_whitened_advantages(run) -> None:
    flags = here(run, f"{SLIME} --normalize-advantages {NO_STD_SLIME}")[1]
    assert "--advantage dr_grpo --whiten-advantages" in flags
    one = f"{NEMO_RL} grpo.adv_estimator.name=reinforce_plus_plus"
    assert "--advantage dr_grpo --whiten-advantages" in here(run, one)[1]
    other = f"{one} grpo.adv_estimator.minus_baseline=false"
    assert "--advantage reward --whiten-advantages" in here(run, other)[1]
    plain = "--advantage-estimator reinforce_plus_plus_baseline --disable-rewards-normalization"
    assert "--advantage reward --whiten-advantages" in here(run, f"{SLIME} {plain}")[1]


R_PLUS_PLUS = "--advantage-estimator reinforce_plus_plus --normalize-advantages"
NOT_CARRIED_OVER = {
    "python -m verl.trainer.main_ppo "
    "actor_rollout_ref.actor.use_kl_loss=true": "algorithm.adv_estimator=gae",
    f"{VERL} algorithm.adv_estimator=opo": "algorithm.adv_estimator=opo",
    f"{VERL} algorithm.use_kl_in_reward=true": "algorithm.use_kl_in_reward=True: subtract the KL",
    f"{VERL} algorithm.adv_estimator=reinforce_plus_plus "
    f"algorithm.gamma=0.9": "algorithm.gamma=0.9",
    f"{VERL} algorithm.use_pf_ppo=true": "algorithm.use_pf_ppo=True",
    f"{VERL} data.train_batch_size=512 {ACTOR}ppo_mini_batch_size=128": "4 optimizer steps per "
    "batch",
    f"{VERL} data.train_batch_size=64 {ACTOR}ppo_mini_batch_size=64 "
    f"{ACTOR}ppo_epochs=2": "2 optimizer",
    f"{SLIME} --advantage-estimator ppo": "--advantage-estimator=ppo: advantages of a critic",
    f"{SLIME} --advantage-estimator ppo --lambd 0.95": "--lambd=0.95",
    f"{SLIME} {R_PLUS_PLUS} --kl-coef 0.1": "--kl-coef=0.1: subtract the KL",
    f"{SLIME} {R_PLUS_PLUS} --gamma 0.9": "--gamma=0.9",
    f"{SLIME} --custom-advantage-function-path a.b": "--custom-advantage-function-path=a.b",
    f"{SLIME} --custom-reward-post-process-path a.b": "--custom-reward-post-process-path=a.b",
    f"{SLIME} --use-opd --opd-kl-coef 1": "--use-opd=True",
    f"{SLIME} --use-kl-loss --kl-loss-coef 0.1 --ref-update-interval 5": "--ref-update-interval=5",
    f"{SLIME} --keep-old-actor": "--keep-old-actor=True",
    f"{SLIME} --num-steps-per-rollout 2": "2 optimizer steps per batch",
    f"{SLIME} --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size "
    f"64": "4 optimizer",
    f"{MILES} --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size "
    f"128": "2 optimizer",
    NEMO_RL: "grpo.adv_estimator.use_leave_one_out_baseline=True: its mean and deviation",
    f"{NEMO_RL} grpo.adv_estimator.name=gdpo": "grpo.adv_estimator.name=gdpo",
    f"{NEMO_RL} grpo.advantage_clip_low=-1": "grpo.advantage_clip_low=-1",
    f"{NEMO_RL} grpo.num_prompts_per_step=64": "2 optimizer steps per batch",
    f"{NEMO_RL} grpo.overlong_filtering=true": "call filter_overlong",
    f"{NEMO_RL} grpo.adv_estimator.name=reinforce_plus_plus "
    f"loss_fn.use_kl_in_reward=true": "loss_fn.use_kl_in_reward",
}


@pytest.mark.parametrize("line", NOT_CARRIED_OVER)
def test_what_is_beside_the_per_token_loss_is_carried_over_or_said(line: str, run) -> None:
    assert any(NOT_CARRIED_OVER[line] in text for text in beside(run, line))
    taken(here(run, line)[1])


NOT_CHANGED = [
    f"{SLIME} --kl-coef 0.1 --gamma 0.9 --lambd 0.9",  # none is read by the default estimator
    f"{SLIME} --loss-type sft_loss --custom-advantage-function-path a.b --use-opd",
    f"{SLIME} --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256",
    f"{VERL} data.train_batch_size=512 {ACTOR}ppo_mini_batch_size=512 algorithm.gamma=0.9",
    f"{VERL} data.train_batch_size=$BATCH {ACTOR}ppo_mini_batch_size=$MINI",
]


@pytest.mark.parametrize("line", NOT_CHANGED)
def test_what_is_carried_over_or_not_read_is_no_remark(line: str, run) -> None:
    assert beside(run, line) == []


NULL = f"{VERL} {ACTOR}clip_ratio=0.3 {ACTOR}clip_ratio_low=null {ACTOR}clip_ratio_high=null"


def test_null_clip_ratios_are_that_of_both_sides(run) -> None:
    assert "--eps-clip 0.3 --eps-clip-high 0.3" in here(run, NULL)[1]


REFUSED_HERE = {
    f"{SLIME} --entropy-coef=-0.01": "--entropy-coef=-0.01",
    f"{SLIME} --use-kl-loss --kl-loss-coef=-0.1 --kl-loss-type k2": "--kl-loss-coef=-0.1",
    f"{SLIME} --eps-clip 1.5": "--eps-clip=1.5",
    f"{SLIME} --eps-clip-c 0.5": "--eps-clip-c=0.5",
    f"{SLIME} --use-tis --tis-clip 0.5 --tis-clip-low 0.7": "--tis-clip",
    f"{VERL} actor_rollout_ref.rollout.temperature=0": "actor_rollout_ref.rollout.temperature=0",
}
"""Values that the trainers take, and this package does not."""


@pytest.mark.parametrize("line", REFUSED_HERE)
def test_what_this_package_refuses_is_said_and_not_printed(line: str, run) -> None:
    which, flags, lost = here(run, line)
    assert which == "nearest" and any(REFUSED_HERE[line] in text for text in lost)
    taken(flags)


# What is printed for this package's own plugins is accepted by their checks.

ESTIMATORS = ("grpo", "rloo", "opo", "reinforce_plus_plus", f"{PREFIXED}gpg", "my_own")
BATCHES = (
    "",
    "data.train_batch_size=512 ",
    f"data.train_batch_size=96 {ACTOR}ppo_mini_batch_size=32 ",
)
MODES = ("vanilla", "gspo", "megatron_pg_token_mean", "megatron_pg_constant_gspo")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_plugin_of_verl_takes_its_lines(estimator, batch, mode, run, monkeypatch) -> None:
    name = estimator.rpartition("=")[2]
    base = name.removeprefix("megatron_pg_prompt_mean_")
    line = (
        f"{VERL} algorithm.adv_estimator={name} {batch}{MODE}={mode} actor_rollout_ref.rollout.n=8"
    )
    printed = run(line, "--loss-aggregation prompt_mean")
    lines = printed.split("prompt_mean exactly, in verl\n")[1].split("\n\n")[0]
    added = dict(re.findall(r"^  ([\w.]+)=(\S+)$", lines, re.M))
    assert added.pop("algorithm.adv_estimator") == f"megatron_pg_prompt_mean_{base}"
    prompts = int(
        dict(re.findall(r"(data\.train_batch_size)=(\d+)", batch)).get(
            "data.train_batch_size", 1024
        )
    )
    actor = SimpleNamespace(
        policy_loss=SimpleNamespace(loss_mode=added.pop(MODE)),
        ppo_mini_batch_size=int(added.pop(f"{ACTOR}ppo_mini_batch_size")),
    )
    assert not added
    parts = {"actor": actor, "rollout": SimpleNamespace(n=8)}
    monkeypatch.setattr(verl, "_select", lambda config, key: parts[key.split(".")[-1]])
    verl.refuse_estimator_settings(base, object(), prompts * 8, [0])
    assert actor.policy_loss.loss_mode.endswith("_gspo") == ("gspo" in mode)


@pytest.mark.parametrize("estimator", sorted(verl.NEED_MORE))
def test_estimators_that_the_plugin_cannot_make_have_no_lines(estimator: str, run) -> None:
    line = f"{VERL} algorithm.adv_estimator={estimator}"
    printed = run(line, "--loss-aggregation prompt_mean")
    assert f"(no lines: verl handles {estimator} only by name" in printed
    assert "megatron_pg_prompt_mean" not in printed


HOOKED = [line for line in (*LINES, *OFF) if line.startswith((SLIME, MILES)) and "$" not in line]
HOOKED += [
    f"{SLIME} --global-batch-size 100 --n-samples-per-prompt 8",
    f"{SLIME} --context-parallel-size 2 --allgather-cp",
    f"{MILES} --use-dynamic-global-batch-size",
    f"{MILES} --entropy-coef 0.1 --use-kl-loss --kl-loss-coef 0.1",
]


@pytest.mark.parametrize("mode", ["prompt_mean", "token_mean", "constant"])
@pytest.mark.parametrize("line", HOOKED)
def test_the_hooks_take_their_lines_or_their_refusal_is_printed(line, mode, run) -> None:
    name = of_words(line).trainer.name
    divisor = "--loss-aggregation-divisor 64" * (mode == "constant")
    printed = run(line, f"--loss-aggregation {mode} {divisor}")
    lines = printed.split(f"{mode} exactly, in {name}\n")[1].split("\n\n")[0]
    # The attributes that argparse makes of the launch line and of the lines, and slime of its file
    # of settings.
    own = lines.partition("\n  (")[0]
    words = re.findall(r"--([\w-]+)(?:[ =](?!--)(\S+))?", f"{line}\n{own}")
    args = {key.replace("-", "_"): int(x) if x.isdigit() else x or True for key, x in words}
    args |= {"calculate_per_token_loss": False, "custom_pg_loss_reducer_function_path": None}
    args |= dict.fromkeys(("loss_aggregation", "loss_aggregation_divisor"))
    file = lines.partition("# with the lines:")[2].split("\n")[0]
    args |= dict(re.findall(r"(\w+): (\w+)", file))
    hooks = {"slime": SLIME_HOOKS, "miles": MILES_HOOKS}[name]
    assert args[hooks.hook] == f"{OURS}.{name}.{mode}"
    try:
        hooks.require(mode, argparse.Namespace(**args))
    except ValueError as error:
        why = str(error).removeprefix(f"{hooks.path(mode)}: ")
        assert f"(refused in this launch line, with the remedy: {why})" in printed
    else:
        assert "refused in this launch line" not in printed


NO_COUNTERPART = [
    f"{MODE}={mode}" for mode in ("geo_mean", "clip_cov", "kl_cov", "dro", "cum-token-cumprod-la")
]
LOST = {
    **{f"{VERL} {mode}": mode for mode in NO_COUNTERPART},
    f"{VERL} {MODE}=dppo_kl": f"{ACTOR}clip_ratio_c=3",
    f"{VERL} {ROLLOUT}.bypass_mode=true "
    f"{ROLLOUT}.loss_type=reinforce": f"{ROLLOUT}.loss_type=reinforce",
    f"{SLIME} --use-rollout-logprobs --use-tis": "--use-rollout-logprobs=True",
    f"{VERL} {ADAPTIVE}": "algorithm.kl_ctrl.type=adaptive",
    f"{VERL_KL}abs": f"{ACTOR}kl_loss_type=abs",
    f"{VERL_KL}full": f"{ACTOR}kl_loss_type=full",
    f"{VERL} {ROLLOUT}.rollout_is=token "
    f"{ROLLOUT}.rollout_is_threshold=0.5_5.0": f"{ROLLOUT}.rollout_is_threshold=0.5_5.0",
    f"{VERL} {ROLLOUT}.rollout_rs=token_k1": f"{ROLLOUT}.rollout_rs=token_k1",
    f"{VERL} {ACTOR}loss_agg_mode=token-sum": "aggregation=token_sum",
    f"{NEMO_RL} loss_fn.force_on_policy_ratio=true": "loss_fn.force_on_policy_ratio=True",
    f"{NEMO_RL} loss_fn.positive_example_nll_weight=0.1": "loss_fn.positive_example_nll_weight=0.1",
    f"{NEMO_RL} loss_fn.kl_output_clamp_value=5": "loss_fn.kl_output_clamp_value=5",
    f"{NEMO_RL} loss_fn.use_cispo=true loss_fn.ratio_clip_c=3": "loss_fn.ratio_clip_c=3",
    f"{SLIME} --use-tis --custom-tis-function-path a.b": "--custom-tis-function-path=a.b",
    f"{SLIME} --loss-type custom_loss": "--loss-type=custom_loss",
}


@pytest.mark.parametrize("line", LOST)
def test_what_has_no_counterpart_is_said(line: str, run) -> None:
    which, flags, lost = here(run, line)
    assert which == "nearest" and LOST[line] in lost
    taken(flags)
    assert "--use-tis" not in flags or "--custom-tis-function-path" not in line


def test_a_mean_of_each_micro_batch_is_no_aggregation() -> None:
    assert terms(f"{VERL_KL}k3 {MODE}=geo_mean").startswith("unknown 1, token_mean 0.001,")


@pytest.mark.parametrize("given", ["200,,", "", "0", "2.5", "200,-1", "x"])
def test_lengths_are_whole_numbers(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--lengths", given, "--", *shlex.split(VERL)])
    assert f"--lengths: {given!r}: expected numbers of active tokens" in capsys.readouterr().err


def test_likelihood_is_not_printed_as_ppo(run) -> None:
    line = f"{SLIME} --loss-type sft_loss --use-tis --eps-clip-c 3 --advantage-estimator gspo"
    flags = here(run, line)[1]
    assert "--policy-loss sft --eps-clip-high 0.28" in flags and taken(flags).policy_loss == "sft"
    assert "tis" not in flags and "gspo" not in flags


def test_thresholds_of_a_divergence(run) -> None:
    line = f"{VERL} {MODE}=dppo_tv {ACTOR}clip_ratio_low=0.15 {ACTOR}clip_ratio_high=0.1"
    flags = here(run, line)[1]
    assert flags.endswith("--policy-loss dppo_tv --dppo-delta 0.15 --dppo-delta-high 0.1")


def test_every_value_is_printed_or_said(run) -> None:
    """A value that is not the default changes the flags, is named, or is of a row that is no
    setting of this loss.
    """
    bases = {"verl": f"{VERL} {ACTOR}use_kl_loss=true", "nemo-rl": f"{NEMO_RL} {ON}"}
    slime = f"train.py {KL} --use-tis --use-opsm"
    silent = []
    for name, trainer in TRAINERS.items():
        base, options = bases.get(name, slime), f"--trainer {name}"
        default = here(run, base, options), beside(run, base, options)
        for key, row in trainer.settings.items():
            if not key.startswith("--") and name in ("slime", "miles"):
                continue
            number = "1.5" if key.endswith(("-c", "_c")) else "0.75"
            cases = row.get("here")
            texts = [text for _, text in cases] if isinstance(cases, list) else [cases]
            values = row.get("choices", ["true", "false"] if row["kind"] == "flag" else [number])
            for value in values:
                line = f"{base} {key}={value}"
                found = here(run, line, options), beside(run, line, options)
                if "<L>" not in found[0][1]:
                    taken(found[0][1])
                is_declared = any(
                    text == "" or isinstance(text, dict) and text.get(value) == "" for text in texts
                )
                is_default = value in (row.get("default"), str(row.get("default")).lower())
                is_reference = str(row.get("default")).startswith("${") and value == "true"
                if found == default and not is_declared and not is_default and not is_reference:
                    silent.append((name, key, value))
    assert not silent


@pytest.mark.parametrize("name", ["slime", "miles"])
def test_the_hooks_that_are_named_exist(name: str) -> None:
    module = pytest.importorskip(f"megatron_pg.integrations.{name}")
    paths = re.findall(rf"megatron_pg\.integrations\.{name}\.(\w+)", str(TRAINERS[name].exact))
    assert set(paths) == {"prompt_mean", "token_mean", "constant", "check"}
    assert all(callable(getattr(module, path)) for path in paths)
