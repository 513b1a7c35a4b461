"""`PolicyLossConfig`: every setting of the policy loss, in groups by subject.

The docstring under a field is also the `--help` text of its flag, so each formula is stated once. The text of a table's
word (`--loss-aggregation`, `--policy-loss`, `--kl-loss-type`) is that of its row. In all of them m is the loss mask,
A the advantage, sg() stops the gradient, and log-ratios are clamped to +-20 before they are exponentiated.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_pg.config.aggregation import AggregationSettings
from megatron_pg.config.fields import check_fields, fields_of, flag_of, refuse
from megatron_pg.config.flags import read_args
from megatron_pg.config.mismatch import MAX_LOG_RATIO as MAX_LOG_RATIO
from megatron_pg.config.mismatch import MismatchSettings
from megatron_pg.config.model import CpPartitionMode as CpPartitionMode
from megatron_pg.config.model import ModelSettings, ReportSettings
from megatron_pg.config.objective import (
    DistillationSettings,
    ObjectiveSettings,
    RegularizerSettings,
)
from megatron_pg.config.rows import ANCHOR, TABLES

LOG_PROB_FIELDS = ("old_log_probs", "ref_log_probs", "rollout_log_probs")
OPTIONAL_SAMPLE_FIELDS = (*LOG_PROB_FIELDS, "group_index", "kept_tokens", "loss_weights")
"""Fields of `Sample` that some settings need and others do not."""


@dataclass(frozen=True)
class PolicyLossConfig(
    # A dataclass takes the fields of its last base first.
    ReportSettings,
    ModelSettings,
    DistillationSettings,
    MismatchSettings,
    RegularizerSettings,
    ObjectiveSettings,
    AggregationSettings,
):
    """Settings of the policy loss.

    Raises:
        ValueError: values are out of range or contradict each other. One error has all violations, and names fields
            and flags.
    """

    def __post_init__(self) -> None:
        refuse(violations_of(vars(self))[0])

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> PolicyLossConfig:
        """Make the config from args that `validate_policy_loss_args` has returned.

        A field whose flag the parser did not define keeps its default.

        Raises:
            ValueError: the args were not validated, or a value is out of range.
        """
        if vars(args).get("loss_aggregation", "") is None:
            raise ValueError(
                "args.loss_aggregation is None: call validate_policy_loss_args(args) before "
                "PolicyLossConfig.from_args(args)"
            )
        return read_args(cls, args)

    @property
    def required_sample_fields(self) -> tuple[str, ...]:
        """Optional fields of `Sample` that every sample must carry under these settings."""
        return tuple(required_inputs(self))

    @property
    def distills(self) -> bool:
        """The loss, or one of its terms, is the divergence from a teacher."""
        return self.distill_coef > 0 or (
            self.policy_loss == "distill" and self.custom_policy_loss_path is None
        )

    @property
    def needs_entropy(self) -> bool:
        """The loss or a metric reads the entropy."""
        return self.entropy_coef > 0 or self.pg_metrics == "with_entropy"


def anchor_of(config: Any) -> str:
    """Return the field of `Sample` that the ratio is taken against."""
    return f"{config.ratio_anchor}_log_probs"


def required_inputs(config: PolicyLossConfig) -> dict[str, tuple[str, ...]]:
    """Return the optional `Sample` fields that `config` needs, each with the flags that need it.

    A custom policy loss may read what it likes of the batch: nothing is required on its behalf.
    """
    readers: list[tuple[str, tuple[str, ...]]] = []
    if config.use_unbiased_kl and config.kl_loss_coef > 0:
        readers.append(("--use-unbiased-kl", (ANCHOR,)))
    if config.replay_sampling_set:
        readers.append(("--replay-sampling-set", ("kept_tokens",)))
    for table in TABLES.values():
        readers += [(table.flag_of_row(row, config), row.inputs) for row in table.rows_on(config)]
    flags: dict[str, dict[str, None]] = {field: {} for field in OPTIONAL_SAMPLE_FIELDS}
    for flag, inputs in readers:
        if ANCHOR in inputs and config.ratio_anchor == "rollout":
            flag += " --ratio-anchor rollout"
        for name in inputs:
            flags[anchor_of(config) if name == ANCHOR else name][flag] = None
    return {field: tuple(names) for field, names in flags.items() if names}


def violations_of(values: Mapping[str, Any]) -> tuple[list[str], PolicyLossConfig]:
    """Return everything that is wrong with the values of a config, and a config with defaults for the wrong ones."""
    violations, sound = check_fields(PolicyLossConfig, values)
    for table in TABLES.values():
        for row in table.rows_on(sound):
            violations += row.refusals(sound)
        violations += _option_violations(table, sound, values)
    groups: tuple[Any, ...] = PolicyLossConfig.__bases__
    for group in reversed(groups):
        violations += group.conflicts(sound)
    return violations, sound


def _option_violations(
    table: Any, sound: PolicyLossConfig, values: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the options that the rows which are on lack, and those that only other rows of the table read."""
    if table.is_replaced(sound):
        return
    fields, rows = fields_of(PolicyLossConfig), table.rows_on(sound)
    for row in rows:
        for option in row.needs:
            if values.get(option) is None:
                yield (
                    f"{table.flag_of_row(row)} needs {flag_of(option)}, a finite number {fields[option].interval}; "
                    "found None: give it, or choose another"
                )
    for option in dict.fromkeys(option for row in table.values() for option in row.options):
        value = getattr(sound, option)
        if value == fields[option].default or any(option in row.options for row in rows):
            continue
        setting = flag_of(option) if value is True else f"{flag_of(option)} {value}"
        owners = [row for row in table.values() if option in row.options]
        flag = flag_of(table.field)
        if owners[0].flag:
            switches = [table.switch_of_row(row) for row in owners]
            words = [set(switch.split()) for switch in switches]
            least = [s for s in switches if not any(other < set(s.split()) for other in words)]
            flags = " or ".join(dict.fromkeys(least))
            yield f"{setting} is about {flags}: add what is missing, or drop it"
        else:
            names = " and ".join(row.name for row in owners)
            yield f"{setting} belongs to {flag} {names}: drop it with {flag} {getattr(sound, table.field)}"
