"""The corrections that look at d = old_log_prob - rollout_log_prob: weights and rejections, by token or by sequence.

Each is made of d, of its sum or of its mean over a sequence, exponentiated within +-20; nothing has a gradient.
"""

from __future__ import annotations

from torch import Tensor

from megatron_pg.config.policy_loss import PolicyLossConfig
from megatron_pg.loss.corrections import (
    CLIPPED,
    CORRECTIONS,
    MISMATCH_INPUTS,
    OF_REJECTION,
    TIS_SETTINGS,
    Corrected,
    Correction,
)
from megatron_pg.loss.sequence import SequenceSums
from megatron_pg.loss.tokens import Tokens, clamped_log_ratio, masked


def _at_level(tokens: Tokens, sums: SequenceSums, level: str) -> Tensor:
    """Return the mismatch d of each token, or its sum or mean over the token's sequence, [window] float64, 0 where masked."""
    if level == "token":
        return tokens.mismatch()
    over_sequence = sums.total if level == "sequence" else sums.mean
    return masked(over_sequence("mismatch"), tokens.loss_mask)


def _of_sample(mismatch: Tensor, level: str, active_tokens: int) -> Tensor:
    """Return the mismatch of one sample on the host, [response_length], or 0-d for its sum or mean."""
    if level == "token":
        return mismatch
    total = mismatch.sum()
    return total if level == "sequence" else total / max(active_tokens, 1)


def importance_weights(config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums) -> Tensor:
    """Compute the weight w of `--use-tis` before its bounds, [window] float64, 1 at masked positions. No gradient."""
    return clamped_log_ratio(_at_level(tokens, sums, config.tis_level)).exp()


def _is_outside(ratio: Tensor, low: float, high: float) -> Tensor:
    return (ratio < low) | (ratio > high)


def _weighted(
    config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums, loss: Tensor
) -> Corrected:
    """Weight every token by its own truncated ratio, or by that of its sequence."""
    low, high = config.tis_clip_low, config.tis_clip
    weights = importance_weights(config, tokens, sums)
    # In the precision of the loss: float64 stays.
    weighted = loss * weights.clamp(low, high).to(loss.dtype)
    return Corrected(weighted, tokens.loss_mask, {CLIPPED: _is_outside(weights, low, high)})


def _masked_by_weight(
    config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums, loss: Tensor
) -> Corrected:
    """Weight the tokens, and drop those whose ratio, or whose sequence's ratio, is out of bounds."""
    weighted = _weighted(config, tokens, sums, loss)
    return weighted._replace(loss_mask=tokens.loss_mask & ~weighted.metrics[CLIPPED])


def _is_rejected_by_weight(config: PolicyLossConfig, mismatch: Tensor, count: int) -> Tensor:
    weight = clamped_log_ratio(_of_sample(mismatch, config.tis_level, count)).exp()
    return _is_outside(weight, config.tis_clip_low, config.tis_clip)


TRUNCATED = (
    "truncated importance sampling, Ionides 2008; for rollout mismatch Yao et al. 2025, Your efficient RL framework "
    "secretly brings you off-policy RL training"
)
LEVELS = {"token": "", "sequence": "sum_t d", "geometric": "mean_t d"}
"""Exponent of a sequence's weight, by `--tis-level`; "" for a token's."""


def _weight_row(level: str, mode: str) -> Correction:
    """Make the row of one level and mode of `--use-tis`."""
    is_mask, statistic = mode == "mask", LEVELS[level]
    flags = ["--use-tis", *[f"--tis-level {level}"] * (level != "token")]
    dropped = "sequences" if statistic else "tokens"
    formula = "loss * clamp(w, tis_clip_low, tis_clip)"
    if is_mask:
        formula = f"loss * w, {dropped} with w outside [tis_clip_low, tis_clip] drop"
    about = {"token": "IcePop, Ring-1T, arXiv:2510.18855" if is_mask else TRUNCATED}
    return Correction(
        name=f"{level}_{mode}",
        formula=formula + f", w = exp(clamp({statistic}, +-20))" * bool(statistic),
        about=about.get(level, "one weight for a sequence"),
        flag=" ".join([*flags, *["--tis-mode mask"] * is_mask]),
        when=lambda config: (
            config.use_tis
            and config.custom_tis_function_path is None
            and (config.tis_level, config.tis_mode) == (level, mode)
        ),
        inputs=MISMATCH_INPUTS,
        options=TIS_SETTINGS + OF_REJECTION * is_mask,
        sequence_sums=("mismatch",) if statistic else (),
        is_sum_over_tokens=True,
        function=_masked_by_weight if is_mask else _weighted,
        rejects=is_mask,
        rejected_by_data=_is_rejected_by_weight if is_mask else None,
        metrics=(CLIPPED,),
    )


CORRECTIONS.add(*(_weight_row(level, mode) for mode in ("truncate", "mask") for level in LEVELS))


def _rejection_row(level: str) -> Correction:
    """Make the row that drops the sequences whose sum or mean of the mismatch is out of bounds."""

    def is_outlier(config: PolicyLossConfig, of_sequence: Tensor) -> Tensor:
        low, high = (getattr(config, f"{level}_rejection_{bound}") for bound in ("low", "high"))
        return _is_outside(clamped_log_ratio(of_sequence).exp(), low, high)

    def reject(
        config: PolicyLossConfig, tokens: Tokens, sums: SequenceSums, loss: Tensor
    ) -> Corrected:
        outliers = is_outlier(config, _at_level(tokens, sums, level))
        return Corrected(loss, tokens.loss_mask & ~outliers, {})

    return Correction(
        name=f"{level}_rejection",
        formula=f"sequences with exp({LEVELS[level]}) outside [{level}_rejection_low, {level}_rejection_high] drop",
        about="Liu, Li et al. 2025, When speed kills stability",
        flag=f"--use-{level}-rejection",
        when=lambda config: getattr(config, f"use_{level}_rejection"),
        inputs=MISMATCH_INPUTS,
        options=(f"{level}_rejection_low", f"{level}_rejection_high", *OF_REJECTION),
        sequence_sums=("mismatch",),
        is_sum_over_tokens=True,
        function=reject,
        rejects=True,
        rejected_by_data=lambda config, mismatch, count: is_outlier(
            config, _of_sample(mismatch, level, count)
        ),
    )


CORRECTIONS.add(_rejection_row("geometric"), _rejection_row("sequence"))
