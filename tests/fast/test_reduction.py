"""The count of the step that an inner sum is divided by: a user's reducer, and a step without
samples.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_pg.config import PolicyLossConfig
from megatron_pg.loss.aggregation import AGGREGATIONS, Weights, host_weights
from megatron_pg.loss.policy_loss import quotient
from megatron_pg.loss.reducer import get_pg_loss_reducer, weighted_sum
from megatron_pg.loss.resolved import resolve
from megatron_pg.step.batch import PackedBatch, pack
from megatron_pg.step.sample import Sample
from megatron_pg.step.totals import StepTotals
from tests import oracle
from tests.cut_policy_loss import OneProcessGroup, aggregated, package_config
from tests.cut_steps import assert_same
from tests.fast import objectives_oracle
from tests.fast.objectives_oracle import ZERO, Correction, Sequence1
from tests.fast.one_step import loss_of
from tests.fast.refusals import assert_refused
from tests.fast.sequences import flat_gradient, flat_log_probs, package_sample, random_sequences
from tests.oracle import Objective
from tests.random_steps import package_samples, random_losses, random_step, uneven_totals


def mean_of_each_sample(total, response, masks, per_token, *, cp_rank, cp_size):
    """As reducers of the field do: the token mean of every sample, or the token sum in per-token
    mode.
    """
    place = {"cp_rank": cp_rank, "cp_size": cp_size}
    return get_pg_loss_reducer(total, response, masks, per_token, **place)


def custom_config(reducer: str, per_token: bool = False, **settings: Any) -> PolicyLossConfig:
    path = {"custom_pg_loss_reducer_function_path": f"{__name__}:{reducer}"}
    return PolicyLossConfig(**path, calculate_per_token_loss=per_token, **settings)


def reduced(config: PolicyLossConfig, batch: PackedBatch, totals: StepTotals, x: Tensor) -> Tensor:
    """This rank's share of the aggregate of x [window] over the step."""
    resolved = resolve(config)
    weights = Weights.spread(
        *host_weights(resolved.normalization, batch, totals, 1.0),
        loss_mask=batch.loss_mask,
        sample_ids=batch.window_segment_ids,
        loss_weights=batch.loss_weights,
    )
    reduce = resolved.own_reducer.reduction(batch) if resolved.own_reducer else weighted_sum
    return quotient(reduce(x, weights.loss), weights.outer_count)


@pytest.mark.parametrize("per_token", (False, True))
@pytest.mark.parametrize("cp_size", (1, 2, 4))
def test_the_sum_of_a_users_reducer_is_divided_by_rollouts_or_tokens(cp_size, per_token):
    """Fully masked rollouts count in N, and a rollout of two samples counts once."""
    step = random_step(seed=50)
    samples, losses = package_samples(step), random_losses(step)
    totals, config = uneven_totals(samples), custom_config("mean_of_each_sample", per_token)
    layout = {"cp_size": cp_size, "pad_to_multiple": 3 * cp_size}
    found = torch.zeros((), dtype=torch.float64)
    for members in (slice(4), slice(4, None)):
        flat = torch.cat(losses[members])
        for cp_rank in range(cp_size):
            batch = pack(samples[members], cp_rank=cp_rank, **layout)
            found = found + reduced(config, batch, totals, flat[batch.window.response_indices])

    rollouts = oracle.rollouts(step)
    assert AGGREGATIONS["sample_mean"].expected_sums(totals)[0] < len(rollouts) < len(step)
    alone = [[index] for index in range(len(step))]
    means = oracle.mean_of_token_means(step, losses, alone) * len(step)
    expected = oracle.token_mean(step, losses) if per_token else means / len(rollouts)
    assert_same(found, expected, losses)


