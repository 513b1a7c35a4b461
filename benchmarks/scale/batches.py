"""Curves over samples and micro-batches: totals, `pack`, routed experts and sampling sets."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.planning import BUDGET, length_distributions, samples_with
from benchmarks.scale.planning import sample_of
from benchmarks.scale.played import measured, table
from megatron_pg import Ragged, Sample, pack, plan_step, step_totals

Row = Sequence[Any]


def best(make: Any, call: Any, rounds: int = 3) -> float:
    """Return the shortest seconds of a call on new inputs, whose creation is not timed."""
    return min(measured(lambda: call(inputs))[1] for inputs in (make() for _ in range(rounds)))  # noqa: B023


def steps() -> Iterator[Row]:
    """Time new samples of `benchmarks.planning` on one rank: on average 824 tokens, with two kinds
    of log-probs.
    """
    for count in (10**3, 10**4, 10**5):
        lengths = length_distributions(count)["log-normal, median 500"]

        def make() -> list[Sample]:
            return samples_with(lengths)  # noqa: B023

        seconds = [
            best(make, step_totals),
            best(
                make,
                lambda samples: plan_step(samples, max_tokens_per_microbatch=BUDGET, cp_size=2),
            ),
        ]
        yield count, *seconds, 1e6 * seconds[1] / count


def packs() -> Iterator[Row]:
    """Time single samples by length, plain and with the channels that make them larger."""
    for length in (2**10, 2**13, 2**16, 2**19):
        plain = sample_of(length, 0)
        fields = {
            "tokens": plain.tokens,
            "response_length": length - 1,
            "loss_mask": plain.loss_mask,
        }
        sets = Ragged(torch.zeros(length - 1, dtype=torch.int64), torch.arange(length))
        kept = Sample(**fields | {"tokens": torch.zeros(length)[:].long()}, kept_tokens=sets)
        times = [best(lambda s=s: [s], pack) for s in (plain, kept)]
        experts = float("nan")
        if length <= 2**16:
            chosen = torch.zeros(48, length, 8, dtype=torch.uint8)
            chosen += torch.arange(8, dtype=torch.uint8)
            experts = best(lambda: [Sample(**fields, routed_experts=chosen)], pack)  # noqa: B023
        yield length, *(1e3 * seconds for seconds in times), 1e3 * experts, 48 * 8 * length / 2**20


def main() -> None:
    table(
        "Fresh samples on one rank", "samples, step_totals s, plan_step s, us per sample", steps()
    )
    table(
        "A micro-batch of one sample",
        "tokens, pack ms, with kept sets of one id ms, with experts of 48 layers (k = 8) ms, "
        "experts MiB",
        packs(),
    )
