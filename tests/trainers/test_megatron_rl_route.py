"""Megatron's RL script under Megatron's own schedule: what its `loss_func` computes, and the
wrapper of the docs.

`loss_func` is taken from `train_rl.py`, unmodified, where TRAINERS names a folder with a checkout
called Megatron-LM; the rest of the script is not run.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from .sources import code_of_the_docs, functions

BINS, SIZE = (100, 10, 0), 128


@pytest.fixture
def loss_func(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Theirs; it moves tensors to a GPU."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    args = SimpleNamespace(check_for_nan_in_loss_and_grad=False, check_for_spiky_loss=False)
    names = {"get_args": lambda: args, "get_rerun_state_machine": lambda: None}
    return functions("Megatron-LM/train_rl.py", "loss_func", **names)["loss_func"]


def masks() -> list[torch.Tensor]:
    return [torch.tensor([[1.0] * n + [0.0] * (SIZE - n)]) for n in BINS]


def forward_step_of(loss_func: Callable[..., Any]) -> Callable[..., Any]:
    """Per-token losses of a bin, and theirs in a partial, as their forward_step returns them."""

    def forward_step(data_iterator: Any, model: Sequence[torch.Tensor]) -> Any:
        number = next(data_iterator)
        zeros = torch.zeros(1, SIZE)
        return model[number], partial(loss_func, masks()[number], *[zeros] * 5)

    return forward_step


def token_weights(forward_step: Callable[..., Any], per_token: bool) -> list[torch.Tensor]:
    """What a token of each bin weighs after megatron-core's schedule, on one rank."""
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    config = SimpleNamespace(calculate_per_token_loss=per_token, timers=None)
    model = [torch.zeros(1, SIZE, requires_grad=True) for _ in BINS]
    all_tokens = 0
    for number in range(len(BINS)):
        output, function = forward_step(iter([number]), model)
        ends = {"cp_group_size": 1, "is_last_stage": True}
        loss, num_tokens = schedules.forward_step_calc_loss(
            SimpleNamespace(), output, function, config, None, False, len(BINS), [], **ends
        )
        all_tokens += int(num_tokens) if per_token else 0
        loss.backward()
    return [each.grad / max(all_tokens, 1) for each in model]


@pytest.mark.parametrize(
    ("per_token", "weights"),
    # An empty bin is a token under the flag.
    [(False, [1 / 300, 1 / 30]), (True, [1 / 111] * 2)],
)
def test_what_a_token_of_a_bin_weighs(loss_func, per_token, weights) -> None:
    found = token_weights(forward_step_of(loss_func), per_token)
    assert [float(gradient[0, 0]) for gradient in found[:2]] == pytest.approx(weights)


def test_the_wrapper_gives_any_weights(loss_func: Callable[..., Any]) -> None:
    expected = [mask / 110 for mask in masks()]
    weighted = code_of_the_docs("def weighted")["weighted"]
    step = weighted(forward_step_of(loss_func), expected.__getitem__, 1, len(BINS))
    for found, weights in zip(token_weights(step, per_token=False), expected, strict=True):
        assert torch.allclose(found, weights, rtol=1e-6, atol=0)
