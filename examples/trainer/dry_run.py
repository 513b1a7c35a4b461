"""`--dry-run`: what a launch would do, and the memory of a GPU, from its validated arguments;
nothing is started.

Megatron's formulas are in megatron/training/theoretical_memory_usage.py, in the wheel from 0.17 on.
They are for bfloat16, and for an attention that keeps no scores (flash attention). The output
layer's are this package's.
"""

import itertools
import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.training import theoretical_memory_usage as megatron

from megatron_pg import PolicyLossConfig
from megatron_pg.head.chunks import chunk_rows, rows_in_budget
from megatron_pg.loss.aggregation import AGGREGATIONS
from megatron_pg.loss.resolved import resolve
from megatron_pg.rollout_files import validate_rollout_file

from .rollouts import FileSteps, plan_of, row_settings, with_advantages

GIB = 2**30
"""Logits that `--fused-lm-head` holds at once, and their gradient that `--fp32-lm-head` rounds."""


def print_plan(args: Namespace, config: PolicyLossConfig) -> None:
    """Print processes, objective, step, micro-batches and memory; on rank 0 of a job that was
    launched nevertheless.
    """
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
    """Refuse what a later step of the run would refuse: a wrong row, or a prompt group whose rows
    are scattered.
    """
    report = validate_rollout_file(*args.rollout_files, max_errors=1, **row_settings(args, config))
    if report.errors and args.on_bad_row == "error":
        raise report.errors[0]
    flag = "--keep-prompt-groups" if args.keep_prompt_groups else "prompt_mean"
    if report.scattered and (args.keep_prompt_groups or config.loss_aggregation == flag):
        raise ValueError(f"{flag}: {report.scattered[0]}")


