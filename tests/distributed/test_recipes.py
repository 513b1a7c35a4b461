"""The launch lines of docs/recipes.md go through the real parser (Megatron's, where the wheel has it) and every check."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_pg import PolicyLossConfig
from megatron_pg.config.versions import has_megatron_training

if not has_megatron_training():
    pytest.skip(
        "the trainer's parser is megatron.training's: 0.17 and later", allow_module_level=True
    )

from trainer.arguments import parse_arguments  # noqa: E402

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/recipes.md").read_text()
WORLD_SIZE = 8


def command_lines() -> list[list[str]]:
    """The arguments of torchrun of every line, as bash reads them."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    stub = 'torchrun() { printf "%s\\n" "$@" ==; }\n'
    printed = subprocess.run(
        ["bash", "-euc", stub + "".join(blocks)], capture_output=True, text=True, check=True
    ).stdout
    return [line.split("\n") for line in printed.split("\n==\n") if line]


LINES = command_lines()


@pytest.mark.parametrize(
    "line", LINES, ids=lambda line: " ".join(line[line.index("--docs-per-step-mode") + 3 :])
)
def test_the_line_is_accepted(line: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = line.index("examples/trainer")
    assert line[:script] == ["--nproc-per-node", str(WORLD_SIZE)]
    monkeypatch.setenv("WORLD_SIZE", str(WORLD_SIZE))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(sys, "argv", line[script:])
    config = PolicyLossConfig.from_args(parse_arguments())
    given = dict(zip(line, line[1:], strict=False))
    asked = given.get("--loss-aggregation", "sample_mean")
    assert config.loss_aggregation == asked
    assert config.policy_loss == given.get("--policy-loss", "ppo")


def test_every_aggregation_and_clipped_objective_has_a_recipe() -> None:
    text = "".join(" ".join(line) for line in LINES)
    for name in ("sample_mean", "prompt_mean", "token_mean", "constant"):
        assert f"--loss-aggregation {name}" in text
    for name in ("ppo", "gspo", "cispo", "reinforce", "sapo", "gmpo", "dppo_tv", "dppo_kl"):
        assert f"--policy-loss {name}" in text
