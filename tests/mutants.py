"""Wrong implementations that the tests must reject. Each names a mistake made in the field."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_pg import AGGREGATIONS
from megatron_pg.config.tables import TABLES, rows_on
from megatron_pg.loss import CORRECTIONS, OBJECTIVES, objectives, policy_loss
from megatron_pg.loss.objectives import Outcome

from . import oracle
from .cut_policy_loss import CutFused, CutLoss
from .cut_steps import CutCritic, CutPadded, Package
from .oracle import PlainSample
from .settings import choice_of_row


class ExtraContextParallelFactor(Package):
    """Multiplies by the context-parallel size, to undo a division that nobody makes."""

    def rank_sum(self, step, micro_batch, flat_losses, aggregation, cp_rank, cp_size):
        inner = super().rank_sum(step, micro_batch, flat_losses, aggregation, cp_rank, cp_size)
        return inner * cp_size


class MeanOverContextParallel(Package):
    """Averages the ranks' sums, as an all-gather followed by a mean does."""

    def over_context_parallel(self, parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).mean()


class MeanOverMicroBatches(Package):
    """The mean of micro-batch means, as gradient accumulation without totals does."""

    def outer_count(self, step, aggregation):
        return 1.0

    def rank_sum(self, step, micro_batch, flat_losses, aggregation, cp_rank, cp_size):
        inner = super().rank_sum(step, micro_batch, flat_losses, aggregation, cp_rank, cp_size)
        return inner / oracle.outer_count(micro_batch, aggregation) if micro_batch else inner

    def over_micro_batches(self, parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).mean()


class MicroBatchDenominator(Package):
    """Divides by the rollout's or group's active tokens in the micro-batch, not in the step."""

    def denominators(self, step, micro_batch, aggregation, cp_rank, cp_size):
        return super().denominators(micro_batch, micro_batch, aggregation, cp_rank, cp_size)


class WindowDenominator(Package):
    """Divides by the active tokens that this context-parallel rank holds of each sample."""

    def denominators(self, step, micro_batch, aggregation, cp_rank, cp_size):
        step_denominators = super().denominators(step, micro_batch, aggregation, cp_rank, cp_size)
        if step_denominators is None:
            return None
        flat_mask = [keep for sample in micro_batch for keep in sample.loss_mask]
        counts = torch.zeros(len(micro_batch), dtype=torch.float64)
        for row in self.layout(micro_batch, cp_size)[cp_rank]:
            if row.response is not None:
                counts[row.segment] += flat_mask[row.response]
        return counts


class PhantomToken(Package):
    """Counts one token for a sample that has none: T = sum of max(active tokens, 1)."""

    def outer_count(self, step, aggregation):
        if aggregation != "token_mean":
            return super().outer_count(step, aggregation)
        return float(sum(max(sum(sample.loss_mask), 1) for sample in step))


class DropsMaskedRollouts(Package):
    """Leaves fully masked rollouts and groups out of N and P: filtering changes the scale."""

    def outer_count(self, step: Sequence[PlainSample], aggregation: str) -> float:
        if aggregation == "token_mean":
            return super().outer_count(step, aggregation)
        kept = [sample for sample in step if any(sample.loss_mask)]
        return super().outer_count(kept, aggregation)


class SamplesForRollouts(Package):
    """Counts samples where rollouts are meant, so that a rollout of two turns counts twice."""

    def outer_count(self, step, aggregation):
        if aggregation in ("sample_mean", "constant"):
            return float(len(step))
        return super().outer_count(step, aggregation)


class WindowByOwner(Package):
    """Takes a response token from the rank that owns it, not from the one that predicts it."""

    def scored_tokens(self, micro_batch, cp_rank, cp_size):
        prompts = [sample.prompt_length for sample in micro_batch]
        firsts = [0]
        for sample in micro_batch:
            firsts.append(firsts[-1] + sample.response_length)
        found = [
            firsts[row.segment] + row.position - prompts[row.segment]
            for row in self.layout(micro_batch, cp_size)[cp_rank]
            if row.token is not None and row.position >= prompts[row.segment]
        ]
        # As many as the reducer takes: a mutant that only raises would prove nothing.
        wanted = len(super().scored_tokens(micro_batch, cp_rank, cp_size))
        return (found + list(range(firsts[-1])))[:wanted]


