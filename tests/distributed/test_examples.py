"""examples/minimal.py is short and learns, the same at every sharding; the cells of
examples/tour.ipynb print what it shows.
"""

import contextlib
import io
import json
import re
import runpy
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from .launch import run_ranks
from .quickstart_run import start_script, succeed

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
SCRIPT, NOTEBOOK = ROOT / "examples/minimal.py", ROOT / "examples/tour.ipynb"
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
    assert len(text.splitlines()) <= 110
    readme = (ROOT / "README.md").read_text()
    (shown,) = re.findall(r"^```py\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert textwrap.indent(shown, "    ") in text


def code_cells() -> list[dict[str, Any]]:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def printed_by_cells() -> list[str]:
    """Without the start of a kernel, in a process that has imported Megatron."""
    import torch.distributed as dist

    dist.destroy_process_group()  # the notebook makes its own
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for number, cell in enumerate(code_cells()):
        code = compile("".join(cell["source"]), f"{NOTEBOOK.name} cell {number}", "exec")
        with contextlib.redirect_stdout(io.StringIO()) as text:
            exec(code, namespace)
        printed.append(text.getvalue())
    return printed


def test_the_notebook_prints_what_it_shows() -> None:
    (printed,) = run_ranks(printed_by_cells, 1)
    outputs = [cell["outputs"] for cell in code_cells()]
    assert printed == ["".join(sum((part["text"] for part in parts), [])) for parts in outputs]
    assert "prompt_mean  7.6250" in printed[0]
    assert printed[-1].splitlines()[0].split()[-1] == "1.000"


def write_outputs(printed: list[str]) -> None:
    """Stores what the cells print; `python -m tests.distributed.test_examples`."""
    notebook = json.loads(NOTEBOOK.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, text) in enumerate(zip(cells, printed, strict=True), 1):
        stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell |= {"execution_count": number, "outputs": [stream] if text else []}
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write_outputs(run_ranks(printed_by_cells, 1)[0])
