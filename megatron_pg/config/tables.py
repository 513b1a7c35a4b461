"""Tables of rows: what a setting chooses by name, each row with its properties beside its formula.

`megatron_pg/loss` fills the tables. Flags, help texts, required inputs, refusals, metric names,
the fused head and the tables of the docs read the rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

ANCHOR = "anchor_log_probs"
"""Name in `Row.inputs` of the log-probs that `--ratio-anchor` chooses."""
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
"""Fields of `Sample` that some settings need and others do not."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A name, its text, and its demands on the samples and on other settings."""

    setting: ClassVar[str] = ""
    """The setting that chooses one of the rows; "" if each row has a flag of its own."""

    name: str
    formula: str
    about: str = ""
    """Meaning of the formula's letters, and its source."""
    inputs: tuple[str, ...] = ()
    """Optional fields of `Sample` that every sample must fill, or `ANCHOR`."""
    options: tuple[str, ...] = ()
    """Settings that only rows which name them read: with another row they are refused."""
    needs: tuple[str, ...] = ()
    """The options that must be given."""
    flag: str = ""
    """The flags that turn the row on, a format of `config`; "" for the setting's, with the name."""
    when: Callable[[Any], bool] | None = None
    """Condition on a config for the row to be on, in addition to its name in the setting."""
    sequence_sums: tuple[str, ...] = ()
    """Sums over whole sequences that it needs, of "policy" (log r), "clipped_policy" (log r clipped
    as its token's advantage says) and "mismatch" (old_log_prob - rollout_log_prob)."""
    is_sum_over_tokens: bool = False
    """A token's gradient depends on that token and `sequence_sums` only: the fused head may work
    chunk by chunk."""

    @property
    def help(self) -> str:
        """Part of the flag's help text."""
        return f"{self.formula}, {self.about}" if self.about else self.formula

    @property
    def switch(self) -> str:
        """The flags that turn the row on, without a config's value."""
        return self.flag.partition(" {")[0] or self.flag_in(None)

    def flag_in(self, config: Any) -> str:
        """Return the flags that turn the row on under a config, for error messages."""
        chosen = f"--{self.setting.replace('_', '-')} {self.name}"
        return self.flag.format(config=config) if self.flag else chosen

    def is_on(self, config: Any) -> bool:
        """Return whether a config has the row on."""
        is_chosen = not self.setting or getattr(config, self.setting) == self.name
        is_read = is_chosen and not is_replaced(self.setting, config)
        return is_read and (self.when is None or self.when(config))

    def refusals(self, config: Any) -> list[str]:
        """Return the faults of a config with this row, beyond `options` and `needs`."""
        return []

    def unread_settings(self, config: Any) -> tuple[str, ...]:
        """Return the settings that this row does not read though other rows of its table do."""
        return ()


TABLES: dict[str, dict[str, Any]] = {
    "corrections": {},
    "loss_aggregation": {},
    "policy_loss": {},
    "kl_loss_type": {},
}
"""The tables by their setting, and the corrections, which have flags of their own."""
REPLACED_BY = {
    "loss_aggregation": "custom_pg_loss_reducer_function_path",
    "policy_loss": "custom_policy_loss_path",
}
"""The setting that, if given, takes the place of every row of a table."""
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
"""A row's name by a name that people give it, for hints in errors."""


def rows_on[RowType: Row](table: Mapping[str, RowType], config: Any) -> list[RowType]:
    """Return the rows that are on under a config, in the table's order."""
    return [row for row in table.values() if row.is_on(config)]


def is_replaced(setting: str, config: Any) -> bool:
    """Return whether a function of the user's own takes the place of a table's rows."""
    return setting in REPLACED_BY and getattr(config, REPLACED_BY[setting]) is not None


def required_inputs(config: Any) -> dict[str, tuple[str, ...]]:
    """Return the optional `Sample` fields that `config` needs, each with the flags that need it.

    A custom policy loss may read what it likes of the batch: nothing is required on its behalf.
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
    """Add rows to a table; refuse a name that is taken."""
    for row in rows:
        if row.name in table:
            raise ValueError(f"there is a row {row.name!r} already: give this one another name")
        table[row.name] = row


def decorator[RowType: Row, F: Callable[..., Any]](
    table: dict[str, RowType], row_type: Callable[..., RowType]
) -> Callable[..., Callable[[F], F]]:
    """Return a decorator `(formula, **properties)` that adds a function as a row of its name."""

    def of_row(formula: str, **properties: Any) -> Callable[[F], F]:
        def add(function: F) -> F:
            name = function.__name__
            add_rows(table, row_type(name=name, formula=formula, function=function, **properties))
            return function

        return add

    return of_row
