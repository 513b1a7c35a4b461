"""No number depends on the default dtype and the default device that a process has set for its
model.
"""

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_pg import (
    PolicyLossConfig,
    Sample,
    get_pg_loss_reducer,
    pack,
    policy_loss_from_log_probs,
    policy_loss_function,
    reduce_metrics,
    reduce_padded,
    step_totals,
)
from megatron_pg.critic.gae import gae, whiten
from megatron_pg.critic.settings import CriticConfig
from megatron_pg.critic.value_loss import MicroBatchValueLoss, value_report
from megatron_pg.head import HeadOptions, linear_log_probs_and_entropy
from megatron_pg.loss import AGGREGATIONS
from megatron_pg.loss.corrections import accepted_samples
from megatron_pg.megatron.fused_head import active_rows, of_all_responses
from megatron_pg.megatron.multi_token import multi_token_mask
from megatron_pg.rollout_files import routed_experts_of_engine, with_group_advantages
from megatron_pg.rollout_files.schema import sample_of_row
from megatron_pg.step import plan_step
from megatron_pg.step.advantages import METHODS, group_advantages
from megatron_pg.step.batch import PackedBatch
from tests.fast.sequences import CORRECTIONS, OF_LOG_PROBS

VOCAB_SIZE, HIDDEN = 11, 6
LENGTHS = (7, 1, 12, 5, 9, 3)


class Draw:
    """Numbers from NumPy, which has no defaults; None at masked positions, as an engine has none
    there.
    """

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)

    def floats(self, *shape: int, dtype: type = np.float64) -> Tensor:
        return torch.from_numpy(self.rng.normal(size=shape).astype(dtype))

    def log_probs(self, mask: list[int]) -> list[float | None]:
        return [-0.5 - float(self.rng.random()) if keep else None for keep in mask]

    def sample(self, number: int, length: int) -> Sample:
        mask = [1, *self.rng.integers(2, size=length - 1).tolist()]
        ids = [number // 2, 3, *self.rng.integers(VOCAB_SIZE, size=length).tolist()]
        weights = None if number % 3 == 0 else self.rng.random(length).tolist()
        numbers: dict[str, Any] = {
            name: self.rng.normal(size=length).tolist()
            for name in ("advantages", "old_values", "returns")
        }
        names = ("old_log_probs", "ref_log_probs", "rollout_log_probs")
        numbers |= {name: self.log_probs(mask) for name in names}
        teacher = torch.from_numpy(np.log(self.rng.random((length, 2)) / 2))
        return Sample(
            tokens=ids,
            response_length=length,
            loss_mask=mask,
            group_index=number // 2,
            loss_weights=weights,
            policy_version=number,
            turn_ids=sorted(self.rng.integers(3, size=length).tolist()),
            kept_tokens=[[token, (token + 3) % VOCAB_SIZE] for token in ids[2:]],
            routed_experts=[[[number % 4, 4]] * (length + 2)] * 2,
            side_channels={
                "teacher_ids": torch.from_numpy(np.tile([1, 2], (length, 1))),
                "teacher_log_probs": teacher,
            },
            **numbers,
        )


def losses(step: list[Sample], batch: PackedBatch, draw: Draw) -> Iterator[Any]:
    """Loss, gradient and metrics of one rank's window under every objective and aggregation."""
    totals, size = step_totals(step), len(batch.window)
    corrections = {k: v for k, v in CORRECTIONS.items() if "tis" not in k}
    settings: list[dict[str, Any]] = [
        {"policy_loss": name, **(corrections if name == "dis" else CORRECTIONS)}
        for name in OF_LOG_PROBS
    ]
    settings += [
        {"loss_aggregation": name, "loss_aggregation_divisor": 7.0 if name == "constant" else None}
        for name in AGGREGATIONS
    ]
    settings += [
        {"policy_loss": "gspo", "sequence_unit": "turn", "loss_weight_denominator": "weights"},
        {"kl_loss_coef": 0.1, "use_unbiased_kl": True, "regularizer_aggregation": "loss"},
    ]
    for dtype, setting in ((d, s) for d in (np.float32, np.float64) for s in settings):
        config = PolicyLossConfig(**setting)
        log_probs = (-draw.floats(size, dtype=dtype).abs()).requires_grad_()
        loss, metrics = policy_loss_from_log_probs(
            config, batch, log_probs, log_probs.detach() ** 2, totals=totals
        )
        yield loss, torch.autograd.grad(loss, log_probs)
        yield reduce_metrics(config, [metrics], contributes=True, device="cpu")
    for setting in (
        {"replay_sampling_set": True, "kept_set_mass": True},
        {"distill_coef": 0.1, "distill_teacher": "top_k"},
    ):
        logits = draw.floats(batch.window.local_tokens, VOCAB_SIZE, dtype=np.float32)
        config = PolicyLossConfig(**setting)
        loss, metrics = policy_loss_function(config, batch, logits.requires_grad_(), totals=totals)
        yield loss, torch.autograd.grad(loss, logits)
        yield reduce_metrics(config, [metrics], contributes=True, device="cpu")
    config, critic = PolicyLossConfig(), CriticConfig()
    values = draw.floats(size, dtype=np.float32).requires_grad_()
    loss, metrics = MicroBatchValueLoss(config, critic, batch, totals)(values)
    report = value_report(config, [metrics], "cpu")
    yield loss, torch.autograd.grad(loss, values), report.metrics(report.sums)


def everything() -> Iterator[Any]:
    """All that is made of numbers on the way from a rollout to a gradient."""
    draw = Draw()
    step = [draw.sample(number, length) for number, length in enumerate(LENGTHS)]
    yield step
    masks = [sample.loss_mask.tolist() for sample in step]
    rejecting = {"use_geometric_rejection": True, "rejection_denominator": "accepted"}
    bounds = {"geometric_rejection_low": 0.9, "geometric_rejection_high": 1.1}
    yield accepted_samples(PolicyLossConfig(**rejecting, **bounds), step)  # type: ignore[arg-type]
    plan = plan_step(step, max_tokens_per_microbatch=24, cp_size=2)
    yield plan.microbatches
    for rank in range(2):
        batch = pack(step, cp_rank=rank, cp_size=2)
        yield batch, active_rows(batch, None)
        yield multi_token_mask(batch, 9.0), of_all_responses("advantages", batch)
        yield batch.window.sample_borders(of_all_responses("loss_mask", batch), 4)
        yield from losses(step, batch, draw)
    yield pack([]), list(losses(step, pack([step[1]]), draw))
    hidden, weight = draw.floats(7, HIDDEN), draw.floats(VOCAB_SIZE, HIDDEN)
    options = HeadOptions(temperature=0.7)
    yield linear_log_probs_and_entropy(hidden, weight, pack(step[3:4]).targets, options)
    # Advantages, before there are samples.
    rows: Any = [draw.rng.normal(size=length).tolist() for length in LENGTHS]
    ends = draw.rng.random(len(LENGTHS)).tolist()
    pairs = zip(rows, masks, strict=True)
    rewards = [[x if keep else 0.0 for x, keep in zip(*p, strict=True)] for p in pairs]
    adaptive = {"lam_alpha": 0.3, "value_lam": 0.8, "bootstrap_values": ends}
    for settings in ({}, {"lam": 0.9, "gamma": 0.7}, adaptive):
        estimates = gae(rewards, rows, masks, **settings)  # type: ignore[arg-type]
        yield estimates, whiten(estimates.advantages, masks)
    for method in METHODS:
        yield group_advantages(ends, [0, 0, 1, 1, 1, 2], method=method, prompts=[[1]] * 6)
    row = {"prompt_ids": [1, 2], "response_ids": [3, 4, 5], "log_probs": [-1.1, None, -0.3]}
    row |= {"loss_mask": [1, 0, 1], "group_index": 0, "kept_tokens": [[3], [], [5, 6]]}
    rewarded = [
        sample_of_row(row | {"reward": x}, required=(), vocab_size=8, name=str(x)) for x in ends
    ]
    yield with_group_advantages(rewarded)
    yield routed_experts_of_engine([[[1, 2]], [[0, 3]]], 3)
    # Reducers of other trainers.
    totals, lengths = [length + 2 for length in LENGTHS], list(LENGTHS)
    losses_of_tokens = draw.floats(sum(lengths), dtype=np.float32)
    for denominators in (None, [3] * len(LENGTHS)):
        reducer = get_pg_loss_reducer(totals, lengths, masks, denominators=denominators)  # type: ignore[arg-type]
        yield reducer(losses_of_tokens)
    mask = torch.from_numpy(draw.rng.integers(2, size=(3, 5)))
    for setting in ({}, {"aggregation": "token_mean"}, {"rollout_id": [1, 1, 2]}):
        yield reduce_padded(draw.floats(3, 5, dtype=np.float32), mask, **setting)  # type: ignore[arg-type]


def bits(value: Any) -> Any:
    """What two equal results have in common: types, shapes and bits."""
    if isinstance(value, Tensor):
        content = hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()
        return str(value.dtype), list(value.shape), content
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, dict):
        return {name: bits(each) for name, each in value.items()}
    if is_dataclass(value):
        given = [f.name for f in fields(value) if f.name not in ("name", "number")]
        return {name: bits(getattr(value, name)) for name in given}
    return [bits(each) for each in value] if isinstance(value, (list, tuple)) else value