class OneTokenLate(Package):
    """The right number of losses on every rank, each one token too late."""

    def scored_tokens(self, micro_batch, cp_rank, cp_size):
        last = sum(sample.response_length for sample in micro_batch) - 1
        right = super().scored_tokens(micro_batch, cp_rank, cp_size)
        return [min(index + 1, last) for index in right]


class FirstSampleCountsMore(Package):
    """A weight that depends on a sample's place in the step."""

    def objective(self, step, losses, cut, aggregation):
        return super().objective(step, losses, cut, aggregation) + losses[0].sum()


# The policy loss from logits, and what Megatron makes of it. `choices` are settings of
# `tests.settings` without which the mistake does not show.


def changed(config, **settings):
    """The config with other settings, or as it is where they are refused."""
    try:
        return replace(config, **settings)
    except ValueError:
        return config


class LossTimesContextParallel(CutLoss):
    def total(self, results, cut):
        return super().total(results, cut) * cut.cp_size


class TotalsOfTheMicroBatch(CutLoss):
    """Denominators of the micro-batch; the counts of the step are right."""

    choices = {"weights": "mask", "rejection": "off", "tis": "off"}

    def totals(self, config, step, micro_batch):
        right, local = (CutLoss.totals(self, config, each, each) for each in (step, micro_batch))
        counts = ("num_rollouts", "num_prompt_groups", "num_active_tokens")
        return replace(local, **{name: getattr(right, name) for name in counts})


class LocalSumsOfSequences(CutLoss):
    """Ratios and corrections of sequences read the tokens of this rank's window only."""

    choices = {"objective": "gspo"}

    def rank_loss(self, config, batch, logits, *, context_parallel_group, **keywords):
        return super().rank_loss(config, batch, logits, context_parallel_group=None, **keywords)


class TemperatureOfOne(CutLoss):
    """The symptom in the field: old log-probs at a temperature against new ones at 1."""

    choices = {"temperature": "0.7"}

    def rank_loss(self, config, batch, logits, **keywords):
        config = changed(config, rollout_temperature=1.0)
        return super().rank_loss(config, batch, logits, **keywords)


class TheOtherAggregationOfRegularizers(CutLoss):
    choices = {"kl": "k2", "aggregation": "token_mean"}

    def rank_loss(self, config, batch, logits, **keywords):
        other = "sample_mean" if config.regularizer_aggregation == "loss" else "loss"
        config = changed(config, regularizer_aggregation=other)
        return super().rank_loss(config, batch, logits, **keywords)


class OneRowLate(CutLoss):
    """Every logit row one position too late."""

    def rows(self, micro_batch, logits, *place):
        return super().rows(micro_batch, logits, *place).roll(1, 0)


class WeightsOfOtherTokens(CutLoss):
    choices = {"weights": "weights"}

    def rank_loss(self, config, batch, logits, **keywords):
        if batch.loss_weights is not None:
            batch = replace(batch, loss_weights=batch.loss_weights.flip(0))
        return super().rank_loss(config, batch, logits, **keywords)


class WeightsInTheNumeratorOnly(CutLoss):
    choices = {"weights": "weights"}

    def rank_loss(self, config, batch, logits, **keywords):
        config = changed(config, loss_weight_denominator="mask")
        return super().rank_loss(config, batch, logits, **keywords)


class DivisorOfAllTerms(CutLoss):
    """`grad_divisor` divides the KL and entropy terms too."""

    choices = {"divisor": "given", "kl": "k2"}

    def losses(self, config, step, logits, cut, **keywords):
        results = super().losses(config, step, logits, cut, **keywords)
        if config.grad_divisor is None:
            return results
        plain = super().losses(replace(config, grad_divisor=None), step, logits, cut, **keywords)
        count = self.totals(config, step, step)
        count = AGGREGATIONS[config.loss_aggregation].outer_count(
            count.counted_in(config.loss_weight_denominator)
        )
        pairs = zip(results, plain, strict=True)
        return [replace(r, loss=p.loss * count / config.grad_divisor) for r, p in pairs]


