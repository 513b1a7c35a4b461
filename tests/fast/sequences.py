"""Random responses, as the objectives' oracle and as the package hold them."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pg import PackedBatch, PolicyLossConfig, Sample, pack
from megatron_pg.loss import OBJECTIVES
from megatron_pg.loss.micro_batch import MicroBatchLoss
from megatron_pg.loss.resolved import resolve
from megatron_pg.loss.sequence import SequenceSums
from megatron_pg.loss.tokens import Tokens
from tests.fast.objectives_oracle import Sequence1
from tests.random_steps import uneven_totals

CORRECTIONS: dict[str, Any] = {
    "use_tis": True,
    "tis_mode": "mask",
    "tis_clip_low": 0.8,
    "use_geometric_rejection": True,
    "geometric_rejection_low": 0.9,
    "geometric_rejection_high": 1.1,
    "use_opsm": True,
    "kl_loss_coef": 0.1,
    "entropy_coef": 0.05,
    "pg_metrics": "with_entropy",
}
"""Settings that ask for everything that the loss does beside the objective."""
GIVEN = ("old_log_probs", "ref_log_probs", "rollout_log_probs")
"""The log-probs that a sample brings."""
OF_LOG_PROBS = [name for name in OBJECTIVES if name != "distill"]
"""The objectives that are made of log-probs; the other's teacher is in `test_distillation_head`."""


def random_sequence(
    seed: int, length: int, *, active_rate: float = 0.75, spread: float = 0.3
) -> Sequence1:
    """Log-probs that differ from each other by about `spread`; every number fits into bfloat16."""
    rng = random.Random(seed)

    def numbers(lowest: float, highest: float) -> list[float]:
        values = torch.tensor([rng.uniform(lowest, highest) for _ in range(length)])
        return values.bfloat16().tolist()

    base = numbers(-3.0, -0.5)

    def near() -> list[float]:
        noise = numbers(-spread, spread)
        moved = [value + shift for value, shift in zip(base, noise, strict=True)]
        return torch.tensor(moved).bfloat16().tolist()

    return Sequence1(
        log_probs=torch.tensor(near(), dtype=torch.float64, requires_grad=True),
        loss_mask=[int(rng.random() < active_rate) for _ in range(length)],
        advantages=numbers(-2.0, 2.0),
        old_log_probs=near(),
        ref_log_probs=near(),
        rollout_log_probs=near(),
        turn_ids=sorted(rng.randrange(3) for _ in range(length)),
    )


def random_sequences(seed: int = 0, **settings: float) -> list[Sequence1]:
    """Ragged; one is fully masked, one has a single token, one has none."""
    sequences = [random_sequence(seed * 100 + n, n, **settings) for n in (7, 1, 12, 0, 5, 9)]
    return [*sequences, random_sequence(seed, 3, active_rate=0.0)]


def grid_sequence(log_ratios: Sequence[float], advantages: Sequence[float]) -> Sequence1:
    """One token for every pair; all the differences of log-probs are the same log-ratio."""
    pairs = [(log_ratio, advantage) for log_ratio in log_ratios for advantage in advantages]
    values = [log_ratio for log_ratio, _ in pairs]
    zeros = [0.0] * len(pairs)
    return Sequence1(
        log_probs=torch.tensor(values, dtype=torch.float64, requires_grad=True),
        loss_mask=[1] * len(pairs),
        turn_ids=[0] * len(pairs),
        advantages=[advantage for _, advantage in pairs],
        old_log_probs=zeros,
        ref_log_probs=zeros,
        rollout_log_probs=torch.tensor(
            [-value for value in values]
        ).tolist(),  # as float32 holds them
    )


def package_sample(sequence: Sequence1, **fields: object) -> Sample:
    """The same response after a prompt of two tokens. A sample refuses log-probs above 0: those of
    a grid's token are shifted together, which leaves their differences.
    """
    length = len(sequence.loss_mask)
    log_probs = torch.tensor([getattr(sequence, name) for name in GIVEN])
    log_probs = log_probs - log_probs.amax(0).clamp(min=0.0)
    return Sample(
        tokens=torch.zeros(length + 2, dtype=torch.int64),
        response_length=length,
        loss_mask=torch.tensor(sequence.loss_mask, dtype=torch.int64),
        advantages=torch.tensor(sequence.advantages),
        **({**dict(zip(GIVEN, log_probs, strict=True)), "turn_ids": sequence.turn_ids} | fields),  # type: ignore[arg-type]
    )


def package_batch(
    sequences: Sequence[Sequence1], cp_rank: int = 0, cp_size: int = 1
) -> PackedBatch:
    """The micro-batch with the log-probs that the sequences have, whatever a sample would say of
    them.
    """
    batch = pack([package_sample(s) for s in sequences], cp_rank=cp_rank, cp_size=cp_size)
    flat = {name: [value for s in sequences for value in getattr(s, name)] for name in GIVEN}
    here = batch.window.response_indices
    given: dict[str, Any] = {name: torch.tensor(values)[here] for name, values in flat.items()}
    return dataclasses.replace(batch, **given)


def tokens_and_sums(
    config: PolicyLossConfig,
    batch: PackedBatch,
    log_probs: Tensor,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tokens, SequenceSums]:
    """The tensors that the loss of a micro-batch is a function of."""
    loss = MicroBatchLoss(resolve(config), batch, uneven_totals(batch.samples), group)
    tokens, _, sums = loss._arguments(loss._inputs(log_probs, log_probs))
    return tokens, sums


def flat_log_probs(sequences: Sequence[Sequence1], dtype: torch.dtype = torch.float64) -> Tensor:
    """A leaf [responses laid end to end], which is the window at context-parallel size 1."""
    flat = torch.cat([torch.zeros(0), *(s.log_probs.detach() for s in sequences)])
    return flat.to(dtype).requires_grad_()


def flat_gradient(total: Tensor, sequences: Sequence[Sequence1]) -> Tensor:
    """The gradient of the oracle's total for every log-prob, laid end to end."""
    leaves = [s.log_probs for s in sequences]
    if not total.requires_grad:  # every token is clipped
        return torch.zeros_like(torch.cat(leaves))
    return torch.cat(torch.autograd.grad(total, leaves, materialize_grads=True))


def stacked(values: Sequence[Sequence[Tensor]]) -> Tensor:
    return torch.stack([value for sample in values for value in sample])
