"""`--dry-run`: what a launch would do, from its validated arguments, without starting anything."""

import itertools
import os
from argparse import Namespace
from collections.abc import Iterator

from megatron_pg import PolicyLossConfig
from megatron_pg.loss.aggregation import AGGREGATIONS
from megatron_pg.rollout_files import validate_rollout_file

from .memory_estimate import GIB, estimate_memory
from .rollouts import FileSteps, plan_of, row_settings, with_advantages


def print_plan(args: Namespace, config: PolicyLossConfig) -> None:
    """Print processes, objective, step, micro-batches and memory; on rank 0 of a job that was launched nevertheless."""
    if int(os.environ.get("RANK", "0")) > 0:
        return
    parts = (_processes(args), _objective(config), _step(args, config), _memory(args))
    for name, text in itertools.chain(*parts):
        print(f"{name:<17}{text}")


def _processes(args: Namespace) -> Iterator[tuple[str, str]]:
    tensor, stages = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    context, data = args.context_parallel_size, args.data_parallel_size
    yield "processes", f"{args.world_size} = TP {tensor} x PP {stages} x CP {context} x DP {data}"
    if chunks := args.virtual_pipeline_model_parallel_size:
        yield "", f"{chunks} chunks of layers on each pipeline rank"
    if args.num_experts:
        experts = args.expert_model_parallel_size
        tensor = args.expert_tensor_parallel_size or tensor
        sizes = f"EP {experts} x ETP {tensor} x DP {args.world_size // (experts * tensor * stages)}"
        yield "", f"{args.num_experts} experts: {sizes} of each stage"


def _objective(config: PolicyLossConfig) -> Iterator[tuple[str, str]]:
    name = config.loss_aggregation
    if name in AGGREGATIONS:
        yield "objective", f"{name}: {AGGREGATIONS[name].formula}"
        yield "", AGGREGATIONS[name].about
    else:
        yield "objective", f"{name}: a reducer of your own"
    if config.loss_aggregation_divisor is not None:
        yield "", f"L = {config.loss_aggregation_divisor:g}"
    yield "", f"x = {_token_loss(config)}; m the loss mask; counts are of the whole step"
    if config.kl_loss_coef:
        yield "", f"+ {config.kl_loss_coef:g} x sample_mean of KL ({config.kl_loss_type})"
    if config.entropy_coef:
        yield "", f"- {config.entropy_coef:g} x sample_mean of the entropy"


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


def _step(args: Namespace, config: PolicyLossConfig) -> Iterator[tuple[str, str]]:
    limit = args.max_tokens_per_microbatch
    budget = f"at most {limit} tokens, {limit // args.context_parallel_size} on a rank"
    if not args.rollout_files:
        answers = f"{args.prompts_per_step} prompts x {args.samples_per_prompt} answers"
        yield "step", f"{answers} to {args.task}; {args.train_iters} steps"
        yield "micro-batches", budget
        return
    plan_of(args, [])  # refuses a budget that not even the smallest segment fits
    mode = args.docs_per_step_mode.replace("_", " ")
    yield "step", f"{mode} {args.docs_per_step} rollouts; up to {args.train_iters} steps"
    try:
        step = FileSteps(args, config).collect(0)
    except FileNotFoundError as error:
        yield "micro-batches", f"{budget}; no more is known: {error}"
        return
    _refuse_later_steps(args, config)
    samples, size = with_advantages(args, config, step.samples), args.data_parallel_size
    # Row i of the files is read by data-parallel rank i modulo their number.
    ranks = [plan_of(args, samples[rank::size]) for rank in range(size)]
    totals = plan_of(args, samples).totals
    if config.loss_aggregation in AGGREGATIONS:
        AGGREGATIONS[config.loss_aggregation].outer_count(totals)  # refuses what the run refuses
    groups = f"P = {totals.num_prompt_groups or '?'} prompt groups"
    counts = f"N = {totals.num_rollouts} rollouts, {groups}, T = {totals.num_active_tokens}"
    yield "", f"the first: {counts} active tokens"
    if step.num_documents < args.docs_per_step:
        only = f"one of {step.num_documents} rollouts is all that is trained on"
        yield "remark", f"the files end before a step is full: {only}"
    yield "micro-batches", budget
    most = max(rank.num_microbatches for rank in ranks)
    filled = [tokens for rank in ranks for tokens in rank.microbatch_tokens]
    share = f"{sum(filled) / (most * size * limit):.0%} full, the fullest {max(filled)} tokens"
    yield "", f"the first step: {most} on each data-parallel rank, {share}"


def _refuse_later_steps(args: Namespace, config: PolicyLossConfig) -> None:
    """Refuse what a later step of the run would refuse: a wrong row, or a prompt group whose rows are scattered."""
    report = validate_rollout_file(*args.rollout_files, max_errors=1, **row_settings(args, config))
    if report.errors and args.on_bad_row == "error":
        raise report.errors[0]
    flag = "--keep-prompt-groups" if args.keep_prompt_groups else "prompt_mean"
    if report.scattered and (args.keep_prompt_groups or config.loss_aggregation == flag):
        raise ValueError(f"{flag}: {report.scattered[0]}")


def _memory(args: Namespace) -> Iterator[tuple[str, str]]:
    memory = estimate_memory(args)
    yield "model", f"{memory.parameters / 1e9:.2f} billion parameters"
    estimated = "estimated, for bfloat16 and flash attention; nothing for NCCL and fragmentation"
    yield "memory of a GPU", estimated
    sharded = ", sharded" if args.use_distributed_optimizer else ""
    rows = {
        f"weights, gradients, optimizer{sharded}": memory.states,
        f"activations, recomputation: {args.recompute_granularity or 'none'}": memory.activations,
        "output layer with the logits of all tokens": memory.logits,
        "output layer with --fused-lm-head": memory.fused_head,
    }
    for fused, how in ((False, "without"), (True, "with")):
        mine = " (these flags)" if bool(args.fused_lm_head) == fused else ""
        rows[f"in all {how} --fused-lm-head{mine}"] = memory.total(fused=fused)
    for what, amount in rows.items():
        yield "", f"{amount / GIB:7.1f} GiB  {what}"
