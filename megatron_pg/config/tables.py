"""Tables of rows that a setting chooses by name. Each row has a formula and its properties.

`megatron_pg/loss` fills the tables. Flags, help texts, required inputs, errors, metric names, the
fused head and the docs' tables read the rows.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

ANCHOR = "anchor_log_probs"
"""Name in `Row.inputs` for the log-probs that `--ratio-anchor` chooses."""
LOG_PROB_FIELDS = ("old_log_probs", "ref_log_probs", "rollout_log_probs")
OPTIONAL_SAMPLE_FIELDS = (
    *LOG_PROB_FIELDS,
    "group_index",
    "kept_tokens",
    "loss_weights",
    "policy_version",
    "routed_experts",
    "sampler_top_k",
    "turn_ids",
)
"""Fields of `Sample` that only some settings require."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Name with a formula and its requirements on samples and other settings."""

    setting: ClassVar[str] = ""
    """The setting that chooses a row, or "" if each row has its own flag."""

    name: str
    formula: str
    about: str = ""
    """Meaning of the formula's letters, and the source."""
    inputs: tuple[str, ...] = ()
    """Optional fields of `Sample` that every sample must fill, or `ANCHOR`."""
    options: tuple[str, ...] = ()
    """Settings that only rows naming them read. With a different row they are errors."""
    needs: tuple[str, ...] = ()
    """Required options."""
    flag: str = ""
    """Format string over `config` for the flags that turn the row on. "": setting and name."""
    when: Callable[[Any], bool] | None = None
    """Condition on a config for the row to be on, in addition to its name in the setting."""
    sequence_sums: tuple[str, ...] = ()
    """Required sums over whole sequences: "policy" (log r), "clipped_policy" (log r, clipped by the
    sign of its token's advantage) and "mismatch" (old_log_prob - rollout_log_prob)."""
    is_sum_over_tokens: bool = False
    """Whether a token's gradient depends only on that token and `sequence_sums`, so that the fused
    head may work chunk by chunk."""

    @property
    def help(self) -> str:
        """The row's part of the flag's help text."""
        return f"{self.formula}, {self.about}" if self.about else self.formula

    @property
    def switch(self) -> str:
        """The flags that turn the row on, without values."""
        return self.flag.partition(" {")[0] or self.flag_in(None)

    def flag_in(self, config: Any) -> str:
        """Return the flags that turn the row on, with a config's values, for error messages."""
        chosen = f"--{self.setting.replace('_', '-')} {self.name}"
        return self.flag.format(config=config) if self.flag else chosen

    def is_on(self, config: Any) -> bool:
        """Return whether a config turns the row on."""
        is_chosen = not self.setting or getattr(config, self.setting) == self.name
        is_read = is_chosen and not is_replaced(self.setting, config)
        return is_read and (self.when is None or self.when(config))

    def refusals(self, config: Any) -> list[str]:
        """Return a config's errors with this row, in addition to `options` and `needs`."""
        return []

    def unread_settings(self, config: Any) -> tuple[str, ...]:
        """Return the settings that this row ignores although other rows of its table read them."""
        return ()


