"""`PolicyLossConfig`: every setting of the policy loss, its flags, and their startup validation.

Each setting is defined with its help text. Choices from a table take the text of their row.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_pg.config.aggregation import (
    AggregationSettings,
    settle_divisor,
    settle_per_token_mode,
)
from megatron_pg.config.custom import custom_function_violations
from megatron_pg.config.model import ModelSettings, layout_violation, output_layer_violations
from megatron_pg.config.objective import (
    DistillationSettings,
    MismatchSettings,
    ObjectiveSettings,
    RegularizerSettings,
)
from megatron_pg.config.settings import add_args, fields_of, is_defined
from megatron_pg.config.tables import (
    OPTIONAL_SAMPLE_FIELDS,
    REPLACED_BY,
    TABLES,
    is_replaced,
    required_inputs,
    rows_on,
)
from megatron_pg.config.values import did_you_mean, flag_of, refuse

logger = logging.getLogger("megatron_pg")


@dataclass(frozen=True)
class PolicyLossConfig(
    # A dataclass takes the fields of its last base first.
    ModelSettings,
    DistillationSettings,
    MismatchSettings,
    RegularizerSettings,
    ObjectiveSettings,
    AggregationSettings,
):
    """Settings for the policy loss.

    Raises:
        ValueError: values are out of range or contradict each other. One error lists all
            violations and names fields and flags.
    """

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> PolicyLossConfig:
        """Make the config from args that `validate_policy_loss_args` has returned.

        See `Settings.from_args`.
        """
        if vars(args).get("loss_aggregation", "") is None:
            raise ValueError(
                "args.loss_aggregation is None. Call validate_policy_loss_args(args) first."
            )
        return super().from_args(args)

    def conflicts(self, given: Mapping[str, Any]) -> Iterator[str]:
        for setting, table in TABLES.items():
            for row in rows_on(table, self):
                yield from row.refusals(self)
            if not is_replaced(setting, self):
                yield from _option_violations(setting, self, given)

    @property
    def required_sample_fields(self) -> tuple[str, ...]:
        """Optional fields of `Sample` that every sample must carry under these settings."""
        return tuple(required_inputs(self))

    @property
    def distills(self) -> bool:
        """Whether the loss or one of its terms is the divergence from a teacher."""
        return self.distill_coef > 0 or (
            self.policy_loss == "distill" and self.custom_policy_loss_path is None
        )

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss or a metric reads the entropy."""
        return self.entropy_coef > 0 or self.pg_metrics == "with_entropy"


def _option_violations(
    table: str, config: PolicyLossConfig, given: Mapping[str, Any]
) -> Iterator[str]:
    """Yield options that the active rows need but lack, and options that only other rows read."""
    fields, all_rows = fields_of(PolicyLossConfig), TABLES[table].values()
    rows = rows_on(TABLES[table], config)
    for row in rows:
        for option in row.needs:
            if given.get(option) is None:
                need = f"{flag_of(option)}, a finite number {fields[option].interval}"
                yield f"{row.switch} requires {need}, not None."
    for option in dict.fromkeys(option for row in all_rows for option in row.options):
        value = getattr(config, option)
        if value == fields[option].default or any(option in row.options for row in rows):
            continue
        setting = flag_of(option) if value is True else f"{flag_of(option)} {value}"
        owners = [row for row in all_rows if option in row.options]
        if owners[0].flag:
            # Leave out a row's flags if a subset of them turns on a different row.
            switches = dict.fromkeys(row.switch for row in owners)
            least = [s for s in switches if not any({*o.split()} < {*s.split()} for o in switches)]
            yield f"{setting} has no effect without {' or '.join(least)}. Add one or remove it."
        else:
            flag, names = flag_of(table), " and ".join(row.name for row in owners)
            chosen = f"{flag} {getattr(config, table)}"
            yield f"{setting} belongs to {flag} {names}. Remove it for {chosen}."


