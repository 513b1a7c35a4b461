"""Sampling masks in the engines' own forms: read, written to a file, packed, and scored against
plain loops.

The answers have the form of vLLM's `CompletionOutput` and `/inference/v1/generate`, and of SGLang's
`/generate`.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_pg import PolicyLossConfig, pack, policy_loss_function, step_totals
from megatron_pg.rollout_files import RolloutFiles, kept_tokens_of_engine
from tests import oracle
from tests.fast.refusals import assert_refused
from tests.fast.test_rollout_files import pull_all, write

VOCABULARY = 12
PROMPT = [3, 1]
RESPONSES = [[7, 2, 5], [4, 9]]
SETS = [[[7, 0], [2], [1, 5, 11]], [[4, 9, 2, 8], [9, 3]]]
LOG_PROBS = [[-0.4, 0.0, -1.2], [-1.5, -0.7]]
ADVANTAGES = [1.5, -0.5]


def offsets_of(sets: list[list[int]]) -> list[int]:
    return [0, *torch.tensor([len(kept) for kept in sets]).cumsum(0).tolist()]


FORMS: dict[str, Any] = {
    "vllm lists": lambda sets: SimpleNamespace(token_ids=sets),
    "vllm flat": lambda sets: SimpleNamespace(token_ids=sum(sets, []), offsets=offsets_of(sets)),
    "vllm flat arrays": lambda sets: SimpleNamespace(
        token_ids=torch.tensor(sum(sets, [])).int().numpy(), offsets=offsets_of(sets)
    ),
    "vllm json": lambda sets: {"token_ids": sum(sets, []), "offsets": offsets_of(sets)},
    "sglang flat": lambda sets: SimpleNamespace(token_ids=sum(sets, []), lengths=[*map(len, sets)]),
    "sglang, vllm generate": lambda sets: sets,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_from_an_engines_answer_to_value_and_gradient(tmp_path, form: str, kind: str) -> None:
    rows = [
        {
            "prompt_ids": PROMPT,
            "response_ids": response,
            "kept_tokens": kept_tokens_of_engine(FORMS[form](sets), response),
            "log_probs": log_probs,
            "advantages": advantage,
            "group_index": 0,
        }
        for response, sets, log_probs, advantage in zip(
            RESPONSES, SETS, LOG_PROBS, ADVANTAGES, strict=True
        )
    ]
    samples: Any = pull_all(RolloutFiles([write(tmp_path, rows, kind)], vocab_size=VOCABULARY))
    config = PolicyLossConfig(replay_sampling_set=True, pg_metrics="none")
    count = sum(len(PROMPT) + len(response) for response in RESPONSES)
    given = torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(1))
    logits = given.clone().requires_grad_()
    loss, _ = policy_loss_function(config, pack(samples), logits, totals=step_totals(samples))
    loss.backward()

    plain = [
        oracle.PlainSample(
            PROMPT + response,
            len(response),
            [1] * len(response),
            [advantage] * len(response),
            log_probs,
            kept_tokens=sets,
            group_index=0,
        )
        for response, sets, log_probs, advantage in zip(
            RESPONSES, SETS, LOG_PROBS, ADVANTAGES, strict=True
        )
    ]

    def expected(step: list[oracle.PlainSample]) -> tuple[float, torch.Tensor]:
        leaf = given.double().requires_grad_()
        parts = leaf.split([len(sample.tokens) for sample in step])
        value = oracle.policy_loss(step, parts, oracle.Objective()).loss
        return value.item(), torch.autograd.grad(value, leaf)[0]

    value, gradient = expected(plain)
    assert logits.grad is not None
    assert loss.item() == pytest.approx(value, rel=1e-6)
    assert (logits.grad.double() - gradient).abs().max() < 1e-6 * gradient.abs().max()
    # A mutant: the sets of the answers moved by one token, which still hold the second's.
    moved = [SETS[0], [[4, 9, 2, 8], [9, 3, 0]]]
    _, other = expected(
        [replace(sample, kept_tokens=sets) for sample, sets in zip(plain, moved, strict=True)]
    )
    assert (logits.grad.double() - other).abs().max() > 1e-3 * gradient.abs().max()


def test_refusals() -> None:
    read = kept_tokens_of_engine
    assert_refused("the engine returned no sampling mask. Use vLLM with", read, None, [7])
    assert_refused("has 3 sets for 2 tokens, expected one per token", read, SETS[0], [7, 2])
    assert_refused(
        "set 1 of the engine's sampling mask has 1 ids without 5", read, SETS[0], [7, 5, 2]
    )
    assert_refused("set 0 of the engine's sampling mask has 0 ids without 7", read, [[]], [7])