def sum_without_gradient(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda x: x.detach().sum()


def test_a_users_reducer_that_loses_the_gradient_is_refused() -> None:
    batch = pack(package_samples(random_step(seed=50)))
    config, totals = custom_config("sum_without_gradient"), uneven_totals(batch.samples)
    x = torch.ones(len(batch.window), dtype=torch.float64)
    total = float(reduced(config, batch, totals, x)) * totals.num_rollouts
    assert total == pytest.approx(len(x))
    words = "the reducer returned a tensor without a gradient"
    assert_refused(words, reduced, config, batch, totals, x.requires_grad_())


def sum_over_samples(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    """As trainers write it that have no empty micro-batch: Python's sum over samples, of none the
    int 0.
    """
    torch.stack([mask.sum() for mask in loss_masks])

    def reduce(x: Tensor) -> Any:
        parts = zip(x.split(response_lengths), loss_masks, strict=True)
        return sum((part * mask).sum() for part, mask in parts)

    return reduce


CONFIGS = {
    "custom": custom_config("mean_of_each_sample"),
    "custom_over_samples": custom_config("sum_over_samples"),
    "custom_per_token": custom_config("mean_of_each_sample", per_token=True),
    **{name: package_config(aggregated(Objective(), name)) for name in oracle.AGGREGATIONS},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_without_samples_is_zero_and_connected(name: str) -> None:
    """0 / 0 on a rank whose filters left nothing would make every gradient NaN."""
    losses = torch.zeros(0, requires_grad=True)
    objective = reduced(CONFIGS[name], pack([]), uneven_totals([]), losses)
    objective.backward()
    assert objective.item() == 0.0 and losses.grad is not None


received: list[list[Tensor]] = []
"""The loss masks of every call of `mean_of_what_is_left`."""


def mean_of_what_is_left(
    total_lengths, response_lengths, loss_masks, calculate_per_token_loss, cp_rank, cp_size
):
    """The token mean of every sample, of the masks that it is given."""
    received.append(loss_masks)
    place = {"cp_rank": cp_rank, "cp_size": cp_size}
    return get_pg_loss_reducer(total_lengths, response_lengths, loss_masks, **place)


def drop_falling(config, batch: PackedBatch, log_probs: Tensor, pg_loss: Tensor):
    return pg_loss, batch.advantages >= 0


ICEPOP = {"use_tis": True, "tis_mode": "mask", "tis_clip_low": 0.8, "tis_clip": 1.25}
OF_SEQUENCE = {"sequence_rejection_low": 0.5, "sequence_rejection_high": 2.0}
OF_MEAN = {"geometric_rejection_low": 0.9, "geometric_rejection_high": 1.1}
GEOMETRIC_MASK = ICEPOP | {"tis_level": "geometric", "tis_clip_low": 0.95, "tis_clip": 1.05}
OPSM = {"use_opsm": True, "opsm_delta": 0.01}
DROPPING: dict[str, tuple[dict[str, Any], Correction]] = {
    "icepop": (ICEPOP, Correction("mask", 0.8, 1.25)),
    "sequence_mask": (ICEPOP | {"tis_level": "sequence"}, Correction("sequence_mask", 0.8, 1.25)),
    "geometric_mask": (GEOMETRIC_MASK, Correction("geometric_mask", 0.95, 1.05)),
    "sequence": ({"use_sequence_rejection": True, **OF_SEQUENCE}, Correction(sequence=(0.5, 2.0))),
    "geometric": ({"use_geometric_rejection": True, **OF_MEAN}, Correction(geometric=(0.9, 1.1))),
    "opsm": (OPSM, Correction(opsm_delta=0.01)),
    "icepop_and_opsm": (ICEPOP | OPSM, Correction("mask", 0.8, 1.25, opsm_delta=0.01)),
    "truncated": ({"use_tis": True, "tis_clip": 1.1}, Correction("token", tis_high=1.1)),
}
TERMS = {"kl_loss_coef": 0.3, "entropy_coef": 0.2, "regularizer_aggregation": "loss"}


def mean_of_samples(losses: Sequence[list[Tensor]], masks: Sequence[list[int]]) -> Tensor:
    means = [sum(x, ZERO) / max(sum(m), 1) for x, m in zip(losses, masks, strict=True)]
    return sum(means, ZERO) / len(means)


def evaluated(sequences: Sequence[Sequence1], settings: dict[str, Any], size: int) -> tuple:
    """The loss, its gradient, and the shapes of the all-reduces; each rank's call of the reducer
    leaves its masks in `received`.
    """
    config, log_probs = custom_config("mean_of_what_is_left", **settings), flat_log_probs(sequences)
    samples = [package_sample(sequence) for sequence in sequences]
    totals, group = uneven_totals(samples), OneProcessGroup(size)

    def of_rank(rank: int) -> Tensor:
        received.clear() if rank == 0 else None
        batch = pack(samples, cp_rank=rank, cp_size=size)
        of_window = log_probs[batch.window.response_indices]
        # An entropy of NaN at masked positions.
        entropy = torch.where(batch.loss_mask, of_window.detach().square(), torch.nan)
        options: Any = {"totals": totals, "context_parallel_group": group}
        return loss_of(config, batch, of_window, entropy, **options)[0]

    loss = torch.stack(group.run(of_rank)).sum()
    loss.backward()
    return loss.item(), log_probs.grad, [tuple(total.shape) for total in group.sums]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", DROPPING)
def test_a_users_reducer_gets_the_masks_that_corrections_leave(name: str, size: int) -> None:
    """On every rank, those whose window is empty included; the terms follow it with the masks from
    before.
    """
    settings, correction = DROPPING[name]
    for terms in ({}, TERMS):
        sequences = random_sequences(4, spread=0.5)
        ppo = [objectives_oracle.objective("ppo", s) for s in sequences]
        pairs = zip(sequences, ppo, strict=True)
        corrected = [objectives_oracle.correct(s, losses, correction) for s, losses in pairs]
        losses, masks = [loss for loss, _ in corrected], [mask for _, mask in corrected]
        before = [s.loss_mask for s in sequences]
        expected = mean_of_samples(losses, masks)
        assert (masks != before) == (name != "truncated")
        if any(0 < sum(one) < sum(other) for one, other in zip(masks, before, strict=True)):
            other = mean_of_samples(losses, before)  # divides by what was dropped too
            assert abs(other.item() - expected.item()) > 1e-3
        if terms:  # by the reducer with the masks from before
            kl = mean_of_samples([objectives_oracle.kl(s, "k3") for s in sequences], before)
            squares = [s.log_probs.detach().square() * torch.tensor(s.loss_mask) for s in sequences]
            entropies = list(map(list, squares))
            expected = expected + 0.3 * kl - 0.2 * mean_of_samples(entropies, before)
        loss, gradient, shapes = evaluated(sequences, settings | terms, size)
        is_dropping, given = masks != before, [[m.tolist() for m in each] for each in received]
        assert given == [masks, *[before] * bool(terms and is_dropping)] * size
        if size > 1:  # one all-reduce of sums, if any, and one of masks where any may be dropped
            assert len(shapes) == is_dropping + bool(OF_SUMS & {*settings, *settings.values()})
            assert not is_dropping or shapes[-1] == (sum(map(len, before)),)
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        wanted = flat_gradient(expected, sequences)
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)


OF_SUMS = {"sequence", "geometric", "use_sequence_rejection", "use_geometric_rejection", "use_opsm"}
"""The settings with sums over sequences, which are all-reduced."""


def test_a_masked_token_and_one_that_a_custom_correction_drops() -> None:
    sample = Sample(
        tokens=[1] * 7,
        response_length=5,
        loss_mask=[1, 1, 0, 1, 1],
        advantages=[1.0, 1.0, 1.0, -1.0, 1.0],
        old_log_probs=[0.0] * 5,
        rollout_log_probs=[0.0, -3.0, 0.0, 0.0, 0.0],
    )
    of_user = {"use_tis": True, "custom_tis_function_path": f"{__name__}:drop_falling"}
    for settings, expected in ((ICEPOP, [1, 0, 0, 1, 1]), (of_user, [1, 1, 0, 0, 1])):
        received.clear()
        config = custom_config("mean_of_what_is_left", **settings)
        loss_of(config, pack([sample]), torch.zeros(5, requires_grad=True))
        assert [mask.tolist() for mask in received[0]] == [expected]
