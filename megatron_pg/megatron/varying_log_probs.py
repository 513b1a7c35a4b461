"""The check for models with log-probs that vary at the same weights, between calls or modes.

With such a model, a first step's ratio is not 1. The table comes from reading megatron-core 0.16.1
and 0.19.2 for `self.training`, random numbers and state that a forward changes. Not in the table,
because they do not change the forward: router, multi-token and sparse-attention losses, expert bias
and `quantile_balancing` (updated after a step, like weights), stochastic rounding of FP4 (in
backward), current, block and MXFP8 scaling (from the tensor), FP8 padding of experts (at
probability 0), recomputation, and Megatron's norms.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch.nn import Module
from torch.nn.modules.dropout import _DropoutNd

from megatron_pg.config import PolicyLossConfig
from megatron_pg.config.values import refuse
from megatron_pg.megatron.groups import chunks_of, unwrapped

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Variation:
    """A reason why log-probs vary."""

    owner: Literal["module", "router", "model"]
    """The owner of the settings: a module (attributes), or a router's or the model's config."""
    find: Callable[[Settings], Settings]
    """A function that returns the settings that are on."""
    effect: str
    remedy: str

    def violation(self, found: Settings, place: str) -> str:
        """Describe the variation, its place and the remedy."""
        settings = ", ".join(f"{name}={value}" for name, value in found.items())
        remedy = f"{self.remedy}, or add --allow-varying-log-probs"
        return f"{place} has {settings}: {self.effect}. {remedy}"


def drops_tokens(settings: Settings) -> bool:
    """Tell whether an expert may get more tokens than its `--moe-expert-capacity-factor`."""
    capacity = settings.get("moe_expert_capacity_factor")
    return bool(capacity and capacity * settings["moe_router_topk"] < settings["num_moe_experts"])


def _dropout(settings: Settings) -> Settings:
    # By name, because Megatron, Transformer Engine, adapters and encoders share no class.
    return {
        name: value
        for name, value in settings.items()
        if value.__class__ is float and value > 0 and ("drop" in name or "noise" in name)
    }


def _other_recipe(settings: Settings) -> Settings:
    recipes: Any = settings.get("te_quant_params")
    scored = getattr(recipes, "evaluation_recipe", None)
    is_other = scored is not None and scored != recipes.training_recipe
    return {"te_quant_params.evaluation_recipe": scored} if is_other else {}


def _delayed_scaling(settings: Settings) -> Settings:
    return _set("fp8_recipe", to="delayed")(settings) if settings.get("fp8") else {}


def _token_dropping(settings: Settings) -> Settings:
    return _set("moe_expert_capacity_factor")(settings) if drops_tokens(settings) else {}


def _set(*names: str, to: str | None = None) -> Callable[[Settings], Settings]:
    """Make a function that finds which of these settings are set, or equal to `to`."""

    def find(settings: Settings) -> Settings:
        values = {name: settings.get(name) for name in names}
        return {
            name: value
            for name, value in values.items()
            if (value == to if to else value is not None and value is not False)
        }

    return find


_RANDOM = ("moe_input_jitter_eps", "moe_router_force_load_balancing", "moe_router_force_biased")
VARIATIONS = (
    Variation(
        "module",
        _dropout,
        "training draws random numbers, but scoring does not, so a first step's ratio is not 1",
        "Set it to 0 (--hidden-dropout 0 --attention-dropout 0)",
    ),
    Variation(
        "module",
        _set("track_running_stats"),
        "training normalizes by a micro-batch's tokens, but scoring by past tokens",
        "Keep the module in eval mode",
    ),
    Variation(
        "module",
        _other_recipe,
        "scoring quantizes differently from training",
        "Drop the recipe of evaluation",
    ),
    Variation(
        "router", _set(*_RANDOM), "routers draw random numbers in every forward", "Drop the setting"
    ),
    Variation(
        "router",
        _token_dropping,
        "which tokens an expert drops depends on the micro-batch's other tokens on the rank, "
        "padding included",
        "Drop the setting",
    ),
    Variation(
        "router",
        _set("moe_router_load_balancing_type", to="sinkhorn"),
        "training chooses experts by all of a micro-batch's tokens on one rank, scoring by one "
        "token",
        "Choose a different type",
    ),
    Variation(
        "model",
        _delayed_scaling,
        "scales come from earlier micro-batches",
        "Choose --fp8-recipe tensorwise, blockwise or mxfp8",
    ),
)


def varying_settings(settings: Settings) -> list[str]:
    """List how the fields of a `TransformerConfig` would make log-probs vary, before building a
    model.
    """
    rows = [row for row in VARIATIONS if row.owner != "router" or settings.get("num_moe_experts")]
    found = [(row, row.find(settings)) for row in rows]
    return [row.violation(settings, "the model") for row, settings in found if settings]


def require_steady_log_probs(model: Any, config: PolicyLossConfig) -> None:
    """Raise ValueError for a model with varying log-probs, unless `--allow-varying-log-probs`.

    The modules decide, not the config that they were built from. A module in eval mode inside a
    model in training mode is assumed to stay in it.

    Raises:
        ValueError: lists each kind of setting with its value and the first module that has it.
    """
    if config.allow_varying_log_probs:
        return
    violations: dict[tuple[str, ...], str] = {}
    for chunk in map(unwrapped, chunks_of(model)):
        for name, module in chunk.named_modules() if isinstance(chunk, Module) else ():
            for row, found in _found(module, chunk):
                place = f"{name or 'the model'} ({type(module).__name__})"
                violations.setdefault((row.effect, *found), row.violation(found, place))
    refuse(list(violations.values()))


def _found(module: Any, chunk: Any) -> list[tuple[Variation, Settings]]:
    owners: dict[str, Settings] = {}
    if module.training or not chunk.training:
        is_dropout = isinstance(module, _DropoutNd)
        owners["module"] = {"dropout": module.p} if is_dropout else vars(module)
    if hasattr(type(module), "apply_z_loss"):
        owners["router"] = vars(module.config)
    if module is chunk:
        owners["model"] = vars(chunk.config)
    rows = [row for row in VARIATIONS if row.owner in owners]
    return [(row, found) for row in rows if (found := row.find(owners[row.owner]))]
