"""The table of a check's rows, with their steps and models, and the list of what is not checked."""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_pg.check.options import CheckOptions
from megatron_pg.config import versions

LOSS_SCALE = 2.0**16
CASE_AGGREGATION = "prompt_mean"
"""The aggregation of rows that run once."""


class Case(NamedTuple):
    """A kind of step."""

    name: str
    models: tuple[str, ...] = ("end to end",)
    settings: Mapping[str, Any] = {}
    """Fields of the model's configuration, set during the step."""
    builds: Mapping[str, Any] = {}
    """Fields of the model's configuration, set when it is built."""
    policy_loss: str = "ppo"
    loss_scale: float = 1.0
    """The divisor of the gradients before the comparison."""
    is_even: bool = False
    """The step has a loss in addition to the policy loss. Its samples come from
    `make_even_samples`, so that no micro-batch is empty."""
    logit_coefficient: float = 0.0
    """The coefficient of the sum of all squared logits. It includes a sequence's last token, whose
    logits score no token."""
    has_sets: bool = False
    """Samples have the sets that their tokens were drawn from (`with_kept_sets`)."""
    has_heads: bool = False
    """Samples have an engine's likeliest tokens (`with_sampler_top_k`), which center the policy
    loss."""
    has_experts: bool = False
    """Samples have the experts that their tokens take (`with_routed_experts`)."""
    updates: bool = False
    """An optimizer step follows. The check compares the parameters' updates and the gradient
    norm."""
    lacks: Callable[[CheckOptions], str] = lambda options: ""
    """The reason why the options exclude the case, or ""."""

    @property
    def balancing(self) -> dict[str, float]:
        """The coefficients of the routers' load-balancing losses, by Megatron's names."""
        kinds = self.builds.get("moe_router_load_balancing_type", [])
        values = self.builds.get("moe_aux_loss_coeff", [])
        if isinstance(kinds, str):
            kinds, values = [kinds], [values]
        return dict(zip(kinds, values, strict=True))

    @property
    def has_sigmoid(self) -> bool:
        """Routers score experts by the sigmoid of the logits instead of the softmax."""
        return self.builds.get("moe_router_score_function") == "sigmoid"

    @property
    def has_expert_bias(self) -> bool:
        return bool(self.builds.get("moe_router_enable_expert_bias"))

    def num_microbatches(self, options: CheckOptions, data_rank: int) -> int:
        """Return a data-parallel rank's M. All ranks have the same M if a loss combines their
        micro-batches.
        """
        return options.num_microbatches(0 if "global_aux_loss" in self.balancing else data_rank)


class Run(NamedTuple):
    """A step to run: a model, a case, an aggregation and a loss mode."""

    model: str
    case: Case
    aggregation: str
    per_token: bool

    @property
    def key(self) -> tuple[str, str, bool]:
        """Identify the run among the model's runs."""
        return self.case.name, self.aggregation, self.per_token


def _auxiliary_lacks(options: CheckOptions) -> str:
    if options.num_experts is None or options.num_experts < 3:
        return "needs --num-experts 3 or more"
    if options.dtype == "bf16":
        return "in bf16, rounding decides between experts: use --dtype fp32"
    return ""


def _replay_lacks(options: CheckOptions) -> str:
    if options.num_experts is None or options.num_experts < 3:
        return "needs --num-experts 3 or more"
    if options.dtype == "bf16":
        return "in bf16, a token takes all experts: use --dtype fp32"
    return ""


