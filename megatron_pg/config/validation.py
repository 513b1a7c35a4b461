"""Startup validation: the one place that changes parsed arguments."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_pg.config.combinations import violations_of
from megatron_pg.config.custom import custom_function_violations
from megatron_pg.config.fields import fields_of, flag_of, refuse
from megatron_pg.config.flags import add_args, is_defined
from megatron_pg.config.policy_loss import OPTIONAL_SAMPLE_FIELDS, PolicyLossConfig, required_inputs
from megatron_pg.config.rows import TABLES, did_you_mean

logger = logging.getLogger("megatron_pg")

AUXILIARY_LOAD_BALANCING = frozenset({"aux_loss", "seq_aux_loss", "global_aux_loss"})


def add_policy_loss_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the flags of the policy loss, in a group of their own; usable as Megatron's `extra_args_provider`.

    A flag that the parser has already is left as it is: its value lands in the same attribute.

    Raises:
        ValueError: the parser has a flag of the same name that stores to another attribute.
    """
    add_args(
        parser,
        PolicyLossConfig,
        title="policy loss",
        description="r: ratio of new to old policy; A: advantage; m: loss mask; x: per-token loss; sg: no gradient. "
        "Log-ratios are clamped to +-20.",
        # None tells validation that nothing was chosen, so that --pg-loss-divisor may.
        unset=("loss_aggregation",),
    )
    if not is_defined(parser, "pg_loss_divisor"):
        parser.add_argument(
            "--pg-loss-divisor",
            type=float,
            metavar="L",
            help="Short for --loss-aggregation constant --loss-aggregation-divisor L: 1/(N L) sum m x.",
        )
    return parser


def validate_policy_loss_args(
    args: argparse.Namespace, *, sample_fields: Collection[str] | None = None
) -> argparse.Namespace:
    """Checks the flags of the policy loss, settles those that follow from others, and returns args.

    Call it once on every rank, after every override of the arguments and before Megatron builds its configs from them
    (`validate_args` may come before or after). It settles `loss_aggregation`, `loss_aggregation_divisor` and
    `calculate_per_token_loss`; a second call changes nothing. If it raises, the arguments are as they were.

    Args:
        args: parsed arguments. What a parser did not define counts as absent.
        sample_fields: optional fields of `Sample` that the training script fills, of `old_log_probs`,
            `ref_log_probs`, `rollout_log_probs`, `group_index` and `kept_tokens`. None: not known yet, and nothing is checked
            against them.

    Raises:
        ValueError: settings are out of range, contradict each other or lack their inputs. The message has every
            violation, with its flag, what was found and what to do.
        NotImplementedError: the same where all that is wrong is a layout that has no token window (BSHD under context
            parallelism), Megatron-FSDP, or a setting of the output layer that `--fused-lm-head` or `--fp32-lm-head` leaves out.
    """
    # The trainer's own under Megatron's names (`megatron/training/arguments.py` of 0.19); absent: a feature not used.
    found = vars(args)
    values, refused = _settled_spelling(found)
    violations, config = violations_of(PolicyLossConfig, values)
    per_token, aggregation, of_per_token = _settled_per_token_mode(config, found)
    refused += violations + of_per_token
    refused += _sample_field_violations(config, sample_fields)
    refused += custom_function_violations(config)
    layout = layout_violation(config.qkv_format, found.get("context_parallel_size") or 1)
    not_implemented = [layout] if layout else []
    if found.get("use_megatron_fsdp"):
        not_implemented.append(
            "--use-megatron-fsdp: no test has held its gradients against the unsharded model's; use DDP, with "
            "--use-distributed-optimizer where optimizer states are to be sharded"
        )
    if config.fp32_lm_head or config.fused_lm_head:
        flag = "--fused-lm-head" if config.fused_lm_head else "--fp32-lm-head"
        not_implemented += output_layer_violations(flag, found)
    refuse(refused + not_implemented, error=ValueError if refused else NotImplementedError)
    rank = found.get("rank")
    if int(os.environ.get("RANK", "0") if rank is None else rank) == 0:
        _log_decisions(config, aggregation)
    args.loss_aggregation, args.calculate_per_token_loss = aggregation, per_token
    args.loss_aggregation_divisor = config.loss_aggregation_divisor
    return args


