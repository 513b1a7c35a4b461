"""The fused head inside slime, miles and verl: scores, metrics and every parameter's gradient equal to their own path's."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.launch import run_ranks
from tests.distributed.models import ModelOptions, Sharding

from . import head_step, sources

TOLERANCE = 2e-5
DENSE = ModelOptions()
SETTINGS: list[dict[str, Any]] = [
    {},
    {"advantage_estimator": "gspo", "entropy_coef": 0.0, "rollout_temperature": 1.3},
]
CASES = {
    "one process": DENSE,
    "TP2": replace(DENSE, tied_embeddings=True),
    "CP2": replace(DENSE, mtp_num_layers=1),
    "TP2+SP CP2": DENSE,
}


def difference(found: Any, expected: Any) -> float:
    """The largest difference of two outcomes' numbers, each over the largest of its kind."""
    pairs = []
    for name, parts in expected.scores.items():
        pairs.append((torch.cat(found.scores[name]), torch.cat(parts)))
    assert found.metrics.keys() == expected.metrics.keys()
    for name, number in expected.metrics.items():
        pairs.append((torch.tensor(found.metrics[name]), torch.tensor(number)))
    assert found.gradients.keys() == expected.gradients.keys()
    pairs += [(found.gradients[name], gradient) for name, gradient in expected.gradients.items()]
    return max(_relative(*pair) for pair in pairs if pair[1].numel())


def _relative(found: Tensor, expected: Tensor) -> float:
    scale = expected.abs().max().item()
    return (found - expected).abs().max().item() / max(scale, 1e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=sources.needs_tree(name)) for name in ("slime", "miles")]
)
def test_a_step_equals_their_own_path(name: str, case: str) -> None:
    sharding = Sharding.named(case)
    ranks = run_ranks(
        head_step.theirs_and_ours, sharding.world_size, name, sharding, CASES[case], SETTINGS
    )
    for number in range(len(SETTINGS)):
        outcomes = [rank[number] for rank in ranks]
        errors = [max(difference(rank[way], rank[0]) for rank in outcomes) for way in (1, 2, 3)]
        print(f"{name}, {case}, {number}: {errors}")
        assert errors[0] <= TOLERANCE < 100 * TOLERANCE < min(errors[1:])
        assert all(rank[0].columns > 1 and rank[1].columns == 1 for rank in outcomes)
        assert len(ranks[0][number][0].gradients) > 10
