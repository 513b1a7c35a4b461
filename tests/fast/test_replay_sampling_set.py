"""What `--replay-sampling-set` asks of samples, by name and position, before a model has run; and
what it reports.
"""

from typing import Any

import pytest
import torch

from megatron_pg import PolicyLossConfig, Sample, pack, policy_loss_function, step_totals
from megatron_pg.loss.micro_batch import MicroBatchLoss
from megatron_pg.loss.resolved import resolve
from tests.fast.one_step import reported
from tests.fast.refusals import assert_refused, refusal

SETS = [[3, 1], [4], [], [5]]


def sample(name: str = "a", **changes: Any) -> Sample:
    fields = {"old_log_probs": [-0.5, 0.0, -2.0, 0.0], "kept_tokens": SETS, **changes}
    return Sample([9, 8, 3, 4, 2, 5], 4, [1, 1, 1, 1], 1.0, name=name, **fields)


def loss_of(*samples: Sample, cp: tuple[int, int] = (0, 1), **settings: Any) -> MicroBatchLoss:
    config = PolicyLossConfig(replay_sampling_set=True, **settings)
    batch = pack(samples, cp_rank=cp[0], cp_size=cp[1])
    return MicroBatchLoss(resolve(config), batch, step_totals(samples))


def test_without_sets() -> None:
    words = "a has no kept_tokens, required by --replay-sampling-set"
    assert_refused(words, loss_of, sample(kept_tokens=None))
    assert loss_of().batch.kept_tokens is not None  # an empty micro-batch
    assert "kept_tokens" in PolicyLossConfig(replay_sampling_set=True).required_sample_fields


READ_BY = {
    "old_log_probs": {},
    "ref_log_probs": {"kl_loss_coef": 0.1},
    "rollout_log_probs": {"use_tis": True},
}


@pytest.mark.parametrize(("field", "settings"), READ_BY.items())
@pytest.mark.parametrize("cp", [(0, 1), (1, 2)])
def test_log_probs_of_the_whole_vocabulary(field, settings, cp) -> None:
    """A KL to them would be of no two distributions, and a ratio one of two supports."""
    good = {name: [-0.5, 1e-4, -2.0, 0.0] for name in ("ref_log_probs", "rollout_log_probs")}
    loss_of(sample(**good), sample("b", **good), cp=cp, **settings)
    wrong = {**good, field: [-0.5, -0.3, -2.0, -0.1]}
    message = refusal(loss_of, sample(**good), sample("b", **wrong), cp=cp, **settings)
    assert message.startswith(f"b: {field}[1] is -0.3, but must be 0 because its token is the only")
    unread = {**good, field: wrong[field]} if field != "old_log_probs" else good
    loss_of(sample(**unread), cp=cp)


def test_metrics() -> None:
    """Size and mass of the sets: 0 and 1 where all tokens were kept."""
    samples = [sample("a"), sample("b")]
    config = PolicyLossConfig(replay_sampling_set=True, kept_set_mass=True)
    batch, totals = pack(samples), step_totals(samples)
    logits = torch.randn(batch.window.local_tokens, 11, generator=torch.Generator().manual_seed(0))
    _, found = policy_loss_function(config, batch, logits, totals=totals)
    metrics = reported(config, found)
    rows = logits.double().softmax(1).view(2, 6, 11)[:, 1:5].flatten(0, 1)
    masses = [float(p[ids].sum()) if ids else 1.0 for p, ids in zip(rows, SETS * 2, strict=True)]
    assert metrics["kept_set_size"] == pytest.approx(1.0)
    assert metrics["kept_set_mass"] == pytest.approx(sum(masses) / 8, rel=1e-6)
    plain = PolicyLossConfig()
    _, found = policy_loss_function(plain, batch, logits, totals=totals)
    assert not {"kept_set_size", "kept_set_mass"} & reported(plain, found).keys()


def test_an_id_outside_the_vocabulary() -> None:
    samples = [sample(kept_tokens=[[3, 40], [4], [], [5]])]
    given = (PolicyLossConfig(replay_sampling_set=True), pack(samples), torch.zeros(6, 11))
    words = "a: kept_tokens: token id 40 is outside the vocabulary of 11"
    assert_refused(words, policy_loss_function, *given, totals=step_totals(samples))
