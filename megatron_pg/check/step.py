"""Runs the steps of a check and compares their gradients with the reference's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_pg.check.compare import Reference, compare
from megatron_pg.check.model import (
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
from megatron_pg.check.rows import Row, Step
from megatron_pg.check.sharded_parameters import gradient_slices
from megatron_pg.check.steps import CUSTOM, config_of, cut, make_samples, with_log_probs
from megatron_pg.loss.aggregation import AGGREGATIONS
from megatron_pg.loss.metrics import CHECKSUM, reduce_metrics
from megatron_pg.loss.policy_loss import policy_loss_from_log_probs
from megatron_pg.megatron.groups import ParallelGroups
from megatron_pg.megatron.output_head import output_head
from megatron_pg.megatron.packing import packed_seq_params
from megatron_pg.step.batch import PackedBatch, pack
from megatron_pg.step.sample import Sample
from megatron_pg.step.totals import step_totals

MODELS: dict[str, Callable[..., list[torch.nn.Module]]] = {
    "end to end": build_gpt,
    "loss only": build_logit_table,
}
"""`end to end` is a GPT model in the dtype asked for; `loss only` has float32 logits for parameters."""


def run_check(options: CheckOptions) -> list[Row]:
    """All rows; every rank of the world calls it, and gets the same ones."""
    initialize_groups(options)
    groups = ParallelGroups.from_parallel_state()
    data_size = groups.data_size
    initialize_groups(unsharded(options))
    shape = ModelShape.of(options)
    # The table has logits for parameters, and no output layer that could be fused.
    models = {
        name: build
        for name, build in MODELS.items()
        if name == "end to end" or not options.fused_lm_head
    }
    references = {name: _reference(options, shape, name, data_size) for name in models}
    initialize_groups(options)
    groups = ParallelGroups.from_parallel_state()
    modes = [False] if options.average_in_collective else [False, True]
    rows = []
    for name, build in models.items():
        model_options = _options_of(options, name)
        for per_token in modes:
            config = model_config(model_options, shape, calculate_per_token_loss=per_token)
            chunks = under_ddp(model_options, config, build(model_options, shape, config))
            for aggregation in _aggregations(options):
                samples = references[name].samples
                metrics = train_step(chunks, model_options, groups, samples, aggregation)
                step = Step(
                    model=name,
                    aggregation=aggregation,
                    calculate_per_token_loss=per_token,
                    dtype=model_options.dtype,
                    loss=metrics["loss"],
                    checksum=1.0 if _has_own_weights(aggregation, options) else metrics[CHECKSUM],
                )
                rows.append(compare(step, chunks, references[name]))
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
    if options.dtype == "fp32":
        # What is measured is then the float32 run's error alone, and not the difference of two.
        options = replace(options, dtype="fp64")
    config = model_config(options, shape, calculate_per_token_loss=False)
    (module,) = MODELS[model](options, shape, config)
    module = module.to(options.torch_dtype)
    samples = make_samples(data_size)
    with torch.no_grad():
        log_probs = [
            response_log_probs(sample, _logits_alone(module, sample, options))[0].float().cpu()
            for sample in samples
        ]
    # One rank's numbers, so that the samples are the same to the last bit everywhere.
    dist.broadcast_object_list(log_probs, src=0)
    samples = with_log_probs(samples, log_probs)
    reference = Reference(samples, {}, {})
    for aggregation in _aggregations(options):
        # Anew for each: Transformer Engine goes through a graph once.
        outputs = [_logits_alone(module, sample, options) for sample in samples]
        logits = [output.detach().requires_grad_() for output in outputs]
        if aggregation == CUSTOM:
            loss = _custom_loss(options, samples, logits)
        else:
            loss = reference_loss(aggregation, samples, logits)
        loss.backward()  # type: ignore[no-untyped-call]
        reference.losses[aggregation] = float(loss.detach())
        reference.gradients[aggregation] = _sum_of_gradients(
            module, outputs, [each.grad for each in logits]
        )
    return reference


def _aggregations(options: CheckOptions) -> list[str]:
    return [*AGGREGATIONS, *([CUSTOM] if options.has_custom_functions else [])]


def _has_own_weights(aggregation: str, options: CheckOptions) -> bool:
    """Whether a custom reducer weighs the tokens: no aggregation checksum is reported then."""
    return aggregation == CUSTOM and options.custom_pg_loss_reducer_function_path is not None


def _custom_loss(
    options: CheckOptions, samples: Sequence[Sample], logits: Sequence[Tensor]
) -> Tensor:
    """0-d: the user's functions on the whole step at once, in one micro-batch on one rank."""
    found = [response_log_probs(each, rows) for each, rows in zip(samples, logits, strict=True)]
    log_probs, entropies = (torch.cat(parts) for parts in zip(*found, strict=True))
    batch = pack(samples).to(options.device)
    loss, _ = policy_loss_from_log_probs(
        config_of(CUSTOM, options), batch, log_probs, entropies, totals=step_totals(samples)
    )
    return loss


def _sum_of_gradients(
    module: torch.nn.Module, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> dict[str, Tensor]:
    """Whole gradients by name, the samples' summed in float64: many bf16 sums would lose digits of their own."""
    total: dict[str, Tensor] = {}
    for output, gradient in zip(outputs, gradients, strict=True):
        if gradient is None:  # of a sample that is masked as a whole
            continue
        module.zero_grad(set_to_none=True)
        output.backward(gradient)  # type: ignore[no-untyped-call]
        for shard, part in gradient_slices([module]):
            total[shard.name] = total.get(shard.name, 0.0) + part.double()
    return total


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
) -> dict[str, float]:
    """One step through Megatron's schedule; returns its metrics and leaves the gradients in DDP's buffers."""
    micro_batches = cut(
        samples,
        data_size=groups.data_size,
        data_rank=groups.data_rank,
        num_microbatches=options.num_microbatches(groups.data_rank),
    )
    config = replace(config_of(aggregation, options), fused_lm_head=options.fused_lm_head)
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
        head = output_head(config, batch, totals, num_microbatches=len(batches), model=model)
        output = model(
            batch.tokens[None],
            batch.position_ids[None],
            None,
            packed_seq_params=packed_seq_params(batch),
            **head.model_arguments,
        )
        return output, head.loss_func

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
    return reduce_metrics(config, metrics, contributes=contributes, device=options.device)
