"""examples/minimal.py is short and learns, the same at every sharding."""

import re
import runpy
import sys
import textwrap
from pathlib import Path

import pytest

from megatron_pg import PolicyLossConfig
from megatron_pg.config.versions import has_hybrid_model

from .trainer_run import start_script, succeed

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not has_hybrid_model(), reason="HybridModel: megatron-core 0.18"),
]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/minimal.py"
FLAGS = {
    "CP 2": "--context-parallel-size 2",
    "TP 2, token mean": "--tensor-model-parallel-size 2 --loss-aggregation token_mean",
}


def run_instead(rank: int) -> None:
    """The script, and the end of the process: there is no `main` to go on with."""
    runpy.run_path(str(SCRIPT), run_name="__main__")
    sys.exit()


def run(folder: Path, flags: str) -> list[float]:
    ranks = start_script(flags.split(), folder / "run", prepare=run_instead)
    output = succeed(ranks, folder / "run")
    lines = re.findall(r"^reward (\S+), ratio (\S+)$", output, re.MULTILINE)
    assert {ratio for _, ratio in lines} == {"1.0000"}, "scored and trained alike"
    return [float(reward) for reward, _ in lines]


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_it_learns_at_any_sharding(flags: str, tmp_path: Path) -> None:
    rewards = run(tmp_path, flags)
    assert len(rewards) == 30
    assert rewards[0] < 0.4 and sum(rewards[-5:]) / 5 > 0.6, rewards


def test_it_is_a_page_that_the_readme_shows() -> None:
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 111
    readme = (ROOT / "README.md").read_text()
    (shown,) = re.findall(r"^```py\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    names, loop = shown.split("\n\n", 1)
    exec(names, {"PolicyLossConfig": PolicyLossConfig})
    assert textwrap.indent(loop, "    ") in text
