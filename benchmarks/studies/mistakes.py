"""Mistakes that trainers have shipped, put back from outside into a process that then trains: no option of the package has them.

A mistake of the normaliser is a factor of the weights that the right loss gives to a sample, so that the checksum meets it
where it would meet it in a trainer; a mistake of the scale is a factor of the loss that the schedule is given.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_pg.loss import aggregation, micro_batch
from megatron_pg.megatron import policy_step
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.totals import StepTotals


class Mistake(NamedTuple):
    """A mistake, its source, and the patch that makes it."""

    about: str
    source: str
    apply: Callable[[], None]


SampleFactors = Callable[[PackedBatch, StepTotals, float], Tensor | float]
"""A function (micro-batch, totals, parts of the step: micro-batches x ranks) -> wrong weight / right weight, by sample."""


def of_weights(
    factors: SampleFactors, rows: Sequence[str] = ("loss", "identified")
) -> Callable[[], None]:
    def apply() -> None:
        right = micro_batch.host_weights

        def wrong(
            config: Any, batch: PackedBatch, totals: StepTotals, share: float
        ) -> tuple[Tensor, Tensor]:
            counts, weights = right(config, batch, totals, share)
            factor = torch.as_tensor(factors(batch, totals, 1.0 / share), dtype=torch.float64)
            weights = weights.clone()
            for name in rows:
                row = weights[aggregation.SAMPLE_WEIGHTS.index(name)]
                row[: len(batch.samples)] *= factor
            return counts, weights

        micro_batch.host_weights = wrong

    return apply


def of_scale(factor: Callable[[dict[str, Any]], float]) -> Callable[[], None]:
    def apply() -> None:
        right = policy_step.scale_contract

        def wrong(*args: Any, **sizes: Any) -> Any:
            contract = right(*args, **sizes)
            return dataclasses.replace(contract, factor=contract.factor * factor(sizes))

        policy_step.scale_contract = wrong

    return apply


def _active(samples: Sequence[Any]) -> float:
    return float(sum(sample.num_active_tokens for sample in samples))


def _mean_of_micro_batch(batch: PackedBatch, totals: StepTotals, parts: float) -> float:
    ranks_of_context = batch.window.cp_size
    own = max(_active(batch.samples), 1.0)
    return totals.num_active_tokens / (own * parts / ranks_of_context)


def _mean_of_rank(batch: PackedBatch, totals: StepTotals, parts: float) -> float:
    own = max(_active(totals.counts.here[totals.data_parallel_rank]), 1.0)
    return totals.num_active_tokens / (own * len(totals.counts.sizes))


def _mean_of_sequence(batch: PackedBatch, totals: StepTotals, parts: float) -> Tensor:
    own = torch.tensor([max(_active([sample]), 1.0) for sample in batch.samples])
    return totals.num_active_tokens / (own * len(totals.counts))


def _route_padding() -> None:
    policy_step.take_padding_mask = lambda model, groups: False


MISTAKES = {
    "micro_batch_mean": Mistake(
        "a mean over each micro-batch's tokens, averaged over micro-batches and ranks",
        "huggingface/trl#7206; agentscope-ai/Trinity-RFT#336",
        of_weights(_mean_of_micro_batch),
    ),
    "sequence_mean": Mistake(
        "micro-batches of one sequence, each its own mean, averaged: 2.0 for 1.2 where one token has 3 and nine have 1",
        "allenai/open-instruct#1137, #1161",
        of_weights(_mean_of_sequence),
    ),
    "local_denominator": Mistake(
        "each data-parallel rank divides by its own tokens, then ranks are averaged",
        "PrimeIntellect-ai/prime-rl#2358, #2562",
        of_weights(_mean_of_rank),
    ),
    "times_cp": Mistake(
        "the loss times the context-parallel size, which the schedule multiplies by already",
        "NVIDIA/Megatron-LM#906; NovaSky-AI/SkyRL#1751",
        of_scale(lambda sizes: sizes["context_parallel_size"]),
    ),
    "forgotten_micro_batches": Mistake(
        "the number of micro-batches, by which the schedule divides, is not multiplied back",
        "areal-project/AReaL#1273",
        of_scale(lambda sizes: 1.0 / sizes["num_microbatches"]),
    ),
    "divisor_1000": Mistake(
        "a constant divisor of 1000 whatever the length of a response may be",
        "THUDM/slime#1235, #2060; radixark/miles#1328",
        lambda: None,
    ),
    "kl_other_mean": Mistake(
        "the policy loss over tokens of the step, KL over samples",
        "huggingface/trl#2995",
        lambda: None,
    ),
    "kl_beside_1000": Mistake(
        "a policy loss divided by 1000 through a reducer's hook, KL by the sample mean as before",
        "THUDM/slime#1235 (its reducer is of the policy loss alone)",
        lambda: None,
    ),
    "padding_routed": Mistake(
        "tokens that only align a pack are routed and counted by the auxiliary loss",
        "this package itself, before its padding mask (CHANGELOG.md); no trainer read for it passes the mask",
        _route_padding,
    ),
}
"""Those without a patch are settings of the arm."""
