"""A fifth aggregation is one row: the divisor sqrt(D_i), against plain loops, wherever aggregations
are read.
"""

import dataclasses
import json
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_pg import AGGREGATIONS, PolicyLossConfig, Sample, StepTotals, pack
from megatron_pg.check import options as check_options
from megatron_pg.check import reference
from megatron_pg.explain import main as explain
from megatron_pg.loss.aggregation import Aggregation
from megatron_pg.migrate import main as migrate
from megatron_pg.migrate.report import divisor_per_rollout, effective
from megatron_pg.migrate.rows import Term
from megatron_pg.step import plan_step
from megatron_pg.step.batch import PackedBatch
from megatron_pg.step.totals import sample_counts, totals_of_counts
from tests.fast.one_step import loss_of, reported

ROW = Aggregation(
    name="root_mean",
    formula="1/N sum_i (sum_t m x / sqrt(max(D_i, 1)))",
    about="D_i the active tokens of rollout i, N rollouts",
    denominator=lambda totals, samples: totals.rollout_denominators(samples).sqrt(),
    outer_count=lambda totals: max(totals.num_rollouts, 1),
)
MASKS = ([1, 1, 0, 1], [1, 1, 1], [0, 0], [1] * 9, [1, 0, 1, 1, 1], [], [1, 1])
ROLLOUTS = [7, 7, None, None, 8, 9, None]


@pytest.fixture(autouse=True)
def fifth_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AGGREGATIONS, ROW.name, ROW)


def samples_of_step(weights: bool = False) -> list[Sample]:
    samples = []
    for index, mask in enumerate(MASKS):
        length, advantage = len(mask), (-1.0) ** index * (1 + index)
        fields = {"rollout_id": ROLLOUTS[index], "group_index": 0, "name": f"sample {index}"}
        fields["old_log_probs"] = [-1.0 - 0.25 * t for t in range(length)]
        fields["ref_log_probs"] = [-1.5] * length
        fields["loss_weights"] = [0.5 + t for t in range(length)] if weights else None
        samples.append(Sample([*range(1, 3 + length)], length, mask, advantage, **fields))
    return samples


def token_weights() -> list[float]:
    """Compute what a token of each sample weighs, by plain loops."""
    keys = [number if id_ is None else f"rollout {id_}" for number, id_ in enumerate(ROLLOUTS)]
    sizes: Counter[object] = Counter()
    for key, mask in zip(keys, MASKS, strict=True):
        sizes[key] += sum(mask)
    return [1 / (len(sizes) * math.sqrt(max(sizes[key], 1))) for key in keys]


@pytest.mark.parametrize("has_weights", [False, True])
def test_the_loss_is_that_of_loops_and_the_checksum_is_1(has_weights):
    """Over two data-parallel ranks, two context-parallel ranks and the micro-batches of a plan."""
    samples = samples_of_step(has_weights)
    log_probs = [torch.linspace(-2, -1, len(mask), dtype=torch.float64) for mask in MASKS]
    expected = torch.zeros((), dtype=torch.float64)
    for number, (sample, weight) in enumerate(zip(samples, token_weights(), strict=True)):
        for t, active in enumerate(MASKS[number]):
            factor = 0.5 + t if has_weights else 1.0
            loss = -float(sample.advantages[t]) * log_probs[number][t]
            expected += weight * factor * loss if active else 0.0

    settings = {"loss_aggregation": ROW.name, "check_aggregation": True}
    config = PolicyLossConfig(policy_loss="reinforce", **settings)
    counts = [sample_counts(samples[:3]), sample_counts(samples[3:])]
    cut: list[tuple[PackedBatch, Tensor, StepTotals]] = []
    for rank, start in enumerate((0, 3)):
        own = samples[start : (3, 7)[rank]]
        plan = plan_step(own, max_tokens_per_microbatch=16, cp_size=2)
        totals = totals_of_counts(counts, rank)
        for indices in plan.microbatches:
            responses = [log_probs[start + index] for index in indices]
            flat = torch.cat([torch.zeros(0, dtype=torch.float64), *responses])
            for cp_rank in range(2):
                batch = pack([own[index] for index in indices], cp_rank=cp_rank, cp_size=2)
                cut.append((batch, flat[batch.window.response_indices], totals))
    assert len(cut) > 4
    losses, metrics = [], []
    for batch, own, totals in cut:
        step = {"totals": totals, "step_share": 1 / len(cut)}
        loss, metric = loss_of(config, batch, own, **step)
        losses.append(loss)
        metrics.append(metric)
    assert sum(losses).item() == pytest.approx(expected.item(), rel=1e-12)
    assert reported(config, *metrics)["aggregation_checksum"] == pytest.approx(1.0, abs=1e-12)


