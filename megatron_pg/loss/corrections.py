"""Corrections for tokens that were not sampled from the policy in training. One table row each.

d = old_log_prob - rollout_log_prob is the mismatch of trainer and rollout engine, and w =
exp(clamp(d, +-20)). Both have no gradient. Every correction uses the tokens that are active before
any rejection, so that their order does not matter, and masks only shrink. NaN compares as false
with any bound, so that it is kept and stays visible.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_pg.config.custom import check_returned, load_custom_function
from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.config.tables import ANCHOR, TABLES, Row, add_rows, decorator, rows_on
from megatron_pg.head.centering import CENTERING_VALUES
from megatron_pg.loss.sequence import SequenceSums, sequence_sum_names, sequence_units, sums_of_rank
from megatron_pg.loss.tokens import Tokens, clamped_log_ratio, masked
from megatron_pg.step.sample import Sample, number_samples

LEVELS = {"token": "", "sequence": "sum_t d", "geometric": "mean_t d"}
"""Exponent of a sequence's weight, by `--tis-level`. "" for a token's weight."""
MISMATCH_INPUTS = ("old_log_probs", "rollout_log_probs")
REJECTED = "rejected_fraction"
"""Metric of every correction: the fraction of tokens that any correction dropped."""
CLIPPED = "tis_clipped_fraction"
TIS_SETTINGS = ("tis_level", "tis_mode", "tis_clip", "tis_clip_low", "custom_tis_function_path")
OF_REJECTION = ("rejection_denominator",)


class Corrected(NamedTuple):
    """Micro-batch after one correction, or after all corrections."""

    loss: Tensor  # per token, [window], and after all corrections 0 for dropped tokens
    loss_mask: Tensor  # the active tokens that were not rejected, [window] bool
    metrics: dict[str, Tensor]  # [window], detached, for tokens active before any rejection


@dataclass(frozen=True, kw_only=True)
class Correction(Row):
    """Correction with its properties. Defaults are the safe values."""

    function: Callable[[PolicyLossConfig, Tokens, SequenceSums, Tensor], Corrected]
    """The formula (config, tokens, sums, current loss [window]) -> Corrected, with only its own
    rejections."""
    rejects: bool = False
    rejects_by_data: bool = False
    """Whether only old and rollout log-probs decide which tokens it drops, so that they are known
    before the step."""
    metrics: tuple[str, ...] = ()  # in addition to `REJECTED`
    follows_rejections: bool = False
    """Whether its term is also added to tokens that other corrections drop."""

    def refusals(self, config: Any) -> list[str]:
        """Require, for accepted totals, rejections by data, and only one kind."""
        if config.rejection_denominator != "accepted" or not self.rejects:
            return []
        rejecting = [row for row in rows_on(CORRECTIONS, config) if row.rejects_by_data]
        if not self.rejects_by_data:
            wrong = f"cannot count what {self.switch} rejects before the step. Use"
        elif rejecting[0] is self and len(rejecting) > 1:
            flags = " or ".join(row.switch for row in rejecting)
            wrong = f"allows one kind of rejection. Remove {flags}, or use"
        else:
            return []
        return [f"--rejection-denominator accepted {wrong} --rejection-denominator original."]


CORRECTIONS: dict[str, Correction] = TABLES["corrections"]
correction = decorator(CORRECTIONS, Correction)


def apply_corrections(
    config: PolicyLossConfig,
    tokens: Tokens,
    loss: Tensor,
    sums: SequenceSums,
    rows: Sequence[Correction],
) -> Corrected:
    """Weight the per-token loss [window] and shrink the loss mask with the corrections `rows`."""
    if not rows:
        return Corrected(loss, tokens.loss_mask, {})
    kept = tokens.loss_mask
    metrics: dict[str, Tensor] = {}
    for row in rows:
        if row.follows_rejections:
            continue
        loss, kept_by_row, row_metrics = row.function(config, tokens, sums, loss)
        kept = kept & kept_by_row
        metrics |= row_metrics
    loss = torch.where(kept, loss, 0.0)
    for row in rows:
        if row.follows_rejections:
            loss, _, row_metrics = row.function(config, tokens, sums, loss)
            metrics |= row_metrics
    metrics[REJECTED] = (tokens.loss_mask & ~kept).float()
    return Corrected(loss, kept, metrics)


def accepted_samples(config: PolicyLossConfig, samples: Sequence[Sample]) -> list[Sample]:
    """Mark the tokens that no rejection drops, on the host, for `--rejection-denominator accepted`.

    Call it before `step_totals` or `plan_step`, and pack the samples that it returns: each has an
    `accepted_mask`. Their policy loss is then divided by the step's accepted tokens. KL and entropy
    terms and metrics keep the loss mask. It supports only rejections that data decide, by weights
    or of whole sequences. With `--rejection-denominator original`, or old log-probs of the trained
    forward pass, samples are returned unchanged.

    Raises:
        ValueError: log-probs are missing.
    """
    if not counts_accepted(config) or not samples:
        return list(samples)
    number_samples(samples)
    needed = (*MISMATCH_INPUTS, *["turn_ids"] * (config.sequence_unit == "turn"))
    for sample, name in itertools.product(samples, needed):
        if getattr(sample, name) is None:
            raise ValueError(
                f"{sample.name} has no {name}. Pass Sample({name}=...) for every sample of the step"
            )
    fields = ("loss_mask", *MISMATCH_INPUTS)
    tensors = {name: torch.cat([getattr(sample, name) for sample in samples]) for name in fields}
    lengths = [sample.response_length for sample in samples]
    ids, sample_of_unit = sequence_units(config, samples)
    # These rejections do not read the policy in training or advantages.
    unread = torch.zeros_like(ids, dtype=torch.float32)
    tensors |= {"sample_ids": ids, "log_probs": unread, "advantages": unread}
    tokens = Tokens.masked(tensors)
    names, rows = sequence_sum_names(config), rows_on(CORRECTIONS, config)
    table = sums_of_rank(config, names, tokens, len(sample_of_unit))
    sums = SequenceSums.of_table(names, ids, table)
    masks = torch.split(apply_corrections(config, tokens, unread, sums, rows).loss_mask, lengths)
    marked = []
    for sample, mask in zip(samples, masks, strict=True):
        size = _accepted_size(config.loss_weight_denominator, sample, mask)
        marked.append(dataclasses.replace(sample, accepted_mask=mask, accepted_size=size))
    return marked


def _accepted_size(unit: str, sample: Sample, mask: Tensor) -> float:
    if unit == "mask" or sample.loss_weights is None:
        return float(mask.sum())
    return float(sample.loss_weights[mask].double().sum())


def require_accepted(unit: str, samples: Sequence[Sample]) -> None:
    """Raise a ValueError with the name of a sample that `accepted_samples` has not marked under
    this `--loss-weight-denominator`.
    """
    for sample in samples:
        mask, where = sample.accepted_mask, f"--rejection-denominator accepted: {sample.name}"
        if mask is None:
            raise ValueError(
                f"{where} did not go through accepted_samples. Pack the samples that it returns."
            )
        if sample.accepted_size != _accepted_size(unit, sample, mask):
            raise ValueError(
                f"{where} has an accepted_size for a different --loss-weight-denominator. Call "
                "accepted_samples with the config of the loss."
            )


def counts_accepted(config: PolicyLossConfig) -> bool:
    """Return whether accepted tokens, known before the step, divide the policy loss."""
    is_known = config.old_log_probs == "given"
    return is_known and config.rejection_denominator == "accepted" and drops_tokens(config)


def counts_accepted_afterwards(config: PolicyLossConfig) -> bool:
    """Return whether the step's gradients are multiplied by its tokens over its accepted tokens.

    Among the aggregations that the config then allows, only the token mean counts accepted tokens.
    """
    is_unknown = config.old_log_probs != "given" and config.rejection_denominator == "accepted"
    return is_unknown and config.loss_aggregation == "token_mean"


def drops_tokens(config: PolicyLossConfig) -> bool:
    """Return whether an active correction may drop tokens."""
    return any(row.rejects for row in rows_on(CORRECTIONS, config))


def correction_metric_names(config: PolicyLossConfig) -> tuple[str, ...]:
    """List the metrics of `apply_corrections` under these settings."""
    rows = rows_on(CORRECTIONS, config)
    names = dict.fromkeys(name for row in rows for name in row.metrics)
    return (*names, REJECTED) if rows else ()


@correction(
    "f(config, tokens, log_probs, pg_loss) -> (pg_loss, loss_mask)",
    about="a custom function instead of the weights",
    flag="--use-tis --custom-tis-function-path",
    when=lambda config: config.use_tis and config.custom_tis_function_path is not None,
    inputs=MISMATCH_INPUTS,
    options=TIS_SETTINGS + OF_REJECTION,
    rejects=True,
)
def custom_tis(
    config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums, loss: Tensor
) -> Corrected:
    """Call the custom function and check its shapes, but not the values on the device."""
    path = str(config.custom_tis_function_path)
    where = f"--custom-tis-function-path {path}"
    function = load_custom_function("custom_tis_function_path", path)
    results = function(config, tokens, tokens.log_probs, loss)
    if not isinstance(results, (tuple, list)) or len(results) != 2:
        raise ValueError(
            f"{where} returned a {type(results).__name__}, expected two tensors (pg_loss, "
            "loss_mask)"
        )
    corrected, kept = results
    shape, meaning = tokens.loss_mask.shape, "one value per token of the window"
    check_returned(corrected, shape, f"{where}: pg_loss:", meaning, differentiable_in=loss)
    check_returned(kept, shape, f"{where}: loss_mask:", meaning)
    return Corrected(corrected, tokens.loss_mask & kept.bool(), {})


@correction(
    "drop tokens with A < 0 in sequences with mean_t(-log r) > opsm_delta",
    about="off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556",
    flag="--use-opsm",
    when=lambda config: config.use_opsm,
    inputs=(ANCHOR,),
    options=("opsm_delta", *OF_REJECTION),
    sequence_sums=("policy",),
    is_sum_over_tokens=True,
    rejects=True,
)
def opsm(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums, loss: Tensor) -> Corrected:
    is_off_policy = -sums.mean("policy") > config.opsm_delta
    return Corrected(loss, tokens.loss_mask & ~(is_off_policy & (tokens.advantages < 0)), {})


@correction(
    "loss + A C",
    about="score centering, also for tokens that --tis-mode mask drops, arXiv:2609.20807 eq. 14",
    flag="--score-centering",
    when=lambda config: config.score_centering,
    inputs=("sampler_top_k",),
    is_sum_over_tokens=True,
    metrics=tuple(f"centering_{name}" for name in CENTERING_VALUES[1:]),
    follows_rejections=True,
)
def score_centering(
    config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums, loss: Tensor
) -> Corrected:
    """Add the engine's mean of weight times log p, which centers the gradient of the loss."""
    value, *others = tokens.given("centering")
    names = (f"centering_{name}" for name in CENTERING_VALUES[1:])
    metrics = {name: x.detach() for name, x in zip(names, others, strict=True)}
    return Corrected(loss + tokens.advantages * value.to(loss.dtype), tokens.loss_mask, metrics)


