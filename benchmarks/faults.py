"""Faults of one rank among many light processes over gloo: what the others are told, and when all of them know.

    python -m benchmarks.faults [--ranks 64] [--timeout 30] [--only NAME ...]

The job's store lives in the parent, as torchrun's agent holds it. A process that has raised ends, as a trainer does.
"""

import argparse
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_pg import PolicyLossConfig, Sample, StepCollector, pack, plan_step, step_totals
from megatron_pg.loss import metrics
from megatron_pg.loss.from_logits import policy_loss_from_log_probs
from megatron_pg.rollout_files import LiveSource
from megatron_pg.step import absent, agreement

LATENESS = 1.5
"""The delay of a late rank, in units of `Job.wait`."""
SAMPLES_EACH = 4
DOCS_PER_STEP = 193


class Job(NamedTuple):
    """A case on one rank."""

    rank: int
    size: int
    wait: float  # seconds for late samples; `absent.POLL_SECONDS` is a fifth of it
    timeout: float  # seconds of the process group
    folder: str  # of a checkpoint
    note_fault: Callable[[], None]  # called by the faulty rank, at the moment of its fault

    @property
    def is_faulty(self) -> bool:
        return self.rank == self.size - 2


def samples_of(rank: int, count: int = SAMPLES_EACH) -> list[Sample]:
    return [
        Sample([rank, index], 1, [1], 1.0, group_index=rank, name=f"sample {index} of rank {rank}")
        for index in range(count)
    ]


def plan_of(samples: list[Sample]) -> Any:
    return plan_step(samples, max_tokens_per_microbatch=64, data_parallel_group=dist.group.WORLD)


def _end(job: Job) -> None:
    job.note_fault()
    os.kill(os.getpid(), signal.SIGKILL)


def has_no_samples(job: Job) -> str:
    if job.is_faulty:
        job.note_fault()
    totals = plan_of([] if job.is_faulty else samples_of(job.rank)).totals
    return f"N = {totals.num_rollouts}, P = {totals.num_prompt_groups}, T = {totals.num_active_tokens:g}"


def has_a_bad_sample(job: Job) -> str:
    samples = samples_of(job.rank)
    if job.is_faulty:
        samples[1] = Sample([0] * 65, 1, [1], name="the long sample")
        job.note_fault()
    return str(plan_of(samples))


def is_late(job: Job) -> str:
    if job.is_faulty:
        time.sleep(LATENESS * job.wait)
        job.note_fault()
    return f"N = {plan_of(samples_of(job.rank)).totals.num_rollouts}"


def never_comes(job: Job) -> str:
    if job.is_faulty:
        job.note_fault()
        time.sleep(1000 * job.timeout)
    return str(plan_of(samples_of(job.rank)))


def dies_before_the_plan(job: Job) -> str:
    if job.is_faulty:
        _end(job)
    return str(plan_of(samples_of(job.rank)))


def dies_in_the_plan(job: Job) -> str:
    """It is killed while it waits for a late rank, as others do."""
    if job.is_faulty:
        threading.Timer(0.2 * job.wait, _end, (job,)).start()
    if job.rank == 0:
        time.sleep(0.5 * job.wait)
    return str(plan_of(samples_of(job.rank)))


def dies_in_the_reduction(job: Job) -> str:
    samples, config = samples_of(job.rank), PolicyLossConfig(policy_loss="reinforce")
    totals = step_totals(samples, data_parallel_group=dist.group.WORLD)
    _, reported = policy_loss_from_log_probs(
        config, pack(samples), torch.zeros(len(samples)), None, totals=totals
    )
    if job.is_faulty:
        _end(job)
    return str(metrics.reduce_metrics(config, [reported], contributes=True, device="cpu"))


def _collector(
    job: Job, late_samples: Any, docs_per_step: int = SAMPLES_EACH
) -> StepCollector[Any]:
    """A collector of steps of `docs_per_step` samples a rank, from an engine that stops within the second step."""

    def engine() -> Iterator[Sample]:
        yield from samples_of(job.rank, 2 * SAMPLES_EACH - (2 if job.is_faulty else 0))
        if job.is_faulty:
            job.note_fault()
        time.sleep(1000 * job.timeout)

    source = LiveSource(engine(), wait_seconds=job.wait, late_samples=late_samples)
    return StepCollector(
        source, docs_per_step=docs_per_step * job.size, data_parallel_group=dist.group.WORLD
    )


def samples_never_come(job: Job) -> str:
    collector = _collector(job, "error")
    collector.collect()
    return str(collector.collect())


def goes_on_without_samples(job: Job) -> str:
    collector = _collector(job, "next_step")
    collector.collect()
    step = collector.collect()
    totals = plan_of(list(step.samples if step else ())).totals
    counts = f"N = {totals.num_rollouts}, P = {totals.num_prompt_groups}, T = {totals.num_active_tokens:g}"
    return f"{counts}, late: {step.late_ranks if step else None}"


class _Rows:
    """Row i of a file is of rank i % size, from where this run began."""

    can_reshard = True

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size, self.position = rank, size, 0

    def seek(self, position: Any) -> None:
        self.position = position

    def pull(self, count: int) -> list[Sample | None]:
        start = self.position
        self.position += count * self._size
        return [
            Sample([row, 0], 1, [1]) for row in range(start + self._rank, self.position, self._size)
        ]