def test_explain_shows_its_coefficients(capsys):
    assert explain(["--lengths", "1,4,9", "--loss-aggregation", ROW.name, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["aggregations"][ROW.name]
    assert report["token_coefficient"] == pytest.approx([1 / 3, 1 / 6, 1 / 9], rel=1e-12)
    assert report["total_weight"] == pytest.approx((1 + 2 + 3) / 3, rel=1e-12)
    assert report["sample_share"] == pytest.approx([1 / 6, 2 / 6, 3 / 6], rel=1e-12)


def test_migrate_reads_its_divisor_off_its_formula(capsys):
    kl, policy = Term("KL", "sample_mean", 0.1), Term("policy loss", ROW.name)
    expected = "0.1 * sqrt(D_i) / D_i = 0.05, 0.0333 for 4, 9 tokens"
    assert effective(kl, policy, [4, 9], 1) == expected
    line = ["--trainer", "slime", "--loss-aggregation", ROW.name, "--", "--eps-clip", "0.2"]
    assert migrate(line) == 0
    assert "root_mean exactly, in slime\n  no lines are known" in capsys.readouterr().out


def test_the_reference_of_check_is_that_of_loops():
    samples = [
        replace(sample, rollout_id=ROLLOUTS[number] or -number)
        for number, sample in enumerate(samples_of_step())
        if sample.response_length
    ]
    scores = [(torch.linspace(-2, -1, s.response_length).double(),) * 2 for s in samples]
    found = reference._reference_loss(ROW.name, "ppo", samples, scores)
    difference = found - reference._reference_loss("sample_mean", "ppo", samples, scores)
    expected = 0.0
    sizes = {7: 6, 8: 4}
    for sample, (log_probs, _) in zip(samples, scores, strict=True):
        size = max(sizes.get(sample.rollout_id or -1, sum(sample.loss_mask.tolist())), 1)
        weight = (1 / math.sqrt(size) - 1 / size) / 5  # five rollouts have a response
        for t, active in enumerate(sample.loss_mask.tolist()):
            advantage = float(sample.advantages[t])
            ratio = math.exp(float(log_probs[t]) - float(sample.old_log_probs[t]))
            held = min(max(ratio, 0.8), 1.2)
            expected -= active * weight * min(ratio * advantage, held * advantage)
    assert difference.item() == pytest.approx(expected, rel=1e-9)
    options = check_options.CheckOptions()
    assert check_options.config_of(ROW.name, options).loss_aggregation == ROW.name


@pytest.mark.parametrize(("formula", "divisor"), [
    ("1/N sum m x", "1"),
    ("1/(N K) sum_i (sum_t m x / D_i)", "K D_i"),
    ("1/N sum_i (sum_t m x) / D_i", "(the divisor of root_mean)"),
    ("sum_i w_i sum_t m x^2", "(the divisor of root_mean)"),
])  # fmt: skip
def test_migrate_does_not_guess_a_divisor_of_another_formula(monkeypatch, formula, divisor):
    row = dataclasses.replace(ROW, name="root_mean", formula=formula)
    monkeypatch.setitem(AGGREGATIONS, row.name, row)
    assert divisor_per_rollout(row.name) == divisor
