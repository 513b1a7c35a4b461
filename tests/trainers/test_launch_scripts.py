"""`megatron-pg migrate` on the trainers' own launch scripts and configurations.

They are read from the checkouts in the folder that TRAINERS names, `verl-git` for verl's repository.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_pg.migrate import main
from megatron_pg.migrate.read import read_file
from megatron_pg.migrate.rows import TRAINERS

from .sources import TRAINERS as SOURCES


def scripts(name: str, folders: Sequence[str], suffix: str, words: str) -> list[Path]:
    roots = [SOURCES / name / folder for folder in folders]
    files = [path for root in roots for path in sorted(root.rglob(f"*{suffix}"))]
    return [path for path in files if words in path.read_text()]


CHECKOUTS = {
    "slime": ("slime", ("scripts", "examples"), ".sh", "--advantage-estimator"),
    "miles": ("miles", ("scripts", "examples"), ".sh", "--advantage-estimator"),
    "verl": ("verl-git", ("examples", "recipe"), ".sh", "main_ppo"),
    "nemo-rl": ("NeMo-RL", ("examples/configs",), ".yaml", "grpo:"),
}


@pytest.mark.parametrize("name", CHECKOUTS)
def test_the_trainers_own_scripts(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No key is unknown; a value that is a variable of the caller's shell is asked for."""
    paths = scripts(*CHECKOUTS[name])
    if not paths:
        checkout = CHECKOUTS[name][0]
        pytest.skip(f"needs {name}'s scripts: TRAINERS=<folder with a checkout named {checkout}>")
    understood = 0
    for path in paths:
        understood += main(["--trainer", name, str(path)]) == 0
        error = capsys.readouterr().err
        assert "no key of" not in error, f"{path}: {error}"
        assert not error or "shell variables" in error or "$" in error, f"{path}: {error}"
    assert understood > 0.9 * len(paths)


def test_a_few_of_them_in_particular() -> None:
    def found(name: str, path: str) -> list[tuple[str, float, float | None]]:
        file = SOURCES / path
        if not file.exists():
            pytest.skip(f"needs {path}: TRAINERS=<folder of checkouts>")
        trainer = TRAINERS[name]
        return [
            (t.aggregation, t.coefficient, t.divisor)
            for t in trainer.terms(trainer.read(read_file(file)))
        ]

    assert found("slime", "slime/scripts/run-qwen3-4B.sh")[0] == ("sample_mean", 1.0, None)
    of_verl = found("verl", "verl-git/examples/grpo_trainer/run_qwen3-235b_megatron_96gb.sh")
    assert of_verl[:2] == [("token_mean", 1.0, None), ("token_mean", 0.001, None)]
