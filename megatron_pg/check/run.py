"""Runs the steps of a check and compares their gradients with the reference's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_pg.aggregation import AGGREGATIONS, StepTotals, step_totals
from megatron_pg.batch import PackedBatch, pack
from megatron_pg.check.models import (
    MAX_SEQUENCE_LENGTH,
    ModelShape,
    build_gpt,
    build_logit_table,
    initialize_groups,
    model_config,
    under_ddp,
    unsharded,
)
from megatron_pg.check.options import CheckOptions
from megatron_pg.check.reference import reference_loss, response_log_probs
from megatron_pg.check.sharded_parameters import Shard, gradient_slices
from megatron_pg.check.steps import config_of, cut, make_samples, with_log_probs
from megatron_pg.megatron.loss import megatron_loss
from megatron_pg.megatron.packing import packed_seq_params
from megatron_pg.megatron.process_groups import ParallelGroups
from megatron_pg.metrics import reduce_metrics
from megatron_pg.samples import Sample

TOLERANCES = {
    ("loss only", "fp32"): 1e-6,
    # Rounding through a whole model, on hardware of any summation order. A wrong factor is off by far more.
    ("end to end", "fp32"): 5e-6,
    ("end to end", "bf16"): 2e-2,
}

MODELS: dict[str, Callable[..., list[torch.nn.Module]]] = {
    "end to end": build_gpt,
    "loss only": build_logit_table,
}
"""`end to end` is a GPT model in the dtype asked for; `loss only` has float32 logits for parameters."""


@dataclass(frozen=True)
class Row:
    """One step of one configuration, compared with the reference. Equal on every rank."""

    model: str
    aggregation: str
    calculate_per_token_loss: bool
    dtype: str
    loss: float
    reference_loss: float
    gradient_error: float
    """The largest over all parameters and ranks, of max|g - reference| / max|reference| (bf16: of the norms)."""
    worst_parameter: str
    gradient_ratio: float
    """<g, reference> / <reference, reference> of the worst parameter's slice: a wrong scale shows here."""
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether loss and gradients agree; NaN does not."""
        scale = max(1.0, abs(self.reference_loss))
        loss_agrees = abs(self.loss - self.reference_loss) <= 2 * self.tolerance * scale
        return loss_agrees and self.gradient_error <= self.tolerance


@dataclass(frozen=True)
class Reference:
    """What a step should give: its samples, the loss by aggregation, and whole gradients by aggregation and name."""

    samples: list[Sample]
    losses: dict[str, float]
    gradients: dict[str, dict[str, Tensor]]


def run_check(options: CheckOptions) -> list[Row]:
    """All rows; every rank of the world calls it, and gets the same ones."""
    initialize_groups(options)
    groups = ParallelGroups.from_parallel_state()
    data_size = groups.data_size
    initialize_groups(unsharded(options))
    shape = ModelShape.of(options)
    references = {name: _reference(options, shape, name, data_size) for name in MODELS}
    initialize_groups(options)
    groups = ParallelGroups.from_parallel_state()
    modes = [False] if options.average_in_collective else [False, True]
    rows = []
    for name, build in MODELS.items():
        model_options = _options_of(options, name)
        for per_token in modes:
            config = model_config(model_options, shape, calculate_per_token_loss=per_token)
            chunks = under_ddp(model_options, config, build(model_options, config))
            for aggregation in AGGREGATIONS:
                loss = train_step(
                    chunks, model_options, groups, references[name].samples, aggregation
                )
                rows.append(
                    _compare(
                        chunks, model_options, name, aggregation, per_token, loss, references[name]
                    )
                )
    return rows


def _options_of(options: CheckOptions, model: str) -> CheckOptions:
    """The table of logits is float32 and has no experts."""
    if model == "end to end":
        return options
    return replace(
        options,
        dtype="fp32",
        transformer_impl="local",
        num_experts=None,
        expert_model_parallel_size=1,
    )


def _reference(options: CheckOptions, shape: ModelShape, model: str, data_size: int) -> Reference:
    """Each sample alone through the whole model, and the float64 loss; every rank computes it for itself."""
    options = unsharded(_options_of(options, model))
    config = model_config(options, shape, calculate_per_token_loss=False)
    (module,) = MODELS[model](options, config)
    samples = make_samples(data_size)
    with torch.no_grad():
        log_probs = [
            response_log_probs(sample, _logits_alone(module, sample, options))[0].float().cpu()
            for sample in samples
        ]
    # One rank's numbers, so that the samples are the same to the last bit everywhere.
    dist.broadcast_object_list(log_probs, src=0)
    samples = with_log_probs(samples, log_probs)
    losses, gradients = {}, {}
    for aggregation in AGGREGATIONS:
        module.zero_grad(set_to_none=True)
        logits = [_logits_alone(module, sample, options) for sample in samples]
        loss = reference_loss(aggregation, samples, logits)
        loss.backward()
        losses[aggregation] = float(loss)
        gradients[aggregation] = {
            shard.name: gradient.clone() for shard, gradient in gradient_slices([module])
        }
    return Reference(samples, losses, gradients)


def _logits_alone(module: torch.nn.Module, sample: Sample, options: CheckOptions) -> Tensor:
    """[total_length, vocab] logits of one sample, neither packed nor padded."""
    length = sample.total_length
    boundaries = torch.tensor([0, length], dtype=torch.int32, device=options.device)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=length,
        max_seqlen_kv=length,
    )
    positions = torch.arange(length, device=options.device)
    logits: Tensor = module(
        sample.tokens.to(options.device)[None], positions[None], None, packed_seq_params=packed
    )
    return logits[0]


def train_step(
    chunks: Sequence[Any],
    options: CheckOptions,
    groups: ParallelGroups,
    samples: Sequence[Sample],
    aggregation: str,
) -> float:
    """One step through Megatron's schedule; returns the reported loss and leaves the gradients in DDP's buffers."""
    micro_batches = cut(
        samples,
        data_size=groups.data_size,
        data_rank=groups.data_rank,
        # Ranks of one expert-parallel group exchange tokens in every micro-batch.
        ragged=options.expert_model_parallel_size == 1,
        multiple=options.pipeline_model_parallel_size if options.num_chunks > 1 else 1,
    )
    config = config_of(aggregation)
    totals = step_totals(
        [s for each in micro_batches for s in each], data_parallel_group=groups.data
    )
    batches = [
        pack(
            each,
            cp_rank=groups.context_rank,
            cp_size=groups.context_size,
            pad_to_multiple=options.pad_to_multiple,
        ).to(options.device)
        for each in micro_batches
    ]
    for chunk in chunks:
        chunk.zero_grad_buffer()

    def forward_step(iterator: Iterator[PackedBatch], model: Any) -> tuple[Tensor, Any]:
        batch = next(iterator)
        output = model(
            batch.tokens[None],
            batch.position_ids[None],
            None,
            packed_seq_params=packed_seq_params(batch),
        )
        return output, _loss_func(config, batch, totals, len(batches), model)

    metrics = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=MAX_SEQUENCE_LENGTH,
        micro_batch_size=1,
        forward_only=False,
    )
    contributes = groups.is_last_pipeline_stage and groups.tensor_rank == 0
    return reduce_metrics(config, metrics, contributes=contributes, device=options.device)["loss"]


def _loss_func(
    config: Any, batch: PackedBatch, totals: StepTotals, num_microbatches: int, model: Any
) -> Any:
    return megatron_loss(config, batch, totals, num_microbatches=num_microbatches, model=model)


def _compare(
    chunks: Sequence[Any],
    options: CheckOptions,
    model: str,
    aggregation: str,
    per_token: bool,
    loss: float,
    reference: Reference,
) -> Row:
    """The worst slice of all ranks; every rank calls it."""
    expected = reference.gradients[aggregation]
    worst = max(
        (
            _slice_error(shard, gradient, expected[shard.name], options.dtype == "bf16")
            for shard, gradient in gradient_slices(chunks)
        ),
        default=(0.0, "", 1.0),
    )
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, worst)
    error, parameter, ratio = max(gathered)
    return Row(
        model=model,
        aggregation=aggregation,
        calculate_per_token_loss=per_token,
        dtype=options.dtype,
        loss=loss,
        reference_loss=reference.losses[aggregation],
        gradient_error=error,
        worst_parameter=parameter,
        gradient_ratio=ratio,
        tolerance=TOLERANCES[model, options.dtype],
    )


def _slice_error(
    shard: Shard, gradient: Tensor, whole: Tensor, by_norm: bool
) -> tuple[float, str, float]:
    """(error, name, <g, reference> / <reference, reference>) of one slice; infinity for NaN."""
    expected = shard.cut(whole).double()
    found = gradient.double()
    difference = found - expected
    if by_norm:
        error, scale = float(difference.norm()), float(expected.norm())
    else:
        error, scale = float(difference.abs().max()), float(whole.double().abs().max())
    ratio = float((found * expected).sum()) / (float(expected.square().sum()) or 1.0)
    if error == 0.0:
        return 0.0, shard.name, ratio
    relative = error / scale if scale else float("inf")
    return (relative if relative == relative else float("inf")), shard.name, ratio