def _memory(args: Namespace) -> Iterator[tuple[str, str]]:
    memory = estimate_memory(args).in_gib()
    yield "model", f"{memory.parameters / 1e9:.2f} billion parameters"
    yield (
        "memory of a GPU",
        "estimated, for bfloat16 and flash attention; nothing for NCCL and fragmentation",
    )
    sharded = ", sharded" if args.use_distributed_optimizer else ""
    plain, fused = ("", " (these flags)") if args.fused_lm_head else (" (these flags)", "")
    recomputed = f", recomputation: {args.recompute_granularity or 'none'}"
    of_first = of_last = ""
    if args.pipeline_model_parallel_size > 1:
        of_first, of_last = (f" of the {stage} pipeline stage" for stage in ("first", "last"))
    rows = {
        f"weights, gradients, optimizer{sharded}": memory.states,
        f"activations{of_first}{recomputed}": memory.activations,
        f"activations{of_last}{recomputed}": memory.last_stage_activations,
        f"output layer{of_last} with the logits of all tokens": memory.logits,
        f"output layer{of_last} with --fused-lm-head": memory.fused_head,
    }
    for flag, is_fused in (
        (f"without --fused-lm-head{plain}", False),
        (f"with --fused-lm-head{fused}", True),
    ):
        stage = of_last if memory.is_fullest_at_the_end(fused=is_fused) else of_first
        rows[f"in all{stage} {flag}"] = memory.total(fused=is_fused)
    for name, size in rows.items():
        yield "", f"{size:7.1f} GiB  {name}"


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a GPU, and the number of parameters of the model."""

    parameters: float
    states: float
    """Weights, gradients and optimizer of the fullest rank."""
    activations: float
    """Of the first pipeline stage, which holds as many micro-batches as there are stages."""
    last_stage_activations: float
    """Of the last one, which holds one."""
    logits: float
    """Of the output layer, with the logits of all tokens."""
    fused_head: float
    """Of the output layer with `--fused-lm-head`."""

    def in_gib(self) -> "MemoryEstimate":
        """The same in GiB, each part rounded to a tenth: what is printed adds up to its total."""
        parts = {name: round(size / GIB, 1) for name, size in vars(self).items()}
        return MemoryEstimate(**parts | {"parameters": self.parameters})

    def total(self, *, fused: bool) -> float:
        """Bytes of the fuller one of the first and the last pipeline stage."""
        return self.states + max(self.activations, self._end(fused))

    def is_fullest_at_the_end(self, *, fused: bool) -> bool:
        """The last pipeline stage, with the output layer, holds at least as much as the first."""
        return self._end(fused) >= self.activations

    def _end(self, fused: bool) -> float:
        return self.last_stage_activations + (self.fused_head if fused else self.logits)


def estimate_memory(args: Namespace) -> MemoryEstimate:
    """The estimate for validated arguments."""
    activations = _activations(args)
    tokens = _local_tokens(args)
    columns = -(-args.vocab_size // args.tensor_model_parallel_size)
    narrow = 2 * tokens * columns
    wide_chunk = 2 * columns * _chunk_rows(args, columns, None)
    widths = 2 if args.fp32_lm_head else 1
    axes = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    sizes = {f"{axis}_parallel_size": 1 for axis in axes} | {"world_size": 1}
    whole = _changed(args, **sizes, data_parallel_size=1, use_distributed_optimizer=False)
    return MemoryEstimate(
        parameters=_states(whole) / 18,  # bytes where one process holds everything
        states=_states(args),
        activations=activations,
        last_stage_activations=activations / args.pipeline_model_parallel_size,
        # Float32 logits, whose place the gradient takes, and what is bfloat16 beside them: the
        # logits that Megatron's Float16Module copies, or with --fp32-lm-head a chunk of the
        # gradient.
        logits=2 * narrow + (wide_chunk if args.fp32_lm_head else narrow),
        # Beside the chunk: the hidden states, gathered over tensor parallelism, and their gradient.
        fused_head=widths * 2 * columns * _head_rows(args, columns) + tokens * args.hidden_size * 4,
    )


def _head_rows(args: Namespace, columns: int) -> int:
    """The rows of logits that the fused head holds, of student and teacher together."""
    config, budget = PolicyLossConfig.from_args(args), args.fused_lm_head_memory_gib
    models = 2 if config.distills else 1
    rows = _chunk_rows(args, columns, budget, models)
    if resolve(config).scope.tokens != "token":
        # A sequence may take twice the budget.
        held = 2 * rows_in_budget(columns, torch.device("cpu"), budget, models)
        rows = max(rows, min(_local_tokens(args), held))
    return models * rows


def _chunk_rows(args: Namespace, columns: int, budget: float | None, models: int = 1) -> int:
    """The rows of a chunk on a GPU of 80 GB or more."""
    place = (columns, torch.device("cpu"), budget, models)
    return chunk_rows(_local_tokens(args), args.hidden_size, *place)


def _local_tokens(args: Namespace) -> int:
    return int(args.max_tokens_per_microbatch // args.context_parallel_size)


def _changed(args: Namespace, **values: Any) -> Namespace:
    return Namespace(**(vars(args) | values))


def _states(args: Namespace) -> float:
    # The distributed optimizer shards over context-parallel ranks too; Megatron's estimate leaves
    # them out.
    ranks = args.data_parallel_size * args.context_parallel_size
    copied = _changed(args, padded_vocab_size=args.vocab_size, data_parallel_size=ranks)
    return float(megatron.compute_weight_and_optimizer_memory(copied))


def _activations(args: Namespace) -> float:
    """Without those of the output layer."""
    tokens = _local_tokens(args)
    of_layer = _bytes_of_a_layer(args)
    if args.recompute_granularity == "full":
        # Every layer's input in bfloat16, and all of the layer that is being recomputed.
        split = args.tensor_model_parallel_size if args.sequence_parallel else 1
        return float(tokens * args.hidden_size * (2 * args.num_layers / split + of_layer))
    # Megatron's formula has 18 + 4 ffn_hidden_size / hidden_size bytes for each of ours, over
    # tensor parallelism.
    width = (of_layer * args.tensor_model_parallel_size - 18) / 4 * args.hidden_size
    copied = _changed(args, seq_length=tokens, padded_vocab_size=0, ffn_hidden_size=width)
    return float(megatron.compute_activation_memory(copied, num_microbatches=None))


def _ffn_width(args: Namespace) -> float:
    """What stands for the MLP in Megatron's formula, which knows neither gates nor experts."""
    gate = 1.5 if args.swiglu else 1.0
    if args.num_experts is None:
        return float(gate * args.ffn_hidden_size)
    experts = args.moe_router_topk * args.moe_ffn_hidden_size
    shared = args.moe_shared_expert_intermediate_size or 0
    # Each of a token's experts gets a copy of it and gives one back: 4 bytes of the hidden size.
    return float(gate * (experts + shared) + args.moe_router_topk * args.hidden_size)


def _bytes_of_a_layer(args: Namespace) -> float:
    """What a layer keeps on a rank, in bytes a token and element of the hidden states
    (arXiv:2205.05198, table 2).
    """
    # Inputs of norms, attention and MLP, and two dropout masks: whole on every rank without
    # sequence parallelism.
    inputs = 8 + (2 if args.hidden_dropout else 0)
    # Queries, keys, values and the attention's output, of 2 bytes each; and the MLP.
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    split = 4 + 4 * groups / args.num_attention_heads + 4 * _ffn_width(args) / args.hidden_size
    size = args.tensor_model_parallel_size
    return float(inputs / (size if args.sequence_parallel else 1) + split / size)
