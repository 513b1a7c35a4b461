"""The rows of a check, as a table: what each runs beside the plain step, on which model, and what is not checked here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_pg.check.options import CheckOptions, has_gradient_accumulation_fusion
from megatron_pg.config import versions

LOSS_SCALE = 2.0**16
AUXILIARY_COEFFICIENT = 0.5
CASE_AGGREGATION = "prompt_mean"
"""Of the rows that are made once."""


@dataclass(frozen=True)
class Case:
    """A kind of step."""

    name: str
    models: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the model's configuration while it runs."""
    policy_loss: str = "ppo"
    loss_scale: float = 1.0
    """What the gradients are divided by before they are compared."""
    is_even: bool = False
    """On samples that need no padding (`make_even_samples`), with the auxiliary loss in the reference."""
    updates: bool = False
    """Followed by an optimizer step: its parameters and its gradient norm are what is compared."""
    lacks: Callable[[CheckOptions], str] = lambda options: ""
    """Why it cannot be run under some options; "" where it can."""


def _auxiliary_lacks(options: CheckOptions) -> str:
    if options.num_experts is None or options.num_experts < 3:
        return "needs --num-experts 3 or more"
    if options.dtype == "bf16":
        return "rounding decides between experts in bf16, use --dtype fp32"
    is_right = versions.moe_auxiliary_loss_under_context_parallel_is_right()
    return "" if options.context_parallel_size == 1 or is_right else "needs megatron-core 0.16"


GRADIENT = Case("gradient", ("end to end", "tied", "loss only"))
CASES: Sequence[Case] = (
    GRADIENT,
    # Sums over a whole sequence, which context-parallel ranks share.
    Case("gspo", ("end to end", "loss only"), policy_loss="gspo"),
    # As fp16 has it.
    Case(
        "loss scale",
        ("end to end",),
        settings={"grad_scale_func": lambda loss: loss * LOSS_SCALE},
        loss_scale=LOSS_SCALE,
    ),
    Case(
        "recompute",
        ("end to end",),
        settings={
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ),
    Case(
        "auxiliary loss",
        ("end to end",),
        settings={"moe_aux_loss_coeff": AUXILIARY_COEFFICIENT},
        is_even=True,
        lacks=_auxiliary_lacks,
    ),
    # The last: it leaves other parameters behind.
    Case("update", ("end to end", "tied"), updates=True),
)


def cases_of(
    model: str, options: CheckOptions, aggregations: Sequence[str], per_token: bool
) -> Iterator[tuple[Case, str]]:
    """The rows of a model in one loss mode, and the aggregation of each, in their order."""
    for case in CASES:
        if model not in case.models or case.lacks(options):
            continue
        if case is GRADIENT and model != "tied":
            yield from ((case, aggregation) for aggregation in aggregations)
        elif case is GRADIENT or not per_token or _has_both_modes(case, options):
            yield case, CASE_AGGREGATION


def _has_both_modes(case: Case, options: CheckOptions) -> bool:
    """Whether a case is another thing where Megatron divides by tokens, and is served there."""
    is_right = versions.per_token_moe_under_context_parallel_is_right()
    return case.is_even and (options.context_parallel_size == 1 or is_right)


def not_checked(options: CheckOptions) -> dict[str, str]:
    """What this check does not look at, and what would have to be otherwise."""
    has_fusion = has_gradient_accumulation_fusion(options)
    needs_transformer_engine = "Transformer Engine, --device cuda --dtype bf16"
    found = {
        "Transformer Engine's attention": (
            "" if options.transformer_impl == "transformer_engine" else needs_transformer_engine
        ),
        "--dtype bf16": "" if options.dtype == "bf16" else "asked for fp32",
        "--cp-comm-type": _unless(
            options.context_parallel_size == 1 or options.cp_comm_type is not None,
            "Megatron's default is checked"
            if options.transformer_impl == "transformer_engine"
            else needs_transformer_engine,
        ),
        "--gradient-accumulation-fusion": _unless(
            options.gradient_accumulation_fusion,
            "not asked for" if has_fusion else "needs a GPU and Transformer Engine or Apex",
        ),
        "--overlap-grad-reduce": _unless(options.overlap_grad_reduce, "not asked for"),
        "--use-distributed-optimizer": _unless(options.use_distributed_optimizer, "not asked for"),
        "--fused-lm-head": _unless(
            options.fused_lm_head,
            "not asked for" if versions.supports_output_processor() else "needs megatron-core 0.18",
        ),
        "experts": _unless(options.num_experts is not None, "needs --num-experts"),
        "per-token rows": "" if not options.average_in_collective else "--average-in-collective",
        "loss-only rows": "" if not options.fused_lm_head else "--fused-lm-head",
    }
    found["norms of queries and keys"] = "their gradients cancel to more digits than float32 has"
    found |= {case.name: case.lacks(options) for case in CASES}
    return {name: why for name, why in found.items() if why}


def _unless(is_checked: bool, why: str) -> str:
    return "" if is_checked else why
