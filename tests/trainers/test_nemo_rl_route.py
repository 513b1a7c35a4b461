"""The loss object of docs/records/other_trainers.md under NeMo-RL's own loss, packing wrapper and batches, unmodified.

Their source is read where TRAINERS names a folder with a checkout called NeMo-RL. A process of its own, in which packages
and modules that they import and that are not called here are stand-ins:

    TRAINERS=... python -m tests.trainers.test_nemo_rl_route
"""

import importlib
import math
import sys
from typing import Any

import pytest
import torch

from tests import progress

from .logit_table import difference
from .sources import ROOT, TRAINERS, code_of_the_docs, stand_in_for

CHECKOUT = TRAINERS / "NeMo-RL"
PACKAGES = "ray requests transformers decord torchvision PIL megatron pynvml uvicorn fastapi zmq wandb omegaconf".split()
MODULES = tuple(
    "nemo_rl." + name
    for name in "models algorithms.x_token data distributed.model_utils environments utils experience".split()
)
"""Prefixes of theirs: models, data and logging, of which the loss takes names alone."""
PROMPT, LENGTHS, WIDTH = 2, [2, 4, 1, 3], 8
TOKENS = sum(LENGTHS)
LOG_PROBS = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
WEIGHTS = {
    "sample_mean": [1 / (4 * length) for length in LENGTHS],
    "prompt_mean": [1 / (2 * 6)] * 2 + [1 / (2 * 4)] * 2,
    "token_mean": [1 / TOKENS] * 4,
    "constant": [1 / (4 * 8)] * 4,
}


def plain_gradient(data: Any, log_probs: torch.Tensor, weights: list[float]) -> torch.Tensor:
    """Of policy loss (dual clip, truncated importance weights) and KL, in float64 loops; log_probs [rows, positions]."""
    x = log_probs.detach().clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for row, length in enumerate(LENGTHS):
        for token in range(length):
            at = PROMPT - 1 + token
            advantage, old, generated, reference = (
                float(data[key][row, at + 1]) for key in ("advantages", *LOG_PROBS)
            )
            ratio = torch.exp(x[row, at] - old)
            loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
            if advantage < 0:
                loss = torch.min(loss, torch.tensor(-advantage * 3.0, dtype=torch.float64))
            distance = reference - x[row, at]
            kl = torch.exp(x[row, at] - x[row, at].detach()) * (torch.exp(distance) - 1 - distance)
            total = total + weights[row] * (loss * min(2.0, math.exp(old - generated)) + 0.01 * kl)
    total.backward()
    assert x.grad is not None
    return x.grad


def differences() -> dict[str, float]:
    """The largest difference of the gradients of each aggregation, relative to the largest gradient."""
    sys.path.insert(0, str(CHECKOUT))
    stand_in_for([*PACKAGES, *MODULES], even_if_installed=True)
    losses = importlib.import_module("nemo_rl.algorithms.loss.loss_functions")
    wrapper = importlib.import_module("nemo_rl.algorithms.loss.wrapper").SequencePackingLossWrapper
    batches = importlib.import_module("nemo_rl.distributed.batched_data_dict")
    page = code_of_the_docs("def token_weights", "class AggregatedLoss")
    torch.manual_seed(0)
    mask = torch.zeros(len(LENGTHS), WIDTH)
    for row, length in enumerate(LENGTHS):
        mask[row, PROMPT : PROMPT + length] = 1

    def normal() -> torch.Tensor:
        return torch.randn(len(LENGTHS), WIDTH, dtype=torch.float64)

    data = batches.BatchedDataDict(
        input_ids=torch.zeros(len(LENGTHS), WIDTH, dtype=torch.long),
        token_mask=mask,
        sample_mask=torch.ones(len(LENGTHS)),
        **{key: normal() * 0.3 - 1 for key in LOG_PROBS},
        advantages=normal(),
    )
    log_probs = (normal() * 0.3 - 1).requires_grad_()
    starts = torch.tensor([0, *LENGTHS]).add(torch.tensor([0] + [PROMPT] * len(LENGTHS))).cumsum(0)
    config = losses.ClippedPGLossConfig(
        ratio_clip_c=3.0,
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="tis",
        truncated_importance_sampling_ratio=2.0,
    )

    class Policy:
        def train(self, data: Any, loss_fn: Any) -> None:
            def prepare(logits: torch.Tensor, data: Any, **others: Any) -> Any:
                return {"next_token_logprobs": logits[:, : data["input_ids"].shape[1] - 1]}, data

            packed = torch.cat([log_probs[row, : PROMPT + n] for row, n in enumerate(LENGTHS)])
            loss, _ = wrapper(loss_fn, prepare, starts)(
                packed[None], data, torch.tensor(4.0), mask[:, 1:].sum()
            )
            loss.backward()

    def error(policy: Policy, expected: torch.Tensor) -> float:
        log_probs.grad = None
        policy.train(data, losses.ClippedPGLossFn(config))
        return difference(log_probs.grad, expected)

    found = {}
    for aggregation, weights in WEIGHTS.items():
        policy, expected = Policy(), plain_gradient(data, log_probs, weights)
        page["train_with"](policy, aggregation, 2, 4, 8.0 if aggregation == "constant" else None)
        found[aggregation] = error(policy, expected)
        # A mutant: their own loss, a token mean, is none of the others.
        own = error(Policy(), expected)
        assert (own > 1e-2) == (aggregation != "token_mean"), (aggregation, own)
    return found


@pytest.mark.skipif(
    not CHECKOUT.is_dir(),
    reason="needs NeMo-RL's source: TRAINERS=<folder with a checkout named NeMo-RL>",
)
def test_the_loss_object_under_their_own_loss() -> None:
    command = [sys.executable, "-m", "tests.trainers.test_nemo_rl_route"]
    done = progress.run(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = dict(line.split() for line in done.stdout.splitlines())
    assert set(found) == set(WEIGHTS) and all(float(each) < 1e-6 for each in found.values())


if __name__ == "__main__":
    for name, largest in differences().items():
        print(name, f"{largest:.1e}")
