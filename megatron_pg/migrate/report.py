"""The objective of a launch line, in words and in numbers."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_pg.config import PolicyLossConfig
from megatron_pg.loss.aggregation import AGGREGATIONS
from megatron_pg.migrate.accepted import refusal_of_hook, refused_flag
from megatron_pg.migrate.line import Line
from megatron_pg.migrate.rows import Settings, Term, TrainerTable, holds, shown, with_terms
from megatron_pg.step.totals import BareSample, step_totals

OLD = "compute old_log_probs for the whole batch before its first step"
SETTINGS = re.compile(r".*<settings>.*\n")
"""A recipe's line with the file of this package's settings in slime and miles."""
OTHERS = {"token_sum": "sum m x", "unknown": "not known here"}
"""Formulas of aggregations that this package does not have."""


def formula_of(aggregation: str) -> str:
    """Return the formula of an aggregation, of this package or a trainer."""
    return OTHERS.get(aggregation) or AGGREGATIONS[aggregation].formula


def divisor_per_rollout(aggregation: str) -> str:
    """Return N times a token's divisor from the formula of its aggregation, such as D_i or (P G_g /
    N).
    """
    formula = re.sub(r"max\((\w+), 1\)", r"\1", formula_of(aggregation))
    read = re.fullmatch(r"(?:1/\(?([\w ]+?)\)? )?sum(?: |.* )m x(?: / (.+)\))?", formula)
    if read is None:  # a formula of a different form
        return f"(the divisor of {aggregation})"
    factors = [*(read[1] or "").split(), *([read[2]] if read[2] else [])]
    if "N" in factors:
        return " ".join(factor for factor in factors if factor != "N") or "1"
    return f"({' '.join(factors) or 1} / N)"


def weights(term: Term, lengths: Sequence[int], group_size: int) -> list[float]:
    """Return each rollout's weight per token in a term, without the coefficient.

    `lengths` are the active tokens of the step's rollouts. Each `group_size` consecutive rollouts
    share a prompt.
    """
    if term.aggregation == "token_sum":
        return [1.0] * len(lengths)
    mode = AGGREGATIONS[term.aggregation]
    rows = [BareSample(n, i // group_size, None, f"rollout {i}") for i, n in enumerate(lengths)]
    totals = step_totals(rows, allow_different_group_sizes=True)  # the last group may be smaller
    divisors = mode.divisors_of(totals, rows, term.divisor)
    return (1 / (divisors * mode.outer_count(totals))).tolist()


def effective(term: Term, policy: Term, lengths: Sequence[int], group_size: int) -> str:
    """Return a term's coefficient relative to the policy loss, on one token."""
    coefficient = abs(term.coefficient)
    if "unknown" in (term.aggregation, policy.aggregation):
        return "not known"
    if term.weighing == policy.weighing:
        return f"{coefficient:g} for every token"
    both = (policy, term)
    divisors = [f"{t.divisor:g}" if t.divisor else divisor_per_rollout(t.aggregation) for t in both]
    text = f"{coefficient:g} * {' / '.join(divisors)}"
    if any(t.aggregation == "constant" and not t.divisor for t in both):
        return text
    if not lengths:
        return text + " (in numbers with --lengths)"
    ratios = zip(*(weights(t, lengths, group_size) for t in both), strict=True)
    numbers = ", ".join(f"{coefficient * own / other:.3g}" for other, own in ratios)
    return f"{text} = {numbers} for {', '.join(map(str, lengths))} tokens"


def wanted(line: Line, options: Any) -> tuple[list[Term], str, float | None]:
    """Return a launch line's terms, and the wanted aggregation and divisor, by default the
    line's.
    """
    terms = line.trainer.terms(line.settings)
    mode = options.loss_aggregation or terms[0].aggregation
    mode = mode if mode in AGGREGATIONS else "sample_mean"
    divisor = options.loss_aggregation_divisor or terms[0].divisor
    divisor = divisor if divisor and divisor > 0 else None
    if terms[0].aggregation == "constant":
        terms[0] = terms[0]._replace(divisor=terms[0].divisor or divisor)
    return terms, mode, divisor


