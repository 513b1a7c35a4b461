"""The launch scripts dry-run: flags that Megatron and this package accept for that many processes,
and a plan.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_pg.config.versions import has_megatron_training
from tests import progress
from tests.distributed.launch import run_ranks
from tests.distributed.test_trainer_sampler import write_model

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples/launch"
WORLD_SIZES = {"one_node.sh": 8, "multi_node.sh": 64}
SCRIPTS = sorted(LAUNCH / name for name in WORLD_SIZES)
FROM_WEIGHTS = ["", "--device cpu"]
"""Flags of smollm2.sh, where a folder of weights describes the model."""
PARAMETERS = {"one_node.sh": 8.19, "multi_node.sh": 70.55}
"""Billions; those of the published models Qwen3-8B and Llama-3.1-70B."""


def started_by(
    script: Path, folder: Path, *flags: str, **environment: str
) -> tuple[int, list[str]]:
    """(WORLD_SIZE, arguments of Python) of the process that a dry run of a script starts."""
    world_size, *arguments = printed_by(script, folder, "--dry-run", *flags, **environment)
    return int(world_size), arguments


def printed_by(script: Path, folder: Path, *flags: str, **environment: str) -> list[str]:
    """WORLD_SIZE and the arguments of Python, of which a script starts one that prints them."""
    python = folder / "python"
    python.write_text('#!/bin/sh\necho "$WORLD_SIZE"\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    environment |= {"PYTHON": str(python), "ROLLOUTS": str(folder / "rollouts")}
    inherited = {name: value for name, value in os.environ.items() if name != "SLURM_JOB_ID"}
    command = ["bash", str(script), *flags]
    options = {"capture_output": True, "text": True, "check": True, "cwd": folder}
    return subprocess.run(command, env=inherited | environment, **options).stdout.splitlines()


def dry_runs(processes: list[tuple[int, list[str]]]) -> list[str]:
    """What processes as `started_by` describes them print, or why they end; on a forked rank, one
    after the other.
    """
    from train import main

    os.environ["RANK"] = "0"
    texts = []
    for world_size, arguments in processes:
        os.environ["WORLD_SIZE"] = str(world_size)
        sys.argv = arguments
        printed, refused = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(refused):
                main()
            texts.append(printed.getvalue())
        except SystemExit as end:
            texts.append(f"{refused.getvalue()}{end}")
    return texts


def write_rollouts(folder: Path, last_group: int = 127) -> None:
    """1024 responses in groups of 8, of 100 to 1600 tokens, to prompts of 50; the last row may be
    of another group.
    """
    (folder / "rollouts").mkdir()
    with (folder / "rollouts/step.jsonl").open("w") as file:
        for index in range(1024):
            length, group = 100 * (1 + index % 16), index // 8 if index < 1023 else last_group
            row = {"prompt_ids": [1] * 50, "response_ids": [2] * length, "group_index": group}
            row |= {"log_probs": [-1.0] * length, "reward": float(index % 2)}
            file.write(json.dumps(row) + "\n")


@pytest.mark.parametrize("script", [*SCRIPTS, LAUNCH / "smollm2.sh"], ids=lambda path: path.name)
def test_the_script_is_bash_and_explains_every_flag(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "--dry-run" in text.split("set -euo pipefail")[0], "said how to try it"
    for line in text.splitlines() + (LAUNCH / "common.sh").read_text().splitlines():
        is_launcher = line.rstrip().endswith(("\\", "--"))
        assert is_launcher or not re.match(r" +--", line) or "# " in line, line


def test_the_page_shows_what_is_printed(plans: dict[str, str]) -> None:
    printed = re.sub(r"folder `\S+`", "folder `rollouts`", plans["one_node.sh"])
    assert printed in (ROOT / "docs/launch.md").read_text()


CONTRADICTIONS = {
    "--tensor-model-parallel-size 3": "Megatron refuses these flags: world size",
    "--max-tokens-per-microbatch 4": "--max-tokens-per-microbatch",
    "--context-parallel-size 2 --qkv-format bshd": "--qkv-format thd",
}
OF_THE_FIRST_STEP = {
    "--loss-aggregation sample_mean": "error: step.jsonl row 0 has a reward and no advantages, .* "
    "--keep-prompt-groups",
    "--seq-length 1024 --max-position-embeddings 1024": "error: step.jsonl row 9 has 1050 tokens, "
    "more than",
    "--docs-per-step 2048": "remark +the files end before the step is full, after 1024 rollouts",
    "--loss-aggregation constant --loss-aggregation-divisor 1": "remark: .*Use --advantage dr_grpo "
    "for the other half",
    "--advantage dr_grpo": "remark: --advantage dr_grpo is one half of Dr.GRPO",
}
"""What a dry run says of the rollouts of the first step, by flags."""
FILES, SCATTERED = "with rollout files", "files whose last row is of the first group"


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the dry runs print: of every script by its name, with rollout files, with contradictory
    flags by those.
    """
    if not has_megatron_training():
        pytest.skip("the scripts take Megatron's own flags: megatron-core 0.17 and later")
    folder = tmp_path_factory.mktemp("without_files")
    processes = {script.name: started_by(script, folder) for script in SCRIPTS}
    for flags in CONTRADICTIONS:
        processes[flags] = started_by(LAUNCH / "multi_node.sh", folder, *flags.split())
    model = tmp_path_factory.mktemp("model") / "hf"
    write_model(model)
    for flags in FROM_WEIGHTS:
        given = started_by(LAUNCH / "smollm2.sh", folder, *flags.split(), MODEL=str(model))
        processes[f"smollm2.sh {flags}"] = given
    folder = tmp_path_factory.mktemp("files")
    write_rollouts(folder)
    flags = ("--max-tokens-per-microbatch", "16384", "--seq-length", "8192")
    processes[FILES] = started_by(LAUNCH / "one_node.sh", folder, *flags)
    for more in OF_THE_FIRST_STEP:
        size, arguments = started_by(LAUNCH / "one_node.sh", folder, *flags, *more.split())
        if "sample_mean" in more:
            arguments.remove("--keep-prompt-groups")
        processes[more] = size, arguments
    folder = tmp_path_factory.mktemp("scattered")
    write_rollouts(folder, last_group=0)
    processes[SCATTERED] = started_by(LAUNCH / "one_node.sh", folder, *flags)
    (texts,) = run_ranks(dry_runs, 1, list(processes.values()))
    return dict(zip(processes, texts, strict=True))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_plan_of_every_script(script: Path, plans: dict[str, str]) -> None:
    plan = plans[script.name]
    sizes = re.search(r"^processes +(\d+) = TP (\d+) x PP (\d+) x CP (\d+) x DP (\d+)$", plan, re.M)
    assert sizes is not None, plan
    world_size, *axes = map(int, sizes.groups())
    assert world_size == WORLD_SIZES[script.name] == axes[0] * axes[1] * axes[2] * axes[3]
    assert f"{PARAMETERS[script.name]:.2f} billion parameters" in plan
    assert re.search(r"^memory of a GPU +\d+\.\d GiB  weights, gradients, optimizer$", plan, re.M)
    assert "rollouts` does not exist" in plan


