"""The steps of a check, for every aggregation, loss mode and model."""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from megatron_pg.check.cases import CASE_AGGREGATION, Run, cases_of
from megatron_pg.check.compare import CheckRow, compare
from megatron_pg.check.model import (
    MODELS,
    build_model,
    destroy_groups,
    initialize_groups,
    model_config,
)
from megatron_pg.check.options import ADAM_EPSILON, CUSTOM, CheckOptions, config_of, shardings
from megatron_pg.check.placement import Part, gradient_parts, placed
from megatron_pg.check.reference import Expected, Scored, WholeModel
from megatron_pg.check.report import Checked
from megatron_pg.check.routers import Pack, head_start
from megatron_pg.check.samples import cut, cut_evenly, samples_of
from megatron_pg.check.weights import biased_routers, expert_bias
from megatron_pg.loss.aggregation import AGGREGATIONS
from megatron_pg.loss.checksum import CHECKSUM
from megatron_pg.megatron.experts import padding_mask
from megatron_pg.megatron.groups import ParallelGroups, unwrapped
from megatron_pg.megatron.policy_step import MicroBatchHead, PolicyStep
from megatron_pg.megatron.schedule import run_micro_batches
from megatron_pg.step.batch import PackedBatch, pack
from megatron_pg.step.sample import Sample
from megatron_pg.step.totals import step_totals

KnownRows = dict[tuple[str, CheckOptions], list[CheckRow]]
"""The rows of a model by name and options. Shardings that differ only in experts share the dense
models."""
KnownReferences = dict[tuple[object, ...], dict[tuple[str, str, bool], Expected]]
"""The expected results by `_reference_key` and `Run.key`, for shardings with the same TP, PP and
CP."""


def run_check(
    options: CheckOptions,
    known_rows: KnownRows | None = None,
    known_references: KnownReferences | None = None,
    *,
    has_every_aggregation: bool = True,
) -> list[CheckRow]:
    """Make all rows. Every rank of the world calls it and gets the same. Known rows and references
    are reused and added to.

    Without `has_every_aggregation`, new models run only `CASE_AGGREGATION`.
    """
    known_rows = {} if known_rows is None else known_rows
    references = {} if known_references is None else known_references
    options_of = {
        name: replace(options, **model.changes)
        for name, model in MODELS.items()
        if model.is_run(options)
    }
    aggregations = [*AGGREGATIONS] if has_every_aggregation else [CASE_AGGREGATION]
    aggregations += [CUSTOM] if options.has_custom else []
    modes = [False] if options.average_in_collective else [False, True]
    runs = {
        name: [run for mode in modes for run in cases_of(name, options, aggregations, mode)]
        for name in options_of
        if (name, options_of[name]) not in known_rows
    }
    data_size = dist.get_world_size() // options.model_parallel_size
    initialize_groups(options, sharded=False)
    expected_of: dict[str, dict[tuple[str, str, bool], Expected]] = {}
    for name in runs:
        keys = [run.key for run in runs[name]]
        expected = references.setdefault(_reference_key(name, options, data_size), {})
        if not expected.keys() >= {*keys}:
            expected |= zip(keys, _references(options_of[name], runs[name]), strict=True)
        expected_of[name] = expected
    initialize_groups(options)
    for name in runs:
        chunks: list[Any] = []
        built, rows = None, []
        for run in runs[name]:
            if built != (built := {**run.case.builds, "calculate_per_token_loss": run.per_token}):
                config = model_config(options_of[name], **built)
                chunks = build_model(options_of[name], config, MODELS[name].new)
            rows.append(_row(run, chunks, options_of[name], expected_of[name][run.key]))
        known_rows[name, options_of[name]] = rows
    return [row for name in options_of for row in known_rows[name, options_of[name]]]