def _router(name: str, kind: str | list[str] = "aux_loss", value: Any = 0.0, **builds: Any) -> Case:
    """Make the case of one or several load-balancing losses with their coefficients."""
    builds |= {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": value}
    return Case(name, builds=builds, is_even=True, lacks=_auxiliary_lacks)


def _exchange(kind: str, engine: tuple[int, int]) -> Case:
    """Make the case of a `cp_comm_type`. `engine` is the first Transformer Engine version that has
    it for packed sequences.
    """

    def lacks(options: CheckOptions) -> str:
        if options.context_parallel_size == 1 or options.cp_comm_type is not None:
            return "needs --context-parallel-size 2 or more, without --cp-comm-type"
        if options.transformer_impl != "transformer_engine":
            return "needs Transformer Engine: --device cuda --dtype bf16"
        found = versions.parse_version(importlib.import_module("transformer_engine").__version__)
        return "" if found[:2] >= engine else f"needs Transformer Engine {engine[0]}.{engine[1]}"

    return Case(f"cp {kind}", builds={"cp_comm_type": kind}, lacks=lacks)


SIGMOID = {"moe_router_score_function": "sigmoid"}
BIAS_RATE = 0.25
"""The step of the experts' bias. Its sums are exact in float32."""
ROUTER_LOSSES: Sequence[Case] = (
    _router("auxiliary loss", "aux_loss", 0.5),
    _router("sequence loss", "seq_aux_loss", 0.5),
    _router("global loss", "global_aux_loss", 0.5),
    _router(
        "listed losses", ["aux_loss", "seq_aux_loss", "global_aux_loss"], [0.2, 0.1, 0.4], **SIGMOID
    ),
    _router("router z loss", moe_z_loss_coeff=0.1),
)
"""The cases that differ in per-token mode."""
SCALING = {"grad_scale_func": lambda loss: loss * LOSS_SCALE}
"""The loss scale of fp16."""
RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
GRADIENT = Case("gradient", ("end to end", "tied", "hybrid", "multi-token", "loss only"))
CASES: Sequence[Case] = (
    GRADIENT,
    # GSPO sums over whole sequences, which context-parallel ranks share.
    Case("gspo", ("end to end", "loss only"), policy_loss="gspo"),
    # DIS reads the rollout engine's log-probs instead of the old ones.
    Case("dis", policy_loss="dis"),
    Case("kept set", has_sets=True),
    Case("centering", has_heads=True),
    Case("loss scale", settings=SCALING, loss_scale=LOSS_SCALE),
    Case("recompute", settings=RECOMPUTE),
    # The second forward must replay too.
    Case("routing replay", settings=RECOMPUTE, has_experts=True, lacks=_replay_lacks),
    Case(
        "every token",
        is_even=True,
        logit_coefficient=0.01,
        lacks=lambda options: "--fused-lm-head" if options.fused_lm_head else "",
    ),
    *ROUTER_LOSSES,
    _router(
        "expert bias",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=BIAS_RATE,
        **SIGMOID,
    ),
    # Older engines refuse packed sequences (attention/dot_product_attention/context_parallel.py),
    # and all engines refuse a2a+p2p.
    _exchange("a2a", (2, 10)),
    _exchange("all_gather", (2, 18)),
    # This case is last because it changes the parameters.
    Case("update", ("end to end", "tied"), updates=True),
)


def cases_of(
    model: str, options: CheckOptions, aggregations: Sequence[str], per_token: bool
) -> Iterator[Run]:
    """Yield the runs of a model in one loss mode, in order."""
    if model == "multi-token" and per_token:
        return  # `scale_contract` refuses it
    for case in CASES:
        if model not in case.models or case.lacks(options):
            continue
        if case is GRADIENT and model in ("end to end", "loss only"):
            yield from (Run(model, case, aggregation, per_token) for aggregation in aggregations)
        elif case is GRADIENT or not per_token or case in ROUTER_LOSSES:
            yield Run(model, case, CASE_AGGREGATION, per_token)


def not_checked(options: CheckOptions) -> dict[str, str]:
    """Return the features that the user's flags enable and this check leaves out, with reasons."""
    if options.model_provider is not None:
        return {
            "router and multi-token prediction losses of your model": "switched off: check them "
            "with the built-in model, --num-experts and --mtp-num-layers"
        }
    experts, fused = options.num_experts is not None, options.fused_lm_head
    exchanges = {
        f"--cp-comm-type {kind}": case.lacks(options)
        for case in CASES
        if (kind := case.builds.get("cp_comm_type")) is not None
        and options.context_parallel_size > 1
        and options.cp_comm_type is None
    }
    table = {
        **exchanges,
        "router losses and bias": _auxiliary_lacks(options) if experts else "",
        "--replay-routing": _replay_lacks(options) if experts else "",
        "per-token rows": "--average-in-collective" if options.average_in_collective else "",
        "loss-only rows": "--fused-lm-head" if fused else "",
        "the last token of a sequence": "--fused-lm-head" if fused else "",
        "copies of the model outside the sample, and the sum over them": (
            "--sample-groups" if options.sample_groups is not None else ""
        ),
    }
    return {name: why for name, why in table.items() if why}
