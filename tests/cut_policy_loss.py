"""`policy_loss_function` on every rank and micro-batch of a cut step, in one process."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from megatron_pg.config import PolicyLossConfig
from megatron_pg.loss.corrections import accepted_samples
from megatron_pg.loss.from_logits import policy_loss_function
from megatron_pg.step.batch import PackedBatch, pack
from megatron_pg.step.totals import StepTotals

from .cut_steps import DIVISOR, Cut
from .oracle import Objective, Step
from .random_steps import VOCAB_SIZE, lengths, package_samples, uneven_totals
from .token_layout import token_layout

OBJECTIVES = {
    "ppo": Objective(),
    "clip_higher": Objective(eps_clip=0.1, eps_clip_high=0.28),
    "dual_clip": Objective(eps_clip_c=1.5),
    "kl_k1": Objective(kl_loss_coef=0.1, kl_loss_type="k1"),
    "kl_k2": Objective(kl_loss_coef=0.1, kl_loss_type="k2"),
    "kl_k3": Objective(kl_loss_coef=0.1, kl_loss_type="k3"),
    "kl_low_var": Objective(kl_loss_coef=0.1, kl_loss_type="low_var_kl"),
    "kl_unbiased": Objective(kl_loss_coef=0.1, use_unbiased_kl=True),
    "entropy": Objective(entropy_coef=0.05),
    "everything": Objective(
        **{"eps_clip_high": 0.3, "eps_clip_c": 2.0, "rollout_temperature": 0.7},
        **{"kl_loss_coef": 0.2, "entropy_coef": 0.01},
    ),
    "everything_by_the_loss": Objective(
        kl_loss_coef=0.2, entropy_coef=0.03, regularizer_aggregation="loss"
    ),
}


def aggregated(objective: Objective, aggregation: str) -> Objective:
    divisor = DIVISOR if aggregation == "constant" else None
    return replace(objective, loss_aggregation=aggregation, loss_aggregation_divisor=divisor)


def package_config(objective: Objective, **others: object) -> PolicyLossConfig:
    shared = {field.name: getattr(objective, field.name) for field in fields(objective)}
    return PolicyLossConfig(**{**shared, **others})  # type: ignore[arg-type]


def local_logits(
    micro_batch: Step, logits: Sequence[Tensor], cp_rank, cp_size, pad_to_multiple=1
) -> Tensor:
    """[local_tokens, vocab]: what the model of this rank gives; NaN at padding. `logits` are of
    each sample.
    """
    columns = logits[0].shape[1] if logits else VOCAB_SIZE
    padding = torch.full((1, columns), torch.nan, dtype=torch.float64)
    rows = torch.cat([*logits, padding])
    layout = token_layout(*lengths(micro_batch), cp_size, pad_to_multiple)
    return rows[[-1 if row.token is None else row.token for row in layout[cp_rank]]]


@dataclass
class RankLoss:
    """What one rank computed of one micro-batch, and of how many micro-batches of its own."""

    batch: PackedBatch
    loss: Tensor
    metrics: dict[str, Tensor]
    num_microbatches: int


def rank_losses(
    config: PolicyLossConfig,
    step: Step,
    logits: Sequence[Tensor],
    cut: Cut,
    *,
    totals: StepTotals | None = None,
    vocab_size: int | None = None,
    pad_to_multiple: int = 1,
) -> list[RankLoss]:
    """One entry for every (data-parallel rank, micro-batch, context-parallel rank)."""
    totals = totals or uneven_totals(accepted_samples(config, package_samples(step)))
    settings = {"totals": totals, "vocab_size": vocab_size}
    size = cut.cp_size
    place = {"cp_size": size, "pad_to_multiple": pad_to_multiple}
    results = []
    for micro_batches in cut.ranks:
        share = 1 / (cut.dp_size * size * len(micro_batches))
        for indices in micro_batches:
            micro_batch, rows = [step[i] for i in indices], [logits[i] for i in indices]
            samples = accepted_samples(config, package_samples(micro_batch))
            for cp_rank in range(size):
                batch = pack(samples, cp_rank=cp_rank, **place)
                local = local_logits(micro_batch, rows, cp_rank, size, pad_to_multiple)
                loss, metrics = policy_loss_function(
                    config, batch, local, step_share=share, **settings
                )
                results.append(RankLoss(batch, loss, metrics, len(micro_batches)))
    return results


def summed_loss(results: Sequence[RankLoss]) -> Tensor:
    return torch.stack([result.loss for result in results]).sum()


def summed_metrics(results: Sequence[RankLoss]) -> dict[str, float]:
    """Numerators and denominators added up, then divided, as Megatron's train_step does."""
    metrics = {}
    for name in results[0].metrics:
        numerator, denominator = sum(result.metrics[name].double() for result in results)
        metrics[name] = (numerator / denominator).item()
    return metrics
