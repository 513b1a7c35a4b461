"""Which settings of the policy loss contradict each other, and which would be ignored: all of it in one error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_pg.config.fields import check_fields, fields_of, flag_of
from megatron_pg.config.rows import ANCHOR, TABLES

BOUNDS = (
    ("tis_clip_low", "tis_clip"),
    ("geometric_rejection_low", "geometric_rejection_high"),
    ("sequence_rejection_low", "sequence_rejection_high"),
)
"""Settings that are the lower and the upper bound of one weight."""


def violations_of(settings: type, values: Mapping[str, Any]) -> tuple[list[str], Any]:
    """Everything that is wrong with the values of a config, and the values with defaults for those that are wrong.

    Args:
        settings: `PolicyLossConfig`, whose own error this is.
        values: by the names of its fields.
    """
    violations, sound = check_fields(settings, values)
    for table in TABLES.values():
        for row in table.rows_on(sound):
            violations += row.refusals(sound)
        violations += _option_violations(table, sound, values, fields_of(settings))
    violations += _combination_violations(sound, values, fields_of(settings))
    return violations, sound


def _option_violations(
    table: Any, sound: Any, values: Mapping[str, Any], fields: Mapping[str, Any]
) -> Iterator[str]:
    """Settings of some rows that were given with others, which would ignore them, and those that a row lacks."""
    if table.is_replaced(sound):
        return
    on = table.rows_on(sound)
    for row in on:
        for option in row.needs:
            if values.get(option) is None:
                yield (
                    f"{table.flag_of_row(row)} needs {flag_of(option)}, a finite number {fields[option].interval}; "
                    "found None: give it, or choose another"
                )
    for option in dict.fromkeys(option for row in table.values() for option in row.options):
        value = getattr(sound, option)
        if value == fields[option].default or any(option in row.options for row in on):
            continue
        given = flag_of(option) if value is True else f"{flag_of(option)} {value}"
        owners = [row for row in table.values() if option in row.options]
        flag = flag_of(table.field)
        if owners[0].flag:
            switches = [table.switch_of_row(row) for row in owners]
            least = [
                s for s in switches if not any(set(o.split()) < set(s.split()) for o in switches)
            ]
            flags = " or ".join(dict.fromkeys(least))
            yield f"{given} is about {flags}: add what is missing, or drop it"
        else:
            names = " and ".join(row.name for row in owners)
            yield f"{given} belongs to {flag} {names}: drop it with {flag} {getattr(sound, table.field)}"


def _combination_violations(
    sound: Any, values: Mapping[str, Any], fields: Mapping[str, Any]
) -> Iterator[str]:
    """Settings that lack what they need, or would silently be ignored."""
    divisor = values.get("loss_aggregation_divisor")
    if sound.custom_pg_loss_reducer_function_path is not None:
        replaces = "--custom-pg-loss-reducer-function-path replaces the reduction and would ignore"
        if divisor is not None or sound.loss_aggregation == "constant":
            yield (
                f"{replaces} --loss-aggregation-divisor (found {divisor}) and --loss-aggregation constant: drop the divisor "
                "or the path"
            )
        if sound.loss_weight_denominator == "weights":
            yield f"{replaces} --loss-weight-denominator weights: drop one of the two"
    for low, high in BOUNDS:
        lowest, highest = getattr(sound, low), getattr(sound, high)
        if lowest > highest:
            yield (
                f"{flag_of(low)} {lowest:g} exceeds {flag_of(high)} {highest:g}: the lower bound must not be above the "
                "upper one"
            )
    if sound.ratio_anchor == "rollout":
        yield from _anchor_violations(sound)
    if sound.divide_gradient_twice and sound.grad_divisor is not None:
        yield (
            f"--divide-gradient-twice is the divisor outer count^2, and grad_divisor is {sound.grad_divisor:g}: give one "
            "of the two"
        )
    if sound.regularizer_aggregation == "loss" and not (sound.kl_loss_coef or sound.entropy_coef):
        yield (
            "--regularizer-aggregation loss is about --kl-loss-coef and --entropy-coef: give one of them, or drop it"
        )
    if sound.kl_loss_gradient == "k2" and sound.use_unbiased_kl:
        yield (
            "--kl-loss-gradient k2 and --use-unbiased-kl each give the KL term a gradient that is right in expectation: "
            "drop one of the two"
        )
    yield from _distillation_violations(sound, fields)
    if sound.kept_set_mass:
        yield from _mass_violations(sound)
    if sound.fused_lm_head and sound.qkv_format != "thd":
        yield (
            f"--fused-lm-head takes packed sequences; found --qkv-format {sound.qkv_format}: use --qkv-format thd, or "
            "drop --fused-lm-head"
        )


def _distillation_violations(sound: Any, fields: Mapping[str, Any]) -> Iterator[str]:
    """A teacher without distillation, distillation without a teacher, and what is defined for neither."""
    is_loss = sound.policy_loss == "distill" and sound.custom_policy_loss_path is None
    is_on = is_loss or sound.distill_coef > 0
    if is_on and sound.distill_teacher is None:
        flag = "--policy-loss distill" if is_loss else "--distill-coef"
        yield f"{flag} needs --distill-teacher logits, hidden or top_k: what the samples bring of the teacher"
    if sound.distill_teacher is not None and not is_on:
        yield "--distill-teacher is for --policy-loss distill and --distill-coef: give one of them, or drop it"
    if is_loss and sound.distill_coef > 0:
        yield "--distill-coef is for another policy loss: with --policy-loss distill drop it"
    if is_on and sound.replay_sampling_set:
        yield (
            "--replay-sampling-set renormalises the student to a set that the teacher's distribution does not have: drop it, "
            "or the distillation"
        )
    divergence, beta = sound.distill_divergence, sound.distill_beta
    if divergence != fields["distill_divergence"].default and not is_on:
        yield (
            f"--distill-divergence {divergence} is about --policy-loss distill and --distill-coef: give one of them, or drop it"
        )
    if beta == 1:
        yield "--distill-beta 1 leaves nothing of the student in the mixture: give a number below 1"
    elif beta != fields["distill_beta"].default and divergence != "jsd":
        yield f"--distill-beta {beta:g} is about --distill-divergence jsd: add what is missing, or drop it"


def _mass_violations(sound: Any) -> Iterator[str]:
    """What leaves --kept-set-mass without sets, without logits or without a report."""
    if not sound.replay_sampling_set:
        yield "--kept-set-mass is about the sets of --replay-sampling-set: add it, or drop --kept-set-mass"
    if sound.fused_lm_head:
        yield "--kept-set-mass takes the logits of all tokens, which --fused-lm-head does not make: drop one of the two"
    if sound.pg_metrics == "none":
        yield "--kept-set-mass is a metric, and --pg-metrics none reports none: drop one of the two"


def _anchor_violations(sound: Any) -> Iterator[str]:
    """What would make nothing of --ratio-anchor rollout, or twice of what it does."""
    if sound.use_tis:
        yield (
            "--ratio-anchor rollout takes the ratio against the rollout engine, and --use-tis would weigh the same "
            "mismatch again: drop one of the two"
        )
    rows = [row for table in TABLES.values() for row in table.rows_on(sound)]
    is_read = any(ANCHOR in row.inputs for row in rows) or sound.custom_policy_loss_path is not None
    if not (is_read or (sound.use_unbiased_kl and sound.kl_loss_coef > 0)):
        yield (
            f"--ratio-anchor rollout is about a ratio, and --policy-loss {sound.policy_loss} has none: drop it, or choose "
            "an objective with a ratio"
        )