@pytest.mark.parametrize("flags", FROM_WEIGHTS)
def test_the_plan_of_a_model_from_weights(flags: str, plans: dict[str, str]) -> None:
    plan = plans[f"smollm2.sh {flags}"]
    assert plan.startswith("processes        1 = TP 1 x PP 1 x CP 1 x DP 1"), plan
    assert "objective        sample_mean" in plan


def test_with_rollout_files_the_plan_counts_the_first_step(plans: dict[str, str]) -> None:
    # 512 rows are 64 groups; each run of 16 rows has 100 + 200 + ... + 1600 = 13600 active tokens.
    plan = plans[FILES]
    assert "N = 512 rollouts, P = 64 prompt groups, T = 435200 active tokens" in plan
    # Over both ranks 435200 + 512 x 50 tokens, which padding to multiples of 4 makes 512 x 2 longer
    # at half of the lengths.
    found = re.search(r" (\d+) micro-batches on each data-parallel rank, (\d+)% full", plan)
    assert found is not None, plan
    assert 15 <= int(found[1]) <= 17
    assert int(found[2]) == pytest.approx(100 * 461824 / (2 * int(found[1]) * 16384), abs=1)


@pytest.mark.parametrize("flags", OF_THE_FIRST_STEP)
def test_a_dry_run_says_what_the_run_would_say_at_its_first_step(flags, plans):
    assert re.search(f"(?m)^{OF_THE_FIRST_STEP[flags]}", plans[flags]), plans[flags]


def test_a_dry_run_refuses_what_a_later_step_would(plans: dict[str, str]) -> None:
    """The first step is whole: the run would stop at its second."""
    assert "--keep-prompt-groups: " in plans[SCATTERED] and "row 1023" in plans[SCATTERED]


@pytest.mark.parametrize("flags", CONTRADICTIONS)
def test_contradictions_are_named(flags: str, plans: dict[str, str]) -> None:
    assert re.search(f"(?ms)^error: .*{CONTRADICTIONS[flags]}", plans[flags]), plans[flags]


@pytest.mark.skipif(not has_megatron_training(), reason="the scripts take Megatron's own flags")
def test_a_contradiction_ends_with_the_reason_and_status_1(tmp_path: Path) -> None:
    """One real process, as a user would start it."""
    done = progress.run(
        ["bash", LAUNCH / "one_node.sh", "--dry-run", "--num-attention-heads", "5"],
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert re.search("^error: Megatron refuses these flags", done.stderr, re.M), done
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir()), "nothing is written"


@pytest.mark.parametrize("script", [LAUNCH / "one_node.sh", LAUNCH / "multi_node.sh"])
def test_without_dry_run_the_launcher_is_started(script: Path, tmp_path: Path) -> None:
    _, *printed = printed_by(script, tmp_path, NODE_RANK="3", MASTER_ADDR="first")
    launcher = printed[: printed.index("examples/train.py")]
    assert launcher[:2] == ["-m", "torch.distributed.run"]
    assert launcher[launcher.index("--nproc-per-node") + 1] == "8"
    if script.name == "multi_node.sh":
        assert launcher[launcher.index("--node-rank") + 1] == "3"
        assert launcher[launcher.index("--master-addr") + 1] == "first"
