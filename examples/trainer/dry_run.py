"""`--dry-run`: what a launch would do, from its validated arguments, without starting anything."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator

from megatron_pg import PolicyLossConfig, Sample, StepCollector
from megatron_pg.config.planning import PlanningConfig
from megatron_pg.loss.aggregation import AGGREGATIONS
from megatron_pg.rollout_files import RolloutFiles, StepSamples, validate_rollout_file
from megatron_pg.rollout_files.collector import no_sample_in
from megatron_pg.step import SampleCost, StepPlan, plan_step

from .memory_estimate import GIB, estimate_memory
from .rollouts import required_fields, with_advantages

OUTER_COUNTS = {
    "sample_mean": "N, its rollouts",
    "prompt_mean": "P, its prompt groups",
    "token_mean": "T, its active tokens",
    "constant": "N, its rollouts",
}


def print_plan(args: argparse.Namespace, config: PolicyLossConfig) -> None:
    """Print processes, objective, step, micro-batches and memory; on rank 0 of a job that was launched nevertheless.

    Raises:
        ValueError: a row of the rollout files is no sample, or does not fit what the arguments say.
    """
    if int(os.environ.get("RANK", "0")) > 0:
        return
    for name, text in itertools.chain(
        _processes(args), _objective(config), _step(args, config), _memory(args)
    ):
        print(f"{name:<17}{text}")


def _processes(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    sizes = {
        "TP": args.tensor_model_parallel_size,
        "PP": args.pipeline_model_parallel_size,
        "CP": args.context_parallel_size,
        "DP": args.data_parallel_size,
    }
    product = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    yield "processes", f"{args.world_size} = {product}"
    if chunks := args.virtual_pipeline_model_parallel_size:
        yield "", f"{chunks} chunks of layers on each pipeline rank"
    if args.num_experts:
        experts = args.expert_model_parallel_size
        tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
        data = args.world_size // (experts * tensor * sizes["PP"])
        yield (
            "",
            f"{args.num_experts} experts: EP {experts} x ETP {tensor} x DP {data} of each stage",
        )


def _objective(config: PolicyLossConfig) -> Iterator[tuple[str, str]]:
    name = config.loss_aggregation
    formula = AGGREGATIONS[name].formula if name in AGGREGATIONS else "a reducer of your own"
    if config.loss_aggregation_divisor is not None:
        formula += f", L = {config.loss_aggregation_divisor:g}"
    yield "objective", f"{name}: {formula}"
    yield "", f"x = {_token_loss(config)}; m the loss mask"
    terms = []
    if config.kl_loss_coef:
        terms.append(f"+ {config.kl_loss_coef:g} x sample_mean of KL ({config.kl_loss_type})")
    if config.entropy_coef:
        terms.append(f"- {config.entropy_coef:g} x sample_mean of the entropy")
    if terms:
        yield "", " ".join(terms)


def _token_loss(config: PolicyLossConfig) -> str:
    if config.custom_policy_loss_path is not None:
        return config.custom_policy_loss_path
    text = config.policy_loss
    if text in ("ppo", "gspo", "cispo"):
        high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
        low = 0.0 if text == "cispo" and not config.cispo_lower_bound else 1 - config.eps_clip
        text += f", ratio clipped to [{low:g}, {1 + high:g}]"
    if config.use_tis:
        text += f", {config.tis_level} TIS ({config.tis_mode}) at {config.tis_clip:g}"
    return text


def _step(args: argparse.Namespace, config: PolicyLossConfig) -> Iterator[tuple[str, str]]:
    count = OUTER_COUNTS.get(config.loss_aggregation, "a count of its own")
    yield "outer count", f"{count}, over the whole step"
    budget = (
        f"at most {args.max_tokens_per_microbatch} tokens, "
        f"{args.max_tokens_per_microbatch // args.context_parallel_size} on a rank"
    )
    if not args.rollout_files:
        rollouts = f"{args.prompts_per_step} prompts x {args.samples_per_prompt} answers"
        yield "step", f"{rollouts} to {args.task}; {args.train_iters} steps"
        yield "micro-batches", budget
        return
    _plan(args, [])  # refuses a budget that not even the smallest segment fits
    mode = args.docs_per_step_mode.replace("_", " ")
    yield "step", f"{mode} {args.docs_per_step} rollouts; up to {args.train_iters} steps"
    try:
        step = _first_step(args, config)
    except FileNotFoundError as error:
        yield "micro-batches", f"{budget}; no more is known: {error}"
        return
    _refuse_later_steps(args, config)
    samples = with_advantages(args, config, step.samples)
    ranks = [
        _plan(args, samples[rank :: args.data_parallel_size])
        for rank in range(args.data_parallel_size)
    ]
    totals = _plan(args, samples).totals
    if config.loss_aggregation in AGGREGATIONS:
        AGGREGATIONS[config.loss_aggregation].outer_count(totals)  # refuses what the run refuses
    yield (
        "",
        (
            f"the first: N = {totals.num_rollouts} rollouts, P = {totals.num_prompt_groups or '?'} prompt groups, "
            f"T = {totals.num_active_tokens} active tokens"
        ),
    )
    if step.num_documents < args.docs_per_step:
        yield (
            "remark",
            f"the files end before a step is full: one of {step.num_documents} rollouts is all that is trained on",
        )
    yield "micro-batches", budget
    most = max(rank.num_microbatches for rank in ranks)
    filled = [tokens for rank in ranks for tokens in rank.microbatch_tokens]
    share = sum(filled) / (most * len(ranks) * args.max_tokens_per_microbatch)
    yield (
        "",
        f"the first step: {most} on each data-parallel rank, {share:.0%} full, the fullest {max(filled)} tokens",
    )


def _refuse_later_steps(args: argparse.Namespace, config: PolicyLossConfig) -> None:
    """Refuse what a later step of the run would refuse: a wrong row, or a prompt group whose rows are scattered."""
    planning = PlanningConfig.from_args(args)
    report = validate_rollout_file(
        *planning.rollout_files,
        required_fields=required_fields(args, config),
        vocab_size=args.vocab_size,
        distinct_ids=planning.distinct_ids == "file",
        max_errors=1,
    )
    if report.errors and planning.on_bad_row == "error":
        raise report.errors[0]
    flag = "--keep-prompt-groups" if planning.keep_prompt_groups else "prompt_mean"
    if report.scattered and (planning.keep_prompt_groups or config.loss_aggregation == flag):
        raise ValueError(f"{flag}: {report.scattered[0]}")


def _first_step(args: argparse.Namespace, config: PolicyLossConfig) -> StepSamples[Sample]:
    """The samples of the first step over all ranks, in the order of the files."""
    planning = PlanningConfig.from_args(args)
    files = RolloutFiles(
        planning.rollout_files,
        on_bad_row=planning.on_bad_row,
        required_fields=required_fields(args, config),
        vocab_size=args.vocab_size,
        distinct_ids=planning.distinct_ids == "file",
    )
    collector = StepCollector(
        files,
        docs_per_step=planning.docs_per_step or 1,
        mode=planning.docs_per_step_mode,
        keep_prompt_groups=planning.keep_prompt_groups,
        refuse_cut_groups=config.loss_aggregation == "prompt_mean",
    )
    step = collector.collect()
    if step is None:
        raise no_sample_in(planning.rollout_files, collector.state().num_skipped)
    return step


def _plan(args: argparse.Namespace, samples: list[Sample]) -> StepPlan:
    """The plan of a data-parallel rank with these samples: row i of the files is read by rank i modulo DP."""
    context, tensor = args.context_parallel_size, args.tensor_model_parallel_size
    interleaved = args.virtual_pipeline_model_parallel_size is not None
    group = args.microbatch_group_size_per_vp_stage
    return plan_step(
        samples,
        max_tokens_per_microbatch=args.max_tokens_per_microbatch,
        cp_size=context,
        pad_to_multiple=context * tensor if args.sequence_parallel else 1,
        cp_partition_mode=args.cp_partition_mode,
        cost=SampleCost.balancing(args.balance, args, args.vocab_size),
        microbatch_group_size=(group or args.pipeline_model_parallel_size) if interleaved else 1,
        oversized=args.oversized_samples,
        allow_different_prompts=args.allow_different_prompts_in_group,
        allow_different_group_sizes=True,
    )


def _memory(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    memory = estimate_memory(args)
    yield "model", f"{memory.parameters / 1e9:.2f} billion parameters"
    yield (
        "memory of a GPU",
        "estimated, for bfloat16 and flash attention; nothing for NCCL and fragmentation",
    )
    recompute = args.recompute_granularity or "none"
    sharded = ", sharded" if args.use_distributed_optimizer else ""
    chosen = {args.fused_lm_head: " (these flags)"}
    for amount, what in (
        (memory.states, f"weights, gradients, optimizer{sharded}"),
        (memory.activations, f"activations, recomputation: {recompute}"),
        (memory.logits, "output layer with the logits of all tokens"),
        (memory.fused_head, "output layer with --fused-lm-head"),
        (memory.total(fused=False), f"in all without --fused-lm-head{chosen.get(False, '')}"),
        (memory.total(fused=True), f"in all with --fused-lm-head{chosen.get(True, '')}"),
    ):
        yield "", f"{amount / GIB:7.1f} GiB  {what}"