def all_bits() -> list[str]:
    return [str(bits(value)) for value in everything()]


@pytest.fixture(scope="module")
def expected() -> list[str]:
    return all_bits()


@pytest.mark.parametrize(
    ("dtype", "device"),
    [
        (torch.bfloat16, "cpu"),
        (torch.float16, "cpu"),
        (torch.float64, "cpu"),
        (torch.float32, "meta"),
    ],
)
def test_every_result_is_the_same_to_the_bit(dtype, device, expected) -> None:
    """A tensor of the meta device has no values: reading one, or mixing it with others, raises."""
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            found = all_bits()
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == expected


def test_defaults_that_are_set_before_the_package_is_imported(expected) -> None:
    program = f"""
import torch
torch.set_default_dtype(torch.bfloat16)
torch.set_default_device("meta")
from {__name__} import all_bits
print(*all_bits(), sep="\\n")
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-len(expected) :] == expected


def test_a_sum_over_sequences_divides_in_float64() -> None:
    """1 / 3 in float32 is off by 1e-8, and the sum of squares with it."""
    lengths, ratio = (3, 5, 7), math.exp(0.25)
    step = [
        Sample([0] * (length + 1), length, [1] * length, 1.0, [-1.0] * length) for length in lengths
    ]
    config, batch = PolicyLossConfig(policy_loss="gspo"), pack(step)
    log_probs = torch.full((sum(lengths),), -0.75, dtype=torch.float64)
    _, metrics = policy_loss_from_log_probs(
        config, batch, log_probs, None, totals=step_totals(step)
    )
    found = reduce_metrics(config, [metrics], contributes=True, device="cpu")
    assert found["ratio_new_old_sum"] == pytest.approx(3 * ratio, rel=1e-13)
    assert found["ratio_new_old_squared_sum"] == pytest.approx(3 * ratio**2, rel=1e-13)