def lines(line: Line, options: Any) -> list[str]:
    """Write the report of a launch line, with the command's options."""
    trainer, given = line.trainer, line.settings
    terms, mode, divisor = wanted(line, options)
    policy, active = terms[0], [term for term in terms[1:] if term.coefficient]
    found = [f"{trainer.name}, as in {trainer.source}", "", "What it computes"]
    for term in terms:
        sign = "" if term is policy else f"{term.coefficient:+g} * "
        length = f" with L = {term.divisor:g}" if term.divisor else ""
        shown = f"{sign}{term.aggregation}{length}: {formula_of(term.aggregation)}"
        found.append(f"  {term.name:<12} {shown if term.coefficient else 'none'}")
    for term in active:
        ratio = effective(term, policy, options.lengths, options.group_size)
        found.append(f"  {term.name} relative to the policy loss: {ratio}")
    limits = trainer.limits(given, terms)
    for term in active:
        if term.weighing != policy.weighing:
            two = f"{term.name} is {term.aggregation}, the policy loss {policy.aggregation}"
            limits.append(f"{two}: their ratio is not the coefficient (see above).")
    limits += line.notes
    shown_limits = limits or ["no known error"]
    found += ["", "Where it is off", *(f"  - {limit}" for limit in shown_limits)]
    exact = recipe(line, terms, mode, divisor)
    is_wanted = mode == policy.aggregation and divisor == policy.divisor
    if is_wanted and not limits and "no lines" not in exact:
        exact += "\n(not needed: the launch line has no known error)"
    found += ["", f"{mode} exactly, in {trainer.name}", *(f"  {s}" for s in exact.splitlines())]
    flags, missing, beside = here(trainer, given, terms, mode, divisor)
    if policy.aggregation not in AGGREGATIONS and not options.loss_aggregation:
        missing.append(f"aggregation={policy.aggregation}")
    is_same = "nearest" if missing else "same"
    found += ["", f"The {is_same} per-token loss in a training script of this package"]
    found += [f"  {flags}", *(f"  no counterpart here: {setting}" for setting in missing)]
    found += [f"  not carried over: {setting}" for setting in beside]
    if "<L>" in exact + flags:
        text = "<L> is the unknown divisor in tokens: add --loss-aggregation-divisor"
        found += ["", text]
    return found


def recipe(line: Line, terms: Sequence[Term], mode: str, divisor: float | None) -> str:
    """Return the lines that make an aggregation exact in the trainer, and why they are refused
    there, if they are.
    """
    policy, active = terms[0], [term for term in terms[1:] if term.coefficient]
    settings = {"loss_aggregation_divisor": _number(divisor)} if mode == "constant" else {}
    if active:
        is_one = all(term.weighing == policy.weighing for term in active)
        settings["regularizer_aggregation"] = "loss" if is_one else "sample_mean"
    text = line.trainer.recipe(mode, line.settings).strip().replace("<L>", _number(divisor))
    written = ", ".join(f"{key}: {value}" for key, value in settings.items())
    text = text.replace("<settings>", written) if written else SETTINGS.sub("", text)
    if refusal := refusal_of_hook(line, mode, settings):
        text += f"\n(refused in this launch line, with the remedy: {refusal})"
    return text


def _number(divisor: float | None) -> str:
    return f"{divisor:g}" if divisor else "<L>"


class Translation(NamedTuple):
    """A launch line translated to this package."""

    flags: str
    missing: list[str]
    """Settings of the per-token loss that have no counterpart, as `key=value`."""
    beside: list[str]
    """Settings outside the per-token loss that have no flag, with advice."""


def here(
    trainer: TrainerTable, given: Settings, terms: Sequence[Term], mode: str, divisor: float | None
) -> Translation:
    """Translate the trainer's settings to flags that this package's validation accepts."""
    flags: list[str | None] = [f"--loss-aggregation {mode}"]
    if mode == "constant":
        flags.append(f"--loss-aggregation-divisor {_number(divisor)}")
    known, missing, beside = with_terms(given, terms), list[str](), list[str]()
    policy, active = terms[0], [term for term in terms[1:] if term.coefficient]
    if all(term.weighing == policy.weighing for term in active):
        flags += ["--regularizer-aggregation loss"] * (bool(active) and mode != "sample_mean")
    else:
        others = [term for term in active if term.aggregation != "sample_mean"]
        missing += [f"aggregation of the {term.name}={term.aggregation}" for term in others]
    num_own = len(flags)
    flags += [_words(row, given[key], known) for key, row in trainer.settings.items()]
    while (index := refused_flag([words or "" for words in flags])) is not None:
        flags[index] = None
    for (key, row), words in zip(trainer.settings.items(), flags[num_own:], strict=True):
        if words is None and "beside" in row:
            beside.append(f"{key}={shown(key, given[key])}: {row['beside']}")
        elif words is None:
            missing.append(f"{key}={shown(key, given[key])}")
    steps = trainer.steps(given)
    if steps is not None and steps != 1:
        beside.append(f"{steps:g} optimizer steps per batch of rollouts: {OLD}")
    return Translation(" ".join(filter(None, flags)), missing, beside)


def _words(row: Mapping[str, Any], value: Any, known: Settings) -> str | None:
    """Return this package's words for a setting's value, "" if none are needed, None if there are
    none.
    """
    own = row.get("here")
    if isinstance(own, list):
        own = next((words for condition, words in own if holds(condition, known)), None)
    if isinstance(own, str):
        is_taken = not own or row["kind"] != "bound" or isinstance(value, float)
        return _flag(own, value) if is_taken else None
    if own is False:
        return None
    if value == row.get("default") and str(value) not in (own or ()):
        return ""
    return (own or {}).get(str(value), (own or {}).get("*"))


def _flag(flag: str, value: Any) -> str:
    """Return the flag with its value, or "" if it is the flag's default here."""
    default = getattr(PolicyLossConfig(), flag.removeprefix("--").replace("-", "_"), None)
    if not flag or value is None or value == default:
        return ""
    if value is True:
        return flag
    return f"{flag} {value:g}" if isinstance(value, (int, float)) else f"{flag} {value}"
