"""``megatron-pg check`` of a wrong package: ``torchrun -m tests.distributed.wrong_check MISTAKE [flags]``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_pg.arguments.config import PolicyLossConfig
from megatron_pg.batch import PackedBatch
from megatron_pg.megatron.cpu_runtime import enable_cpu_runtime

WRONG_RANK = "1"


def reducer_that_raises(
    total_lengths: Any,
    response_lengths: Any,
    loss_masks: Any,
    calculate_per_token_loss: bool = False,
) -> Any:
    """A custom reducer that fails when one rank calls it."""

    def reducer(loss: Any) -> Any:
        if os.environ["RANK"] == WRONG_RANK:
            raise ValueError("this reducer does not know the sample")
        return loss.sum()

    return reducer


def rank_raises_in_reducer(run: Any) -> None:
    right = run.config_of

    def config_of(aggregation: str) -> PolicyLossConfig:
        return replace(
            right(aggregation),
            loss_aggregation="sample_mean",
            loss_aggregation_divisor=None,
            custom_pg_loss_reducer_function_path=f"{__name__}:reducer_that_raises",
        )

    run.config_of = config_of


def rank_has_nan(run: Any) -> None:
    right = run.pack

    def pack(*args: Any, **keywords: Any) -> PackedBatch:
        batch: PackedBatch = right(*args, **keywords)
        if os.environ["RANK"] != WRONG_RANK or not batch.loss_mask.any():
            return batch
        values = batch.old_log_probs.clone()
        values[batch.loss_mask.nonzero()[0]] = float("nan")
        return replace(batch, old_log_probs=values)

    run.pack = pack


def rank_raises_while_others_wait(run: Any) -> None:
    right = run.train_step

    def train_step(*args: Any) -> dict[str, float]:
        if os.environ["RANK"] == WRONG_RANK:
            raise ValueError("only here")
        time.sleep(600)
        return right(*args)

    run.train_step = train_step


def replace_loss(run: Any, loss: Any) -> None:
    """Has a check take `loss` for `megatron_loss`."""
    from megatron_pg.megatron.output_head import OutputHead

    run.output_head = lambda *args, **keywords: OutputHead(loss(*args, **keywords))


def extra_context_parallel_factor(run: Any) -> None:
    from .mutants import MUTANTS

    replace_loss(run, MUTANTS["extra context-parallel factor"].loss)


MISTAKES = {
    mistake.__name__: mistake
    for mistake in (
        rank_raises_in_reducer,
        rank_raises_while_others_wait,
        rank_has_nan,
        extra_context_parallel_factor,
    )
}


def check(mistake: str, flags: Sequence[str]) -> int:
    """The exit status of the loss-only rows of a check under one of `MISTAKES`; every rank calls it."""
    enable_cpu_runtime()
    from megatron_pg.check import main, run

    del run.MODELS["end to end"]
    MISTAKES[mistake](run)
    return main(["--device", "cpu", *flags])


if __name__ == "__main__":
    sys.exit(check(sys.argv[1], sys.argv[2:]))
