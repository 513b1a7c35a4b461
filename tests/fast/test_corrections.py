"""The corrections of rollout mismatch against their formulas, value, gradient and mask."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_pg import PackedBatch, PolicyLossConfig, Sample, accepted_samples, filter_overlong
from megatron_pg.config.tables import rows_on
from megatron_pg.loss.corrections import (
    CORRECTIONS,
    Corrected,
    apply_corrections,
    correction_metric_names,
)
from megatron_pg.loss.objectives import OBJECTIVES
from megatron_pg.loss.sequence import SequenceSums, sequence_sum_names, sequence_units
from tests.fast import objectives_oracle as oracle
from tests.fast.objectives_oracle import Correction, Sequence1
from tests.fast.refusals import assert_refused
from tests.fast.sequences import (
    flat_gradient,
    flat_log_probs,
    grid_sequence,
    package_batch,
    package_sample,
    random_sequences,
    stacked,
    tokens_and_sums,
)


def tis(low: float, high: float, **others: str) -> dict[str, Any]:
    return {"use_tis": True, "tis_clip_low": low, "tis_clip": high, **others}


def geometric(low: float, high: float) -> dict[str, Any]:
    bounds = {"geometric_rejection_low": low, "geometric_rejection_high": high}
    return {"use_geometric_rejection": True, **bounds}


def sequence(low: float, high: float) -> dict[str, Any]:
    bounds = {"sequence_rejection_low": low, "sequence_rejection_high": high}
    return {"use_sequence_rejection": True, **bounds}


def opsm(delta: float) -> dict[str, Any]:
    return {"use_opsm": True, "opsm_delta": delta}


GEOMETRIC, OPSM = geometric(0.95, 1.03), opsm(0.01)
MASK = {"tis_mode": "mask"}
ICEPOP = tis(0.8, 1.2, **MASK)
TIS_SEQUENCE = tis(0.5, 1.5, tis_level="sequence")
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "tis": tis(0.0, 1.1),
    "tis_both_bounds": tis(0.9, 1.1),
    "tis_sequence": TIS_SEQUENCE,
    "icepop": ICEPOP,
    "geometric": GEOMETRIC,
    "tis_geometric": tis(0.95, 1.03, tis_level="geometric"),
    "mask_sequence": tis(0.4, 1.5, tis_level="sequence", **MASK),
    "mask_geometric": tis(0.95, 1.03, tis_level="geometric", **MASK),
    "sequence": sequence(0.7, 1.9),
    "sequence_above_one": sequence(1.05, math.inf),
    "geometric_below_one": geometric(0.0, 0.945),
    "both_rejections": {**GEOMETRIC, **sequence(0.6, 2.0)},
    "opsm": OPSM,
    **{
        f"{name}_by_turn": {**settings, "sequence_unit": "turn"}
        for name, settings in (
            ("tis_sequence", TIS_SEQUENCE),
            ("tis_geometric", tis(0.95, 1.03, tis_level="geometric")),
            ("mask_geometric", tis(0.95, 1.03, tis_level="geometric", **MASK)),
            ("geometric", GEOMETRIC),
            ("sequence", sequence(0.7, 1.9)),
            ("opsm", OPSM),
        )
    },
    "all_with_tis_sequence": {**TIS_SEQUENCE, **GEOMETRIC, **OPSM},
    "all_with_icepop": {**ICEPOP, **GEOMETRIC, **OPSM},
}
BOUNDS: dict[str, tuple[dict[str, Any], list[float]]] = {
    # name: (settings, mismatches of which one meets a bound exactly)
    "icepop_low": (tis(1.0, 1.2, **MASK), [0.0, -0.01, 0.01]),
    "icepop_high": (tis(0.8, 1.0, **MASK), [0.0, -0.01, 0.01]),
    "icepop_beyond_the_clamp": (tis(0.8, 1e9, **MASK), [0.0, 20.5, 25.0]),
    "geometric_low": (geometric(1.0, 1.03), [0.0, 0.0]),
    "geometric_high": (geometric(0.95, 1.0), [0.0, 0.0]),
    "sequence_low": (sequence(1.0, 2.0), [0.25, -0.25]),
    "sequence_high": (sequence(0.0, 1.0), [-0.5, 0.5]),
    "mask_geometric_met": (tis(1.0, 1.2, tis_level="geometric", **MASK), [0.25, -0.25]),
    "opsm_met": (opsm(0.25), [-0.25, -0.25]),
    "geometric_with_tis": ({**GEOMETRIC, **tis(0.9, 1.1)}, [0.3, -0.3]),
}


def correction_of(settings: dict[str, Any]) -> Correction:
    """The settings in the oracle's words."""
    kind = settings.get("tis_level", "token") if "use_tis" in settings else None
    if "tis_mode" in settings:
        kind = "mask" if kind == "token" else f"{kind}_mask"

    def bounds(level: str) -> tuple[float, float] | None:
        if f"use_{level}_rejection" not in settings:
            return None
        return settings[f"{level}_rejection_low"], settings[f"{level}_rejection_high"]

    clip = (settings.get("tis_clip_low", 0.0), settings.get("tis_clip", 2.0))
    rejections = {"geometric": bounds("geometric"), "sequence": bounds("sequence")}
    by_turn = settings.get("sequence_unit") == "turn"
    opsm_delta = settings.get("opsm_delta")
    return Correction(kind, *clip, **rejections, opsm_delta=opsm_delta, by_turn=by_turn)


