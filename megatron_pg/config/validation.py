"""Flags of the policy loss and their startup validation: the one place that changes parsed arguments."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Collection, Iterator
from typing import Any

from megatron_pg.config.aggregation import settle_divisor, settle_per_token_mode
from megatron_pg.config.custom import custom_function_violations
from megatron_pg.config.fields import fields_of, flag_of, refuse
from megatron_pg.config.flags import add_args, is_defined
from megatron_pg.config.model import layout_violation, output_layer_violations
from megatron_pg.config.policy_loss import (
    OPTIONAL_SAMPLE_FIELDS,
    PolicyLossConfig,
    required_inputs,
    violations_of,
)
from megatron_pg.config.rows import TABLES, did_you_mean

logger = logging.getLogger("megatron_pg")


def add_policy_loss_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of the policy loss, in a group of their own; usable as Megatron's `extra_args_provider`.

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
    """Check the flags of the policy loss, settle those that follow from others, and return args.

    Call it once on every rank, after every override of the arguments and before Megatron builds its configs from them
    (`validate_args` may come before or after). It settles `loss_aggregation`, `loss_aggregation_divisor` and
    `calculate_per_token_loss`; a second call changes nothing. If it raises, the arguments are as they were.

    Args:
        args: parsed arguments. An argument that no parser defined counts as absent.
        sample_fields: optional fields of `Sample` that the training script fills (`OPTIONAL_SAMPLE_FIELDS`). None: not
            known yet, and nothing is checked against them.

    Raises:
        ValueError: settings are out of range, contradict each other or lack their inputs. The message has every
            violation, with its flag, what was found and what to do.
        NotImplementedError: the same where nothing else is wrong than a layout without a token window (BSHD under
            context parallelism), Megatron-FSDP, or a setting of the output layer that `--fused-lm-head` or
            `--fp32-lm-head` does not serve.
    """
    arguments = vars(args)
    values = {name: arguments[name] for name in fields_of(PolicyLossConfig) if name in arguments}
    refused = settle_divisor(values, arguments.get("pg_loss_divisor"))
    violations, config = violations_of(values)
    per_token, aggregation, mode_violations = settle_per_token_mode(config, arguments)
    refused += [*violations, *mode_violations, *_sample_field_violations(config, sample_fields)]
    refused += custom_function_violations(config)
    layout = layout_violation(config.qkv_format, arguments.get("context_parallel_size") or 1)
    not_implemented = [layout] if layout else []
    if arguments.get("use_megatron_fsdp"):
        not_implemented.append(
            "--use-megatron-fsdp: no test has held its gradients against the unsharded model's; use DDP, with "
            "--use-distributed-optimizer where optimizer states are to be sharded"
        )
    if config.fp32_lm_head or config.fused_lm_head:
        flag = "--fused-lm-head" if config.fused_lm_head else "--fp32-lm-head"
        not_implemented += output_layer_violations(flag, arguments)
    refuse(refused + not_implemented, error=ValueError if refused else NotImplementedError)
    rank = arguments.get("rank")
    if int(os.environ.get("RANK", "0") if rank is None else rank) == 0:
        for warning in _warnings(config, aggregation):
            logger.warning(warning)
    args.loss_aggregation, args.calculate_per_token_loss = aggregation, per_token
    args.loss_aggregation_divisor = config.loss_aggregation_divisor
    return args


def _sample_field_violations(
    config: PolicyLossConfig, sample_fields: Collection[str] | None
) -> Iterator[str]:
    """Yield the optional fields of a sample that are misspelt, and those that are needed and not filled."""
    if sample_fields is None:
        return
    for field in sorted(set(sample_fields).difference(OPTIONAL_SAMPLE_FIELDS)):
        yield (
            f"sample_fields: {field!r} is no optional field of Sample; expected some of "
            f"{', '.join(OPTIONAL_SAMPLE_FIELDS)}{did_you_mean(field, OPTIONAL_SAMPLE_FIELDS)}"
        )
    required = required_inputs(config)
    if config.loss_weight_denominator == "weights":  # of any sample: tokens of the others weigh 1
        required["loss_weights"] = ("--loss-weight-denominator weights",)
    for field, flags in required.items():
        if field not in sample_fields:
            yield (
                f"{' and '.join(flags)} needs {field} of every sample, and the training script provides none: fill "
                f"Sample.{field}, or drop the flag"
            )


def _warnings(config: PolicyLossConfig, aggregation: str) -> Iterator[str]:
    """Yield what was changed, what is not read and what is likely a mistake."""
    fields = fields_of(PolicyLossConfig)
    if aggregation != config.loss_aggregation:
        yield (
            f"--calculate-per-token-loss makes the objective the token mean: --loss-aggregation {config.loss_aggregation} "
            f"is now {aggregation}. Give --loss-aggregation {aggregation} to silence this, or drop the flag."
        )
    for table in TABLES.values():
        rows = table.rows_on(config)
        chosen: Any = getattr(config, table.field, None)
        if table.replaced_by is not None and table.is_replaced(config):
            path = getattr(config, table.replaced_by)
            yield f"{flag_of(table.replaced_by)} {path} takes the place of {flag_of(table.field)} {chosen}."
        # Said and not refused: a trainer's own flag may have another word as its default.
        elif chosen in table and chosen != fields[table.field].default and not rows:
            switch = table.switch_of_row(table[chosen])
            yield f"{flag_of(table.field)} {chosen} is not read without {switch}."
        for row in rows:
            for name in row.unread_settings(config):
                value: Any = getattr(config, name)
                if value != fields[name].default:
                    yield f"{flag_of(name)} {value:g} is not read by {table.flag_of_row(row)}: nothing is clipped by it."
    is_bare = not config.use_unbiased_kl and config.kl_loss_gradient == "estimate"
    if config.kl_loss_coef > 0 and config.kl_loss_type == "k1" and is_bare:
        yield (
            "--kl-loss-type k1 as a loss has zero expected gradient on-policy: use k2, k3, --use-unbiased-kl or "
            "--kl-loss-gradient k2."
        )