def importance_weights(tokens: Tokens, sums: SequenceSums, level: str) -> Tensor:
    """Compute w per token or per sequence, [window] float64 without gradient, 1 if masked."""
    if level == "token":
        return clamped_log_ratio(tokens.mismatch()).exp()
    over_sequence = sums.total if level == "sequence" else sums.mean
    return clamped_log_ratio(masked(over_sequence("mismatch"), tokens.loss_mask)).exp()


def _weighted(
    config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums, loss: Tensor
) -> Corrected:
    weights = importance_weights(tokens, sums, config.tis_level)
    is_outside = (weights < config.tis_clip_low) | (weights > config.tis_clip)
    # In the precision of the loss, so that float64 stays float64.
    loss = loss * weights.clamp(config.tis_clip_low, config.tis_clip).to(loss.dtype)
    kept = tokens.loss_mask & ~is_outside if config.tis_mode == "mask" else tokens.loss_mask
    return Corrected(loss, kept, {CLIPPED: is_outside})


def _without_outliers(
    config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums, loss: Tensor, *, level: str
) -> Corrected:
    weights = importance_weights(tokens, sums, level)
    low, high = (getattr(config, f"{level}_rejection_{bound}") for bound in ("low", "high"))
    return Corrected(loss, tokens.loss_mask & ~((weights < low) | (weights > high)), {})


