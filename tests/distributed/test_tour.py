"""examples/tour.ipynb: its cells run on a CPU, and print what the notebook shows."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from .launch import run_ranks

NOTEBOOK = Path(__file__).parents[2] / "examples/tour.ipynb"


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
    """Stores what the cells print; `python -m tests.distributed.test_tour`."""
    notebook = json.loads(NOTEBOOK.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, text) in enumerate(zip(cells, printed, strict=True), 1):
        stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell |= {"execution_count": number, "outputs": [stream] if text else []}
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write_outputs(run_ranks(printed_by_cells, 1)[0])
