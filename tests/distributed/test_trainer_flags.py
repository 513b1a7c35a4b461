"""The command line of examples/trainer: every flag of Megatron is read, or refused by name."""

import argparse
import contextlib
import io
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from trainer.arguments import parse_arguments

from megatron_pg import PolicyLossConfig

from .launch import run_ranks
from .trainer_run import FLAGS, MODEL

GIVEN = f"{FLAGS}{MODEL}--train-iters 6 --rollout-files x.jsonl "

REFUSED = {
    "--train-data-path x": "--train-data-path: samples come from --rollout-files",
    "--mock-data": "--mock-data: samples come from",
    "--tokenizer-type NullTokenizer": "--tokenizer-type: samples come from --rollout-files",
    "--grpo-group-size 4": "--grpo-group-size: Megatron's own RL loop is not run",
    "--perform-rl-step": "--perform-rl-step: Megatron's own RL loop is not run",
    "--eval-interval 4": "--eval-interval: there is no validation set",
    "--skip-train": "--skip-train: there is no validation set",
    "--global-batch-size 8": "--global-batch-size: a step holds --docs-per-step rollouts",
    "--micro-batch-size 4": "--micro-batch-size: a step holds --docs-per-step rollouts",
    "--train-samples 8": "--train-samples: steps are counted here, not samples",
    "--mtp-num-layers 1": "--mtp-num-layers: the model is a GPTModel",
    "--use-megatron-fsdp": "--use-megatron-fsdp: the model is wrapped in DDP",
    "--non-persistent-save-interval 3": "cannot be gone on from",
    "--no-save-optim": "cannot be gone on from",
    "--cuda-graph-impl local": "--cuda-graph-impl: its buffers have one size",
    "--ckpt-format torch": "--ckpt-format torch: checkpoints are read at any sharding",
    "--hidden-dropout 0.1": "give 0 with --device cpu",
    "--device cuda --hidden-dropout 0.1": "hidden_dropout=0.1: training draws random numbers",
    "--num-experts 4 --moe-router-topk 2 --moe-input-jitter-eps 0.1": "moe_input_jitter_eps=0.1: "
    "rou",
    "--num-experts 4 --moe-router-topk 2 "
    "--moe-expert-capacity-factor 1": "expert_capacity_factor=1.0",
    "--position-embedding-type yarn": "give one of learned_absolute, rope, none",
    "--clip-grad nan": "--clip-grad is nan: give a finite number",
    "--eps-clip inf": "--eps-clip",
    "--task spell_backward": "give one of --rollout-files and --task",
    "--save-hf x": "--save-hf x: it is written with the config and tokenizer of --hf-model",
    "--hf-model nowhere": "there is no nowhere/config.json",
    "--lr-warmup-iters 6": "--lr-warmup-iters 6 is not below --train-iters 6",
    "--tensor-model-parallel-size 3": "4 processes cannot be split",
    "--num-layers 5 --pipeline-model-parallel-size 2": "Megatron refuses these flags",
    "--loss-aggregation constant": "--loss-aggregation-divisor",
    "--save x": "--save x with --save-interval None: give the steps",
    "--save x --save-interval 4 --save-retain-interval 6": "Megatron refuses these flags: assert "
    "args.save_retain_interval %",
    "--wandb-project p": "--wandb-project needs a folder for its files: give --save",
    "--wandb-project p --save x --save-interval 4": "the package wandb is not installed",
    "--wandb-project p --wandb-save-dir x": "the package wandb is not installed",
}

READ_GROUPS = {
    # The model, its sharding, initialisation and update, and Megatron's loop, which runs unchanged.
    *(
        "transformer configuration",
        "network size",
        "Transformer-Engine",
        "moe",
        "mla",
        "regularization",
    ),
    *("mixed precision", "training", "profiling", "logging", "learning rate and weight decay"),
    *("RNG and initialization", "distributed init", "checkpointing", "experimental"),
    *("policy loss", "planning", "trainer", "settings in a file"),  # this package's
    *("options", "positional arguments"),  # argparse's own
}