def _scales_losses_by_tokens(found: dict[str, Any]) -> bool:
    """Whether Megatron adds losses inside the model, which per-token mode scales by token counts."""
    of_experts = _has_balancing_loss(found) or found.get("moe_z_loss_coeff")
    return bool(found.get("mtp_num_layers") or (found.get("num_experts") and of_experts))


def _has_balancing_loss(found: dict[str, Any]) -> bool:
    """Whether the router has an auxiliary load-balancing loss: one coefficient, or several."""
    coefficients = found.get("moe_aux_loss_coeff") or 0.0
    kinds = found.get("moe_router_load_balancing_type", "aux_loss")
    is_used = any(coefficients) if isinstance(coefficients, (list, tuple)) else coefficients
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return bool(is_used) and not AUXILIARY_LOAD_BALANCING.isdisjoint(kinds)


def _settled_spelling(found: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values of the config with `--pg-loss-divisor` and the default aggregation resolved, and violations."""
    fields = fields_of(PolicyLossConfig)
    values = {name: found[name] for name in fields if name in found}
    chosen, given = values.get("loss_aggregation"), values.get("loss_aggregation_divisor")
    if chosen is None:
        values["loss_aggregation"] = PolicyLossConfig.loss_aggregation
    divisor = found.get("pg_loss_divisor")
    if divisor is None:
        return values, []
    field = replace(fields["loss_aggregation_divisor"], name="pg_loss_divisor")
    if violation := field.violation(divisor):
        return values, [violation]
    refused = []
    if chosen not in (None, "constant"):
        refused.append(
            f"--pg-loss-divisor {divisor:g} is short for --loss-aggregation constant; found --loss-aggregation "
            f"{chosen}: drop one of the two"
        )
    if given not in (None, divisor):
        refused.append(
            f"--pg-loss-divisor {divisor:g} and --loss-aggregation-divisor {given} are two different divisors: give one"
        )
    if values.get("custom_pg_loss_reducer_function_path") is not None:
        refused.append(
            "--custom-pg-loss-reducer-function-path replaces the reduction and would ignore --pg-loss-divisor "
            f"{divisor:g}: drop one of the two"
        )
        values.update(loss_aggregation=PolicyLossConfig.loss_aggregation)
    else:
        values.update(loss_aggregation="constant", loss_aggregation_divisor=divisor)
    return values, refused


def _settled_per_token_mode(config: Any, found: dict[str, Any]) -> tuple[bool, str, list[str]]:
    """Whether per-token mode is on, the aggregation that is left beside it by its row, and violations.

    A mode that the trainer forces on the model's config later is not the flag and is not seen here.
    """
    chosen = config.loss_aggregation
    row = TABLES["loss_aggregation"][chosen]
    is_custom = TABLES["loss_aggregation"].is_replaced(config)
    excluded_by = {
        "--use-torch-fsdp2": found.get("use_torch_fsdp2"),
        "--ddp-average-in-collective": found.get("ddp_average_in_collective"),
    }
    obstacles = [flag for flag, is_used in excluded_by.items() if is_used]
    if not config.calculate_per_token_loss:
        # Per-token mode is how Megatron runs a token mean, but the gradient is the same without it and the losses inside
        # the model keep their scale.
        is_how = row.under_per_token_flag == chosen and not is_custom
        return is_how and not (obstacles or _scales_losses_by_tokens(found)), chosen, []
    refused = []
    if row.under_per_token_flag is None:
        refused.append(
            f"--calculate-per-token-loss asks for the token mean and --loss-aggregation {chosen} for another objective: "
            "drop --calculate-per-token-loss, or choose --loss-aggregation token_mean"
        )
    if obstacles:
        refused.append(
            f"--calculate-per-token-loss does not work with {obstacles[0]}: drop it and choose "
            "--loss-aggregation token_mean, whose gradient is the same without it"
        )
    return True, chosen if is_custom else row.under_per_token_flag, refused


def layout_violation(qkv_format: str, context_parallel_size: int) -> str | None:
    """What is wrong with a layout that has no token window; None where nothing is."""
    if qkv_format != "bshd" or context_parallel_size <= 1:
        return None
    return (
        f"--qkv-format bshd with --context-parallel-size {context_parallel_size}: BSHD chunks every sequence by the padded "
        "maximum length of the micro-batch, which the loss is not told; use --qkv-format thd"
    )


def _sample_field_violations(
    config: PolicyLossConfig, sample_fields: Collection[str] | None
) -> Iterator[str]:
    if sample_fields is None:
        return
    for field in sorted(set(sample_fields).difference(OPTIONAL_SAMPLE_FIELDS)):
        yield (
            f"sample_fields: {field!r} is no optional field of Sample; expected some of "
            f"{', '.join(OPTIONAL_SAMPLE_FIELDS)}{did_you_mean(field, OPTIONAL_SAMPLE_FIELDS)}"
        )
    required = required_inputs(config)
    if config.loss_weight_denominator == "weights":  # of any: it is 1 for the tokens of the others
        required["loss_weights"] = ("--loss-weight-denominator weights",)
    for field, flags in required.items():
        if field not in sample_fields:
            yield (
                f"{' and '.join(flags)} needs {field} of every sample, and the training script provides none: fill "
                f"Sample.{field}, or drop the flag"
            )


def output_layer_violations(flag: str, found: Mapping[str, Any]) -> list[str]:
    """What of Megatron's settings, flags or a model's, is not in a product that takes the place of the output layer's.

    `flag` is the one that asks for it.
    """
    violations = []
    if flag == "--fused-lm-head" and found.get("use_mup"):
        violations.append(f"{flag} does not scale logits as --use-mup does: drop one of the two")
    if found.get("defer_embedding_wgrad_compute"):
        violations.append(
            f"{flag} computes the gradient of the output layer's weight in backward, which "
            "--defer-embedding-wgrad-compute puts off: drop one of the two"
        )
    if (found.get("gtp_weight_remat_size") or 1) > 1:
        violations.append(
            f"{flag} takes the weight of the output layer as tensor parallelism cuts it, and "
            "--tensor-parallel-num-weight-shards cuts it further: drop one of the two"
        )
    return violations


def _log_decisions(config: PolicyLossConfig, aggregation: str) -> None:
    """Says on rank 0 what was changed, what is ignored and what is likely a mistake."""
    if aggregation != config.loss_aggregation:
        logger.warning(
            f"--calculate-per-token-loss makes the objective the token mean: --loss-aggregation {config.loss_aggregation} "
            f"is now {aggregation}. Give --loss-aggregation {aggregation} to silence this, or drop the flag."
        )
    for table in TABLES.values():
        if table.replaced_by is not None and table.is_replaced(config):
            new, old = (
                f"{flag_of(name)} {getattr(config, name)}"
                for name in (table.replaced_by, table.field)
            )
            logger.warning(f"{new} takes the place of {old}.")
        on = table.rows_on(config)
        chosen: Any = getattr(config, table.field, None)
        # Said and not refused: a trainer's own flag may have another word as its default.
        if chosen in table and chosen != fields_of(PolicyLossConfig)[table.field].default:
            if not on and not table.is_replaced(config):
                switch = table.switch_of_row(table[chosen])
                logger.warning(f"{flag_of(table.field)} {chosen} is not read without {switch}.")
        for row in on:
            for name in row.unread_settings(config):
                value = getattr(config, name)
                if value != fields_of(PolicyLossConfig)[name].default:
                    logger.warning(
                        f"{flag_of(name)} {value:g} is not read by {table.flag_of_row(row)}: nothing is clipped by it."
                    )
    is_bare = not config.use_unbiased_kl and config.kl_loss_gradient == "estimate"
    if config.kl_loss_coef > 0 and config.kl_loss_type == "k1" and is_bare:
        logger.warning(
            "--kl-loss-type k1 as a loss has zero expected gradient on-policy: use k2, k3, --use-unbiased-kl or "
            "--kl-loss-gradient k2."
        )
