"""The next step, planned and packed in a thread while this one runs."""

import dataclasses
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg.head.ragged import Ragged
from megatron_pg.step.agreement import is_on_host
from megatron_pg.step.batch import PackedBatch, pack
from megatron_pg.step.plan import StepPlan, plan_step
from megatron_pg.step.sample import Sample


class PackedStep(NamedTuple):
    """A planned step and its micro-batches on this rank."""

    plan: StepPlan
    batches: tuple[PackedBatch, ...]
    """The micro-batches of the plan, in its order, on the device."""


class UpcomingStep:
    """A step that a thread plans and packs. Made by `plan_ahead`."""

    def __init__(self, packed: Future[PackedStep], stream: torch.cuda.Stream | None) -> None:
        self._packed, self._stream = packed, stream

    def wait(self) -> PackedStep:
        """Return the step, when the thread is done; no device is waited for.

        Raises:
            Exception: the error of `plan_step` or `pack`, as it was raised in the thread.
        """
        packed = self._packed.result()
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_stream(self._stream)
            for tensor in _tensors_of(packed.batches):
                if tensor.is_cuda:
                    # Its memory belongs to the other stream, which may give it away while this one still reads.
                    tensor.record_stream(current)
        return packed


def plan_ahead(
    samples: Sequence[Sample],
    *,
    device: torch.device | str = "cpu",
    cp_rank: int = 0,
    cp_size: int = 1,
    pad_to_multiple: int = 1,
    data_parallel_group: dist.ProcessGroup | None = None,
    **planning: Any,
) -> UpcomingStep:
    """Begin to plan and pack a step, and return at once: the caller runs another step meanwhile.

    Plan, totals and micro-batches are those of `plan_step`, `pack` and `PackedBatch.to`, bit for bit. Every rank that would
    call `plan_step` calls it, and `wait` on the result before the next call. The samples must not change before that.

    Args:
        samples: see `plan_step`, for all that is not listed here too.
        device: where the micro-batches go; to a GPU on a stream of their own.
        cp_rank: see `pack`.
        data_parallel_group: the ranks of the data-parallel group without context parallelism, in a group of gloo that nothing
            else uses (`dist.new_group(ranks, backend="gloo")`): two threads in one group would take each other's messages.

    Raises:
        ValueError: a group of NCCL, whose exchange would wait for the step that runs.
    """
    if data_parallel_group is not None and not is_on_host(data_parallel_group):
        raise ValueError(
            f"plan_ahead: the data_parallel_group exchanges by {dist.get_backend(data_parallel_group)}, in turn with the step "
            'that runs: give it a group of its own, dist.new_group(ranks, backend="gloo")'
        )
    layout: dict[str, Any] = {"cp_size": cp_size, "pad_to_multiple": pad_to_multiple}
    target = torch.device(device)
    stream = torch.cuda.Stream(target) if target.type == "cuda" else None  # type: ignore[no-untyped-call]
    packed: Future[PackedStep] = Future()

    def run() -> None:
        try:
            plan = plan_step(samples, data_parallel_group=data_parallel_group, **layout, **planning)
            parts = ([samples[index] for index in indices] for indices in plan.microbatches)
            with torch.cuda.stream(stream):
                batches = [pack(part, cp_rank=cp_rank, **layout).to(target) for part in parts]
            packed.set_result(PackedStep(plan, tuple(batches)))
        except BaseException as error:
            packed.set_exception(error)

    # A daemon: where another rank has died in the exchange, this process can still end.
    threading.Thread(target=run, name="plan_ahead", daemon=True).start()
    return UpcomingStep(packed, stream)


def _tensors_of(batches: Sequence[PackedBatch]) -> list[Tensor]:
    """List the tensors of micro-batches."""
    tensors: list[Tensor] = []
    for batch in batches:
        channels = list(batch.side_channels.values())
        fields = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
        for value in (batch.window.cu_seqlens, *fields, *channels):
            if isinstance(value, Ragged):
                tensors += [value.values, value.offsets]
            elif isinstance(value, Tensor):
                tensors.append(value)
    return tensors
