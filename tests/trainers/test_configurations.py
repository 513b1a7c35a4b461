"""`megatron-pg migrate` on the trainers' own configurations, by reference: configurations.tsv.

They are read from the checkouts in the folder that TRAINERS names, if a checkout is at the commit
of the table. The settings are OmegaConf's, merged along `defaults`. A row without settings is of a
trainer that is answered by name.
"""

import subprocess
from pathlib import Path

import pytest

from megatron_pg.migrate import main
from megatron_pg.migrate.line import read

from .sources import TRAINERS

TABLE = Path(__file__).with_name("configurations.tsv").read_text().splitlines()
COMMITS = {line.split()[1]: line.split()[3] for line in TABLE if line.startswith("#")}
ROWS = [line.split("\t") for line in TABLE if not line.startswith("#")]


def checkout(name: str) -> Path:
    command = ["git", "-C", str(TRAINERS / name), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if head != COMMITS[name]:
        pytest.skip(f"needs TRAINERS/{name} at {COMMITS[name][:7]}, found {head[:7] or 'none'}")
    return TRAINERS / name


def is_same(ours: object, theirs: str) -> bool:
    if isinstance(ours, bool):
        return ours == (theirs.lower() in ("true", "1"))
    if isinstance(ours, float):
        return ours == float(theirs)
    return ours == theirs or (ours is None and theirs in ("null", "None", ""))


def test_the_table_has_at_least_80_lines() -> None:
    assert sum(bool(row[2:]) for row in ROWS) >= 80 and {row[0] for row in ROWS} == set(COMMITS)


@pytest.mark.parametrize("name", COMMITS)
def test_the_trainers_own_configurations(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder, wrong = checkout(name), []
    for _, path, *expected in (row for row in ROWS if row[0] == name):
        if not expected:
            assert main([str(folder / path)]) == 2
            assert f"migrate does not read {name}" in capsys.readouterr().err, path
            continue
        line = read(folder / path, [])
        given = dict(word.split("=", 1) for word in expected[1].split()) if expected[1:] else {}
        differ = [key for key, value in given.items() if not is_same(line.settings[key], value)]
        if line.trainer.name != expected[0] or differ:
            wrong.append((path, line.trainer.name, differ))
    assert not wrong