class DivisorTakesTermsAway(CutLoss):
    """`grad_divisor` takes the KL and entropy terms away."""

    choices = {"divisor": "given", "kl": "k2"}

    def rank_loss(self, config, batch, logits, **keywords):
        if config.grad_divisor is not None:
            config = changed(config, kl_loss_coef=0.0, entropy_coef=0.0)
        return super().rank_loss(config, batch, logits, **keywords)


class WithCorrections(CutLoss):
    """Other corrections in the place of the package's, which `wrong` gets."""

    def rank_loss(self, config, batch, logits, **keywords):
        right = policy_loss.apply_corrections

        def wrong(config, tokens, loss, sums, rows):
            return self.wrong(right(config, tokens, loss, sums, rows), config, tokens, loss, sums)

        with mock.patch.object(policy_loss, "apply_corrections", wrong):
            return super().rank_loss(config, batch, logits, **keywords)


class LastRejectionDecides(WithCorrections):
    """The mask of one correction takes the place of another's."""

    choices = {"tis": "mask", "rejection": "geometric"}

    def wrong(self, found, config, tokens, loss, sums):
        kept = tokens.loss_mask
        for row in rows_on(CORRECTIONS, config):
            loss, kept, _ = row.function(config, tokens, sums, loss)
        return found._replace(loss=torch.where(kept, loss, 0.0), loss_mask=kept)


class RejectionForgetsWeights(WithCorrections):
    """A rejection begins with the loss that no weight has touched."""

    choices = {"tis": "token", "rejection": "geometric"}

    def wrong(self, found, config, tokens, loss, sums):
        if len(rows_on(CORRECTIONS, config)) < 2:
            return found
        return found._replace(loss=torch.where(found.loss_mask, loss, 0.0))


# Objectives: a function in the place of a row's, and the choices under which it is wrong.
RIGHT = {name: row.function for name, row in OBJECTIVES.items()}


def swapped_temperatures(config, tokens, sums):
    pos, neg = config.sapo_tau_neg, config.sapo_tau_pos
    return RIGHT["sapo"](replace(config, sapo_tau_pos=pos, sapo_tau_neg=neg), tokens, sums)


def gate_of_the_log_ratio(config, tokens, sums):
    found = RIGHT["sapo"](config, tokens, sums)
    tau = torch.where(tokens.advantages > 0, config.sapo_tau_pos, config.sapo_tau_neg)
    gate = 4 / tau * torch.sigmoid(tau * (tokens.log_probs - tokens.anchor(config)))
    return replace(found, loss=-gate * tokens.advantages)


def dropped_whatever_the_advantage(config, tokens, sums):
    """A symmetric trust region: a token that comes back is dropped too."""
    found = RIGHT[config.policy_loss](config, tokens, sums)
    return replace(found, loss=found.loss.masked_fill(found.is_clipped, 0.0))


def ratio_for_probability(config, tokens, sums):
    def distance(old: Tensor, new: Tensor) -> Tensor:
        return ((new - old).exp() - 1).abs()

    return objectives._divergence_masked(config, tokens, distance)


def divergence_of_the_new_from_the_old(config, tokens, sums):
    def reversed_(old: Tensor, new: Tensor) -> Tensor:
        return objectives.binary_divergence(new, old)

    return objectives._divergence_masked(config, tokens, reversed_)


def clamped_to_the_band(config, tokens, sums):
    """A token outside keeps a bound's weight, as cispo's does."""
    inside = replace(tokens, old_log_probs=tokens.rollout_log_probs)
    return RIGHT["cispo"](
        replace(config, policy_loss="cispo", cispo_lower_bound=True), inside, sums
    )


def against_the_old_policy(config, tokens, sums):
    return RIGHT["dis"](config, replace(tokens, rollout_log_probs=tokens.old_log_probs), sums)


def weight_of_the_mean_ratio(config, tokens, sums):
    means = sums.sums["policy"] / sums.sums["active_tokens"].clamp(min=1)
    return RIGHT["vespo"](config, tokens, replace(sums, sums={**sums.sums, "policy": means}))


