"""The flags, folder, logs, checkpoints and picture of the quickstart: what is refused, damaged or
half written.
"""

import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from live_line import LiveLine, shown_numbers
from report import CURVES, OF_RATIO, Run, names_of, read_run, report
from rich.console import Console
from run_log import Log, checkpoints, claim_folder, read_checkpoint

from tests.distributed.quickstart_run import (
    output_of,
    parse_for_two_ranks,
    start,
    start_script,
    wait,
    wait_until_ended,
)

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
DISTILL = "--policy-loss distill --distill-teacher hidden"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--loss-aggregation constant", "--loss-aggregation-divisor"),
        ("--context-parallel-size 3", "--context-parallel-size"),
        ("--context-parallel-size 2 --qkv-format bshd", "--qkv-format thd"),
        ("--global-batch-size 10", "--global-batch-size 10"),
        ("--global-batch-size 32 --n-samples-per-prompt 64", "--global-batch-size 32"),
        ("--train-iters 3 --global-batch-size 16", "--train-iters 3"),
        ("--save-interval 0", "--save-interval is 0"),
        ("--rollout-batch-size -1", "--rollout-batch-size is -1"),
        ("--context-parallel-size 0", "--context-parallel-size is 0"),
        ("--warm-start-stutter 0.6", "--warm-start-corruption 0.5 and --warm-start-stutter 0.6"),
        ("--lr nan", "--lr is nan"),
        ("--warm-start-lr inf", "--warm-start-lr is inf"),
        ("--eps-clip nan", "--eps-clip"),
        ("--num-training-tasks 4", "--rollout-batch-size 8"),
        ("--advantage gae --value-clip 0 --lam 2", "--value-clip must be a finite number > 0"),
        ("--lam-alpha 0.05 --gamma 0.9", "--gamma and --lam-alpha: about the critic"),
        ("--critic-lr nan", "--critic-lr is nan"),
        ("--critic-lr 1e-4", "--critic-lr: about the critic of --advantage gae"),
        ("--teacher runs", "--teacher runs and --distill-teacher None"),
        (f"--teacher runs {DISTILL}", "--teacher runs is not the folder of a finished run"),
    ],
)
def test_bad_flags_are_refused_by_name(flags: str, message: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=re.escape(message)):
        parse_for_two_ranks(flags)


def test_gpus_that_are_not_there_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    message = "a GPU for each of the 2 processes here and torch sees 1: give --device cpu"
    with pytest.raises(ValueError, match=message):
        parse_for_two_ranks("--device cuda")


def test_a_student_in_its_teachers_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    flags = f"--teacher {tmp_path} --run-dir {tmp_path} {DISTILL}"
    with pytest.raises(ValueError, match="give another --run-dir"):
        parse_for_two_ranks(flags)


def test_a_resumed_run_that_finds_none_says_so(tmp_path, capsys):
    claim(tmp_path / "run", "--resume").release()
    assert "no run in" in capsys.readouterr().out
    claim(tmp_path / "run", "--resume").release()
    assert capsys.readouterr().out == ""


def test_the_script_explains_its_flags(monkeypatch, capsys):
    script = str(ROOT / "examples/train_grpo.py")
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    # torch's @record makes a return of an exit with status 0.
    runpy.run_path(script, run_name="__main__")
    shown = capsys.readouterr().out
    assert "--loss-aggregation" in shown and "--context-parallel-size" in shown


def claim(folder: Path, *flags: str) -> FileLock:
    return claim_folder(parse_for_two_ranks(" ".join((*flags, f"--run-dir {folder}"))), 2)


def test_a_run_is_one_file_of_settings(tmp_path: Path) -> None:
    """Which gives the flags of the run again; a flag beside it wins, and a key that is none is
    refused.
    """
    claim(tmp_path / "run", "--lr 0.25", "--loss-aggregation token_mean").release()
    file = tmp_path / "run/settings.yaml"
    again = parse_for_two_ranks(f"--config {file} --lr 0.125")
    assert (again.lr, again.loss_aggregation) == (0.125, "token_mean")
    file.write_text("learning-rate: 1")
    with pytest.raises(SystemExit):
        parse_for_two_ranks(f"--config {file}")


