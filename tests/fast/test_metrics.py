"""The metrics of a step against plain loops, and what they may cost."""

import gc
import logging
import math
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_pg.config import PolicyLossConfig
from megatron_pg.critic.settings import CriticConfig
from megatron_pg.critic.value_loss import MicroBatchValueLoss
from megatron_pg.loss.corrections import accepted_samples
from megatron_pg.loss.metrics import MicroBatchMetrics, metric_names, metric_table, metrics_on
from megatron_pg.megatron import PolicyStep
from megatron_pg.step.batch import PackedBatch, pack
from megatron_pg.step.sample import Sample
from megatron_pg.step.totals import step_totals
from tests.dispatches import CountDispatches
from tests.fast import objectives_oracle
from tests.fast.objectives_oracle import Sequence1
from tests.fast.one_step import PLAIN_SUM, loss_of, reported
from tests.fast.refusals import assert_refused, assert_words
from tests.fast.sequences import (
    OF_LOG_PROBS,
    flat_log_probs,
    grid_sequence,
    package_batch,
    package_sample,
    random_sequence,
    random_sequences,
)
from tests.random_steps import uneven_totals

EVERYTHING = {
    "kl_loss_coef": 0.1,
    "entropy_coef": 0.01,
    "pg_metrics": "with_entropy",
    "use_tis": True,
    "tis_mode": "mask",
    "use_geometric_rejection": True,
    "use_opsm": True,
}
"""Settings that turn every metric on."""
DEFAULTS = PolicyLossConfig()


def everything(name: str) -> dict[str, Any]:
    """All that an objective may stand beside: the ratio of dis is the weight of TIS already."""
    dropped = ("use_tis", "tis_mode") if name == "dis" else ()
    kept = {key: value for key, value in EVERYTHING.items() if key not in dropped}
    return {**kept, "policy_loss": name}


def metrics_of(config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor):
    return loss_of(config, batch, log_probs, torch.ones_like(log_probs))[1]


def report_of(config: PolicyLossConfig, sequences: list[Sequence1], log_probs=None) -> dict:
    """What a step of one micro-batch reports."""
    log_probs = flat_log_probs(sequences) if log_probs is None else log_probs
    return reported(config, metrics_of(config, package_batch(sequences), log_probs))


def three_tokens(**changes: Any) -> Sample:
    """A sample of two prompt and three response tokens."""
    fields: dict[str, Any] = {"loss_mask": [1] * 3, "advantages": 1.0, "old_log_probs": [-1.0] * 3}
    return Sample(tokens=[1] * 5, response_length=3, **(fields | changes))


def test_means_of_single_samples_are_the_frozen_formula_to_the_bit() -> None:
    """What a mean was when a document was a sample: mask / own active tokens, one product, one
    division.
    """
    sequences = random_sequences(4)
    batch = package_batch(sequences)
    found = metrics_of(DEFAULTS, batch, flat_log_probs(sequences, torch.float32))
    own = [max(sum(s.loss_mask), 1) for s in sequences for _ in s.loss_mask]
    weights = batch.loss_mask.double() / torch.tensor(own, dtype=torch.float64)
    names = [row.name for row in metrics_on(DEFAULTS) if not row.reads]
    advantage = names.index("advantage")
    values = torch.zeros(len(names), len(weights), dtype=torch.float64)
    values[advantage] = torch.where(batch.loss_mask, batch.advantages, 0.0)
    frozen = (values * weights).sum(1)[advantage]
    assert found["advantage"].tolist() == [frozen.item(), weights.sum().item()]


def test_what_no_sample_carries_is_left_out_and_what_some_carry_is_theirs() -> None:
    """Also where a micro-batch is empty, and where only some micro-batches have the rollout
    engine's log-probs.
    """
    sequences = [random_sequence(seed, 6, active_rate=1.0) for seed in range(3)]
    samples = [package_sample(s, rollout_id=i) for i, s in enumerate(sequences)]
    without = [replace(s, rollout_log_probs=None, ref_log_probs=None) for s in samples]

    def metrics(*parts: list[Sample]) -> dict[str, float]:
        totals, found = step_totals([sample for part in parts for sample in part]), []
        for part in parts:
            log_probs, options = torch.full((6 * len(part),), -1.0), {"step_share": 1 / len(parts)}
            found.append(loss_of(DEFAULTS, pack(part), log_probs, totals=totals, **options)[1])
            assert set(found[-1]) == set(metric_names(DEFAULTS))
        return reported(DEFAULTS, *found)

    assert not [name for name in metrics(without, []) if "rollout" in name or "ref" in name]
    mixed, whole = metrics(without[:1], samples[1:], []), metrics(samples[1:])
    names = [name for name in whole if "rollout" in name or "ref" in name]
    assert len(names) == 12
    assert all(mixed[name] == pytest.approx(whole[name], rel=1e-12) for name in names)


