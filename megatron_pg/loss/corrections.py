"""Corrections for tokens that were not sampled from the policy being improved.

With d = old_log_prob - rollout_log_prob, the mismatch of trainer and rollout engine, and
w = exp(clamp(d, +-20)), none of which has a gradient:

    --use-tis                   loss * clamp(w, tis_clip_low, tis_clip)          (token level)
    --tis-level sequence        the same with w = exp(clamp(sum_t d, +-20))
    --tis-mode mask             IcePop: loss * w, tokens with w outside [tis_clip_low, tis_clip] drop
    --use-geometric-rejection   sequences drop whose exp(mean_t d) is outside [low, high]
    --use-opsm                  tokens drop where A < 0 and mean_t(old_log_prob - log_prob) > delta

Every one looks at the tokens active before any rejection, so their order does not matter, and masks
only shrink. A NaN compares as false with any bound, hence is kept: it stays visible.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_pg.config.custom import TIS_PARAMETERS, check_returned, load_function
from megatron_pg.loss.masking import (
    clamped_log_ratio,
    masked,
    required_log_probs,
    with_masked_inputs,
)
from megatron_pg.loss.sequence import rollout_mismatch

if TYPE_CHECKING:
    from megatron_pg.config import PolicyLossConfig
    from megatron_pg.loss.sequence import SequenceLogRatios
    from megatron_pg.step.batch import PackedBatch
    from megatron_pg.step.sample import Sample


class TISFunction(Protocol):
    """What ``--custom-tis-function-path`` names. It takes the place of the weights of ``--use-tis``."""

    def __call__(
        self, config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor, pg_loss: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Weights or rejects tokens of one micro-batch on one context-parallel rank.

        Args:
            config: the settings of the loss.
            batch: the micro-batch; its ``old_log_probs`` and ``rollout_log_probs`` [window] float32
                are 0 at masked positions, as every input is.
            log_probs: [window] of the policy in training, with gradient.
            pg_loss: [window] the objective's per-token loss, with gradient.

        Returns:
            The new per-token loss [window], and the tokens to keep, [window] bool or 0/1. What the
            loss mask of the batch drops stays dropped. A result that depends on other tokens of the
            micro-batch makes the objective depend on packing; use
            :class:`megatron_pg.loss.sequence.SequenceReduction` for sums over a sequence.
        """


class Corrected(NamedTuple):
    """A micro-batch after the corrections."""

    pg_loss: Tensor
    """[window], 0 where the mask drops the token."""
    loss_mask: Tensor
    """[window] bool: active tokens that were not rejected."""
    metrics: dict[str, Tensor]
    """[window] detached, by `correction_metric_names`; their means are over the tokens active before
    any rejection."""


def apply_corrections(
    config: PolicyLossConfig,
    batch: PackedBatch,
    log_probs: Tensor,
    pg_loss: Tensor,
    loss_mask: Tensor,
    *,
    sequence: SequenceLogRatios | None = None,
) -> Corrected:
    """Weights the per-token loss and shrinks the loss mask by every correction that is on.

    Args:
        config: the settings of the loss.
        batch: this rank's part of the micro-batch.
        log_probs: [window] of the policy in training.
        pg_loss: [window] the objective's per-token loss.
        loss_mask: [window] bool.
        sequence: from :func:`megatron_pg.loss.sequence.sequence_log_ratios`.

    Raises:
        ValueError: `sequence` or log-probs are missing that a setting needs, or a custom function
            returned the wrong shapes.
    """
    if not (config.use_tis or config.use_geometric_rejection or config.use_opsm):
        return Corrected(pg_loss, loss_mask, {})
    kept, is_outside = loss_mask, None
    if config.custom_tis_function_path is not None:
        pg_loss, kept = _custom_tis(config, batch, log_probs, pg_loss)
    elif config.use_tis:
        weights = importance_weights(config, batch, sequence)
        is_outside = _is_outside_tis_range(config, weights)
        if config.tis_mode == "mask":
            kept = kept & ~is_outside
        pg_loss = pg_loss * weights.clamp(config.tis_clip_low, config.tis_clip)
    if config.use_geometric_rejection:
        mean_mismatch = _given(sequence).mismatch_mean_of_tokens()
        kept = kept & ~_is_geometric_outlier(config, mean_mismatch)
    if config.use_opsm:
        is_off_policy = -_given(sequence).policy_mean_of_tokens() > config.opsm_delta
        kept = kept & ~(is_off_policy & (batch.advantages < 0))
    metrics: dict[str, Tensor] = {}
    if config.pg_metrics != "none":
        metrics = _correction_metrics(config, batch, kept, is_outside)
    return Corrected(torch.where(kept, pg_loss, 0.0), kept, metrics)


def importance_weights(
    config: PolicyLossConfig, batch: PackedBatch, sequence: SequenceLogRatios | None = None
) -> Tensor:
    """[window] float32 w of ``--use-tis`` before its bounds, 1 at masked positions. No gradient."""
    if config.tis_level == "sequence":
        mismatch = masked(_given(sequence).mismatch_sum_of_tokens(), batch.loss_mask)
    else:
        mismatch = rollout_mismatch(batch)
    return clamped_log_ratio(mismatch).exp().float()


