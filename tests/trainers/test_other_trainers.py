"""The numbers of docs/where_this_fits.md, by the trainers' own aggregation functions on its
example.

SkyRL and verl may be unpacked wheels.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from .sources import functions

LOSSES = [[1.0, 2.0], [3.0, 4.0, 5.0, 6.0], [20.0], [8.0, 9.0, 10.0]]
WIDTH = 4
VALUES = torch.tensor([each + [0.0] * (WIDTH - len(each)) for each in LOSSES], dtype=torch.float64)
MASK = (VALUES > 0).double()
PROMPT_MEAN, SAMPLE_MEAN, TOKEN_MEAN, CONSTANT = 7.625, 8.75, 6.8, 4.25


SKYRL = {
    **{"token_mean": TOKEN_MEAN, "sequence_mean": SAMPLE_MEAN, "prompt_mean": PROMPT_MEAN},
    # Micro-batches of two rows with 6 and 4 tokens: (21 / 6 + 47 / 4) / 2, no token mean of the
    # step.
    **{"seq_mean_token_sum_norm": CONSTANT, "token_mean_legacy": 7.625},
}


@pytest.mark.parametrize(("reduction", "expected"), SKYRL.items(), ids=SKYRL)
def test_skyrl_reduces_by_advantages(reduction: str, expected: float) -> None:
    name = "apply_loss_reduction_to_advantages_minibatch"
    path = "SkyRL/skyrl/backends/skyrl_train/utils/ppo_utils.py"
    scaled = functions(path, name)[name](VALUES, MASK, reduction, 2, WIDTH, [(0, 2), (2, 4)])
    assert float((scaled * MASK).sum()) == pytest.approx(expected, rel=1e-12)


def roll(mode: str, mask: Tensor = MASK) -> float:
    path = "ROLL/roll/utils/functionals.py"
    agg_loss = functions(path, "agg_loss", "masked_sum", "masked_mean")["agg_loss"]
    return float(agg_loss(VALUES, mask, mode, batch_num_tokens=10, global_valid_samples=4))


def test_roll_on_the_example_and_its_token_mean_that_ignores_a_filter() -> None:
    assert roll("seq-mean-token-mean") == pytest.approx(SAMPLE_MEAN)
    assert roll("token-mean") == pytest.approx(TOKEN_MEAN)
    assert roll("seq-mean-token-sum-norm") == pytest.approx(4 * CONSTANT)  # no 1 / N
    mask = MASK.clone()
    mask[2] = 0
    assert roll("token-mean", mask=mask) == pytest.approx(6.8)
    assert roll("seq-mean-token-sum", mask=mask) == pytest.approx(48 / 4)  # the others apply it


VERL = {
    **{"token-mean": TOKEN_MEAN, "seq-mean-token-mean": SAMPLE_MEAN, "token-sum": 68.0},
    **{"seq-mean-token-sum-norm": CONSTANT, "seq-mean-token-sum": 17.0},
}


@pytest.mark.parametrize(("mode", "expected"), VERL.items(), ids=VERL)
def test_verl_on_the_example(mode: str, expected: float) -> None:
    helpers = functions("verl/verl/utils/torch_functional.py", "masked_sum")
    path, names = "verl/verl/trainer/ppo/core_algos.py", {"verl_F": SimpleNamespace(**helpers)}
    found = functions(path, "agg_loss", **names)["agg_loss"](VALUES, MASK, mode, 1, 10, 4, WIDTH)
    assert float(found) == pytest.approx(expected)