def check_every_sharding(options: CheckOptions) -> Iterator[Checked]:
    """Check each sharding of the world. Every rank iterates over it.

    Aggregations differ only in token weights, which do not depend on experts. So shardings with
    divided experts run one aggregation.
    """
    known_rows = KnownRows()
    every = shardings(options, dist.get_world_size())
    for _, alike in itertools.groupby(every, _SIZES):
        known_references = KnownReferences()
        for sharding in alike:
            started = time.monotonic()
            is_first = sharding.expert_model_parallel_size == 1
            known = known_rows, known_references
            rows = run_check(sharding, *known, has_every_aggregation=is_first)
            destroy_groups()
            yield Checked(sharding, rows, time.monotonic() - started)


_SIZES = attrgetter(
    *(f"{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context"))
)


def _reference_key(name: str, options: CheckOptions, data_size: int) -> tuple[object, ...]:
    """Return what expected results depend on in addition to `_SIZES`: the samples' length and the
    micro-batches.
    """
    counts = map(options.num_microbatches, range(min(data_size, 2)))
    return name, options.num_chunks, options.tokens_per_chunk, *counts


def _references(options: CheckOptions, runs: Sequence[Run]) -> list[Expected]:
    """Return the expected results of a model's runs."""
    model = WholeModel.built_in(options, MODELS[runs[0].model].new)
    data_size = dist.get_world_size() // options.model_parallel_size
    steps: dict[tuple[object, ...], Scored] = {}
    known: dict[tuple[object, ...], Expected] = {}
    references = []
    for run in runs:
        case = run.case
        routing = (case.has_experts, case.has_sigmoid, case.has_expert_bias)
        sets = case.has_sets, case.has_heads
        kind = (case.is_even, bool(case.logit_coefficient), *sets, *routing)
        if kind not in steps:
            steps[kind] = model.score(samples_of(options, data_size, case), case)
        # Both loss modes share one reference, unless tokens weight an auxiliary loss.
        loss_mode = (case.name, run.per_token) if case.is_even else ()
        key = (run.aggregation, case.policy_loss, kind, loss_mode)
        if key not in known:
            packs = _packs(options, steps[kind][0], data_size, run)
            known[key] = model.expected(steps[kind], run, packs)
        references.append(known[key].after_update() if case.updates else known[key])
    return references


def _packs(options: CheckOptions, samples: Sequence[Sample], ranks: int, run: Run) -> list[Pack]:
    """Return one pack per sample, or one per micro-batch if the case has even samples."""
    if not run.case.is_even:
        return [Pack([index], 0.0, 0) for index in range(len(samples))]
    lengths, packs = [sample.total_length for sample in samples], []
    for rank in range(ranks):
        count = run.case.num_microbatches(options, rank)
        for turn, indices in enumerate(cut_evenly(range(rank, len(samples), ranks), count)):
            share = sum(lengths[index] for index in indices) / sum(lengths)
            packs.append(Pack(indices, share if run.per_token else 1 / (ranks * count), turn))
    return packs


def _row(run: Run, chunks: list[Any], options: CheckOptions, expected: Expected) -> CheckRow:
    """Run a step with its case's settings and compare it."""
    case, norm, settings = run.case, None, vars(chunks[0].config)
    before = {name: settings[name] for name in case.settings}
    settings.update(case.settings)
    biases = _start_biases(chunks, expected)
    metrics = train_step(chunks, options, expected.samples, run)
    settings.update(before)
    if case.updates:
        norm, slices = update(chunks, options, expected)
    else:
        scale = case.loss_scale
        scaled = {name: scale * gradient for name, gradient in expected.gradients.items()}
        slices = [(shard, part / scale) for shard, part in gradient_parts(chunks, scaled)]
        slices += [(shard, bias - expert_bias(shard.name, bias)) for shard, bias in biases]
    return compare(
        slices,
        expected,
        options,
        model=run.model,
        aggregation=run.aggregation,
        calculate_per_token_loss=run.per_token,
        loss=metrics["loss"],
        checksum=metrics[CHECKSUM],
        what=case.name,
        gradient_norm=norm,
    )