def add_policy_loss_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the policy loss flags in an argument group. Usable as Megatron's `extra_args_provider`.

    A flag that the parser already has stays unchanged: its value lands in the same attribute.

    Raises:
        ValueError: the parser has a flag of the same name that stores to a different attribute.
    """
    is_theirs = is_defined(parser, "loss_aggregation")
    letters = (
        "r: ratio of new to old policy, A: advantage, m: loss mask, x: per-token loss, sg: no "
    )
    letters += "gradient. Log-ratios are clamped to +-20."
    add_args(parser, PolicyLossConfig, "policy loss", letters)
    if not is_theirs:
        # None means that nothing was chosen, so that --pg-loss-divisor may choose.
        parser.set_defaults(loss_aggregation=None)
    if not is_defined(parser, "pg_loss_divisor"):
        text = (
            "Short for --loss-aggregation constant --loss-aggregation-divisor L: 1/(N L) sum m x."
        )
        parser.add_argument("--pg-loss-divisor", type=float, metavar="L", help=text)
    return parser


def validate_policy_loss_args(
    args: argparse.Namespace, *, sample_fields: Collection[str] | None = None
) -> argparse.Namespace:
    """Check the policy loss flags, set the flags that follow from others, and return args.

    Call it once on every rank, after every override of the arguments and before Megatron builds its
    configs from them (`validate_args` may come before or after). It sets `loss_aggregation`,
    `loss_aggregation_divisor` and `calculate_per_token_loss`. A second call changes nothing. If it
    raises, the arguments are unchanged.

    Args:
        args: parsed arguments. An argument that no parser defined counts as absent.
        sample_fields: optional fields of `Sample` that the training script fills
            (`OPTIONAL_SAMPLE_FIELDS`). None: not known yet, and not checked.

    Raises:
        ValueError: settings are out of range, contradict each other or lack their inputs. The
            message lists every violation with its flag, the value found and a fix.
        NotImplementedError: the only violations are a layout without a token window (BSHD under
            context parallelism), Megatron-FSDP, or a Megatron setting of the output layer that
            `--fused-lm-head` or `--fp32-lm-head` does not support.
    """
    arguments = vars(args)
    values = {name: arguments[name] for name in fields_of(PolicyLossConfig) if name in arguments}
    refused = settle_divisor(values, arguments.get("pg_loss_divisor"))
    violations, config = PolicyLossConfig.checked(values)
    per_token, aggregation, mode_violations = settle_per_token_mode(config, arguments)
    refused += [*violations, *mode_violations, *_sample_field_violations(config, sample_fields)]
    refused += custom_function_violations(config)
    layout = layout_violation(config.qkv_format, arguments.get("context_parallel_size") or 1)
    not_implemented = [layout] if layout else []
    if arguments.get("use_megatron_fsdp"):
        not_implemented.append(
            "--use-megatron-fsdp is not supported: its gradients are untested against the "
            "unsharded model's. Use DDP, with --use-distributed-optimizer to shard optimizer "
            "states."
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
    """Yield the misspelled and the missing optional fields of a sample."""
    if sample_fields is None:
        return
    for field in sorted(set(sample_fields).difference(OPTIONAL_SAMPLE_FIELDS)):
        hint = did_you_mean(field, OPTIONAL_SAMPLE_FIELDS)
        expected = f"expected some of {', '.join(OPTIONAL_SAMPLE_FIELDS)}{hint}"
        yield f"sample_fields: {field!r} is not an optional field of Sample, {expected}"
    required = required_inputs(config)
    if config.loss_weight_denominator == "weights":  # of some samples: tokens of the rest weigh 1
        required["loss_weights"] = ("--loss-weight-denominator weights",)
    for field, flags in required.items():
        if field not in sample_fields:
            need = f"every sample must have {field} for {' and '.join(flags)}"
            yield f"{need}. Fill Sample.{field} or remove the flag."


def require_config(config: Any) -> None:
    """Raise a TypeError for anything except a config, such as the args of a parser."""
    if not isinstance(config, PolicyLossConfig):
        found = type(config).__name__
        raise TypeError(
            f"config is a {found}, not a PolicyLossConfig. Use PolicyLossConfig.from_args(args)."
        )


def _warnings(config: PolicyLossConfig, aggregation: str) -> Iterator[str]:
    """Yield settings that were changed, that are not read, and that are likely a mistake."""
    fields, chosen = fields_of(PolicyLossConfig), config.loss_aggregation
    if aggregation != chosen:
        yield (
            "--calculate-per-token-loss makes the objective the token mean: --loss-aggregation "
            f"{chosen} becomes {aggregation}. Use --loss-aggregation {aggregation} or remove the "
            "flag."
        )
    for setting, table in TABLES.items():
        rows, flag = rows_on(table, config), flag_of(setting)
        word: Any = getattr(config, setting, None)
        if is_replaced(setting, config):
            by = REPLACED_BY[setting]
            yield f"{flag_of(by)} {getattr(config, by)} replaces {flag} {word}."
        # A warning, not an error: the trainer's own flag may have a different default.
        elif word in table and word != fields[setting].default and not rows:
            yield f"{flag} {word} has no effect without {table[word].switch}."
        for row in rows:
            for name in row.unread_settings(config):
                value: Any = getattr(config, name)
                if value != fields[name].default:
                    unread = f"{flag_of(name)} {value:g} has no effect with {row.switch}"
                    yield f"{unread}: it clips nothing."
    is_bare = not config.use_unbiased_kl and config.kl_loss_gradient == "estimate"
    if config.kl_loss_coef > 0 and config.kl_loss_type == "k1" and is_bare:
        yield (
            "--kl-loss-type k1 as a loss has zero expected gradient on-policy. Use k2, k3, "
            "--use-unbiased-kl or --kl-loss-gradient k2."
        )
