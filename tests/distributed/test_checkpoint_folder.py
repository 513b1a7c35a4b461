"""Which folders of a run are its checkpoints, in which order, which of them go, and what two ranks make of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from quickstart import checkpoint_folder
from quickstart.checkpoint_folder import CONTENTS, NAME, CheckpointFolder
from quickstart.errors import RunError

from .launch import run_ranks

OTHERS = (
    "step_best",
    "step_000001",
    "step_000000_000001_keep",
    "step_000000_000001.damaged",
    "step_0000000_000001",
    "step_0_1",
    "old_step_000000_000001",
    "partial_notes",
    "removed_step_000000_000001_keep",
)
"""Names that no run gives."""


def save(folder: CheckpointFolder, *numbers: int) -> str:
    """A checkpoint of two small files, one of them hidden in a folder of its own."""
    name = NAME.format(*numbers)
    partial = folder.begin(name)
    (partial / "run.pt").write_text(f"state {numbers}")
    (partial / "model").mkdir()
    (partial / "model" / ".metadata").write_text(f"metadata {numbers}")
    folder.complete(name)
    return name


def names(folder: CheckpointFolder) -> list[str]:
    return [path.name for path in folder.checkpoints()]


def test_what_the_run_did_not_name_is_no_checkpoint_and_stays(tmp_path: Path) -> None:
    for other in OTHERS:
        (tmp_path / other).mkdir()
    (tmp_path / "step_000009_000009").write_text("a file")
    folder = CheckpointFolder(tmp_path, num_kept=1)
    assert names(folder) == []
    save(folder, 0, 2)
    save(folder, 0, 3)
    assert names(folder) == ["step_000000_000003"]
    expected = {*OTHERS, "step_000009_000009", "step_000000_000003"}
    assert {path.name for path in tmp_path.iterdir()} == expected


def test_the_newest_is_the_one_of_the_highest_numbers(tmp_path: Path) -> None:
    numbers = [(4, 0), (4, 999_999), (4, 1_000_000), (4, 10_000_000), (5, 0), (1_000_000, 7)]
    folder = CheckpointFolder(tmp_path, num_kept=10)
    for each in reversed(numbers):
        save(folder, *each)
    assert names(folder) == [NAME.format(*each) for each in numbers] != sorted(names(folder))
    save(CheckpointFolder(tmp_path, num_kept=2), 1_000_000, 8)
    assert names(folder) == ["step_1000000_000007", "step_1000000_000008"]


def test_what_a_killed_run_has_left_is_removed(tmp_path: Path) -> None:
    for left in ("partial_step_000000_000001", "removed_step_000000_000001", "partial_copy"):
        (tmp_path / left).mkdir()
    name = save(CheckpointFolder(tmp_path, num_kept=2), 0, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"partial_copy", name}


def test_what_cannot_be_removed_is_no_checkpoint_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Removed halfway under its own name it would look whole; and the run goes on."""

    def fail(path: Path) -> None:
        (path / "run.pt").unlink()
        raise OSError("Device or resource busy")

    folder = CheckpointFolder(tmp_path, num_kept=1)
    old = save(folder, 0, 1)
    monkeypatch.setattr(checkpoint_folder.shutil, "rmtree", fail)
    new = save(folder, 0, 2)
    assert names(folder) == [new]
    assert (
        f"warning: the old checkpoint {tmp_path / old} cannot be removed" in capsys.readouterr().out
    )
    monkeypatch.undo()
    newest = save(folder, 0, 3)
    assert {path.name for path in tmp_path.iterdir()} == {newest}


# What ranks agree on.


def truncate(checkpoint: Path) -> None:
    (checkpoint / "run.pt").write_text("sta")


def flip(checkpoint: Path) -> None:
    """One bit of the last byte, which no length shows."""
    path = checkpoint / "model" / ".metadata"
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)


def lose_a_file(checkpoint: Path) -> None:
    (checkpoint / "run.pt").unlink()