TABLES: dict[str, dict[str, Any]] = {
    "corrections": {},
    "loss_aggregation": {},
    "policy_loss": {},
    "kl_loss_type": {},
}
"""Tables by setting, and the corrections, which have their own flags."""
FILLED_BY = "megatron_pg.loss"
"""The package with the rows, named because this layer may not import it."""
REPLACED_BY = {
    "loss_aggregation": "custom_pg_loss_reducer_function_path",
    "policy_loss": "custom_policy_loss_path",
}
"""The setting that replaces all rows of a table."""
ALSO_KNOWN_AS: dict[str, Mapping[str, str]] = {
    "loss_aggregation": {
        "grpo": "sample_mean",
        "dapo": "prompt_mean",
        "scalerl": "prompt_mean",
        "group_mean": "prompt_mean",
        "token-mean": "token_mean",
        **dict.fromkeys(("dr.grpo", "dr_grpo", "drgrpo"), "constant, with dr_grpo's advantages"),
    },
    "policy_loss": {
        "grpo": "ppo",
        "dr_grpo": "ppo, with --loss-aggregation constant and dr_grpo's advantages",
        "pg": "reinforce",
        "policy_gradient": "reinforce",
        "nll": "sft",
        "dppo": "dppo_tv",
        "geo_mean": "gmpo",
        "rollout_is": "dis",
        "luspo": "gspo, with --loss-aggregation constant --loss-aggregation-divisor 1",
    },
    "kl_loss_type": {"kl": "k1", "mse": "k2", "low_var": "low_var_kl"},
}
"""Rows by their common names, for hints in errors."""


def table_of(setting: str) -> dict[str, Any]:
    """Return the rows of a setting, none if no table belongs to it."""
    table = TABLES.get(setting, {})
    if setting in TABLES and not table:  # nothing has imported the rows yet
        importlib.import_module(FILLED_BY)
    return table


def rows_on[RowType: Row](table: Mapping[str, RowType], config: Any) -> list[RowType]:
    """Return the rows that a config turns on, in the table's order."""
    return [row for row in table.values() if row.is_on(config)]


def is_replaced(setting: str, config: Any) -> bool:
    """Return whether a custom function replaces a table's rows."""
    return setting in REPLACED_BY and getattr(config, REPLACED_BY[setting]) is not None


def required_inputs(config: Any) -> dict[str, tuple[str, ...]]:
    """Return the optional `Sample` fields that `config` requires, each with the responsible flags.

    A custom policy loss may read any field and requires none.
    """
    readers: list[tuple[str, tuple[str, ...]]] = []
    if config.use_unbiased_kl and config.kl_loss_coef > 0:
        readers.append(("--use-unbiased-kl", (ANCHOR,)))
    if config.replay_sampling_set:
        readers.append(("--replay-sampling-set", ("kept_tokens",)))
    if config.replay_routing:
        readers.append(("--replay-routing", ("routed_experts",)))
    if config.old_log_probs == "interpolated":
        fields = ("rollout_log_probs", "policy_version")
        readers.append(("--old-log-probs interpolated", fields))
    if config.sequence_unit == "turn":
        readers.append(("--sequence-unit turn", ("turn_ids",)))
    for table in TABLES.values():
        readers += [(row.flag_in(config), row.inputs) for row in rows_on(table, config)]
    flags: dict[str, dict[str, None]] = {field: {} for field in OPTIONAL_SAMPLE_FIELDS}
    for flag, inputs in readers:
        if ANCHOR in inputs and config.ratio_anchor == "rollout":
            flag += " --ratio-anchor rollout"
        for name in inputs:
            flags[config.anchor if name == ANCHOR else name][flag] = None
    if config.old_log_probs != "given":
        del flags["old_log_probs"]
    return {field: tuple(names) for field, names in flags.items() if names}


def add_rows[RowType: Row](table: dict[str, RowType], *rows: RowType) -> None:
    """Add rows to a table.

    Raises:
        ValueError: the table already has a row of this name.
    """
    for row in rows:
        if row.name in table:
            raise ValueError(f"the row {row.name!r} already exists. Choose a different name.")
        table[row.name] = row


def decorator[RowType: Row, F: Callable[..., Any]](
    table: dict[str, RowType], row_type: Callable[..., RowType]
) -> Callable[..., Callable[[F], F]]:
    """Return a decorator `(formula, **properties)` that adds a function as a row under its name."""

    def of_row(formula: str, **properties: Any) -> Callable[[F], F]:
        def add(function: F) -> F:
            name = function.__name__
            add_rows(table, row_type(name=name, formula=formula, function=function, **properties))
            return function

        return add

    return of_row
