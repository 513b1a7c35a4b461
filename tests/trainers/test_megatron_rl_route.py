"""Megatron's RL script under Megatron's own schedule: what its `loss_func` computes, and the wrapper of the docs.

`loss_func` is taken from `train_rl.py`, unmodified, where TRAINERS names a folder with a checkout called Megatron-LM; the
rest of the script is not run.
"""

import ast
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from .sources import TRAINERS

ROOT = Path(__file__).parents[2]
SCRIPT = TRAINERS / "Megatron-LM/train_rl.py"
pytestmark = pytest.mark.skipif(
    not SCRIPT.is_file(),
    reason="needs Megatron-LM's source: TRAINERS=<folder with a checkout named Megatron-LM>",
)
BINS, SIZE = (100, 10, 0), 128


@pytest.fixture
def loss_func(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Theirs; it moves tensors to a GPU."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    tree = ast.parse(SCRIPT.read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", "") == "loss_func"]
    args = SimpleNamespace(check_for_nan_in_loss_and_grad=False, check_for_spiky_loss=False)
    names: dict[str, Any] = {
        "torch": torch,
        "get_args": lambda: args,
        "get_rerun_state_machine": lambda: None,
    }
    exec(compile(tree, str(SCRIPT), "exec"), names)
    return names["loss_func"]


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
        loss, num_tokens = schedules.forward_step_calc_loss(
            SimpleNamespace(),
            output,
            function,
            config,
            None,
            False,
            len(BINS),
            [],
            cp_group_size=1,
            is_last_stage=True,
        )
        all_tokens += int(num_tokens) if per_token else 0
        loss.backward()
    return [each.grad / max(all_tokens, 1) for each in model]


def test_a_token_weighs_by_its_bin(loss_func: Callable[..., Any]) -> None:
    found = token_weights(forward_step_of(loss_func), per_token=False)
    assert [float(gradient[0, 0]) for gradient in found[:2]] == pytest.approx([1 / 300, 1 / 30])


def test_an_empty_bin_is_a_token_under_the_flag(loss_func: Callable[..., Any]) -> None:
    found = token_weights(forward_step_of(loss_func), per_token=True)
    assert [float(gradient[0, 0]) for gradient in found[:2]] == pytest.approx([1 / 111] * 2)


def test_the_wrapper_gives_any_weights(loss_func: Callable[..., Any]) -> None:
    page: dict[str, Any] = {"torch": torch}
    text = (ROOT / "docs/records/other_trainers.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(next(block for block in blocks if "def weighted" in block), page)
    expected = [mask / 110 for mask in masks()]
    step = page["weighted"](forward_step_of(loss_func), expected.__getitem__, 1, len(BINS))
    for found, weights in zip(token_weights(step, per_token=False), expected, strict=True):
        assert torch.allclose(found, weights, rtol=1e-6, atol=0)
