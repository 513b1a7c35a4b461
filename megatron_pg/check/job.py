"""The job that a launcher started, and how a process joins and leaves it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from megatron_pg.check.places import job_rank
from megatron_pg.config.versions import require_supported_version
from megatron_pg.megatron.cpu.runtime import enable_cpu_runtime

TIMEOUT_MINUTES = 5
"""The time that a collective waits for a rank that neither joins nor fails."""
POLL_SECONDS, GRACE_SECONDS = 0.2, 1.0
"""How often a rank looks for a failure of another rank, and how long it then lets that rank end
first. A launcher blames the first rank that ends."""
FAILURE = "megatron_pg_check/" + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
"""The key in the job's store for the message of the first rank that fails."""


class CannotCheckError(ValueError):
    """A model that cannot be checked. The message names the reason and a fix."""


class Launch(NamedTuple):
    """This process's place in the job, as torchrun exports it."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Launch:
        """Read RANK, WORLD_SIZE and LOCAL_RANK, or return a job of one process. Raise ValueError if
        some are missing.
        """
        tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
        world_size = int(environment.get("WORLD_SIZE", "0"))
        if not world_size and tasks > 1:
            raise ValueError(
                f"srun has started {tasks} tasks without WORLD_SIZE. Start one torchrun per node "
                "(srun --ntasks-per-node 1 torchrun ...), or export RANK=$SLURM_PROCID "
                "LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS MASTER_ADDR MASTER_PORT in "
                "every task"
            )
        if not world_size:
            return cls(0, 1, 0)
        needed = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in needed if name not in environment]
        if world_size > 1 and missing:
            raise ValueError(
                f"WORLD_SIZE is {world_size} and {', '.join(missing)} not set: use torchrun, or "
                "export the missing names in every process"
            )
        rank, local_rank = (int(environment.get(name, "0")) for name in needed[:2])
        return cls(rank, world_size, local_rank)

    def in_sample(self, ranks: Sequence[int]) -> Launch | None:
        """Return this process's place among some ranks of the job, or None if it is not one."""
        if self.rank not in ranks:
            return None
        return self._replace(rank=ranks.index(self.rank), world_size=len(ranks))


def prepare(launch: Launch, device: str) -> None:
    """Choose this process's device, "cpu" or "cuda", before any import of Megatron."""
    # A custom function's module may have set defaults under which the reference would round.
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    # Before Blackwell, Megatron requires 1 under tensor and context parallelism.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Standard output is for the report.
    os.environ.setdefault("NCCL_DEBUG_FILE", "/dev/stderr")
    if device == "cpu":
        enable_cpu_runtime()
        return
    require_supported_version()
    if launch.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"LOCAL_RANK is {launch.local_rank} and this process sees {torch.cuda.device_count()} "
            "GPUs: start one process per GPU (LOCAL_RANK=0 if each process sees only its own GPU), "
            "or use --device cpu"
        )
    torch.cuda.set_device(launch.local_rank)
    torch.backends.cuda.matmul.allow_tf32 = False


@contextlib.contextmanager
def joined(launch: Launch, device: str) -> Iterator[None]:
    """Open the default process group: gloo on "cpu", NCCL on "cuda". Every rank enters it after
    `prepare`.

    The ranks leave together, because the end of one would truncate the output of the rest. An
    exception ends this process with status 1 at once. torchrun's agent then ends the other
    processes. Without an agent they end by themselves.
    """
    backend = "nccl" if device == "cuda" else "gloo"
    finished = threading.Event()
    failures: Store = HashStore()
    if launch.world_size == 1:
        dist.init_process_group(backend, store=failures, rank=0, world_size=1)
    else:
        patience = timedelta(minutes=TIMEOUT_MINUTES)
        rank, world_size = launch.rank, launch.world_size
        dist.init_process_group(backend, timeout=patience, rank=rank, world_size=world_size)
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # The process group locks its own connection while a rank waits in it.
        failures = TCPStore(*address, wait_for_workers=False)
        if not dist.is_torchelastic_launched():
            watch = threading.Thread(target=_watch, args=(launch, failures, finished), daemon=True)
            watch.start()
    try:
        yield
    except Exception as error:
        finished.set()
        is_refused = isinstance(error, CannotCheckError)
        kind = "" if is_refused else f" failed: {type(error).__name__}"
        own = first = f"rank {job_rank()}{kind}: {error}"
        # The store is lost with the process that holds it.
        with contextlib.suppress(RuntimeError):
            first = failures.compare_set(FAILURE, "", own).decode()
        if is_refused and first == own:  # every rank finds the same error
            print(f"megatron-pg check: {first}", file=sys.stderr, flush=True)
        elif not is_refused and first == own:
            traceback.print_exception(error)
        if not is_refused and (first == own or job_rank() == 0):
            _say(first)
        # The store may end with this process.
        time.sleep(2 * POLL_SECONDS)
        raise SystemExit(2 if is_refused else 1) from None
    finished.set()
    dist.barrier(device_ids=[torch.cuda.current_device()] if device == "cuda" else None)
    dist.destroy_process_group()


def _watch(launch: Launch, failures: Store, finished: threading.Event) -> None:
    """End this process with the message of a failed rank. It runs in a thread, because NCCL waits
    forever for a peer that never joined.
    """
    # Of thousands of ranks, only rank 0 and the failed one print the reason.
    first, heard = None, job_rank()
    while first is None and not finished.wait(POLL_SECONDS):
        try:
            first = failures.get(FAILURE).decode() if failures.check([FAILURE]) else None
        except RuntimeError:
            first = "the process that holds the job's store has died"
            heard = launch.local_rank  # rank 0 may be that process
    if not finished.wait(GRACE_SECONDS):
        if heard == 0:
            _say(first)
        # The shutdowns of the interpreter and of NCCL may wait forever for peers.
        os._exit(1)


def _say(first: str | None) -> None:
    print(f"megatron-pg check: rank {job_rank()} ends: {first}", file=sys.stderr, flush=True)
