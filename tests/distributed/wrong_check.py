"""``megatron-pg check`` of a wrong package: ``torchrun -m tests.distributed.wrong_check MISTAKE
[flags]``.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_pg import PackedBatch, get_pg_loss_reducer
from megatron_pg.megatron import enable_cpu_runtime

WRONG_RANK = "1"

# Custom functions


def reducer_that_raises(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    """Fails when one rank calls it."""

    def reducer(loss: Any) -> Any:
        if os.environ["RANK"] == WRONG_RANK:
            raise ValueError("this reducer does not know the sample")
        return loss.sum()

    return reducer


def right_reducer(
    total_lengths, response_lengths, loss_masks, calculate_per_token_loss, cp_rank=0, cp_size=1
):
    """Whole responses' denominators, the window from the factory: every response divided by at
    most 3.
    """
    lengths = (total_lengths, response_lengths, loss_masks)
    denominators = torch.tensor([float(mask.sum().clamp(1, 3)) for mask in loss_masks])
    place = {"cp_rank": cp_rank, "cp_size": cp_size}
    return get_pg_loss_reducer(*lengths, denominators=denominators, **place)


def local_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    """The usual mistake: the mean of what this rank and micro-batch hold."""
    return lambda losses: losses.sum() / max(losses.numel(), 1)


def squared_log_probs(config: Any, batch: Any, log_probs: Any) -> Any:
    """A per-token loss of one's own."""
    return 0.1 * log_probs.square() - batch.advantages * log_probs


# Mistakes, made in `megatron_pg.check.step`


def rank_raises_in_reducer(run: Any) -> None:
    right = run.config_of
    run.config_of = lambda *args: replace(
        right(*args),
        loss_aggregation="sample_mean",
        loss_aggregation_divisor=None,
        custom_pg_loss_reducer_function_path=f"{__name__}:reducer_that_raises",
    )


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
    def train_step(*args: Any) -> None:
        if os.environ["RANK"] == WRONG_RANK:
            raise ValueError("only here")
        time.sleep(600)

    run.train_step = train_step


def _gradient_is_doubled(run: Any, rank: str) -> None:
    right = run.gradient_parts

    def slices(*args: Any) -> Any:
        factor = 2.0 if os.environ["RANK"] == rank else 1.0
        return [(shard, factor * gradient) for shard, gradient in right(*args)]

    run.gradient_parts = slices


def gradient_of_rank_1_is_doubled(run: Any) -> None:
    _gradient_is_doubled(run, "1")


def gradient_of_rank_2_is_doubled(run: Any) -> None:
    _gradient_is_doubled(run, "2")


def loss_alone(run: Any) -> None:
    """Leaves the loss-only rows."""
    run.MODELS = {"loss only": run.MODELS["loss only"]}


def replace_loss(run: Any, loss: Any) -> None:
    """Has the steps of a check take `loss` for their own."""
    right = run.PolicyStep

    class Wrong(right):
        def head(self, batch: PackedBatch) -> Any:
            count = self.num_microbatches
            wrong = loss(self.config, batch, self.totals, num_microbatches=count, model=self.model)
            # Without the columns that pad the vocabulary.
            columns = self.vocab_size
            return replace(super().head(batch), loss_func=lambda out: wrong(out[..., :columns]))

    run.PolicyStep = Wrong


def extra_context_parallel_factor(run: Any) -> None:
    from .test_mutants import MUTANTS

    replace_loss(run, MUTANTS["extra context-parallel factor"].loss)


def check(mistake: str, flags: Sequence[str]) -> int:
    """The exit status of the loss-only rows of a check under one of the mistakes above; every rank
    calls it.
    """
    enable_cpu_runtime()
    from megatron_pg.check import main
    from megatron_pg.check import step as run

    loss_alone(run)
    globals()[mistake](run)
    return main(["--device", "cpu", *flags])


def main() -> None:
    sys.exit(check(sys.argv[1], sys.argv[2:]))


if __name__ == "__main__":
    main()