def test_a_folder_is_claimed_by_one_run_and_never_overwritten(tmp_path, monkeypatch):
    monkeypatch.setattr("run_folder.LOCK_PATIENCE", 0.2)
    (tmp_path / "elsewhere").mkdir()
    folder = tmp_path / "run"
    folder.symlink_to(tmp_path / "elsewhere")
    first = claim(folder)
    with pytest.raises(ValueError, match="another run is writing"):
        claim(folder, "--resume")
    (folder / "metrics.jsonl").write_text("earlier")
    first.release()
    second = claim(folder, "--resume", "--save-interval 7")
    assert (folder / "metrics.jsonl").read_text() == "earlier"
    second.release()
    third = claim(folder)
    names = {child.name for child in folder.iterdir()}
    assert names == {"settings.json", "settings.yaml"} and folder.is_symlink()
    assert (tmp_path / "elsewhere.1" / "metrics.jsonl").read_text() == "earlier"
    third.release()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds no run"):
        claim(tmp_path)
    with pytest.raises(ValueError, match="--run-dir .*run cannot be written: .*notes.txt"):
        claim(tmp_path / "notes.txt" / "run")


def test_a_folder_that_is_refused_ends_both_ranks_without_a_traceback(tmp_path: Path) -> None:
    """Rank 0 alone looks at it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    flags = ["--context-parallel-size", "2", "--run-dir", str(tmp_path / "run")]
    ranks = start_script(flags, tmp_path / "run")
    wait_until_ended(ranks)
    assert [rank.exitcode for rank in ranks] == [1, 1]
    said = output_of(tmp_path / "run").read_text()
    assert said.startswith("error: --run-dir") and "Traceback" not in said


def die_as_it_writes(path: Path, text: str) -> None:
    """In place of `Path.write_text`."""
    with path.open("w") as file:
        file.write(text[:5])
    raise KeyboardInterrupt


def test_a_log_that_is_cut_back_is_never_half_written(tmp_path, monkeypatch):
    """Killed as it writes, a resumed run leaves the steps that were there."""
    steps = "".join(f'{{"step": {number}}}\n' for number in range(1, 4))
    (tmp_path / "metrics.jsonl").write_text(steps)

    monkeypatch.setattr(Path, "write_text", die_as_it_writes)
    with pytest.raises(KeyboardInterrupt):
        Log(parse_for_two_ranks(f"--run-dir {tmp_path}"), {"warm_start": 0, "step": 2})
    assert (tmp_path / "metrics.jsonl").read_text() == steps


def test_only_what_the_run_wrote_is_a_checkpoint(tmp_path: Path) -> None:
    names = ["step_000004_999999", "step_000004_1000000", "step_000004_000008"]
    for name in (*names, "step_000004_1000000_keep", "step_best", "partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_000009_000009").write_text("a plain file")
    found = [path.name for path in checkpoints(tmp_path)]
    assert found == ["step_000004_000008", "step_000004_999999", "step_000004_1000000"]


def checkpoint_of(run_dir: Path, step: int) -> Path:
    folder = run_dir / "checkpoints" / f"step_000004_{step:06d}"
    folder.mkdir(parents=True)
    torch.save({"model": torch.arange(256.0), "progress": {"step": step}}, folder / "rank_0.pt")
    return folder


@pytest.mark.parametrize(
    "contents", [b"", b"no checkpoint", None], ids=["empty", "garbage", "gone"]
)
def test_a_damaged_checkpoint_is_named_and_the_one_before(tmp_path, contents):
    older, newest = checkpoint_of(tmp_path, 4), checkpoint_of(tmp_path, 8)
    path = newest / "rank_0.pt"
    path.unlink() if contents is None else path.write_bytes(contents)
    with pytest.raises(ValueError) as refused:
        read_checkpoint(newest, 0)
    assert f"{path} cannot be read" in str(refused.value)
    assert f"move {newest} elsewhere; the one before is {older}" in str(refused.value)
    assert read_checkpoint(older, 0)["progress"] == {"step": 4}
    (older / "rank_0.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="there is none before it"):
        read_checkpoint(older, 0)


def test_no_flipped_bit_of_a_checkpoint_goes_unseen(tmp_path: Path) -> None:
    """Every seventh byte: the state is as it was, or the file is refused. torch.load alone loads
    other weights.
    """
    folder = checkpoint_of(tmp_path, 4)
    path = folder / "rank_0.pt"
    contents, known = path.read_bytes(), torch.arange(256.0)
    changed_for_torch = 0
    for place in range(0, len(contents), 7):
        flipped = bytearray(contents)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        with contextlib.suppress(Exception):
            changed_for_torch += not torch.equal(torch.load(path)["model"], known)
        try:
            state = read_checkpoint(folder, 0)
        except ValueError as error:
            assert str(path) in str(error)
        else:
            assert torch.equal(state["model"], known) and state["progress"] == {"step": 4}
    assert changed_for_torch > 50, "the file has weights that a bit changes"


def test_damaged_settings_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed run does not damage them."""
    claim(tmp_path / "run").release()
    settings = tmp_path / "run/settings.json"
    whole = settings.read_text()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_text", die_as_it_writes)
        claim(tmp_path / "run", "--resume")
    assert settings.read_text() == whole
    for damaged in (whole[:100], "", "[1, 2]"):
        settings.write_text(damaged)
        with pytest.raises(ValueError, match=f"{re.escape(str(settings))} is damaged"):
            claim(tmp_path / "run", "--resume")
    settings.write_text(whole)
    claim(tmp_path / "run", "--resume").release()


