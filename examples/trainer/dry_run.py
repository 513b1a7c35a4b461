"""`--dry-run`: the plan of a launch from its validated arguments, without a run."""

import itertools
import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.training import theoretical_memory_usage as megatron

from megatron_pg import PolicyLossConfig
from megatron_pg.loss.aggregation import AGGREGATIONS
from megatron_pg.rollout_files import validate_rollout_file

from .rollouts import FileSteps, plan_of, row_settings, with_advantages

Lines = Iterator[tuple[str, str]]


def print_plan(args: Namespace, config: PolicyLossConfig) -> None:
    """Print the plan, only on rank 0 if a job was launched."""
    if int(os.environ.get("RANK", "0")) > 0:
        return
    for name, text in itertools.chain(_processes(args), _objective(config), _step(args, config)):
        print(f"{name:<17}{text}")


def _processes(args: Namespace) -> Lines:
    """Describe the processes and the memory, by Megatron's formula for bfloat16 plus the logits."""
    tensor, stages = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    context, data = args.context_parallel_size, args.data_parallel_size
    yield "processes", f"{args.world_size} = TP {tensor} x PP {stages} x CP {context} x DP {data}"
    if chunks := args.virtual_pipeline_model_parallel_size:
        yield "", f"{chunks} chunks of layers on each pipeline rank"
    if args.num_experts:
        experts, split = args.expert_model_parallel_size, args.expert_tensor_parallel_size or tensor
        copies = args.world_size // (experts * split * stages)
        sizes = f"EP {experts} x ETP {split} x DP {copies} of each stage"
        yield "", f"{args.num_experts} experts: {sizes}"
    sizes = "tensor_model pipeline_model context expert_model expert_tensor".split()
    one = dict.fromkeys([f"{axis}_parallel_size" for axis in sizes], 1)
    one |= {"data_parallel_size": 1, "world_size": 1, "use_distributed_optimizer": False}
    yield "model", f"{_states(args, **one) / 18e9:.2f} billion parameters"
    # The distributed optimizer also shards over context-parallel ranks, which Megatron's formula
    # leaves out.
    states = _states(args, data_parallel_size=data * context) / 2**30
    tokens = args.max_tokens_per_microbatch // context
    logits = 6 * tokens * args.vocab_size / tensor / 2**30
    held = ", of which --fused-lm-head holds a chunk" if args.fused_lm_head else ""
    yield "memory of a GPU", f"{states:.1f} GiB  weights, gradients, optimizer"
    yield "", f"{logits:.1f} GiB  logits and their gradient{held}. Activations come in addition"


def _states(args: Namespace, **changes: Any) -> float:
    """Return the bytes of the fullest rank, 18 per parameter without sharding."""
    changes |= {"num_layers": args.transformer_layers, "padded_vocab_size": args.vocab_size}
    copied = Namespace(**vars(args) | changes)
    return float(megatron.compute_weight_and_optimizer_memory(copied))


def _objective(config: PolicyLossConfig) -> Lines:
    if own := config.custom_pg_loss_reducer_function_path:
        yield "objective", f"your reducer {own}"
    else:
        row = AGGREGATIONS[config.loss_aggregation]
        yield "objective", f"{row.name}: {row.formula}"
        yield "", row.about
    loss = config.custom_policy_loss_path or config.policy_loss
    yield "", f"x = {loss}, m = loss mask, counts over the whole step"


def _step(args: Namespace, config: PolicyLossConfig) -> Lines:
    limit = args.max_tokens_per_microbatch
    yield (
        "micro-batches",
        f"at most {limit} tokens, {limit // args.context_parallel_size} on a rank",
    )
    if args.task:
        answers = f"{args.prompts_per_step} prompts x {args.samples_per_prompt} answers"
        yield "step", f"{answers} to {args.task}; {args.train_iters} steps"
        return
    plan_of(args, [])  # raises if the budget is too small for any segment
    mode = args.docs_per_step_mode.replace("_", " ")
    yield "step", f"{mode} {args.docs_per_step} rollouts; up to {args.train_iters} steps"
    try:
        step = FileSteps(args, config).collect(0)
    except FileNotFoundError:
        path = next(path for path in map(Path, args.rollout_files) if not path.exists())
        kind = "file" if path.suffix else "folder"
        yield "", f"cannot plan the first step: the rollout {kind} `{path}` does not exist"
        return
    _refuse_later_steps(args, config)
    samples, size = with_advantages(args, config, step.samples), args.data_parallel_size
    # Data-parallel rank r reads the rows i with i % size == r.
    ranks = [plan_of(args, samples[rank::size]) for rank in range(size)]
    totals = plan_of(args, samples).totals
    if config.loss_aggregation in AGGREGATIONS:
        AGGREGATIONS[config.loss_aggregation].outer_count(totals)  # raises like the run
    groups = f"P = {totals.num_prompt_groups or '?'} prompt groups"
    counts = f"N = {totals.num_rollouts} rollouts, {groups}, T = {totals.num_active_tokens}"
    yield "the first", f"{counts} active tokens"
    if step.num_documents < args.docs_per_step:
        yield (
            "remark",
            f"the files end before the step is full, after {step.num_documents} rollouts",
        )
    most = max(rank.num_microbatches for rank in ranks)
    filled = [tokens for rank in ranks for tokens in rank.microbatch_tokens]
    share = f"{sum(filled) / (most * size * limit):.0%} full, the fullest {max(filled)} tokens"
    yield "", f"{most} micro-batches on each data-parallel rank, {share}"


def _refuse_later_steps(args: Namespace, config: PolicyLossConfig) -> None:
    """Raise like a later step would, for a bad row or a scattered prompt group."""
    report = validate_rollout_file(*args.rollout_files, max_errors=1, **row_settings(args, config))
    if report.errors and args.on_bad_row == "error":
        raise report.errors[0]
    flag = "--keep-prompt-groups" if args.keep_prompt_groups else "prompt_mean"
    if report.scattered and (args.keep_prompt_groups or config.loss_aggregation == flag):
        raise ValueError(f"{flag}: {report.scattered[0]}")