def mean_of_unclipped_ratios(config, tokens, sums, low=-math.inf, high=math.inf):
    """Clipped after the mean instead of before it, as gspo does."""
    values = (tokens.log_probs.detach().double() - tokens.anchor(config)).clamp(low, high)
    wrong = torch.zeros_like(sums.sums["clipped_policy"]).index_add_(0, sums.unit_ids, values)
    sums = replace(sums, sums={**sums.sums, "clipped_policy": wrong})
    return RIGHT["gmpo"](config, tokens, sums)


def clipped_on_both_sides(config, tokens, sums):
    """The mean of ratios clipped whatever the sign of the advantage."""
    return mean_of_unclipped_ratios(config, tokens, sums, math.log(0.8), math.log(1.2))


OBJECTIVE_MISTAKES = [
    ("sapo", swapped_temperatures),
    ("sapo", gate_of_the_log_ratio),
    ("dppo_tv", dropped_whatever_the_advantage),
    ("dppo_kl", dropped_whatever_the_advantage),
    ("dppo_tv", ratio_for_probability),
    ("dppo_kl", divergence_of_the_new_from_the_old),
    ("dis", clamped_to_the_band),
    ("dis", against_the_old_policy),
    ("vespo", weight_of_the_mean_ratio),
    ("gmpo", clipped_on_both_sides),
    ("gmpo", mean_of_unclipped_ratios),
]


class WithRow(CutLoss):
    """Another row of a table in the place of the package's."""

    def __init__(self, table: str, name: str, choices: dict[str, str], **changes: Any) -> None:
        super().__init__()
        self.choices = choices
        self.table, row = TABLES[table], TABLES[table][name]
        self.replaced = {name: replace(row, **changes)}

    def losses(self, *given: Any, **keywords: Any):
        with mock.patch.dict(self.table, self.replaced):
            return super().losses(*given, **keywords)


def with_loss(row, change):
    """The function of a row with another loss."""

    def function(*given):
        found = row.function(*given)
        if isinstance(found, Tensor):
            return change(found)
        is_outcome = isinstance(found, Outcome)
        loss = change(found.loss)
        return replace(found, loss=loss) if is_outcome else found._replace(loss=loss)

    return {"function": function}


def keeps_all(row):
    """A correction that drops nothing."""

    def function(config, tokens, *others):
        return row.function(config, tokens, *others)._replace(loss_mask=tokens.loss_mask)

    return {"function": function}


def row_mutants() -> dict[str, Callable[[], CutLoss]]:
    """Every row of every table with its sign flipped, in value and gradient and in the gradient
    alone; rejections that drop nothing; mistakes of objectives.
    """
    found = {}

    def add(what, table, name, changes, **choices):
        choices = choice_of_row(table, name) | choices
        found[f"{what}: {name}"] = functools.partial(WithRow, table, name, choices, **changes)

    for table, rows in TABLES.items():
        for name, row in rows.items():
            if name in ("distill", "score_centering"):  # whose oracles are in test_rows_oracles
                continue
            if table == "loss_aggregation":
                wrong = {"outer_count": lambda totals, row=row: -row.outer_count(totals)}
                add("negative", table, name, wrong)
                continue
            add("negative", table, name, with_loss(row, torch.neg))
            add("gradient alone", table, name, with_loss(row, lambda x: 2 * x.detach() - x))
            if getattr(row, "rejects", False):
                add("keeps all", table, name, keeps_all(row))
    for name, mistake in OBJECTIVE_MISTAKES:
        add(mistake.__name__, "policy_loss", name, {"function": mistake}, tis="off", clip="off")
    return found


class MeanOfLocalReports(CutLoss):
    """Metrics are means over this rank's window, averaged over ranks."""

    def report(self, config, results):
        parts = [CutLoss.report(self, config, [result]) for result in results]
        found = {}
        for name in parts[0]:
            values = [part[name] for part in parts if math.isfinite(part[name])]
            found[name] = sum(values) / len(values) if values else math.nan
        return found | {name: sum(p[name] for p in parts) for name in ("loss", "pg_loss")}


