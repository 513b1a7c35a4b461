"""The fused head inside slime, miles and verl: scores, metrics and every parameter's gradient equal to their own path's."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.launch import run_ranks
from tests.distributed.models import ModelOptions, Sharding

from . import head_step, head_verl, sources

TOLERANCE = 2e-5
DENSE = ModelOptions()
SETTINGS: list[dict[str, Any]] = [
    {"rollout_temperature": 0.7},
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


missing_verl = sources.find_verl()
STEPS = {
    "slime": (head_step.theirs_and_ours, sources.needs_tree("slime")),
    "miles": (head_step.theirs_and_ours, sources.needs_tree("miles")),
    "verl": (
        head_verl.theirs_and_ours,
        pytest.mark.skipif(missing_verl is not None, reason=str(missing_verl)),
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [pytest.param(name, marks=STEPS[name][1]) for name in STEPS])
def test_a_step_equals_their_own_path(name: str, case: str) -> None:
    sharding = Sharding.named(case)
    steps = STEPS[name][0]
    ranks = run_ranks(steps, sharding.world_size, name, sharding, CASES[case], SETTINGS)
    for number in range(len(SETTINGS)):
        outcomes = [rank[number] for rank in ranks]
        errors = [max(difference(rank[way], rank[0]) for rank in outcomes) for way in (1, 2, 3)]
        print(f"{name}, {case}, {number}: {errors}")
        assert errors[0] <= TOLERANCE < 100 * TOLERANCE < min(errors[1:])
        assert all(rank[0].columns > 1 and rank[1].columns == 1 for rank in outcomes)
        assert len(ranks[0][number][0].gradients) > 10
