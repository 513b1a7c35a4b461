"""Startup validation: the one place that changes parsed arguments."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from megatron_pg.config.custom import (
    POLICY_LOSS_PARAMETERS,
    REDUCER_KEYWORDS,
    REDUCER_PARAMETERS,
    TIS_PARAMETERS,
    load_function,
)
from megatron_pg.config.policy_loss import PolicyLossConfig, config_fields, required_inputs
from megatron_pg.config.values import INTERVALS, flag_of
from megatron_pg.config.versions import megatron_core_version, supports_output_processor

logger = logging.getLogger("megatron_pg")

AUXILIARY_LOAD_BALANCING = frozenset({"aux_loss", "seq_aux_loss", "global_aux_loss"})
OPTIONAL_SAMPLE_FIELDS = ("old_log_probs", "ref_log_probs", "rollout_log_probs", "group_index")
CUSTOM_FUNCTIONS = {
    "custom_policy_loss_path": (POLICY_LOSS_PARAMETERS, ()),
    "custom_tis_function_path": (TIS_PARAMETERS, ()),
    "custom_pg_loss_reducer_function_path": (REDUCER_PARAMETERS, REDUCER_KEYWORDS),
}


def validate_policy_loss_args(
    args: argparse.Namespace, *, sample_fields: Collection[str] | None = None
) -> argparse.Namespace:
    """Checks the flags of the policy loss, settles those that follow from others, and returns args.

    Call it once on every rank, after every override of the arguments and before Megatron builds its
    configs from them (``validate_args`` may come before or after). It settles ``loss_aggregation``,
    ``loss_aggregation_divisor`` and ``calculate_per_token_loss``; a second call changes nothing. If
    it raises, the arguments are as they were.

    Args:
        args: Parsed arguments. What a parser did not define counts as absent.
        sample_fields: Optional fields of ``Sample`` that the training script fills, of
            ``old_log_probs``, ``ref_log_probs``, ``rollout_log_probs`` and ``group_index``. None:
            not known yet, and nothing is checked against them.

    Raises:
        ValueError: A setting is out of range, contradicts another or lacks its input. The message
            names the flag and what to do.
        NotImplementedError: A layout that has no token window (BSHD under context parallelism), or
            ``--fused-lm-head`` where Megatron-Core or the model has no place for it.
    """
    host = HostSettings.from_args(args)
    _check_layout(args, host)
    settled = _settle_per_token_mode(_settle_aggregation(args), host)
    _check_sample_fields(settled, sample_fields)
    _check_custom_functions(settled)
    _check_fused_head(settled, args)
    if host.rank == 0:
        _log_decisions(args, settled)
    for name in ("loss_aggregation", "loss_aggregation_divisor", "calculate_per_token_loss"):
        setattr(args, name, getattr(settled, name))
    return args


@dataclass(frozen=True)
class HostSettings:
    """What validation needs of the trainer's own arguments; an absent one is a feature not used."""

    rank: int
    """Global rank; only rank 0 logs."""
    context_parallel_size: int
    auxiliary_losses: tuple[str, ...]
    """Flags of the losses that Megatron adds inside the model, and scales by token counts in
    per-token mode."""
    without_per_token_mode: tuple[str, ...]
    """Flags of the features that exclude per-token mode."""

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> HostSettings:
        """Reads Megatron's names (``megatron/training/arguments.py`` of 0.19)."""
        found = vars(args)
        auxiliary_losses = {
            "--moe-aux-loss-coeff": bool(found.get("num_experts")) and _has_balancing_loss(found),
            "--moe-z-loss-coeff": bool(found.get("num_experts") and found.get("moe_z_loss_coeff")),
            "--mtp-num-layers": bool(found.get("mtp_num_layers")),
        }
        without_per_token_mode = {
            "--use-torch-fsdp2": bool(found.get("use_torch_fsdp2")),
            "--ddp-average-in-collective": bool(found.get("ddp_average_in_collective")),
        }
        return cls(
            rank=int(found.get("rank", os.environ.get("RANK", "0"))),
            context_parallel_size=found.get("context_parallel_size") or 1,
            auxiliary_losses=tuple(flag for flag, used in auxiliary_losses.items() if used),
            without_per_token_mode=tuple(f for f, used in without_per_token_mode.items() if used),
        )


def _has_balancing_loss(found: dict[str, Any]) -> bool:
    """Whether the router has an auxiliary load-balancing loss: one coefficient, or several."""
    coefficients = found.get("moe_aux_loss_coeff") or 0.0
    kinds = found.get("moe_router_load_balancing_type", "aux_loss")
    if not isinstance(coefficients, (list, tuple)):
        coefficients = [coefficients]
    if isinstance(kinds, str):
        kinds = [kinds]
    return any(coefficients) and not AUXILIARY_LOAD_BALANCING.isdisjoint(kinds)


