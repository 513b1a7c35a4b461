"""docs/loss.md: its plain functions are what the package computes, value and gradient."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_pg import PolicyLossConfig, Sample, pack, policy_loss_from_log_probs, step_totals

PAGE = Path(__file__).parents[2] / "docs" / "loss.md"
WEIGHTS = {
    "none": (None, {}),
    "TIS": ((0.5, 1.2, False), {"use_tis": True, "tis_clip_low": 0.5, "tis_clip": 1.2}),
    "IcePop": (
        (0.5, 1.2, True),
        {"use_tis": True, "tis_clip_low": 0.5, "tis_clip": 1.2, "tis_mode": "mask"},
    ),
}


def code_of_page() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return code


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "loss_page"}
    exec(compile(code_of_page(), str(PAGE), "exec", dont_inherit=True), names)
    return names


def a_step(page: dict[str, Any]) -> tuple[list[Any], list[Sample]]:
    """Ragged responses, one of them masked, two of one rollout, two prompts."""
    generator = torch.Generator().manual_seed(3)
    responses, samples = [], []
    for rollout, group, length in ((0, 0, 3), (0, 0, 5), (1, 0, 1), (2, 1, 7), (3, 1, 4)):
        fields = {
            name: -torch.rand(length, generator=generator)
            for name in ("old_log_probs", "rollout_log_probs", "ref_log_probs")
        }
        log_probs = -torch.rand(length, generator=generator, dtype=torch.float64)
        mask = (torch.rand(length, generator=generator) < 0.7).float() * (rollout != 3)
        advantages = torch.randn(length, generator=generator)
        doubles = {name: x.double() for name, x in fields.items()}
        responses.append(
            page["Response"](
                log_probs.requires_grad_(),
                **doubles,
                advantages=advantages.double(),
                mask=mask.double(),
                rollout=rollout,
                group=group,
            )
        )
        ids = {"rollout_id": rollout, "group_index": group}
        tokens = [group, *range(length)]
        samples.append(Sample(tokens, length, mask, advantages, **fields, **ids))
    return responses, samples


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("objective", ["ppo", "cispo", "reinforce"])
@pytest.mark.parametrize("aggregation", ["sample_mean", "prompt_mean", "token_mean", "constant"])
def test_the_page_is_what_the_package_computes(page, aggregation, objective, weights) -> None:
    responses, samples = a_step(page)
    given, settings = WEIGHTS[weights]
    wanted = page["policy_loss"](responses, aggregation, 7.0, page[objective], given, kl_coef=0.1)
    wanted.backward()
    config = PolicyLossConfig(
        loss_aggregation=aggregation,
        loss_aggregation_divisor=7.0 if aggregation == "constant" else None,
        policy_loss=objective,
        kl_loss_coef=0.1,
        **settings,
    )
    batch = pack(samples)
    log_probs = torch.cat([response.log_probs.detach() for response in responses])
    log_probs.requires_grad_()
    loss, _ = policy_loss_from_log_probs(
        config, batch, log_probs, None, totals=step_totals(samples)
    )
    loss.backward()
    gradient = torch.cat([response.log_probs.grad for response in responses])
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(log_probs.grad, gradient, rtol=1e-12, atol=1e-12)


def test_a_mutant_of_the_page_is_seen(page, monkeypatch) -> None:
    honest = page["mean_of_means"]
    monkeypatch.setitem(page, "mean_of_means", lambda *arguments: 0.99 * honest(*arguments))
    with pytest.raises(AssertionError):
        test_the_page_is_what_the_package_computes(page, "sample_mean", "ppo", "none")


def test_the_page_is_short() -> None:
    assert len(code_of_page().splitlines()) <= 120