@pytest.mark.parametrize("garbage", [b"\xff\x00garbage", b"3", b"{}", b'{"step": null}'])
def test_garbage_in_the_metrics_is_named(tmp_path: Path, garbage: bytes) -> None:
    """A last line without its end is a killed run's, and is removed."""
    metrics = tmp_path / "metrics.jsonl"
    args, whole = parse_for_two_ranks(f"--run-dir {tmp_path}"), b'{"step": 1}\n'
    metrics.write_bytes(whole + garbage + b"\n" + whole)
    with pytest.raises(ValueError, match=f"{re.escape(str(metrics))} line 2 is no line of a run"):
        Log(args, {"warm_start": 0, "step": 2})
    metrics.write_bytes(whole + garbage)
    Log(args, {"warm_start": 0, "step": 2})
    assert metrics.read_bytes() == whole


def metrics_become_a_folder(rank: int) -> None:
    """What a read-only folder is to anyone but root: nothing can be written there."""
    write = Log.write

    def write_until_step_2(log: Log, phase: str, *rest: Any) -> None:
        if phase == "step" and log._progress["step"] == 2:
            metrics = log._folder / "metrics.jsonl"
            metrics.unlink()
            metrics.mkdir()
        write(log, phase, *rest)

    Log.write = write_until_step_2


def test_a_folder_that_takes_no_more_ends_the_run_in_one_line(tmp_path: Path) -> None:
    flags = "--context-parallel-size 1 --train-iters 4"
    codes = wait(start(tmp_path / "run", flags, 1, metrics_become_a_folder))
    said = output_of(tmp_path / "run").read_text()
    assert codes == [1] and "Traceback" not in said
    assert f"error: {tmp_path / 'run'} cannot be written (rank 0): " in said


def test_a_number_that_is_rounded_to_0_has_no_sign(tmp_path: Path, capsys: Any) -> None:
    args = parse_for_two_ranks(f"--run-dir {tmp_path}")
    Log(args, {"warm_start": 0, "step": 1}).write("step", {"reward": 0.5, "loss": -1e-9})
    assert "step 1/12: reward 0.500 loss 0.000\n" in capsys.readouterr().out


def test_on_a_terminal_one_line_shows_the_run_and_in_a_file_none_does() -> None:
    for is_terminal in (True, False):
        written = io.StringIO()
        console = Console(file=written, force_terminal=is_terminal, width=100, color_system=None)
        line = LiveLine(console)
        line.show("warm start", 1, 4, shown_numbers({"loss": 2.5}, 0.0))
        for step in (7, 8):  # a resumed run
            numbers = {"reward": 0.25, "loss": 9.0, "num_tokens": 500.0}
            line.show("step", step, 12, shown_numbers(numbers, 0.25))
        line.close()
        lines = re.sub(r"\x1b\[[?\d;]*[A-Za-z]|\r", "\n", written.getvalue()).split("\n")
        shown = [text for text in lines if text.strip()]
        assert bool(shown) == is_terminal
        for text in shown[-1:]:
            assert re.search(r"step .*8/12 reward 0.250 · 2,000 tokens/s .*left", text), text


SETTINGS = {
    "policy_loss": "ppo",
    "loss_aggregation": "token_mean",
    "advantage": "grpo",
    "seed": "1",
}
SETTINGS |= {"rollout_batch_size": "4", "n_samples_per_prompt": "4", "global_batch_size": "8"}