def correction_metric_names(config: PolicyLossConfig) -> tuple[str, ...]:
    """What `apply_corrections` reports under these settings (nothing under ``--pg-metrics none``).

    With d = old_log_prob - rollout_log_prob: ``rollout_ratio`` is exp(d), ``rollout_kl`` exp(d) - 1 -
    d, whose mean over the rollout engine's tokens estimates KL(rollout || old), and
    ``rollout_abs_difference`` |d|. ``tis_clipped_fraction`` is the share of tokens whose weight is
    out of bounds, ``rejected_fraction`` that of the tokens dropped by whatever correction.
    """
    corrects_mismatch = config.use_tis or config.use_geometric_rejection
    names: tuple[str, ...] = ()
    if corrects_mismatch:
        names += ("rollout_ratio", "rollout_kl", "rollout_abs_difference")
    if config.use_tis and config.custom_tis_function_path is None:
        names += ("tis_clipped_fraction",)
    if corrects_mismatch or config.use_opsm:
        names += ("rejected_fraction",)
    return names


def _correction_metrics(
    config: PolicyLossConfig, batch: PackedBatch, kept: Tensor, is_outside: Tensor | None
) -> dict[str, Tensor]:
    """[window] each, by `correction_metric_names`."""
    metrics: dict[str, Tensor] = {"rejected_fraction": (batch.loss_mask & ~kept).float()}
    if is_outside is not None:
        metrics["tis_clipped_fraction"] = is_outside.float()
    if config.use_tis or config.use_geometric_rejection:
        mismatch = rollout_mismatch(batch).double()
        metrics["rollout_ratio"] = mismatch.exp()
        metrics["rollout_kl"] = mismatch.expm1() - mismatch
        metrics["rollout_abs_difference"] = mismatch.abs()
    return metrics


def accepted_samples(config: PolicyLossConfig, samples: Sequence[Sample]) -> list[Sample]:
    """The samples of a step with rejected tokens masked, for ``--rejection-denominator accepted``.

    The totals of a step are fixed before it starts. Called before ``step_totals``, this makes them
    the totals of what is kept, by the rejections that the data alone decide: IcePop and geometric
    rejection (the config refuses the others with it). With ``--rejection-denominator original`` the
    samples come back as they are, and the loss takes rejected tokens out of the numerator alone. On
    the host.

    Raises:
        ValueError: log-probs are missing.
    """
    is_rejecting = config.use_geometric_rejection or _uses_icepop(config)
    if config.rejection_denominator == "original" or not is_rejecting:
        return list(samples)
    return [_accepted(config, sample) for sample in samples]


def _uses_icepop(config: PolicyLossConfig) -> bool:
    is_built_in = config.use_tis and config.custom_tis_function_path is None
    return is_built_in and config.tis_mode == "mask"


def _accepted(config: PolicyLossConfig, sample: Sample) -> Sample:
    loss_mask = sample.loss_mask
    mismatch = masked(required_log_probs(sample, "old_log_probs", sample.name), loss_mask)
    mismatch = mismatch - masked(
        required_log_probs(sample, "rollout_log_probs", sample.name), loss_mask
    )
    if _uses_icepop(config):
        is_rejected = _is_outside_tis_range(config, clamped_log_ratio(mismatch).exp())
    else:
        mean = mismatch.double().sum() / max(sample.num_active_tokens, 1)
        is_rejected = _is_geometric_outlier(config, mean)
    return dataclasses.replace(sample, loss_mask=loss_mask & ~is_rejected)


def _is_outside_tis_range(config: PolicyLossConfig, weights: Tensor) -> Tensor:
    return (weights < config.tis_clip_low) | (weights > config.tis_clip)


def _is_geometric_outlier(config: PolicyLossConfig, mean_mismatch: Tensor) -> Tensor:
    ratio = clamped_log_ratio(mean_mismatch).exp()
    is_low = ratio < config.geometric_rejection_low
    return is_low | (ratio > config.geometric_rejection_high)


def _given(sequence: SequenceLogRatios | None) -> SequenceLogRatios:
    if sequence is None:
        raise ValueError(
            "a sequence-level correction needs the tokens of every context-parallel rank: pass "
            "sequence=sequence_log_ratios(config, batch, log_probs, context_parallel_group=...)"
        )
    return sequence


@functools.cache
def load_tis_function(path: str) -> TISFunction:
    """The function that ``--custom-tis-function-path`` names, imported and checked once."""
    flag = "--custom-tis-function-path"
    function: TISFunction = load_function(path, flag=flag, positional=TIS_PARAMETERS)
    return function


def _custom_tis(
    config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor, pg_loss: Tensor
) -> tuple[Tensor, Tensor]:
    """Calls the user's function. The shapes are checked; the values, on the device, are not."""
    path = str(config.custom_tis_function_path)
    log_probs = masked(log_probs, batch.loss_mask)
    where = f"--custom-tis-function-path {path}"
    results = load_tis_function(path)(config, with_masked_inputs(batch), log_probs, pg_loss)
    if not isinstance(results, (tuple, list)) or len(results) != 2:
        raise ValueError(
            f"{where} returned a {type(results).__name__}, expected two tensors, (pg_loss, loss_mask)"
        )
    corrected, kept = results
    shape, meaning = batch.loss_mask.shape, "one value per token of the window"
    check_returned(corrected, shape, f"{where}: pg_loss:", meaning, differentiable_in=pg_loss)
    check_returned(kept, shape, f"{where}: loss_mask:", meaning)
    return corrected, batch.loss_mask & kept.bool()