def corrected(
    config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor
) -> tuple[Corrected, Tensor]:
    tokens, sums = tokens_and_sums(config, batch, log_probs)
    loss = OBJECTIVES[config.policy_loss].function(config, tokens, sums).loss
    return apply_corrections(config, tokens, loss, sums, rows_on(CORRECTIONS, config)), loss


def corrected_sequences(
    settings: dict[str, Any], sequences: list[Sequence1]
) -> tuple[Corrected, Tensor]:
    config, batch = PolicyLossConfig(**settings), package_batch(sequences)
    return corrected(config, batch, flat_log_probs(sequences))


def check(case: str, policy_loss: str, sequences: list[Sequence1], dtype: torch.dtype) -> None:
    settings = CASES[case] if case in CASES else BOUNDS[case][0]
    correction = correction_of(settings)
    by_turn = correction.by_turn
    losses = [oracle.objective(policy_loss, s, by_turn=by_turn) for s in sequences]
    both = zip(sequences, losses, strict=True)
    pairs = [oracle.correct(s, of_sample, correction) for s, of_sample in both]
    expected = stacked([losses for losses, _ in pairs])
    expected_mask = [bool(keep) for _, mask in pairs for keep in mask]
    expected_gradient = flat_gradient(expected.sum(), sequences)

    log_probs = flat_log_probs(sequences, dtype)
    config = PolicyLossConfig(policy_loss=policy_loss, **settings)
    found, _ = corrected(config, package_batch(sequences), log_probs)
    found.loss.sum().backward()
    assert found.loss_mask.tolist() == expected_mask
    # Of float64 inputs the weights are float64, as the loss is.
    tolerance = {"rtol": 2e-6, "atol": 2e-6}
    if dtype == torch.float64:
        tolerance = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(found.loss.double(), expected, **tolerance)
    if dtype == torch.bfloat16:
        tolerance = {"rtol": 2**-8, "atol": 1e-6}
    torch.testing.assert_close(log_probs.grad.double(), expected_gradient, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy_loss", ["ppo", "gspo", "reinforce"])
@pytest.mark.parametrize("case", CASES)
def test_random_sequences_equal_the_formula(case, policy_loss, dtype):
    check(case, policy_loss, random_sequences(1), dtype)


@pytest.mark.parametrize("case", [name for name in CASES if name.endswith("_by_turn")])
def test_a_mutant_with_the_weight_of_the_whole_sequence_is_seen(case, monkeypatch):
    def whole(config: PolicyLossConfig, samples: list[Sample]) -> tuple[Tensor, Tensor]:
        return sequence_units(dataclasses.replace(config, sequence_unit="sequence"), samples)

    monkeypatch.setattr("megatron_pg.loss.sequence.sequence_units", whole)
    with pytest.raises(AssertionError):
        check(case, "reinforce", random_sequences(1), torch.float64)


def test_the_random_sequences_meet_every_correction_on_both_sides():
    """Otherwise the comparison above would say little."""
    sequences = random_sequences(1)
    for case, correction in ((case, correction_of(CASES[case])) for case in CASES):
        masks = [oracle.correct(s, oracle.objective("ppo", s), correction)[1] for s in sequences]
        kept = sum(map(sum, masks))
        before = sum(sum(s.loss_mask) for s in sequences)
        if correction.rejects() and not case.startswith("all"):
            assert 0 < kept < before, case


@pytest.mark.parametrize("case", ["tis", "tis_both_bounds", "icepop"])
def test_extreme_mismatches(case):
    mismatches = (-1e4, -20.5, -19.5, -0.3, -0.1, 0.0, 0.05, 0.15, 0.3, 19.5, 20.5, 1e4)
    check(case, "reinforce", [grid_sequence(mismatches, (-1.0, 2.0))], torch.float64)


SEQUENCE_LEVEL = [
    "tis_sequence", "tis_geometric", "mask_sequence", "mask_geometric", "opsm",
    "geometric", "geometric_below_one", "sequence", "sequence_above_one",
]  # fmt: skip


@pytest.mark.parametrize("mismatch", [-1e4, -3.0, -0.1, -0.04, 0.0, 0.02, 0.04, 5.0, 1e4])
@pytest.mark.parametrize("case", SEQUENCE_LEVEL)
def test_sequences_of_extreme_mismatch(case, mismatch):
    check(case, "reinforce", [grid_sequence([mismatch], (-1.0, 0.0, 2.0))], torch.float64)


@pytest.mark.parametrize("case", BOUNDS)
def test_what_is_on_a_bound_is_kept(case):
    check(case, "reinforce", [grid_sequence(BOUNDS[case][1], (-1.0, 2.0))], torch.float64)


ACCEPTED = ("icepop", "mask_sequence", "mask_geometric", "geometric", "sequence")


@pytest.mark.parametrize("case", [*(case for case in BOUNDS if case != "opsm_met"), *ACCEPTED])
def test_accepted_samples_drops_what_the_loss_drops(case):
    settings, mismatches = BOUNDS[case] if case in BOUNDS else (CASES[case], [0.0])
    sequences = [grid_sequence(mismatches, (-1.0, 2.0)), *random_sequences(10)]
    found, _ = corrected_sequences(settings, sequences)
    config = PolicyLossConfig(rejection_denominator="accepted", **settings)
    samples = accepted_samples(config, [package_sample(s) for s in sequences])
    assert torch.equal(torch.cat([s.accepted_mask for s in samples]), found.loss_mask)
    assert [s.loss_mask.tolist() for s in samples] == [s.loss_mask for s in sequences]


def test_a_loss_mask_that_shrinks_after_the_rejection_is_refused():
    config = PolicyLossConfig(rejection_denominator="accepted", **ICEPOP)
    samples = [package_sample(s, name="cut") for s in random_sequences(10)]
    marked = accepted_samples(config, samples)
    words = "cut: accepted_mask[ | the loss mask is 0 there. Call accepted_samples again"
    assert_refused(words, filter_overlong, marked, [True] * len(marked))
    accepted_samples(config, filter_overlong(samples, [True] * len(samples)))


def test_accepted_samples_adds_up_in_float64():
    """2^24 + 1 is 2^24 in float32, and the mean of the three mismatches 0 in place of 1/3."""
    log_probs = {"old_log_probs": [0.0, 0.0, -(2.0**24)]}
    log_probs["rollout_log_probs"] = [-(2.0**24), -1.0, 0.0]
    sample = Sample([0] * 4, 3, [1, 1, 1], 1.0, **log_probs)
    config = PolicyLossConfig(rejection_denominator="accepted", **GEOMETRIC)
    (kept,) = accepted_samples(config, [sample])
    assert not kept.accepted_mask.any()


def test_only_the_log_probs_that_a_setting_needs_are_asked_for():
    sequences = random_sequences(12)
    batch, log_probs = package_batch(sequences), flat_log_probs(sequences)
    without = dataclasses.replace(batch, rollout_log_probs=None)
    for settings in ({"policy_loss": "gspo"}, OPSM):
        config = PolicyLossConfig(**settings)
        expected, found = (corrected(config, one, log_probs)[0] for one in (batch, without))
        assert torch.equal(found.loss, expected.loss)
        assert torch.equal(found.loss_mask, expected.loss_mask)


@pytest.mark.parametrize("settings", [
    {},
    {"use_tis": True},
    {"policy_loss": "gspo", "custom_policy_loss_path": f"{__name__}:keep_likely_tokens"},
    {**TIS_SEQUENCE, "custom_tis_function_path": f"{__name__}:keep_likely_tokens"},
])  # fmt: skip
def test_token_level_settings_need_no_sums_over_sequences(settings):
    """Nor does what a user's function takes the place of."""
    assert sequence_sum_names(PolicyLossConfig(**settings)) == ()


@pytest.mark.parametrize("case", ["tis", "tis_sequence", "icepop", "all_with_icepop"])
def test_a_nan_rollout_log_prob_at_an_active_position_stays_visible(case):
    """A rejection must not swallow it: NaN is neither inside nor outside of a range."""
    sequences = [grid_sequence([0.0, 0.01], [1.0])]
    batch = package_batch(sequences)
    batch = dataclasses.replace(batch, rollout_log_probs=torch.tensor([0.0, math.nan]))
    found, _ = corrected(PolicyLossConfig(**CASES[case]), batch, flat_log_probs(sequences))
    assert torch.isnan(found.loss[1])


@pytest.mark.parametrize("case", CASES)
def test_metrics_are_those_before_rejection_and_named_by_the_config(case):
    sequences = random_sequences(3)
    batch = package_batch(sequences)
    config = PolicyLossConfig(**CASES[case])
    found, _ = corrected(config, batch, flat_log_probs(sequences))
    assert set(found.metrics) == set(correction_metric_names(config))
    if not found.metrics:
        return
    dropped = batch.loss_mask & ~found.loss_mask
    assert torch.equal(found.metrics["rejected_fraction"], dropped.float())


def test_a_sum_over_sequences_that_was_not_made_is_named():
    sequences = random_sequences(4)
    batch, log_probs = package_batch(sequences), flat_log_probs(sequences)
    for settings, name in ((TIS_SEQUENCE, "mismatch"), (GEOMETRIC, "mismatch"), (OPSM, "policy")):
        config = PolicyLossConfig(**settings)
        tokens, _ = tokens_and_sums(config, batch, log_probs)
        sums = SequenceSums(tokens.unit_ids, {})
        words = f"the sum '{name}' over sequences was not computed"
        rows = rows_on(CORRECTIONS, config)
        assert_refused(words, apply_corrections, config, tokens, log_probs, sums, rows)


def test_accepted_samples_leaves_what_needs_no_rejection_alone():
    samples = [package_sample(s) for s in random_sequences(6)]
    for settings in ({}, {"use_tis": True}, ICEPOP):
        config = PolicyLossConfig(**settings)
        assert all(a is b for a, b in zip(accepted_samples(config, samples), samples, strict=True))
    config = PolicyLossConfig(rejection_denominator="accepted", **ICEPOP)
    bare = dataclasses.replace(samples[0], rollout_log_probs=None, name="the first")
    assert_refused("the first has no rollout_log_probs", accepted_samples, config, [bare])


def keep_likely_tokens(config, batch, log_probs, pg_loss):
    assert torch.isfinite(batch.rollout_log_probs).all()
    assert torch.isfinite(log_probs).all() and (log_probs[~batch.loss_mask] == 0).all()
    keeps_masked_tokens_too = torch.ones_like(batch.loss_mask)
    keeps_masked_tokens_too[: batch.loss_mask.numel() // 2] = False
    # The division is a user's mistake that no token shows which counts.
    return 2 * pg_loss / batch.loss_mask, keeps_masked_tokens_too.float()


def wrong_shape(config, batch, log_probs, pg_loss):
    return pg_loss, batch.loss_mask[:-1]


def test_custom_function_weights_and_only_shrinks_the_mask():
    sequences = random_sequences(7)
    batch = package_batch(sequences)
    dirty = batch.rollout_log_probs.masked_fill(~batch.loss_mask, math.nan)
    batch = dataclasses.replace(batch, rollout_log_probs=dirty)
    path = f"{__name__}:keep_likely_tokens"
    config = PolicyLossConfig(use_tis=True, custom_tis_function_path=path)
    log_probs = flat_log_probs(sequences).detach().masked_fill(~batch.loss_mask, math.nan)
    found, loss = corrected(config, batch, log_probs.requires_grad_())
    half = batch.loss_mask.numel() // 2
    expected_mask = batch.loss_mask.clone()
    expected_mask[:half] = False
    assert torch.equal(found.loss_mask, expected_mask)
    assert torch.equal(found.loss, torch.where(expected_mask, 2 * loss, 0.0))
    assert set(found.metrics) == set(correction_metric_names(config))


def without_gradient(config, batch, log_probs, pg_loss):
    return pg_loss.detach(), batch.loss_mask


@pytest.mark.parametrize(("function", "words"), [
    ("without_gradient", "pg_loss: returned a tensor without a gradient"),
    ("wrong_shape", "loss_mask: returned a tensor of shape  | one value per token of the window"),
])  # fmt: skip
def test_custom_functions_of_another_result_are_refused(function, words):
    sequences = random_sequences(8)
    path = f"{__name__}.{function}"
    settings = {"use_tis": True, "custom_tis_function_path": path}
    assert_refused(words, corrected_sequences, settings, sequences)
