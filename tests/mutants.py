"""Wrong implementations that the tests must reject. Each names a mistake made in the field."""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import oracle
from .cut_steps import Package
from .oracle import PlainSample


class ExtraContextParallelFactor(Package):
    """Multiplies by the context-parallel size, to undo a division that nobody makes."""

    def rank_sum(self, step, micro_batch, flat_losses, aggregation, cp_rank, cp_size):
        inner = super().rank_sum(step, micro_batch, flat_losses, aggregation, cp_rank, cp_size)
        return inner * cp_size


class MeanOverContextParallel(Package):
    """Averages the ranks' sums, as an all-gather followed by a mean does."""

    def over_context_parallel(self, parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).mean()


class MeanOverMicroBatches(Package):
    """The mean of micro-batch means, as gradient accumulation without totals does."""

    def outer_count(self, step, aggregation):
        return 1.0

    def rank_sum(self, step, micro_batch, flat_losses, aggregation, cp_rank, cp_size):
        inner = super().rank_sum(step, micro_batch, flat_losses, aggregation, cp_rank, cp_size)
        return inner / oracle.outer_count(micro_batch, aggregation) if micro_batch else inner

    def over_micro_batches(self, parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).mean()


class MicroBatchDenominator(Package):
    """Divides by the rollout's or group's active tokens in the micro-batch, not in the step."""

    def denominators(self, step, micro_batch, aggregation, cp_rank, cp_size):
        return super().denominators(micro_batch, micro_batch, aggregation, cp_rank, cp_size)


class WindowDenominator(Package):
    """Divides by the active tokens that this context-parallel rank holds of each sample."""

    def denominators(self, step, micro_batch, aggregation, cp_rank, cp_size):
        step_denominators = super().denominators(step, micro_batch, aggregation, cp_rank, cp_size)
        if step_denominators is None:
            return None
        flat_mask = [keep for sample in micro_batch for keep in sample.loss_mask]
        counts = torch.zeros(len(micro_batch), dtype=torch.float64)
        for row in self.layout(micro_batch, cp_size)[cp_rank]:
            if row.response is not None:
                counts[row.segment] += flat_mask[row.response]
        return counts


class PhantomToken(Package):
    """Counts one token for a sample that has none: T = sum of max(active tokens, 1)."""

    def outer_count(self, step, aggregation):
        if aggregation != "token_mean":
            return super().outer_count(step, aggregation)
        return float(sum(max(sum(sample.loss_mask), 1) for sample in step))


class DropsMaskedRollouts(Package):
    """Leaves fully masked rollouts and groups out of N and P: filtering changes the scale."""

    def outer_count(self, step: Sequence[PlainSample], aggregation: str) -> float:
        if aggregation == "token_mean":
            return super().outer_count(step, aggregation)
        kept = [sample for sample in step if any(sample.loss_mask)]
        return super().outer_count(kept, aggregation)


class SamplesForRollouts(Package):
    """Counts samples where rollouts are meant, so that a rollout of two turns counts twice."""

    def outer_count(self, step, aggregation):
        if aggregation in ("sample_mean", "constant"):
            return float(len(step))
        return super().outer_count(step, aggregation)


class WindowByOwner(Package):
    """Takes a response token from the rank that owns it, not from the one that predicts it."""

    def scored_tokens(self, micro_batch, cp_rank, cp_size):
        prompts = [sample.prompt_length for sample in micro_batch]
        firsts = [0]
        for sample in micro_batch:
            firsts.append(firsts[-1] + sample.response_length)
        found = [
            firsts[row.segment] + row.position - prompts[row.segment]
            for row in self.layout(micro_batch, cp_size)[cp_rank]
            if row.token is not None and row.position >= prompts[row.segment]
        ]
        # As many as the reducer takes: a mutant that only raises would prove nothing.
        wanted = len(super().scored_tokens(micro_batch, cp_rank, cp_size))
        return (found + list(range(firsts[-1])))[:wanted]


class OneTokenLate(Package):
    """The right number of losses on every rank, each one token too late."""

    def scored_tokens(self, micro_batch, cp_rank, cp_size):
        last = sum(sample.response_length for sample in micro_batch) - 1
        right = super().scored_tokens(micro_batch, cp_rank, cp_size)
        return [min(index + 1, last) for index in right]


MUTANTS = {mutant.__name__: mutant for mutant in Package.__subclasses__()}