def parse_each(lines: list[str]) -> list[str]:
    """What each command line is refused with, or ''; on a forked rank, one after the other."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "4", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    found = []
    for line in lines:
        sys.argv = ["trainer", *line.split()]
        try:
            parse_arguments()
            found.append("")
        except (ValueError, NotImplementedError) as error:
            found.append(str(error))
    return found


@pytest.fixture(scope="module")
def messages() -> dict[str, str]:
    lines = ["", *REFUSED]
    (found,) = run_ranks(parse_each, 1, [GIVEN + line for line in lines])
    return dict(zip(lines, found, strict=True))


def test_the_flags_of_the_tests_are_accepted(messages: dict[str, str]) -> None:
    assert messages[""] == ""


@pytest.mark.parametrize("flags", REFUSED)
def test_what_is_not_done_is_refused(flags: str, messages: dict[str, str]) -> None:
    assert REFUSED[flags] in messages[flags]


def test_every_group_of_flags_is_read_or_refused() -> None:
    """Fails where a release of Megatron brings a group that nobody has decided about."""
    ((refused, titles, missing),) = run_ranks(groups_of_flags, 1)
    assert titles == READ_GROUPS & titles | refused and not READ_GROUPS & refused
    assert not missing, "misspelt names would refuse nothing"


def groups_of_flags() -> tuple[set[str], set[str], set[str]]:
    from megatron.training.arguments import add_megatron_arguments
    from trainer import refusals
    from trainer.arguments import _add_flags

    parser = _add_flags(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    titles = {str(group.title) for group in parser._action_groups if group._group_actions}
    names = {action.dest for action in parser._actions}
    assert refusals.KEPT
    return titles & {*refusals.GROUPS}, titles, {*refusals.FLAGS, *refusals.KEPT} - names


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """What is printed for each of the flags that explain flags, on the first rank of a node and on
    its second.
    """
    (found,) = run_ranks(printed_help, 1, ["--help", "--help-megatron"])
    return dict(found)


def printed_help(flags: list[str]) -> list[tuple[str, str]]:
    found = []
    for flag, rank in itertools.product(flags, "01"):
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        sys.argv = ["trainer", flag]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as end:
            parse_arguments()
        assert end.value.code in (0, None)
        found.append((f"{flag} {rank}", printed.getvalue()))
    return found


def test_help_is_of_the_flags_of_this_program(helps: dict[str, str]) -> None:
    text = helps["--help 0"]
    assert re.search(r"--ref-load FOLDER\s+reference policy", text)
    for flag in ("--loss-aggregation", "--docs-per-step", "--device", "--pg-loss-divisor"):
        assert f"  {flag} " in text
    assert not re.search(r"^  --(num-layers|lr|save|train-iters) ", text, re.MULTILINE)
    assert len(text.splitlines()) < 400 and "usage" not in text


def test_megatrons_flags_have_a_help_of_their_own(helps: dict[str, str]) -> None:
    """Without those that this program refuses."""
    text = helps["--help-megatron 0"]
    for flag in ("--num-layers", "--lr", "--save", "--train-iters"):
        assert re.search(f"^  {flag} ", text, re.MULTILINE)
    given = set(re.findall(r"^  (--[\w-]+)", text, re.MULTILINE))
    refused = {flags.split()[0] for flags in REFUSED if "no validation set" in REFUSED[flags]}
    assert not given & (refused | {"--loss-aggregation", "--micro-batch-size", "--grpo-group-size"})


def test_help_is_printed_once_on_a_node(helps: dict[str, str]) -> None:
    assert helps["--help 1"] == helps["--help-megatron 1"] == ""


def command_lines() -> list[list[str]]:
    """The arguments of torchrun of every launch line of docs/recipes.md, as bash reads them."""
    page = (Path(__file__).parents[2] / "docs/recipes.md").read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    stub = 'torchrun() { printf "%s\\n" "$@" ==; }\n'
    printed = subprocess.run(
        ["bash", "-euc", stub + "".join(blocks)], capture_output=True, text=True, check=True
    ).stdout
    return [line.split("\n") for line in printed.split("\n==\n") if line]


RECIPES = command_lines()


@pytest.mark.parametrize(
    "line", RECIPES, ids=lambda line: " ".join(line[line.index("--docs-per-step-mode") + 3 :])
)
def test_the_line_of_a_recipe_is_accepted(line: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = line.index("examples/trainer")
    assert line[:script] == ["--nproc-per-node", "8"]
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(sys, "argv", line[script:])
    config = PolicyLossConfig.from_args(parse_arguments())
    given = dict(zip(line, line[1:], strict=False))
    assert config.loss_aggregation == given.get("--loss-aggregation", "sample_mean")
    assert config.policy_loss == given.get("--policy-loss", "ppo")


def test_every_aggregation_and_clipped_objective_has_a_recipe() -> None:
    text = "".join(" ".join(line) for line in RECIPES)
    for name in ("sample_mean", "prompt_mean", "token_mean", "constant"):
        assert f"--loss-aggregation {name}" in text
    for name in (
        "ppo",
        "gspo",
        "cispo",
        "dis",
        "reinforce",
        "sapo",
        "gmpo",
        "vespo",
        "dppo_tv",
        "dppo_kl",
    ):
        assert f"--policy-loss {name}" in text
