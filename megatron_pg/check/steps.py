"""The step that is trained on, and how it is cut over data-parallel ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_pg.check.options import CheckOptions
from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.step.sample import Sample

VOCAB_SIZE = 16
DIVISOR = 24.0
KL_COEFFICIENT, ENTROPY_COEFFICIENT = 0.1, 0.05
LENGTHS = ((3, 5), (2, 2), (2, 8), (2, 1), (1, 6), (2, 4), (1, 9), (3, 3), (1, 4), (2, 5))
"""(prompt, response) tokens of the samples, over and over. Short, and twenty of them to a data-parallel rank: float32
loses least where a GEMM sums over few tokens and every gradient is the mean of many."""
SAMPLES_PER_RANK = 20


def make_samples(data_parallel_size: int) -> list[Sample]:
    """All samples of the step: ragged, partly masked, one fully masked, groups spread over the ranks.

    Their number grows with the data-parallel size no further than the reference stays cheap; beyond, ranks hold
    fewer. Log-probs of the old and the reference policy are set by `with_log_probs` once a model has been asked.
    """
    generator = torch.Generator().manual_seed(20)

    def tokens(highest: int, count: int) -> torch.Tensor:
        return torch.randint(highest, (count,), generator=generator)

    samples = []
    count = max(SAMPLES_PER_RANK * min(data_parallel_size, 4), data_parallel_size)
    for index in range(count):
        prompt_length, response_length = LENGTHS[index % len(LENGTHS)]
        mask = torch.rand(response_length, generator=generator) < 0.7
        mask[0] = True
        is_last = index == count - 1
        samples.append(
            Sample(
                # Responses have ids of the lower half alone: the tokens then pull the model one way, where gradients
                # of tokens drawn from all ids would cancel, and leave float32 few digits of what is left.
                tokens=torch.cat(
                    (tokens(VOCAB_SIZE, prompt_length), tokens(VOCAB_SIZE // 2, response_length))
                ),
                response_length=response_length,
                loss_mask=mask if index % 8 != 5 or is_last else torch.zeros(response_length),
                # Of one sign, for the same reason.
                advantages=0.5 + torch.rand(response_length, generator=generator),
                group_index=0 if is_last else index % 4,
                # The first and the last are one rollout: on two data-parallel ranks or, on one, in two micro-batches.
                rollout_id=0 if is_last else index,
                name=f"sample {index}",
            )
        )
    return samples


def with_log_probs(samples: Sequence[Sample], log_probs: Sequence[torch.Tensor]) -> list[Sample]:
    """The samples with old and reference log-probs near the model's: inside the clip range, not on its edge."""
    generator = torch.Generator().manual_seed(21)

    def near(values: torch.Tensor) -> torch.Tensor:
        return values + 0.2 * torch.rand(values.shape, generator=generator) - 0.1

    return [
        Sample(
            tokens=sample.tokens,
            response_length=sample.response_length,
            loss_mask=sample.loss_mask,
            advantages=sample.advantages,
            old_log_probs=near(values),
            ref_log_probs=near(values),
            group_index=sample.group_index,
            rollout_id=sample.rollout_id,
            name=sample.name,
        )
        for sample, values in zip(samples, log_probs, strict=True)
    ]


def cut(
    samples: Sequence[Sample], *, data_size: int, data_rank: int, num_microbatches: int
) -> list[list[Sample]]:
    """This data-parallel rank's micro-batches of uneven sizes, the last one empty."""
    mine = list(samples[data_rank::data_size])
    micro_batches: list[list[Sample]] = [[] for _ in range(num_microbatches)]
    for place, sample in enumerate(mine):
        # The first takes the last one's share too; on a rank of few samples others are empty as well.
        micro_batches[(place + 1) % num_microbatches % (num_microbatches - 1)].append(sample)
    return micro_batches


CUSTOM = "custom"
"""In the place of an aggregation: the user's own reducer, per-token loss or both."""


def config_of(aggregation: str, options: CheckOptions) -> PolicyLossConfig:
    """PPO with a KL and an entropy term, whose outer counts differ from the policy-gradient term's."""
    if aggregation == CUSTOM:
        return PolicyLossConfig(
            custom_pg_loss_reducer_function_path=options.custom_pg_loss_reducer_function_path,
            custom_policy_loss_path=options.custom_policy_loss_path,
            pg_metrics="none",
            kl_loss_coef=KL_COEFFICIENT,
            entropy_coef=ENTROPY_COEFFICIENT,
        )
    return PolicyLossConfig(
        loss_aggregation=aggregation,  # type: ignore[arg-type]
        loss_aggregation_divisor=DIVISOR if aggregation == "constant" else None,
        kl_loss_coef=KL_COEFFICIENT,
        entropy_coef=ENTROPY_COEFFICIENT,
    )
