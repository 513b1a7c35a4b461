"""The fused head inside slime, miles and verl: scores, metrics and every parameter's gradient equal
to their own path's.
"""

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_pg.integrations import fused_head, verl_head
from megatron_pg.integrations.trainer import REDUCER
from megatron_pg.megatron import enable_cpu_runtime
from tests.distributed.launch import refusal, run_ranks
from tests.distributed.models import ModelOptions, Sharding, initialize_groups

from . import head_step, head_verl, sources

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
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
    "one process, bfloat16": replace(DENSE, dtype=torch.bfloat16),
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
        assert errors[0] <= TOLERANCES[CASES[case].dtype] < min(errors[1:]) / 10
        assert all(rank[0].columns > 1 and rank[1].columns == 1 for rank in outcomes)
        assert len(ranks[0][number][0].gradients) > 10


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=sources.needs_tree(n)) for n in ("slime", "miles")]
)
def test_a_critic_is_what_it_was(name: str) -> None:
    ((before, after),) = run_ranks(head_step.critic_before_and_after, 1, name)
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert before[0].abs().max() > 0 and before[-1].abs().max() > 0


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=sources.needs_tree(n)) for n in ("slime", "miles")]
)
def test_a_hook_and_the_head_are_on_together(name: str) -> None:
    assert run_ranks(head_step.hook_beside_head, 1, name) == [(REDUCER, True)]


REFUSED_SETTINGS = {
    "--rollout-top-p 0.9": {"rollout_top_p": 0.9},
    "--loss-type custom_loss": {"loss_type": "custom_loss"},
    "--recompute-loss-function": {"recompute_loss_function": True},
    "--allgather-cp": {"allgather_cp": True},
    "--qkv-format bshd": {"qkv_format": "bshd"},
    "--overlap-moe-expert-parallel-comm": {"overlap_moe_expert_parallel_comm": True},
    "--true-on-policy-mode": {"true_on_policy_mode": True},
}


@pytest.mark.parametrize("flag", REFUSED_SETTINGS)
def test_settings_that_read_logits_are_refused(flag: str) -> None:
    loss = SimpleNamespace(get_rollout_top_p_logprob_kwargs=None)
    assert list(fused_head._violations(head_step.arguments(), loss)) == []
    args = head_step.arguments(**REFUSED_SETTINGS[flag])
    (text,) = fused_head._violations(args, loss)
    assert text.startswith(flag)


def refusals() -> dict[str, str]:
    """What is refused where something else reaches the head, or the trainer's function is
    another.
    """
    enable_cpu_runtime()
    initialize_groups(Sharding())
    label, two = torch.zeros(1, 2, dtype=torch.long), torch.tensor([[0.7, 0.9]])
    output = fused_head.OutputFactors(torch.zeros(1, 2, 4), torch.zeros(3, 4)).stub()

    def without_temperature(logits: Tensor, label: Tensor, *_: Any, **__: Any) -> dict[str, Tensor]:
        rows = logits.log_softmax(-1)
        log_probs = rows.gather(-1, label[..., None])[..., 0]
        return {"log_probs": log_probs, "entropy": -(rows.exp() * rows).sum(-1)}

    verify, score = verl_head.verify, verl_head.scores_of
    device, one = torch.device("cpu"), torch.ones(1, 2)
    return {
        "instead of the model's output": refusal(
            RuntimeError, score, torch.zeros(1, 2, 1), label, one, calculate_entropy=True
        ),
        "temperatures from 0.7 to 0.9": refusal(
            NotImplementedError, score, output, label, two, calculate_entropy=True
        ),
        "calculate_sum_pi_squared": refusal(
            NotImplementedError,
            functools.partial(score, calculate_sum_pi_squared=True, calculate_entropy=True),
            *(output, label, one),
        ),
        "this version of the trainer": refusal(ValueError, verify, without_temperature, device),
    }


def test_what_is_not_the_models_output_is_refused() -> None:
    (found,) = run_ranks(refusals, 1)
    assert all(words in text for words, text in found.items()), found