def _start_biases(chunks: Sequence[Any], expected: Expected) -> list[Part]:
    """Set each router's expert bias, and give one rank the `head_start`. Return the biases, which a
    step updates.
    """
    routers = [part for chunk in chunks for part in biased_routers(unwrapped(chunk))]
    ranks = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    for shard, router in routers:
        router.expert_bias.copy_(expert_bias(shard.name, router.expert_bias))
        if ranks.rank() == 0:
            router.local_tokens_per_expert.copy_(head_start(expected.tokens_of_experts[shard.name]))
    return [(shard, router.expert_bias) for shard, router in routers]


def train_step(
    chunks: Sequence[Any], options: CheckOptions, samples: Sequence[Sample], run: Run
) -> dict[str, float]:
    """Run a step through Megatron's schedule and return its metrics. Gradients stay in DDP's
    buffers.
    """
    groups, case = ParallelGroups.from_parallel_state(), run.case
    data_rank, cp_size = groups.data_rank, groups.context_size
    mine = samples[data_rank :: groups.data_size]
    count = case.num_microbatches(options, data_rank)
    micro_batches = (cut_evenly if case.is_even else cut)(mine, count)
    totals = step_totals(mine, data_parallel_group=groups.data, allow_different_group_sizes=True)
    if case.is_even:  # weighted by tokens in per-token mode
        totals = replace(totals, num_tokens=sum(sample.total_length for sample in samples))
    layout: dict[str, Any] = {
        "cp_rank": groups.context_rank,
        "cp_size": cp_size,
        # Sequence parallelism also splits a rank's tokens.
        "pad_to_multiple": cp_size * groups.tensor_size if options.sequence_parallel else 1,
    }
    batches = [pack(batch, **layout).to(options.device) for batch in micro_batches]
    config = config_of(run.aggregation, options, case.policy_loss)
    step = PolicyStep(
        replace(
            config,
            fused_lm_head=options.fused_lm_head,
            fp32_lm_head=options.fp32_lm_head,
            replay_sampling_set=case.has_sets,
            score_centering=case.has_heads,
            replay_routing=case.has_experts,
            allow_varying_log_probs=True,  # the comparison finds them
        ),
        totals=totals,
        num_microbatches=len(batches),
        model=chunks,
        vocab_size=None if options.model_provider else options.vocab_size,
    )
    for chunk in chunks:
        chunk.zero_grad_buffer()

    def head(batch: PackedBatch) -> MicroBatchHead:
        policy_head = step.head(batch)
        is_padding = padding_mask(batch)[..., None]

        def loss_func(logits: Tensor) -> Any:
            loss, *rest = policy_head.loss_func(logits)
            squares = logits.float().square().masked_fill(is_padding, 0.0)
            return loss + case.logit_coefficient * squares.sum(), *rest

        return replace(policy_head, loss_func=loss_func) if case.logit_coefficient else policy_head

    return step.metrics(run_micro_batches(head, batches, chunks))


def update(
    chunks: list[Any], options: CheckOptions, expected: Expected
) -> tuple[float, list[Part]]:
    """Run the optimizer's first step, starting at minus half the expected updates. Return the
    gradient norm and the updates.

    A weight decay of 1 sets every parameter to zero before Adam's update, so that the sum is exact.
    """
    slices = [part for chunk in chunks for part in placed(unwrapped(chunk))]
    for piece, parameter in slices:
        parameter.copy_(-0.5 * piece.cut(expected.gradients[piece.name]))
    before = [parameter.detach().double() for _, parameter in slices]
    is_bf16 = options.dtype == "bf16"
    config = OptimizerConfig(
        optimizer="adam",
        lr=1.0,
        adam_eps=ADAM_EPSILON,
        weight_decay=1.0,
        clip_grad=0.5 * (expected.norm or 0.0),
        bf16=is_bf16,
        params_dtype=torch.bfloat16 if is_bf16 else torch.float32,
        use_distributed_optimizer=options.use_distributed_optimizer,
    )
    _, norm, _ = get_megatron_optimizer(config, chunks).step()
    pairs = zip(slices, before, strict=True)
    return float(norm), [(s, after.detach().double() - start) for (s, after), start in pairs]