def curve_run(length: int, **settings: str) -> Run:
    values = [-20.0 + 40.0 * (step % 7) for step in range(length)]
    curves = [dict.fromkeys(CURVES, value) | {"kl_new_old": None} for value in values]
    steps = [curve | {"step": number} for number, curve in enumerate(curves, 1)]
    return Run("spell", SETTINGS | settings, steps, [(0, 0.25), (length, 0.75)])


@pytest.mark.parametrize("length", [0, 3, 80, 10_000])
def test_the_report_shows_every_curve_whole_and_smoothed(length: int) -> None:
    """Whatever the rewards are; of what the ratio decides there is a curve for each step of a
    round.
    """
    run = curve_run(length)
    figure = report([run])
    assert [text.get_text() for text in figure.texts] == [
        "spell",
        "ppo · token_mean · advantages grpo · seed 1",
    ]
    panels = dict(zip(CURVES, figure.axes, strict=True))
    for name, panel in panels.items():
        assert panel.get_title("left") == CURVES[name]
        drawn = [line for line in panel.get_lines() if line.get_marker() != "o" or length == 3]
        lines = [line for line in drawn if len(line.get_xdata()) and line.get_markersize() != 9]
        assert any(text.get_text() == "not reported" for text in panel.texts) == (not lines)
        if name == "kl_new_old" or not length:
            assert not lines
            continue
        passes = 2 if name in OF_RATIO else 1
        assert len(lines) == 2 * passes
        for number in range(passes):
            faint, smooth = lines[2 * number : 2 * number + 2]
            values = [step[name] for step in run.steps[number::passes]]
            window = max(len(values) // 16, 1)
            assert list(faint.get_xdata()) == [*range(number + 1, length + 1, passes)]
            assert list(faint.get_ydata()) == values
            for end, mean in list(enumerate(smooth.get_ydata(), 1))[:: max(length // 50, 1)]:
                part = values[max(0, end - window) : end]
                assert mean == pytest.approx(sum(part) / len(part))
        assert all(tick == round(tick) for tick in panel.get_xticks())
    points = [line for line in panels["reward"].get_lines() if line.get_markersize() == 9]
    assert [(*p.get_xdata(), *p.get_ydata()) for p in points] == [(0, 0.25), (length, 0.75)]


def test_runs_in_one_picture_are_told_apart_by_their_settings() -> None:
    runs = [curve_run(20), curve_run(24, seed="2", loss_aggregation="constant")]
    title, labels = names_of(runs)
    assert title == "ppo · advantages grpo"
    assert labels == ["loss_aggregation token_mean, seed 1", "loss_aggregation constant, seed 2"]
    reward = report(runs).axes[0]
    assert [text.get_text() for text in reward.get_legend().get_texts()] == labels
    assert {text.get_text() for text in reward.texts} == {"0.25", "0.75"}


def written_run(folder: Path, **settings: str) -> Path:
    """A run's folder as the quickstart leaves it: all flags, and those that were given."""
    folder.mkdir()
    (folder / "settings.json").write_text(json.dumps(SETTINGS | settings))
    (folder / "settings.yaml").write_text("context-parallel-size: 2\nloss-aggregation: x\n")
    lines = [json.dumps({"step": step, "reward": 0.5}) + "\n" for step in range(1, 9)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "summary.json").write_text(
        '{"task": "spell", "held_out_before": 0, "held_out_after": 1}'
    )
    return folder


def test_a_picture_is_titled_by_all_flags_and_not_only_by_those_given(tmp_path: Path) -> None:
    run = read_run(written_run(tmp_path / "run"))
    assert names_of([run]) == ("ppo · token_mean · advantages grpo · seed 1", [""])
    assert run.steps_of_round == 2


def test_runs_of_equal_settings_have_different_labels(tmp_path: Path) -> None:
    folders = [written_run(tmp_path / name) for name in ("one", "two")]
    folders.append(written_run(tmp_path / "three", seed="2"))
    labels = names_of(list(map(read_run, folders)))[1]
    assert labels == [f"seed {1 + (i == 2)}, {folder}" for i, folder in enumerate(folders)]


def test_a_folder_without_a_run_has_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no step in metrics.jsonl"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    (tmp_path / "held_out.jsonl").write_text('{"step": 0, "score": 0.25}\n')
    assert read_run(tmp_path).held_out == [(0, 0.25)]