def _settle_aggregation(args: argparse.Namespace) -> PolicyLossConfig:
    """The config with the spelling ``--pg-loss-divisor`` and the default aggregation resolved."""
    found = vars(args)
    values = {name: found[name] for name in config_fields() if name in found}
    chosen, given = values.get("loss_aggregation"), values.get("loss_aggregation_divisor")
    divisor = found.get("pg_loss_divisor")
    if divisor is not None:
        if not INTERVALS["loss_aggregation_divisor"].contains(divisor):
            raise ValueError(f"--pg-loss-divisor must be a finite number > 0; found {divisor!r}")
        if chosen not in (None, "constant"):
            raise ValueError(
                f"--pg-loss-divisor {divisor:g} is short for --loss-aggregation constant; found "
                f"--loss-aggregation {chosen}: drop one of the two"
            )
        if given not in (None, divisor):
            raise ValueError(
                f"--pg-loss-divisor {divisor:g} and --loss-aggregation-divisor {given} are two "
                "different divisors: give one"
            )
        if values.get("custom_pg_loss_reducer_function_path") is not None:
            raise ValueError(
                "--custom-pg-loss-reducer-function-path replaces the reduction and would ignore "
                f"--pg-loss-divisor {divisor:g}: drop one of the two"
            )
        values.update(loss_aggregation="constant", loss_aggregation_divisor=divisor)
    elif chosen is None:
        values["loss_aggregation"] = "sample_mean"
    return PolicyLossConfig(**values)


def _settle_per_token_mode(config: PolicyLossConfig, host: HostSettings) -> PolicyLossConfig:
    """The config with the flag ``--calculate-per-token-loss`` and the aggregation in agreement.

    A mode that the host forces on the model's config later is not the flag and is not seen here.
    """
    custom_reducer = config.custom_pg_loss_reducer_function_path is not None
    aggregation = config.loss_aggregation
    if not config.calculate_per_token_loss:
        # Per-token mode is how Megatron runs a token mean, but the gradient is the same without it
        # and the losses inside the model keep their scale.
        obstacles = host.auxiliary_losses + host.without_per_token_mode
        wanted = aggregation == "token_mean" and not custom_reducer and not obstacles
        return replace(config, calculate_per_token_loss=wanted)
    if aggregation in ("constant", "prompt_mean"):
        raise ValueError(
            f"--calculate-per-token-loss asks for the token mean and --loss-aggregation "
            f"{aggregation} for another objective: drop --calculate-per-token-loss, or choose "
            "--loss-aggregation token_mean"
        )
    if host.without_per_token_mode:
        raise ValueError(
            f"--calculate-per-token-loss does not work with {host.without_per_token_mode[0]}: drop "
            "it and choose --loss-aggregation token_mean, whose gradient is the same without it"
        )
    relabelled = aggregation == "sample_mean" and not custom_reducer
    return replace(config, loss_aggregation="token_mean") if relabelled else config


def _check_layout(args: argparse.Namespace, host: HostSettings) -> None:
    if vars(args).get("qkv_format") == "bshd" and host.context_parallel_size > 1:
        raise NotImplementedError(
            f"--qkv-format bshd under --context-parallel-size {host.context_parallel_size}: BSHD "
            "splits sequences by the padded length of the micro-batch, which the loss is not told; "
            "use --qkv-format thd"
        )


def _check_sample_fields(config: PolicyLossConfig, sample_fields: Collection[str] | None) -> None:
    if sample_fields is None:
        return
    unknown = sorted(set(sample_fields) - set(OPTIONAL_SAMPLE_FIELDS))
    if unknown:
        raise ValueError(
            f"sample_fields: {unknown[0]!r} is no optional field of Sample; expected some of "
            + ", ".join(OPTIONAL_SAMPLE_FIELDS)
        )
    for field, flags in required_inputs(config).items():
        if field not in sample_fields:
            raise ValueError(
                f"{' and '.join(flags)} needs {field} of every sample, and the training script "
                f"provides none: fill Sample.{field}, or drop the flag"
            )


def _check_custom_functions(config: PolicyLossConfig) -> None:
    for name, (positional, keywords) in CUSTOM_FUNCTIONS.items():
        path = getattr(config, name)
        if path is not None:
            load_function(path, flag=flag_of(name), positional=positional, keywords=keywords)


def _check_fused_head(config: PolicyLossConfig, args: argparse.Namespace) -> None:
    if not config.fused_lm_head:
        return
    if not supports_output_processor():
        raise NotImplementedError(
            "--fused-lm-head needs GPTModel.forward(output_processor=...) of megatron-core 0.18 or "
            f"later; {'.'.join(map(str, megatron_core_version()))} is installed: drop the flag"
        )
    if vars(args).get("use_mup"):
        raise NotImplementedError(
            "--fused-lm-head does not scale logits as --use-mup does: drop one of the two"
        )


def _log_decisions(args: argparse.Namespace, config: PolicyLossConfig) -> None:
    """Says on rank 0 what was changed, what is ignored and what is likely a mistake."""
    if config.loss_aggregation == "token_mean" and vars(args).get("loss_aggregation") in (
        None,
        "sample_mean",
    ):
        logger.warning(
            "--calculate-per-token-loss makes the objective the token mean: --loss-aggregation "
            "sample_mean is now token_mean. Give --loss-aggregation token_mean to silence this, or "
            "drop the flag for the sample mean."
        )
    if config.custom_pg_loss_reducer_function_path is not None:
        logger.warning(
            "--custom-pg-loss-reducer-function-path %s takes the place of --loss-aggregation %s.",
            config.custom_pg_loss_reducer_function_path,
            config.loss_aggregation,
        )
    if config.custom_policy_loss_path is not None:
        logger.warning(
            "--custom-policy-loss-path %s takes the place of --policy-loss %s.",
            config.custom_policy_loss_path,
            config.policy_loss,
        )
    if config.kl_loss_coef > 0 and config.kl_loss_type == "k1" and not config.use_unbiased_kl:
        logger.warning(
            "--kl-loss-type k1 as a loss has zero expected gradient on-policy: use k2, k3 or "
            "--use-unbiased-kl."
        )