def _collector_of_rows(job: Job) -> StepCollector[Any]:
    rows: Any = _Rows(job.rank, job.size)
    group = dist.group.WORLD
    return StepCollector(rows, docs_per_step=DOCS_PER_STEP, mode="exact", data_parallel_group=group)


def dies_between_checkpoints(job: Job) -> str:
    """Four steps and a checkpoint, one more step, and a death."""
    collector = _collector_of_rows(job)
    for _ in range(4):
        collector.collect()
    states: list[Any] = [None] * job.size
    dist.all_gather_object(states, collector.state())
    if job.rank == 0:
        torch.save(states, f"{job.folder}/states.pt")
    collector.collect()
    if job.is_faulty:
        _end(job)
    return str(collector.collect())


def goes_on_from_the_checkpoint(job: Job) -> str:
    """A job of another size takes the steps that the first would have taken."""
    collector = _collector_of_rows(job)
    collector.load_states(torch.load(f"{job.folder}/states.pt", weights_only=False))
    if job.is_faulty:
        job.note_fault()
    words = []
    for number in (4, 5):
        step = collector.collect()
        rows = [int(sample.tokens[0]) for sample in (step.samples if step else ())]
        everyone: list[Any] = [None] * job.size
        dist.all_gather_object(everyone, rows)
        expected = list(range(number * DOCS_PER_STEP, (number + 1) * DOCS_PER_STEP))
        is_same = sorted(row for of_rank in everyone for row in of_rank) == expected
        words.append(f"step {number} is {'the same' if is_same else 'ANOTHER'}")
    return ", ".join(words)


CASES: dict[str, Callable[[Job], str]] = {
    "has no samples": has_no_samples,
    "has a sample that is too long": has_a_bad_sample,
    "is late": is_late,
    "never comes": never_comes,
    "dies before the plan": dies_before_the_plan,
    "dies in the plan": dies_in_the_plan,
    "dies in the reduction": dies_in_the_reduction,
    "dies between checkpoints": dies_between_checkpoints,
    "goes on from the checkpoint": goes_on_from_the_checkpoint,
    "samples never come, error": samples_never_come,
    "samples never come, next_step": goes_on_without_samples,
}


class Told(NamedTuple):
    """What a rank was told, and how many seconds after the fault."""

    rank: int
    seconds: float
    words: str


def _process(
    pipe: Any,
    rank: int,
    port: int,
    name: str,
    size: int,
    wait: float,
    timeout: float,
    folder: str,
    plain: bool,
) -> None:
    torch.set_num_threads(1)
    absent.POLL_SECONDS = wait / 5
    if plain:
        agreement.naming_absent_ranks = metrics.naming_absent_ranks = contextlib.nullcontext  # type: ignore[assignment]
    store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, is_master=False))
    times = {"store": store, "rank": rank, "world_size": size}
    dist.init_process_group("gloo", timeout=timedelta(seconds=600), **times)
    dist.barrier()
    distributed_c10d._set_pg_timeout(timedelta(seconds=timeout), dist.group.WORLD)
    note_fault = lambda: pipe.send(("fault", time.monotonic()))  # noqa: E731
    job = Job(rank, size, wait, timeout, folder, note_fault)
    try:
        words = CASES[name](job)
    except (RuntimeError, ValueError) as error:
        words = f"{type(error).__name__}: {error}"
    pipe.send((words, time.monotonic()))
    # The end of a process closes its connections, which its peers see.
    os._exit(0)


def run_case(
    context: Any,
    name: str,
    size: int,
    wait: float,
    timeout: float,
    folder: str = "",
    plain: bool = False,
) -> list[Told]:
    """Run a case and return what every rank but the faulty one was told, `plain` without the names of absent ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = {}, []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (theirs, rank, store.port, name, size, wait, timeout, folder, plain)
        processes.append(context.Process(target=_process, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes[ours] = rank
    fault, told = 0.0, []
    try:
        while len(told) < size - 1 and pipes:
            for pipe in multiprocessing.connection.wait(list(pipes)):
                try:
                    words, when = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    del pipes[pipe]  # type: ignore[arg-type]
                    continue
                if words == "fault":
                    fault = when
                elif pipes[pipe] != size - 2:  # type: ignore[index]
                    told.append(Told(pipes[pipe], when, words))  # type: ignore[index]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
    return [one._replace(seconds=one.seconds - fault) for one in told]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--timeout", type=float, default=30.0, help="of the process group")
    parser.add_argument("--wait", type=float, default=5 * absent.POLL_SECONDS)
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--plain", action="store_true", help="without the names of absent ranks")
    args = parser.parse_args()
    folder = tempfile.TemporaryDirectory()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.faults"])
    print(f"{args.ranks} ranks, rank {args.ranks - 2} faulty; seconds after the fault", flush=True)
    for name in args.only:
        started = time.monotonic()
        size = args.ranks // 2 if name == "goes on from the checkpoint" else args.ranks
        told = run_case(context, name, size, args.wait, args.timeout, folder.name, args.plain)
        seconds = sorted(one.seconds for one in told)
        words = statistics.multimode(one.words for one in told)[0]
        print(
            f"{name}: first {seconds[0]:.2f}, median {statistics.median(seconds):.2f}, last {seconds[-1]:.2f} of "
            f"{len(told)} ranks ({time.monotonic() - started:.0f} s in all)\n    {words}",
            flush=True,
        )


if __name__ == "__main__":
    main()
