"""The engine's likeliest tokens: samples, engines' answers, files, and what is refused."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_pg import (
    PolicyLossConfig,
    Sample,
    pack,
    policy_loss_from_log_probs,
    policy_loss_function,
    step_totals,
)
from megatron_pg.head.ragged import Ragged
from megatron_pg.rollout_files import RolloutFiles, top_k_of_sglang, top_k_of_vllm

from .refusals import assert_refused

IDS, LOG_PROBS = [[4, 2], [], [1, 0, 3]], [[-0.5, -1.5], [], [-1.0, -1.25, -3.0]]
CENTERED = {"policy_loss": "reinforce", "score_centering": True}


def sample(top_k: object = (IDS, LOG_PROBS), mask: object = (1, 0, 1)) -> Sample:
    return Sample([7, 4, 5, 1], 3, list(mask), 1.0, old_log_probs=[-1.0] * 3, sampler_top_k=top_k)


def test_rows_of_any_kind_become_the_same() -> None:
    found = sample().sampler_top_k
    assert [found.ids.row(t).tolist() for t in range(3)] == IDS
    assert [found.log_probs.row(t).tolist() for t in range(3)] == LOG_PROBS
    offsets = torch.tensor([0, 2, 2, 5])
    flat = [Ragged(torch.tensor(sum(rows, [])), offsets) for rows in (IDS, LOG_PROBS)]
    again = sample(tuple(flat)).sampler_top_k
    assert torch.equal(again.ids.values, found.ids.values) and again.ids.values.dtype == torch.int32
    dense = sample((torch.tensor([[4, 2]] * 3), torch.tensor([[-0.5, -1.5]] * 3))).sampler_top_k
    assert dense.ids.sizes.tolist() == [2, 0, 2], "masked tokens keep none"


def test_a_window_is_padded() -> None:
    ids, log_probs = pack([sample(), sample()]).sampler_top_k
    assert ids.tolist() == [[4, 2, -1], [-1] * 3, [1, 0, 3]] * 2
    assert log_probs.tolist() == [[-0.5, -1.5, 0.0], [0.0] * 3, LOG_PROBS[2]] * 2
    batches = [pack([sample()], cp_rank=rank, cp_size=2) for rank in range(2)]
    rows = [row for batch in batches for row in batch.sampler_top_k[0][:, :2].tolist()]
    assert sorted(rows) == sorted([[4, 2], [-1, -1], [1, 0]])


REFUSED = {
    "not a pair": (3, "sampler_top_k is not a pair"),
    "rows": ((IDS[:2], LOG_PROBS[:2]), "2 rows of ids and 2 rows of log-probs"),
    "sizes": ((IDS, [[-0.5], [], LOG_PROBS[2]]), "with a log-prob per id"),
    "twice": (([[4, 4], [], [1]], [[-1.0, -1.0], [], [-1.0]]), "id 4 twice"),
    "below 0": (([[-4], [], [1]], [[-1.0], [], [-1.0]]), "id -4, expected ids"),
    "above 0": (([[4], [], [1]], [[0.5], [], [-1.0]]), "expected a log-prob"),
    "none": (([[4], [], []], [[-1.0], [], []]), "number of tokens[2] is 0"),
    "mass": (([[4, 2], [], [1]], [[-0.1, -0.1], [], [-1.0]]), "expected at most 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_samples(case: str) -> None:
    given, words = REFUSED[case]
    assert_refused(words, lambda: sample(given))


CONFLICTS = {
    "objective": ({"policy_loss": "gspo"}, "Use one of ppo, cispo, reinforce"),
    "own": ({"custom_policy_loss_path": "math:sin"}, "does not apply to --custom-policy-loss-path"),
    "level": ({"use_tis": True, "tis_level": "sequence"}, "requires per-token weights"),
    "rejection": ({"use_sequence_rejection": True}, "--use-sequence-rejection are mutually"),
    "accepted": (
        {"use_tis": True, "tis_mode": "mask", "rejection_denominator": "accepted"},
        "requires --rejection-denominator original",
    ),
    "anchor": (
        {"policy_loss": "cispo", "ratio_anchor": "rollout"},
        "--ratio-anchor rollout are mutually exclusive",
    ),
    "teacher": ({"distill_coef": 0.1, "distill_teacher": "logits"}, "mutually exclusive"),
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_refused_settings(case: str) -> None:
    changes, words = CONFLICTS[case]
    assert_refused(words, lambda: PolicyLossConfig(**{**CENTERED, **changes}))


def test_a_likely_token_outside_the_set_is_refused() -> None:
    settings = {**CENTERED, "replay_sampling_set": True}
    config, words = PolicyLossConfig(**settings), "sampler_top_k has id 2 at response token 0"
    ids = sample().sampler_top_k.ids
    kept = [sorted({target, *ids.row(t).tolist()}) for t, target in enumerate([4, 5, 1])]

    def loss(sets: list[list[int]]) -> None:
        batch = pack([replace(sample(), kept_tokens=sets)])
        policy_loss_function(config, batch, torch.zeros(4, 8), totals=step_totals(batch.samples))

    loss(kept)
    loss([[], *kept[1:]])
    assert_refused(words, loss, [[4, 6], *kept[1:]])


def test_a_loss_of_log_probs_cannot_be_centered() -> None:
    batch, totals = pack([sample()]), step_totals([sample()])
    config, log_probs = PolicyLossConfig(**CENTERED), torch.full((3,), -1.0)
    assert_refused(
        "--score-centering requires the centering",
        lambda: policy_loss_from_log_probs(config, batch, log_probs, None, totals=totals),
    )
    assert_refused(
        "no sampler_top_k",
        lambda: policy_loss_from_log_probs(
            config, pack([sample(None)]), log_probs, None, totals=totals
        ),
    )


def test_answers_of_engines() -> None:
    """As vLLM 0.25 and SGLang document them: the sampled token first, or the top k in order."""
    of_vllm = [
        {4: SimpleNamespace(logprob=-0.5, rank=1), 2: SimpleNamespace(logprob=-1.5, rank=2)},
        {1: -1.0},
    ]
    assert top_k_of_vllm(of_vllm) == ([[4, 2], [1]], [[-0.5, -1.5], [-1.0]])
    assert top_k_of_vllm([{4: -0.5, 3: -math.inf}]) == ([[4]], [[-0.5]])
    assert_refused("returned no log-probs", lambda: top_k_of_vllm([None]))
    meta = {"output_top_logprobs": [[(-0.5, 4, None), (-1.5, 2, None)], None]}
    assert top_k_of_sglang(meta) == ([[4, 2], []], [[-0.5, -1.5], []])
    assert_refused("no output_top_logprobs", lambda: top_k_of_sglang({}))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_columns_of_a_file(tmp_path: Path, suffix: str) -> None:
    row = {
        "prompt_ids": [7], "response_ids": [4, 5, 1], "loss_mask": [1, 0, 1], "reward": 1.0,
        "sampler_top_k_ids": IDS, "sampler_top_k_log_probs": LOG_PROBS,
    }  # fmt: skip
    path = tmp_path / f"rollouts.{suffix}"
    if suffix == "jsonl":
        path.write_text(json.dumps(row) + "\n")
    else:
        import pyarrow as pa
        import pyarrow.parquet

        pa.parquet.write_table(pa.Table.from_pylist([row]), path, write_page_checksum=True)
    (found,) = RolloutFiles([path]).pull(2)
    assert [found.sampler_top_k.ids.row(t).tolist() for t in range(3)] == IDS
    assert [found.sampler_top_k.log_probs.row(t).tolist() for t in range(3)] == LOG_PROBS
