"""Joins the job that a launcher has started, and ends all of it when one rank fails."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from megatron_pg.config.versions import require_supported_version
from megatron_pg.megatron.cpu.runtime import enable_cpu_runtime

TIMEOUT_MINUTES = 5
"""Of a collective that some rank never joins: the end of what no watch has seen."""
POLL_SECONDS = 0.2
GRACE_SECONDS = 1.0
"""What the failed rank is given to end first, so that a launcher takes it for the cause."""
FAILURE_KEY = "failure"


@dataclass(frozen=True)
class Launch:
    """This process's place in the job, as torchrun and its like export it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Launch:
        """RANK, WORLD_SIZE and LOCAL_RANK; one process where nothing is set.

        Raises:
            ValueError: only some of the variables are there, or SLURM has started tasks that have none of them.
        """
        if "WORLD_SIZE" not in environment:
            tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
            if tasks > 1:
                raise ValueError(
                    f"srun has started {tasks} tasks, and none of them knows its rank: WORLD_SIZE is not set. Start "
                    "one torchrun a node (srun --ntasks-per-node 1 torchrun ...), or export RANK=$SLURM_PROCID "
                    "LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS MASTER_ADDR MASTER_PORT in every task"
                )
            return cls()
        world_size = int(environment["WORLD_SIZE"])
        needed = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in needed if name not in environment]
        if world_size > 1 and missing:
            raise ValueError(
                f"WORLD_SIZE is {world_size} and {', '.join(missing)} not set: start it with torchrun, or export them "
                "in every process"
            )
        return cls(
            int(environment.get("RANK", "0")), world_size, int(environment.get("LOCAL_RANK", "0"))
        )


def prepare(launch: Launch, device: str) -> None:
    """Chooses this process's device; called before Megatron is imported.

    Args:
        launch: the place of this process.
        device: "cpu" or "cuda".

    Raises:
        ValueError: the process has no GPU of its own.
        UnsupportedMegatronError: Megatron-Core is missing or of an unsupported version.
    """
    # Megatron asks for it under tensor and context parallelism before Blackwell.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if device == "cpu":
        enable_cpu_runtime()
        return
    require_supported_version()
    if launch.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"LOCAL_RANK is {launch.local_rank} and this process sees {torch.cuda.device_count()} GPUs: start one process "
            "a GPU (LOCAL_RANK=0 where each sees its own only), or use --device cpu"
        )
    torch.cuda.set_device(launch.local_rank)
    torch.backends.cuda.matmul.allow_tf32 = False


class Job:
    """The default process group, and a watch over the other ranks: when one fails, all end.

    Used as a context manager by every rank. An exception inside it ends this process with status 1, and within a few
    seconds every other one, each with the message of the rank that failed first; under any launcher, and also where
    the others wait in a collective. `prepare` comes first. In a job of one process the exception is raised as usual.

    Args:
        launch: the place of this process.
        device: "cpu" (gloo) or "cuda" (NCCL).
    """

    def __init__(self, launch: Launch, device: str) -> None:
        self._launch = launch
        self._device = device
        self._finished = threading.Event()
        self._failures: Store | None = None

    def __enter__(self) -> Job:
        backend = "nccl" if self._device == "cuda" else "gloo"
        if self._launch.world_size == 1:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group(backend, timeout=timedelta(minutes=TIMEOUT_MINUTES))
            self._failures = _failure_store()
            threading.Thread(target=self._watch, args=(self._failures,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if error is not None:
            if self._failures is not None:
                self._fail(error, self._failures)
            return
        # No rank's end may cut off another's output.
        if self._device == "cuda":
            dist.barrier(device_ids=[torch.cuda.current_device()])
        else:
            dist.barrier()
        self._finished.set()
        dist.destroy_process_group()

    def _fail(self, error: BaseException, failures: Store) -> None:
        message = f"rank {self._launch.rank} failed: {type(error).__name__}: {error}"
        # Where the store is gone, so are the ranks that a message would be for.
        with contextlib.suppress(RuntimeError):
            if (earlier := _recorded(failures)) is not None:
                self._end(earlier)
        # Before the others hear of it: a launcher ends this process as soon as it misses one of them.
        traceback.print_exception(error, file=sys.stderr)
        sys.stderr.flush()
        with contextlib.suppress(RuntimeError):
            # Unlike set(), it waits for the answer: what fails because this rank ends is later than the message.
            message = failures.compare_set(FAILURE_KEY, "", message).decode()
        self._end(message)

    def _watch(self, failures: Store) -> None:
        while not self._finished.wait(POLL_SECONDS):
            try:
                message = _recorded(failures)
            except RuntimeError:
                message = "the process that holds the job's store has died"
            if message is not None and not self._finished.wait(GRACE_SECONDS):
                self._end(message)

    def _end(self, message: str) -> None:
        print(f"megatron-pg check: rank {self._launch.rank} ends: {message}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # Neither the interpreter's nor NCCL's shutdown, which may wait for peers that never answer.
        os._exit(1)


def _failure_store() -> Store:
    """Where the first rank to fail leaves its message."""
    # A connection of its own: the default group's is locked while a rank waits in it.
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(minutes=TIMEOUT_MINUTES),
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"megatron_pg_check/{attempt}", store)


def _recorded(failures: Store) -> str | None:
    """The message of the rank that failed first, or None. RuntimeError: the store is gone."""
    if not failures.check([FAILURE_KEY]):
        return None
    return str(failures.get(FAILURE_KEY).decode())