TRUNCATED = "truncated importance sampling, Ionides 2008, for rollout mismatch Yao et al. 2025"
OF_MISMATCH: dict[str, Any] = {"inputs": MISMATCH_INPUTS, "is_sum_over_tokens": True}


def _weight_row(level: str, mode: str) -> Correction:
    is_mask, statistic = mode == "mask", LEVELS[level]
    flags = ["--use-tis", *[f"--tis-level {level}"] * (level != "token")]
    formula = "loss * clamp(w, tis_clip_low, tis_clip)"
    if is_mask:
        formula = "loss * w if w in [tis_clip_low, tis_clip], else drop"
    about = {"token": "IcePop, Ring-1T, arXiv:2510.18855" if is_mask else TRUNCATED}
    return Correction(
        name=f"{level}_{mode}",
        formula=formula + f", w = exp(clamp({statistic}, +-20))" * bool(statistic),
        about=about.get(level, "per sequence"),
        flag=" ".join([*flags, *["--tis-mode mask"] * is_mask]),
        when=lambda config: (
            config.use_tis
            and config.custom_tis_function_path is None
            and (config.tis_level, config.tis_mode) == (level, mode)
        ),
        options=TIS_SETTINGS + OF_REJECTION * is_mask,
        sequence_sums=("mismatch",) if statistic else (),
        function=_weighted,
        rejects=is_mask,
        rejects_by_data=is_mask,
        metrics=(CLIPPED,),
        **OF_MISMATCH,
    )


def _rejection_row(level: str) -> Correction:
    bounds = (f"{level}_rejection_low", f"{level}_rejection_high")
    return Correction(
        name=f"{level}_rejection",
        formula=f"drop sequences with exp({LEVELS[level]}) outside [{', '.join(bounds)}]",
        about="Liu, Li et al. 2025" + ", When speed kills stability" * (level == "geometric"),
        flag=f"--use-{level}-rejection",
        when=lambda config: getattr(config, f"use_{level}_rejection"),
        options=(*bounds, *OF_REJECTION),
        sequence_sums=("mismatch",),
        function=functools.partial(_without_outliers, level=level),
        rejects=True,
        rejects_by_data=True,
        **OF_MISMATCH,
    )


add_rows(
    CORRECTIONS,
    *(_weight_row(level, mode) for mode in ("truncate", "mask") for level in LEVELS),
    *map(_rejection_row, ("geometric", "sequence")),
)
