"""Run a function in several gloo processes: all results, or the first error, and never a hang.

The processes are forked from a server that has imported torch, Megatron, transformers and the
training script once, so that a launch costs a fraction of a second and not an import for each rank.
"""

import contextlib
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import socket
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.progress import INTERVAL, PATIENCE, Watch

GRACE_SECONDS = 1.0


class Pickler(pickle.Pickler):
    """Plain but for tensors, which are arrays meanwhile: torch takes a millisecond to pickle and to
    load each.

    The pickler of multiprocessing would share their memory.
    """

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.requires_grad or value.dtype == torch.bfloat16:
            return NotImplemented
        return torch.from_numpy, (value.numpy(),)


def dumps(value: Any) -> bytes:
    """`value` as `pickle.loads` reads it."""
    buffer = io.BytesIO()
    Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class RankError(RuntimeError):
    """A rank failed; the message has its traceback, and those that reached us soon after."""


def refusal(kind: Any, function: Callable[..., Any], *args: Any, **keywords: Any) -> str:
    """The words of an error that a call must end with."""
    with pytest.raises(kind) as error:
        function(*args, **keywords)
    return str(error.value)


def fork_server() -> Any:
    """The multiprocessing context whose processes are forked from what `preload` has imported.

    A server is started by the first process that is asked of it and knows what that one preloads:
    one list for all.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preload"])
    return context


def free_port() -> int:
    """Below the ports that the kernel hands out: gloo's listeners, of the other worker too, cannot
    take it meanwhile.
    """
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port between 20000 and 30000 is free")


def run_ranks(
    worker: Callable[..., Any], world_size: int, *args: Any, patience: float = PATIENCE
) -> list[Any]:
    """`worker(*args)` on `world_size` ranks with a gloo default group; results in rank order.

    Args:
        worker: a module-level function; its result is pickled.
        world_size: number of processes.
        args: pickled for every rank.
        patience: seconds without progress after which the ranks are said to hang, and killed
            (`tests.progress`).

    Raises:
        RankError: a rank raised, or died.
        TimeoutError: the ranks hang.
    """
    task = dumps((worker, args))
    try:
        return _run(task, world_size, patience)
    except RankError as error:
        # A port that gloo listens on may be called by a process of another test, which had it
        # before. Only where no rank had come to the worker: its own groups have to be made the
        # first time.
        if "Gloo connectFullMesh failed" not in str(error) or "worker(*args)" in str(error):
            raise
    return _run(task, world_size, patience)


def _run(task: bytes, world_size: int, patience: float) -> list[Any]:
    context = fork_server()
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (theirs, task, rank, world_size, os.path.join(folder, "store"))
            processes.append(context.Process(target=_run_rank, args=arguments))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            return _collect(pipes, [process.pid for process in processes], patience)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _collect(pipes: list[Any], pids: list[int | None], patience: float) -> list[Any]:
    """Every rank's result; an error ends the wait, once the others have been at rest for a
    moment.
    """
    watch = Watch(pids, patience)
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    results: list[Any] = [None] * len(pipes)
    errors: list[str] = []
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), INTERVAL)
        try:
            watch.look()
        except TimeoutError as error:
            if errors:
                break
            raise TimeoutError(f"ranks {sorted(waiting.values())}: {error}") from None
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                succeeded, value = False, "the process died"
            if succeeded:
                results[rank] = value
            else:
                errors.append(f"rank {rank}: {value}")
                watch = Watch(pids, GRACE_SECONDS)
    if errors:
        raise RankError("\n".join(errors))
    return results


def _run_rank(pipe: Any, task: bytes, rank: int, world_size: int, store: str) -> None:
    """The life of one rank; what it raises goes to the parent as text."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    try:
        worker, args = pickle.loads(task)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(days=1),  # the parent sees a hang
        )
        result = worker(*args)
        dist.barrier()
        dist.destroy_process_group()
        pipe.send_bytes(dumps((True, result)))
    except BaseException:  # whatever it was, the parent has to hear of it
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
