"""The command line of examples/train.py: what would train something else is refused by name."""

import contextlib
import io
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

pytestmark = pytest.mark.full

GIVEN = f"{FLAGS}{MODEL}--train-iters 6 --rollout-files x.jsonl "

REFUSED = {
    "--train-data-path x": "--train-data-path: samples come from --rollout-files",
    "--grpo-group-size 4": "--grpo-group-size: only Megatron's own loops read it. Remove it",
    "--perform-rl-step": "--perform-rl-step: only Megatron's own loops read it",
    "--global-batch-size 8": "--global-batch-size: a step holds --docs-per-step rollouts",
    "--micro-batch-size 4": "--micro-batch-size: a step holds --docs-per-step rollouts",
    "--train-samples 8": "--train-samples: steps are counted here, not samples",
    "--mtp-num-layers 1": "--mtp-num-layers: layers come from --num-layers",
    "--hybrid-layer-pattern M": "--hybrid-layer-pattern: layers come from --num-layers",
    "--use-megatron-fsdp": "--use-megatron-fsdp: the model is wrapped in DDP",
    "--cuda-graph-impl local": "--cuda-graph-impl: micro-batches differ in length",
    "--ckpt-format torch": "--ckpt-format is torch: use torch_dist",
    "--hidden-dropout 0.1": "--device cpu requires --attention-dropout 0",
    "--device cuda --hidden-dropout 0.1": "hidden_dropout=0.1: training draws random numbers",
    "--num-experts 4 --moe-router-topk 2 --moe-input-jitter-eps 0.1": "moe_input_jitter_eps=0.1: "
    "rou",
    "--num-experts 4 --moe-router-topk 2 "
    "--moe-expert-capacity-factor 1": "expert_capacity_factor=1.0",
    "--position-embedding-type yarn": "--position-embedding-type yarn is not supported",
    "--eps-clip inf": "--eps-clip",
    "--task spell_backward": "give either --rollout-files or --task",
    "--save-hf x": "--save-hf x requires --hf-model",
    "--hf-model nowhere": "nowhere/config.json does not exist",
    "--tensor-model-parallel-size 3": "Megatron refuses these flags: world size",
    "--num-layers 5 --pipeline-model-parallel-size 2": "--num-layers 5 cannot be split evenly",
    "--loss-aggregation constant": "--loss-aggregation-divisor",
    "--save x": "--save x requires --save-interval",
}


def parse_each(lines: list[str]) -> list[str]:
    """What each command line is refused with, or ''; on a forked rank, one after the other."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "4"}
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


def test_help_ends_with_the_flags_of_this_program() -> None:
    """On the first rank of a node alone."""
    ((first, second),) = run_ranks(printed_help, 1)
    assert second == "" and "\nusage: " not in first
    flags = re.findall(r"^  (--[\w-]+)", first, re.MULTILINE)
    order = [flags.index(name) for name in ("--num-layers", "--loss-aggregation", "--device")]
    assert order == sorted(order) and flags[-1] == "--whiten-advantages"


def printed_help() -> list[str]:
    found = []
    for rank in "01":
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        sys.argv = ["train.py", "--help"]
        with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
            parse_arguments()
        found.append(printed.getvalue())
    return found


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
    script = line.index("examples/train.py")
    assert line[:script] == ["--nproc-per-node", "8"]
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
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