@pytest.mark.parametrize("settings", [{"ratio_anchor": "rollout"}, {"policy_loss": "dis"}], ids=str)
def test_the_ratio_against_the_rollout_engine_needs_no_old_log_probs(settings) -> None:
    """One sample of six tokens: its means are token means."""
    sequence = random_sequence(5, 6, active_rate=1.0)
    config = PolicyLossConfig(**settings)
    log_ratios = sequence.log_probs.detach() - torch.tensor(sequence.rollout_log_probs)
    for old_log_probs in (None, sequence.old_log_probs):
        sample = replace(package_sample(sequence), old_log_probs=old_log_probs)
        found = reported(config, metrics_of(config, pack([sample]), flat_log_probs([sequence])))
        assert found["ppo_kl"] == pytest.approx(-log_ratios.mean().item(), rel=1e-9)
        assert found["ratio_new_old_sum"] == pytest.approx(log_ratios.exp().sum().item(), rel=1e-9)
        is_there = {"old_logprobs", "rollout_ratio"} <= set(found)
        assert is_there == (old_log_probs is not None)


def test_mismatch_metrics_need_no_correction_and_no_ratio() -> None:
    configs = (PolicyLossConfig(use_tis=True), PolicyLossConfig(policy_loss="reinforce"))
    expected, *others = (report_of(config, random_sequences(2)) for config in (DEFAULTS, *configs))
    names = [name for name in expected if "rollout" in name]
    assert len(names) == 9
    assert all(found[name] == expected[name] for found in others for name in names)


def test_staleness_is_reported_where_samples_and_the_step_have_versions() -> None:
    sequences = [random_sequence(seed, seed + 1, active_rate=1.0) for seed in range(4)]
    rows = zip(sequences, (7, 9, 4, 4), (0, 1, 2, 2), strict=True)
    samples = [package_sample(s, policy_version=v, rollout_id=rollout) for s, v, rollout in rows]
    totals, metrics = step_totals(samples), []
    for cp_rank in range(4):  # some ranks have no token of some samples
        batch = pack(samples, cp_rank=cp_rank, cp_size=4)
        log_probs = flat_log_probs(sequences)[batch.window.response_indices]
        metrics.append(loss_of(DEFAULTS, batch, log_probs, totals=totals, step_share=1 / 4)[1])
    found = reported(DEFAULTS, *metrics)
    assert "staleness" not in found
    assert found["policy_version"] == pytest.approx((7 + 9 + 4) / 3)
    assert found["min_policy_version"] == 4
    told = reported(DEFAULTS, *metrics, policy_version=10)
    assert told["staleness"] == pytest.approx(10 - 20 / 3) and told["max_staleness"] == 6
    with pytest.raises(ValueError, match="has no policy_version and .* has"):
        pack([replace(samples[0], policy_version=None), *samples[1:]])
    with pytest.raises(ValueError, match=r"sample \d+ of this process: policy_version is 1.5"):
        package_sample(sequences[0], policy_version=1.5)


@pytest.mark.parametrize("name", OF_LOG_PROBS)
@pytest.mark.parametrize("pg_metrics", ["none", "basic", "with_entropy"])
def test_the_config_alone_decides_the_names(name: str, pg_metrics: str) -> None:
    """Ranks that hold no metrics must pack the same table; an empty micro-batch has all of it."""
    custom = {"custom_policy_loss_path": f"{__name__}:negative_log_prob"}
    for settings in (everything(name), {}, custom):
        config = PolicyLossConfig(**settings | {"policy_loss": name, "pg_metrics": pg_metrics})
        for batch in (package_batch(random_sequences(1)), pack([])):
            log_probs = torch.full(batch.loss_mask.shape, -1.0, requires_grad=True)
            metrics = metrics_of(config, batch, log_probs)
            assert (*metrics,) == metric_names(config) and metrics["loss"].isfinite().all()
            assert all(value.shape == (2,) for value in metrics.values()), "Megatron's train_step"
            assert not any(value.requires_grad for value in metrics.values())