def lose_the_list(checkpoint: Path) -> None:
    (checkpoint / CONTENTS).unlink()


def truncate_the_list(checkpoint: Path) -> None:
    (checkpoint / CONTENTS).write_text("{")


Damage = Callable[[Path], None]
DAMAGES: dict[Damage, str] = {
    truncate: "run.pt is not as it was written",
    flip: ".metadata is not as it was written",
    lose_a_file: "run.pt",
    lose_the_list: CONTENTS,
    truncate_the_list: CONTENTS,
}


def latest_of(path: Path) -> str:
    """What a rank is to resume from, or is told."""
    try:
        return str(CheckpointFolder(path, 2).latest())
    except RunError as error:
        return f"error: {error}"


def resume_everywhere(paths: list[Path], stale: Path, unmounted: Path) -> list[str]:
    """The latest of each folder; then of one that rank 1 sees as it was before, and of one that it does not see."""
    found = [latest_of(path) for path in paths]
    if dist.get_rank() == 1:
        checkpoints = CheckpointFolder.checkpoints
        CheckpointFolder.checkpoints = lambda self, *_: checkpoints(self)[:1]  # type: ignore[method-assign]
    found.append(latest_of(stale))
    return [*found, latest_of(unmounted if dist.get_rank() == 0 else unmounted / "elsewhere")]


@pytest.fixture(scope="module")
def agreed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What both ranks are told of every folder, in one launch."""
    root = tmp_path_factory.mktemp("folders")
    paths = {
        name: root / name for name in ("none", "whole", "hopeless", "two", *map(_name, DAMAGES))
    }
    paths["none"].mkdir()
    for name in list(paths)[1:]:
        for step in (1, 2, 3):
            save(CheckpointFolder(paths[name], num_kept=3), 0, step)
    shutil.copytree(paths["whole"] / "step_000000_000003", paths["whole"] / "step_best")
    for damage in DAMAGES:
        damage(paths[_name(damage)] / "step_000000_000003")
    for path in paths["hopeless"].iterdir():
        truncate(path)
    for step in (2, 3):
        truncate(paths["two"] / f"step_000000_00000{step}")
    told = run_ranks(resume_everywhere, 2, list(paths.values()), paths["whole"], paths["whole"])
    return dict(zip([*paths, "stale", "unmounted"], zip(*told, strict=True), strict=True)) | {
        "root": [root]
    }


def _name(damage: Damage) -> str:
    return damage.__name__


def test_the_newest_whole_checkpoint_is_resumed_from(agreed: dict[str, list[Any]]) -> None:
    (root,) = agreed["root"]
    assert agreed["none"] == ("None", "None")
    assert agreed["whole"] == (str(root / "whole/step_000000_000003"),) * 2


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_names_itself_and_the_one_before(
    agreed: dict[str, list[Any]], damage: Damage
) -> None:
    (root,) = agreed["root"]
    newest, before = (root / _name(damage) / f"step_000000_00000{step}" for step in (3, 2))
    for told in agreed[_name(damage)]:
        assert told.startswith(f"error: --resume (rank 0): {newest} is damaged (")
        assert DAMAGES[damage] in told and "\n" not in told
        assert told.endswith(f"{before}: to go on from there, mv {newest} {newest}.damaged")


def test_the_one_before_is_a_whole_one(agreed: dict[str, list[Any]]) -> None:
    (root,) = agreed["root"]
    for told in agreed["two"]:
        assert f"the whole one before it is {root}/two/step_000000_000001:" in told
    for told in agreed["hopeless"]:
        assert "no whole one is before it, so start anew without --resume" in told


def test_a_rank_with_a_stale_view_resumes_from_what_rank_0_sees(
    agreed: dict[str, list[Any]],
) -> None:
    """Each rank by its own view: rank 1 would go on from step 1."""
    assert agreed["stale"] == agreed["whole"]
    for told in agreed["unmounted"]:
        assert "--resume (rank 1)" in told and "is not there, and rank 0 sees it" in told