class SamplesForDocuments(CutLoss):
    """Metrics take a sample for a document."""

    choices = {"aggregation": "token_mean", "kl": "off", "entropy": "off", "metrics": "basic"}

    def losses(self, config, step, *given, **keywords):
        alone = [replace(sample, rollout_id=None) for sample in step]
        both = (
            super(SamplesForDocuments, self).losses(config, x, *given, **keywords)
            for x in (step, alone)
        )
        return [replace(r, metrics=a.metrics) for r, a in zip(*both, strict=True)]


class DataParallelSizeLost(CutLoss):
    def returned(self, job, totals, result):
        return super().returned(replace(job, dp_size=1), totals, result)


class NumberOfMicroBatchesLost(CutLoss):
    def returned(self, job, totals, result):
        return super().returned(job, totals, replace(result, num_microbatches=1))


class ExtraFactorForMegatron(CutLoss):
    """A factor of the context-parallel size that Megatron has already."""

    def returned(self, job, totals, result):
        loss, *rest = super().returned(job, totals, result)
        return loss * job.cp_size, *rest


class ExtraFactorInPerTokenMode(ExtraFactorForMegatron):
    def returned(self, job, totals, result):
        kind = ExtraFactorForMegatron if job.per_token else CutLoss
        return kind.returned(self, job, totals, result)


class TwoValuesInPerTokenMode(CutLoss):
    """The field's gradient norm of 1e4: nothing divides the sum."""

    def returned(self, job, totals, result):
        output = super().returned(job, totals, result)
        return output[0], output[-1]


class ThreeValuesInTheOtherMode(CutLoss):
    """A token sum, left to the schedule to divide by the micro-batch's tokens."""

    def returned(self, job, totals, result):
        if job.per_token:
            return super().returned(job, totals, result)
        num_tokens = torch.tensor(result.batch.num_active_tokens, dtype=torch.int32)
        return result.loss * totals.num_active_tokens, num_tokens, result.metrics


class LocalTokenCount(CutLoss):
    """Multiplies by this rank's n where the step's is meant."""

    def returned(self, job, totals, result):
        loss, *rest = super().returned(job, totals, result)
        return (result.loss * rest[0] if job.per_token else loss), *rest


class FusedWithLocalSums(CutFused):
    """Ratios and corrections of sequences read the tokens of this rank's window only."""

    choices = {**CutFused.choices, "objective": "gspo"}

    def rank_loss(self, *given, context_parallel_group, **keywords):
        return super().rank_loss(*given, context_parallel_group=None, **keywords)


# The critic.


class CriticTimesContextParallel(CutCritic):
    def of_rank(self, loss, cp_size):
        return loss * cp_size


class CriticOfTheMicroBatch(CutCritic):
    def totals(self, step, micro_batch):
        totals = super().totals(micro_batch, micro_batch)
        return replace(totals, num_rollouts=len(oracle.rollouts(step)))


class CriticOneTokenLate(CutCritic):
    def scored(self, rows, last):
        return [min(row + 1, last) for row in rows]


class UnclippedCritic(CutCritic):
    clip = 1e9


class MeanOfCriticMetrics(CutCritic):
    def reduced(self, report, parts):
        found = [report.metrics(part) for part in parts if part[-1, 0] > 0]
        return {name: sum(each[name] for each in found) / len(found) for name in found[0]}


# Padded rows.


class ForgetsTheAverage(CutPadded):
    def data_parallel_size(self, cut):
        return 1


class CountsTheRank(CutPadded):
    def counted(self, step, rank):
        return [row for rows in rank for row in rows]


def subclasses(kind: type) -> list[type]:
    return [each for child in kind.__subclasses__() for each in (child, *subclasses(child))]


WAYS = (Package, CutLoss, CutCritic, CutPadded)
MUTANTS: dict[str, Callable[[], Any]] = {
    mutant.__name__: mutant
    for way in WAYS
    for mutant in subclasses(way)
    if mutant not in (CutFused, WithCorrections, WithRow)
} | row_mutants()
