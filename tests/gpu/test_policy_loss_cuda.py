"""The policy loss on a GPU, compiled: the CPU's numbers, and no wait for the device before the
step's end.
"""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_pg import PolicyLossConfig, policy_loss_from_log_probs, reduce_metrics, step_totals
from megatron_pg.loss import compiled
from megatron_pg.loss.metrics import MicroBatchMetrics
from tests.fast.sequences import CORRECTIONS, flat_log_probs, package_batch, random_sequences
from tests.gpu import waits_refused

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


OBJECTIVES = "gspo cispo dis vespo reinforce sft sapo dppo_tv dppo_kl gmpo".split()
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {},
    **{name: {"policy_loss": name} for name in OBJECTIVES},
    "corrections": CORRECTIONS,
    "gspo_with_corrections": {"policy_loss": "gspo", **CORRECTIONS},
}


def loss_of(
    config: PolicyLossConfig, device: str, *, forbid_waiting: bool = False
) -> tuple[Tensor, Tensor, MicroBatchMetrics]:
    """(loss, gradient, metrics) of one micro-batch, the batch moved to the device first."""
    sequences = random_sequences(1)
    batch = package_batch(sequences).to(device)
    log_probs = flat_log_probs(sequences, torch.float32).detach().to(device).requires_grad_()
    totals = step_totals(batch.samples)
    if forbid_waiting:
        torch.cuda.synchronize()
    with waits_refused() if forbid_waiting else contextlib.nullcontext():
        loss, metrics = policy_loss_from_log_probs(
            config, batch, log_probs, -log_probs, totals=totals
        )
        loss.backward()
    return loss.detach(), log_probs.grad, metrics


@pytest.mark.parametrize("name", SETTINGS)
def test_equal_to_the_cpu_without_a_wait(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_programs", {})
    config = PolicyLossConfig(**SETTINGS[name])
    expected_loss, expected_gradient, expected_metrics = loss_of(config, "cpu")
    loss_of(config, "cuda")  # libraries that initialise themselves may wait once
    loss, gradient, metrics = loss_of(config, "cuda", forbid_waiting=True)
    assert compiled._programs and None not in compiled._programs.values()
    torch.testing.assert_close(loss.cpu(), expected_loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient.cpu(), expected_gradient, rtol=1e-5, atol=1e-7)
    found = reduce_metrics(config, [metrics], contributes=True, device="cuda")
    expected = reduce_metrics(config, [expected_metrics], contributes=True, device="cpu")
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_the_check_for_waits_can_fail() -> None:
    tensor = torch.ones(1, device="cuda")
    with waits_refused(), pytest.raises(RuntimeError, match="synchroniz"):
        tensor.item()