def negative_log_prob(config: PolicyLossConfig, batch: PackedBatch, log_probs: Tensor) -> Tensor:
    return -log_probs


@pytest.mark.parametrize("lengths", ((6, 3, 9, 1), (5, 5, 5, 5)))
def test_gspo_metrics_are_per_sequence(lengths: tuple[int, ...]) -> None:
    """Where all are as long and active, two sequences a rollout change nothing."""
    is_even, config = lengths == (5, 5, 5, 5), PolicyLossConfig(policy_loss="gspo")
    rate = 1.0 if is_even else 0.75
    sequences = [random_sequence(n + 1, lengths[n], active_rate=rate) for n in range(4)]
    ids = [n // 2 if is_even else n for n in range(4)]
    samples = [package_sample(s, rollout_id=id) for s, id in zip(sequences, ids, strict=True)]
    found = reported(config, metrics_of(config, pack(samples), flat_log_probs(sequences)))
    log_ratios = [
        objectives_oracle.policy_mean(s, "old", s.active()).item()
        for s in sequences
        if sum(s.loss_mask)
    ]
    ratios = [math.exp(value) for value in log_ratios]
    assert len(ratios) < sum(sum(s.loss_mask) for s in sequences)
    total, squared = sum(ratios), sum(r * r for r in ratios)
    assert found["ratio_new_old_sum"] == pytest.approx(total)
    assert found["ratio_new_old_squared_sum"] == pytest.approx(squared)
    assert found["ratio_new_old"] == pytest.approx(total / len(ratios))
    divergences = [r - 1 - value for r, value in zip(ratios, log_ratios, strict=True)]
    assert found["kl_new_old"] == pytest.approx(sum(divergences) / len(ratios))
    assert found["effective_sample_size"] == pytest.approx(total**2 / squared)
    outside = [not 0.8 <= r <= 1.2 for r in ratios]
    assert found["clipped_ratio_fraction"] == pytest.approx(sum(outside) / len(ratios))


def test_the_fraction_that_is_rejected_is_a_mean_over_documents() -> None:
    sequences = random_sequences(2)
    settings = {"use_tis": True, "tis_mode": "mask", "tis_clip_low": 0.9, "tis_clip": 1.1}
    found = report_of(PolicyLossConfig(**settings), sequences)
    outside = [
        [
            not 0.9 <= math.exp(s.old_log_probs[t] - s.rollout_log_probs[t]) <= 1.1
            for t in s.active()
        ]
        for s in sequences
        if sum(s.loss_mask)
    ]
    expected = sum(sum(sample) / len(sample) for sample in outside) / len(outside)
    assert found["rejected_fraction"] == pytest.approx(expected, rel=1e-6)
    assert found["tis_clipped_fraction"] == found["rejected_fraction"] > 0


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_extremes_when_all_advantages_have_one_sign(sign: float) -> None:
    """Masked positions, empty windows and empty micro-batches bring the identity, not zero."""
    rows = [(s, range(1, len(s.advantages) + 1)) for s in random_sequences(3)]
    sequences = [replace(s, advantages=[sign * t for t in places]) for s, places in rows]
    batches = [package_batch(sequences), pack([]), package_batch(sequences[3:4])]
    metrics = [metrics_of(DEFAULTS, batch, torch.zeros(len(batch.window))) for batch in batches]
    found = reported(DEFAULTS, *metrics)
    active = [s.advantages[t] for s in sequences for t in s.active()]
    assert (found["max_advantage"], found["min_advantage"]) == (max(active), min(active))
    # Where all are equal the largest is the smallest, which does not mean that there is none.
    equal = report_of(DEFAULTS, [grid_sequence([0.1] * 5, [sign])])
    assert (equal["max_advantage"], equal["min_advantage"]) == (sign, sign)


def test_a_rank_that_does_not_contribute_brings_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Neither its numbers nor, a second time, the report of a token without a loss."""
    sequences = [random_sequence(1, 4, active_rate=1.0)]
    for log_probs in (flat_log_probs(sequences), torch.full((4,), torch.nan)):
        metrics = metrics_of(DEFAULTS, package_batch(sequences), log_probs)
        found = reported(DEFAULTS, metrics, contributes=False)
        assert all(math.isnan(value) for value in found.values())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_megatrons_train_step_averages_what_the_schedule_carries() -> None:
    """By the lines of `megatron/training/training.py` that read a loss function's report."""
    sequences = random_sequences(11)
    batches = [package_batch(sequences[:3]), package_batch(sequences[3:])]
    totals = uneven_totals([sample for batch in batches for sample in batch.samples])
    losses_reduced = []
    for batch in batches:
        log_probs = torch.full((len(batch.window),), -1.0)
        metrics = loss_of(DEFAULTS, batch, log_probs, totals=totals, step_share=0.5)[1]
        assert isinstance(metrics, MicroBatchMetrics)
        losses_reduced.append(metrics)
    expected = reported(DEFAULTS, *losses_reduced)
    for key in losses_reduced[0].keys():  # noqa: SIM118
        val = torch.vstack([x[key].view(-1) for x in losses_reduced]).sum(dim=0)
        assert val.numel() == 2
        if key in expected and val[1]:
            assert (val[0] / val[1]).item() == expected[key]
    assert "more" not in losses_reduced[0] and losses_reduced[0].get("more") is None


def test_shares_of_a_step_add_up_in_float64() -> None:
    batch, config = package_batch(random_sequences(11)), PolicyLossConfig(pg_metrics="none")
    loss, metrics = loss_of(config, batch, torch.zeros(len(batch.window)), step_share=1 / 3)
    assert loss.dtype == torch.float32 and metrics["loss"].dtype == torch.float64
    assert metrics["loss"].tolist() == [loss.item(), 1 / 3]


def test_a_step_without_active_tokens_has_no_means() -> None:
    config = PolicyLossConfig(**EVERYTHING)
    found = reported(config, metrics_of(config, pack([]), torch.zeros(0)))
    assert found["loss"] == 0 and found["num_tokens"] == 0
    for name in ("max_advantage", "min_advantage", "ratio_new_old", "effective_sample_size"):
        assert math.isnan(found[name])


def test_ratios_are_those_before_the_clamp() -> None:
    found = report_of(DEFAULTS, [grid_sequence([30.0, -30.0], [1.0])])
    assert found["ratio_new_old_sum"] == pytest.approx(math.exp(30) + math.exp(-30))
    expected = (math.exp(30) - 31 + math.exp(-30) + 29) / 2
    assert found["kl_new_old"] == pytest.approx(expected)


@pytest.mark.parametrize("log_ratio", (60.0, 100.0))
def test_ratios_beyond_float32_are_numbers(log_ratio: float) -> None:
    """exp(100) is infinite in float32, as is the square of exp(60)."""
    sequences = [grid_sequence([log_ratio], [1.0])]
    found = report_of(DEFAULTS, sequences, flat_log_probs(sequences, torch.float32))
    assert found["ratio_new_old"] == pytest.approx(math.exp(log_ratio))
    assert found["ratio_new_old_squared_sum"] == pytest.approx(math.exp(2 * log_ratio))
    assert found["effective_sample_size"] == pytest.approx(1.0)


def test_none_costs_nothing() -> None:
    """No value of a token is computed: the sums are those of the checksum and of the
    denominators.
    """
    sequences = random_sequences(4)
    batch, log_probs = package_batch(sequences), flat_log_probs(sequences)
    config = PolicyLossConfig(pg_metrics="none", use_tis=True)
    assert not metric_table(config).rows and not metrics_on(config)
    metrics = metrics_of(config, batch, log_probs)
    assert metrics.maxima is None and metrics.is_nan is None
    counts = []
    for setting in ("none", "basic"):
        with CountDispatches() as counter:
            metrics_of(replace(config, pg_metrics=setting), batch, log_probs)
        counts.append(len(counter.names))
    assert counts[0] < 0.7 * counts[1], counts


@pytest.mark.parametrize("name", OF_LOG_PROBS)
def test_no_host_synchronisation_before_the_end_of_the_step(name: str) -> None:
    """Tensors on the meta device have no values: reading one on the host raises."""
    config = PolicyLossConfig(**everything(name))
    batch = package_batch(random_sequences(5)).to("meta")
    log_probs = torch.zeros(batch.loss_mask.shape, device="meta", requires_grad=True)
    loss, metrics = loss_of(config, batch, log_probs, log_probs * 2)
    loss.backward()
    assert all(value.device.type == "meta" for value in metrics.values())
    with pytest.raises((NotImplementedError, RuntimeError)):
        reported(config, metrics)  # this is where the host reads


NAN = math.nan
BROKEN: dict[str, tuple[dict[str, Any], dict[str, Any], float, int]] = {
    # of three tokens: settings, the micro-batch's fields, the second log-prob, the first token
    # named
    "policy": ({}, {}, NAN, 1),
    "infinite": ({"policy_loss": "reinforce"}, {}, -math.inf, 1),
    "correction": ({"use_tis": True}, {"rollout_log_probs": [-1.0, -1.0, NAN]}, -1.0, 2),
    "masked and reference": (
        {"kl_loss_coef": 0.1},
        {"loss_mask": [False, True, True], "ref_log_probs": [NAN, -1.0, NAN]}, -1.0, 2
    ),
    "reference that is not read": ({}, {"ref_log_probs": [NAN] * 3}, -1.0, -1),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_loss_that_is_no_number_is_reported_with_sample_and_position(what, caplog) -> None:
    settings, fields, log_prob, token = BROKEN[what]
    spoiled = {field: torch.tensor(values) for field, values in fields.items()}
    # No sample may hold such numbers.
    config, batch = (
        PolicyLossConfig(**settings),
        replace(pack([three_tokens(name="it")]), **spoiled),
    )
    loss = reported(config, metrics_of(config, batch, torch.tensor([-1.0, log_prob, -1.0])))["loss"]
    assert math.isfinite(loss) == (token < 0)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(said) == (token >= 0)
    assert token < 0 or f"The first is response token {token} of sample 0 (it)" in said[0]


def test_a_nan_of_one_rank_is_reported_in_the_tokens_of_its_sample(caplog) -> None:
    sequences = [random_sequence(1, 4, active_rate=1.0), random_sequence(2, 5, active_rate=1.0)]
    samples = [package_sample(s, name=f"task {i}") for i, s in enumerate(sequences)]
    log_probs = torch.zeros(9).index_fill(0, torch.tensor([4 + 3]), torch.nan)
    batches = [pack(samples, cp_rank=cp_rank, cp_size=2) for cp_rank in range(2)]
    metrics = [metrics_of(DEFAULTS, b, log_probs[b.window.response_indices]) for b in batches]
    reported(DEFAULTS, *metrics)
    assert_words("response token 3 of sample 1 (task 1) | 1 active tokens", caplog.text)


@pytest.mark.parametrize("log_prob", (-400.0, -9999.0))
def test_a_ratio_beyond_any_number_is_held_where_its_square_is_one(log_prob: float) -> None:
    """A token that one of the policies, or its engine, holds to be impossible."""
    old, rollout = [-1.0, -1.0, log_prob], [-1.0, log_prob, -1.0]
    batch = pack([three_tokens(old_log_probs=old, rollout_log_probs=rollout)])
    found = reported(DEFAULTS, metrics_of(DEFAULTS, batch, torch.full((3,), -1.0)))
    assert all(map(math.isfinite, found.values())) and found["aggregation_checksum"] == 1.0
    assert found["ratio_new_old_sum"] == pytest.approx(math.exp(300))
    assert found["effective_sample_size"] == pytest.approx(1.0)
    # Of one weight of e^300 among three tokens.
    assert found["rollout_effective_sample_size"] == pytest.approx(1 / 3)


def test_sums_of_a_turns_ratio_are_not_a_number() -> None:
    """A token's weight in them would be its share of the turn, and those of a micro-batch are of
    samples.
    """
    names = {"ratio_new_old_sum", "ratio_new_old_squared_sum", "effective_sample_size"}
    batch = pack([three_tokens(old_log_probs=[-1.0] * 3, turn_ids=[0, 1, 1])])
    for unit in ("sequence", "turn"):
        config = PolicyLossConfig(policy_loss="gspo", sequence_unit=unit)
        found = reported(config, metrics_of(config, batch, torch.full((3,), -1.0)))
        assert found["ratio_new_old"] == 1.0
        assert all(math.isnan(found[name]) == (unit == "turn") for name in names)


@pytest.mark.parametrize("log_prob", (-1e4, -math.inf))
def test_metrics_of_a_policy_that_has_left_all_tokens(log_prob: float) -> None:
    """All ratios are 0, and equal: Kish's sample size is the number of tokens."""
    log_probs = torch.full((3,), log_prob)
    found = reported(DEFAULTS, metrics_of(DEFAULTS, pack([three_tokens()]), log_probs))
    assert found["effective_sample_size"] == pytest.approx(3.0)
    assert found["ppo_kl"] == 300.0 and found["ratio_new_old"] == math.exp(-300)
    assert found["new_logprobs"] == log_prob


CORRECTIONS: list[dict[str, Any]] = [
    {},
    *({"use_tis": True, "tis_level": level} for level in ("token", "sequence", "geometric")),
    *({name: True} for name in ("use_geometric_rejection", "use_sequence_rejection", "use_opsm")),
    {"use_tis": True, "tis_mode": "mask"},
    {"kl_loss_coef": 0.1},
    {"kl_loss_coef": 0.1, "use_unbiased_kl": True},
]
EDGES = [
    *(("log_probs", value) for value in (-math.inf, -1e4, -1e30)),
    *(
        (f"{name}_log_probs", value)
        for name in ("old", "ref", "rollout")
        for value in (-1e4, -1e30)
    ),
]


@pytest.mark.parametrize(("field", "value"), EDGES)
@pytest.mark.parametrize("name", OF_LOG_PROBS)
def test_no_log_prob_spoils_gradient_or_report(name: str, field: str, value: float) -> None:
    """Every third token, also at A = 0, under every correction. A sample refuses -inf of another
    policy than the current.
    """
    drawn = random_sequences(5, active_rate=1.0)
    batch, log_probs = package_batch(drawn), flat_log_probs(drawn, torch.float32).detach()
    changed = (log_probs if field == "log_probs" else getattr(batch, field)).clone()
    changed[::3] = value
    advantages = batch.advantages.clone()
    advantages[::2] = 0.0
    batch = replace(batch, advantages=advantages)
    if field == "log_probs":
        log_probs = changed
    else:
        batch = replace(batch, **{field: changed})
    log_probs.requires_grad_()
    legal = [c for c in CORRECTIONS if not (name == "dis" and "use_tis" in c)]
    for correction in legal:
        config = PolicyLossConfig(policy_loss=name, **correction)
        loss, metrics = loss_of(config, batch, log_probs)
        assert torch.autograd.grad(loss, log_probs)[0].isfinite().all()
        report = reported(config, metrics)
        if value == -math.inf:
            report.pop("new_logprobs")
            if name in OF_FACTOR_LOG_PROB:
                report = {k: v for k, v in report.items() if k not in ("loss", "pg_loss")}
        assert {k: v for k, v in report.items() if not math.isfinite(v)} == {}, correction


OF_FACTOR_LOG_PROB = ("reinforce", "cispo", "vespo", "sft")
"""The log-prob is a factor of their loss, infinite at probability 0; `PolicyStep.metrics` names the
token."""


@pytest.mark.parametrize("kind", ("policy", "value"))
def test_metrics_keep_no_side_channel_alive(kind: str) -> None:
    """They lie in the schedule's list until the step ends, and what a micro-batch brings of a
    teacher is larger than all else.
    """
    channels, zeros = {"teacher_logits": torch.zeros(3, 8)}, [0.0] * 3
    batch = pack([three_tokens(old_values=zeros, returns=zeros, side_channels=channels)])
    samples, channel = batch.samples, weakref.ref(batch.side_channels["teacher_logits"])
    if kind == "policy":
        _, metrics = loss_of(DEFAULTS, batch, torch.full((3,), -1.0))
    else:
        totals = step_totals(samples)
        _, metrics = MicroBatchValueLoss(DEFAULTS, CriticConfig(), batch, totals)(torch.zeros(3))
    assert metrics.batch is not None and metrics.batch.samples == samples
    del batch
    gc.collect()
    assert channel() is None


@pytest.mark.parametrize("is_weighted", (False, True))
@pytest.mark.parametrize(
    "options", ({}, {"pg_metrics": "none"}, {"calculate_per_token_loss": True})
)
def test_the_checksum_of_a_custom_reducer_counts_every_token_once(options, is_weighted) -> None:
    """With and without metrics and loss weights, in per-token mode and over empty micro-batches."""
    config = PolicyLossConfig(**PLAIN_SUM, check_aggregation=True, **options)
    step = list(package_batch(random_sequences(8)).samples)
    if is_weighted:
        step = [replace(s, loss_weights=torch.linspace(0, 2, s.response_length)) for s in step]

    def checksum(fed: list[Sample]) -> float:
        parts = []
        for batch in (pack(fed), pack([])):
            log_probs = torch.full((len(batch.window),), -1.0)
            made = loss_of(config, batch, log_probs, totals=step_totals(step), step_share=0.5)
            parts.append(made[1])
            assert set(parts[-1]) == set(metric_names(config))
        return reported(config, *parts)["aggregation_checksum"]

    assert checksum(step) == pytest.approx(1.0, abs=1e-12)
    with pytest.raises(RuntimeError, match="trained on twice: .*never trained on: "):
        checksum([step[2], *step[1:]])  # step[1] has no active token: once or twice is the same


def window_of_losses(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda x: x


def no_function(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return torch.zeros(())


@pytest.mark.parametrize("reducer", ["window_of_losses", "no_function"])
def test_a_custom_reducer_of_another_result_is_refused(reducer: str) -> None:
    config = PolicyLossConfig(custom_pg_loss_reducer_function_path=f"{__name__}:{reducer}")
    with pytest.raises(ValueError, match=f"--custom-pg-loss-reducer-function-path .*{reducer}"):
        report_of(config, random_sequences(8))


@pytest.mark.parametrize("setting", [{"entropy_coef": 0.1}, {"pg_metrics": "with_entropy"}])
def test_an_entropy_that_is_needed_and_absent_is_refused(setting: dict[str, Any]) -> None:
    batch = package_batch(random_sequences(8))
    with pytest.raises(ValueError, match="--entropy-coef or --pg-metrics with_entropy"):
        loss_of(PolicyLossConfig(**setting), batch, torch.zeros(len(batch.window)))


def test_metrics_do_not_depend_on_the_denominator_of_rejection() -> None:
    """They are of the tokens that were active before it; the terms of the loss are not among
    them.
    """
    sequences = random_sequences(9, spread=0.5)
    samples, log_probs = list(map(package_sample, sequences)), flat_log_probs(sequences)
    original = PolicyLossConfig(use_tis=True, tis_mode="mask", tis_clip=1.1, kl_loss_coef=0.1)
    expected = reported(original, metrics_of(original, package_batch(sequences), log_probs))
    assert expected["rejected_fraction"] > 0
    accepted = replace(original, rejection_denominator="accepted")
    marked = accepted_samples(accepted, samples)
    found = reported(accepted, metrics_of(accepted, pack(marked), log_probs))
    differ = {name for name, value in expected.items() if found[name] != pytest.approx(value)}
    assert differ == {"loss", "pg_loss"}
    # Totals of samples that were not marked, and samples that are not those of the totals.
    words = (
        "--rejection-denominator accepted: sample | 0 of data-parallel rank 0 | did not go through"
    )
    words += " accepted_samples. Call samples = accepted_samples(config, samples)"
    assert_refused(words, loss_of, accepted, pack(samples), log_probs)
    of_step = {"totals": uneven_totals(samples), "num_microbatches": 1}
    assert_refused(words, PolicyStep, accepted, **of_step)  # on every pipeline stage
    totals = uneven_totals(marked)
    words = "did not go through accepted_samples. Pack the samples that it returns"
    assert_refused(words, loss_of, accepted, pack(samples), log_probs, totals=totals)
