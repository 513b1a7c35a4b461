"""What is run: one step that hides no mistake, for every aggregation, loss mode and model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_pg.check.compare import Row, Step, compare
from megatron_pg.check.model import LogitTable, build_model, initialize_groups, model_config
from megatron_pg.check.options import CUSTOM, CUSTOM_PATHS, VOCAB_SIZE, CheckOptions, config_of
from megatron_pg.check.reference import Expected, WholeModel
from megatron_pg.loss.aggregation import AGGREGATIONS
from megatron_pg.loss.checksum import CHECKSUM
from megatron_pg.megatron.groups import ParallelGroups
from megatron_pg.megatron.policy_step import PolicyStep
from megatron_pg.megatron.schedule import run_micro_batches
from megatron_pg.step.batch import pack
from megatron_pg.step.sample import Sample
from megatron_pg.step.totals import step_totals

LENGTHS = ((3, 5), (2, 2), (2, 8), (2, 1), (1, 6), (2, 4), (1, 9), (3, 3), (1, 4), (2, 5))
"""(prompt, response) tokens of the samples, over and over. Short, and twenty of them to a data-parallel rank: float32
loses least where a GEMM sums over few tokens and every gradient is the mean of many."""
SAMPLES_PER_RANK = 20

MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "end to end": GPTModel,
    "loss only": LogitTable,
}
"""`end to end` is a GPT model in the dtype asked for; `loss only` has float32 logits for parameters."""


def run_check(options: CheckOptions) -> list[Row]:
    """All rows; every rank of the world calls it, and gets the same ones."""
    # The table has logits for parameters, and no output layer that could be fused.
    names = [name for name in MODELS if name == "end to end" or not options.fused_lm_head]
    is_custom = any(getattr(options, path) for path in CUSTOM_PATHS)
    aggregations = [*AGGREGATIONS, *[CUSTOM] * is_custom]
    initialize_groups(options, sharded=False)
    references = {name: _reference(options, name, aggregations) for name in names}
    initialize_groups(options)
    groups = ParallelGroups.from_parallel_state()
    rows = []
    for name in names:
        model_options, (samples, expected) = _options_of(options, name), references[name]
        for per_token in [False] if options.average_in_collective else [False, True]:
            config = model_config(model_options, calculate_per_token_loss=per_token)
            model = build_model(model_options, config, MODELS[name])
            for aggregation in aggregations:
                metrics = train_step(model, model_options, groups, samples, aggregation)
                step = Step(
                    model=name,
                    aggregation=aggregation,
                    calculate_per_token_loss=per_token,
                    dtype=model_options.dtype,
                    loss=metrics["loss"],
                    # Only a custom reducer, which weighs the tokens by itself, has none.
                    checksum=metrics.get(CHECKSUM, 1.0 if aggregation == CUSTOM else math.nan),
                )
                rows.append(compare(step, model, expected[aggregation]))
    return rows


def _options_of(options: CheckOptions, model: str) -> CheckOptions:
    """The table of logits is float32 and has no experts."""
    if model == "end to end":
        return options
    plain = replace(options, num_experts=None, expert_model_parallel_size=1)
    return replace(plain, dtype="fp32", transformer_impl="local")


def _reference(
    options: CheckOptions, name: str, aggregations: Sequence[str]
) -> tuple[list[Sample], dict[str, Expected]]:
    """The samples, and what their step should give under each aggregation."""
    model = WholeModel(_options_of(options, name), MODELS[name])
    samples = make_samples(dist.get_world_size() // options.model_parallel_size)
    log_probs = model.log_probs(samples)
    # One rank's numbers, so that the samples are the same to the last bit everywhere.
    dist.broadcast_object_list(log_probs, src=0)
    samples = with_log_probs(samples, log_probs)
    return samples, {each: model.expected(samples, each) for each in aggregations}


def train_step(
    chunks: Sequence[Any],
    options: CheckOptions,
    groups: ParallelGroups,
    samples: Sequence[Sample],
    aggregation: str,
) -> dict[str, float]:
    """One step through Megatron's schedule; returns its metrics and leaves the gradients in DDP's buffers."""
    data_rank, cp_rank, cp_size = groups.data_rank, groups.context_rank, groups.context_size
    mine = samples[data_rank :: groups.data_size]
    micro_batches = cut(mine, options.num_microbatches(data_rank))
    config = replace(config_of(aggregation, options), fused_lm_head=options.fused_lm_head)
    totals = step_totals(mine, data_parallel_group=groups.data, allow_different_prompts=True)
    # Sequence parallelism splits a rank's tokens once more.
    multiple = cp_size * groups.tensor_size if options.sequence_parallel else 1
    packed = [
        pack(each, cp_rank=cp_rank, cp_size=cp_size, pad_to_multiple=multiple)
        for each in micro_batches
    ]
    batches = [batch.to(options.device) for batch in packed]
    step = PolicyStep(config, totals=totals, num_microbatches=len(batches), model=chunks)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    return step.metrics(run_micro_batches(step.head, batches, chunks))


def make_samples(data_parallel_size: int) -> list[Sample]:
    """All samples of the step: ragged, partly masked, one fully masked, groups spread over the ranks.

    Their number grows with the data-parallel size no further than the reference stays cheap; beyond, ranks hold
    fewer. Log-probs of the old and the reference policy are set by `with_log_probs` once a model has been asked.
    """
    generator = torch.Generator().manual_seed(20)

    def tokens(highest: int, count: int) -> Tensor:
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
                id_source="check",
            )
        )
    return samples


def with_log_probs(samples: Sequence[Sample], log_probs: Sequence[Tensor]) -> list[Sample]:
    """The samples with old and reference log-probs near the model's: inside the clip range, not on its edge."""
    generator = torch.Generator().manual_seed(21)

    def near(values: Tensor) -> Tensor:
        return values + 0.2 * torch.rand(values.shape, generator=generator) - 0.1

    return [
        replace(sample, old_log_probs=near(values), ref_log_probs=near(values))
        for sample, values in zip(samples, log_probs, strict=True)
    ]


def cut(samples: Sequence[Sample], num_microbatches: int) -> list[list[Sample]]:
    """The micro-batches of a data-parallel rank's samples, of uneven sizes, the last one empty."""
    micro_batches: list[list[Sample]] = [[] for _ in range(num_microbatches)]
    for place, sample in enumerate(samples):
        # The first takes the last one's share too; on a rank of few samples others are empty as well.
        micro_batches[(place + 1) % num_microbatches % (num_microbatches - 1)].append(sample)
    return micro_batches
