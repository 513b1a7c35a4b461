"""examples/launch/torchrun.py, on ranks that end in each way: what is said, and with which
status.
"""

import os
import runpy
import signal
from functools import partial
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from tests.progress import wait_until

from .quickstart_run import Ranks, output_of, pids_of, start_script, wait

pytestmark = pytest.mark.full

LAUNCHER = Path(__file__).parents[2] / "examples/launch/torchrun.py"
RANK = """
import os, signal, sys, time
from pathlib import Path

def main():
    how, rank = sys.argv[1], os.environ["RANK"]
    if how == f"refused, rank {rank} late":  # it has not imported all of its packages
        time.sleep(600)
    if how.startswith("refused"):
        from megatron_pg.config.command_line import exit_refused
        exit_refused("error: --flag")
    if how == "fault" and rank == "1":
        raise ValueError("a fault")
    if how == "killed" and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    received = []
    signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    Path(f"started_{rank}").touch()
    while not received:
        time.sleep(0.05)
    time.sleep({"stopped": 1, "stopped for long": 600}.get(how, 0))  # a long round
    Path(f"saved_{rank}").write_text(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])

if (sys.argv[1], os.environ["RANK"]) == ("fault", "1"):  # alone: torch takes seconds to import
    from torch.distributed.elastic.multiprocessing.errors import record
    main = record(main)
main()
"""


def launch(folder: Path, environment: dict[str, str], _: int) -> None:
    """Become the launcher. Once it knows its ranks, and can end them, there is a file `watched`."""
    os.chdir(folder)
    os.environ |= environment
    monitor = LocalElasticAgent._monitor_workers

    def watched(*args):
        Path("watched").touch()
        return monitor(*args)

    LocalElasticAgent._monitor_workers = watched
    runpy.run_path(str(LAUNCHER), run_name="__main__")


def start(folder: Path, how: str, **environment: str) -> Ranks:
    """The launcher, in a process forked from one that has imported torch."""
    (folder / "rank.py").write_text(RANK)
    arguments = ["--standalone", "--nproc-per-node", "2", "rank.py", how]
    return start_script(arguments, folder / "run", 1, partial(launch, folder, environment))


def end(launcher: Ranks, folder: Path) -> tuple[int, str]:
    return wait(launcher)[0], output_of(folder / "run").read_text()


@pytest.mark.parametrize("late", [None, 0, 1])
def test_a_refusal_is_said_whichever_rank_is_late(tmp_path, late) -> None:
    """One line from the rank that is in time; two where ranks come seconds apart and both are in
    time.
    """
    how = "refused" if late is None else f"refused, rank {late} late"
    status, said = end(start(tmp_path, how), tmp_path)
    lines = [line for line in said.splitlines() if "cpp_extension" not in line]
    assert status == 1 and set(lines) == {"error: --flag"}
    assert len(lines) == 1 or (late is None and len(lines) == 2)


def test_a_fault_is_traced_once(tmp_path) -> None:
    status, said = end(start(tmp_path, "fault"), tmp_path)
    assert status == 1 and said.count("Traceback") == 1
    assert said.endswith("ValueError: a fault\nrank 1 failed first\n")


def test_a_rank_that_is_killed_is_named(tmp_path) -> None:
    status, said = end(start(tmp_path, "killed"), tmp_path)
    assert status == 1
    assert said.startswith("rank 1: Signal 9 (SIGKILL) received") and len(said.splitlines()) == 1


@pytest.mark.parametrize("seconds", [None, "1"])
def test_a_round_that_is_longer_than_torchrun_waits(tmp_path, seconds) -> None:
    """SIGTERM to the launcher: a round that is longer than the time that ranks have is lost; they
    have ten minutes.

    torch forgets ranks of which it is told before it has noted them: a signal at once would leave
    them behind.
    """
    environment = {} if seconds is None else {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": seconds}
    launcher = start(tmp_path, "stopped for long" if seconds else "stopped", **environment)
    awaited = {"started_0", "started_1", "watched"}
    wait_until(lambda: awaited <= set(os.listdir(tmp_path)), pids_of(launcher))
    launcher[0].terminate()
    status, said = end(launcher, tmp_path)
    assert status == 128 + signal.SIGTERM and "Traceback" not in said
    saved = [path.read_text() for path in tmp_path.glob("saved_*")]
    assert saved == (["600", "600"] if seconds is None else [])
    assert ("forcefully" in said) == (seconds is not None)
