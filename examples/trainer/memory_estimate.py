"""Memory of a GPU, estimated from the arguments: Megatron's formulas, and this package's output layer.

Megatron's are in megatron/training/theoretical_memory_usage.py, in the wheel from 0.17 on. They are for bfloat16, and for an
attention that keeps no scores (flash attention).
"""

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from megatron.training import theoretical_memory_usage as megatron

from megatron_pg import PolicyLossConfig
from megatron_pg.loss.micro_batch import gradient_scope

GIB = 2**30
CHUNK_BYTES = 5 * GIB // 4
"""Logits that `--fused-lm-head` holds at once, and their gradient that `--fp32-lm-head` rounds."""


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

    def total(self, *, fused: bool) -> float:
        """Bytes of the fuller one of the first and the last pipeline stage."""
        head = self.fused_head if fused else self.logits
        return self.states + max(self.activations, self.last_stage_activations + head)


def estimate_memory(args: Namespace) -> MemoryEstimate:
    """The estimate for validated arguments."""
    activations = _activations(args)
    tokens = args.max_tokens_per_microbatch / args.context_parallel_size
    narrow = 2 * tokens * args.vocab_size / args.tensor_model_parallel_size
    # Beside the chunk: the hidden states, gathered over tensor parallelism, and their gradient. A sequence may take four.
    chunks = 1 if gradient_scope(PolicyLossConfig.from_args(args)).tokens == "token" else 4
    widths = 2 if args.fp32_lm_head else 1
    axes = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    sizes = {f"{axis}_parallel_size": 1 for axis in axes} | {"world_size": 1}
    whole = _changed(args, **sizes, data_parallel_size=1, use_distributed_optimizer=False)
    return MemoryEstimate(
        parameters=_states(whole) / 18,  # bytes where one process holds everything
        states=_states(args),
        activations=activations,
        last_stage_activations=activations / args.pipeline_model_parallel_size,
        # Float32 logits, whose place the gradient takes, and what is bfloat16 beside them: the logits that Megatron's
        # Float16Module copies, or with --fp32-lm-head a chunk of the gradient.
        logits=2 * narrow + (min(narrow, CHUNK_BYTES) if args.fp32_lm_head else narrow),
        fused_head=widths * min(narrow, chunks * CHUNK_BYTES) + tokens * args.hidden_size * 4,
    )


def _changed(args: Namespace, **values: Any) -> Namespace:
    return Namespace(**(vars(args) | values))


def _states(args: Namespace) -> float:
    # The distributed optimizer shards over context-parallel ranks too; Megatron's estimate leaves them out.
    ranks = args.data_parallel_size * args.context_parallel_size
    copied = _changed(args, padded_vocab_size=args.vocab_size, data_parallel_size=ranks)
    return float(megatron.compute_weight_and_optimizer_memory(copied))


def _activations(args: Namespace) -> float:
    """Without those of the output layer."""
    tokens = args.max_tokens_per_microbatch / args.context_parallel_size
    of_layer = _bytes_of_a_layer(args)
    if args.recompute_granularity == "full":
        # Every layer's input in bfloat16, and all of the layer that is being recomputed.
        split = args.tensor_model_parallel_size if args.sequence_parallel else 1
        return float(tokens * args.hidden_size * (2 * args.num_layers / split + of_layer))
    # Megatron's formula has 18 + 4 ffn_hidden_size / hidden_size bytes for each of ours, over tensor parallelism.
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
    """What a layer keeps on a rank, in bytes a token and element of the hidden states (arXiv:2205.05198, table 2)."""
    # Inputs of norms, attention and MLP, and two dropout masks: whole on every rank without sequence parallelism.
    inputs = 8 + (2 if args.hidden_dropout else 0)
    # Queries, keys, values and the attention's output, of 2 bytes each; and the MLP.
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    split = 4 + 4 * groups / args.num_attention_heads + 4 * _ffn_width(args) / args.hidden_size
    size = args.tensor_model_parallel_size
    return float(inputs / (size if args.sequence_parallel else 1) + split / size)
