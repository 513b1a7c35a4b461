"""examples/train.py with log-probs that rollouts lack, a reference policy, and Hugging Face
weights.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from .trainer_run import VOCABULARY, WHOLE_GROUPS, end_of, run, steps_of, without_log_probs

pytestmark = pytest.mark.full

STEPS = WHOLE_GROUPS + "--train-iters 3 --save-interval 3 --lr-decay-style constant "
KL = "--kl-loss-coef 0.1 --kl-loss-type k3 "


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without_log_probs(tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl", 1)


@pytest.fixture(scope="module")
def trained(rollouts: Path) -> Path:
    folder = rollouts.with_name("trained")
    run(rollouts, folder, STEPS)
    return folder


def test_old_log_probs_are_those_of_the_step_that_begins(rollouts: Path, trained: Path) -> None:
    for step in steps_of(trained):
        assert step["ratio_new_old"] == pytest.approx(1.0, abs=1e-5)
        assert step["kl_new_old"] == pytest.approx(0.0, abs=1e-6)
        assert step["old_logprobs"] == pytest.approx(step["new_logprobs"], abs=1e-5)
        assert step["grad_norm"] > 0.0


def test_log_probs_of_the_files_stay(trained: Path, tmp_path: Path) -> None:
    """Where half of the rows have some, those are used: far off, so that their ratios are not 1."""
    mixed = without_log_probs(tmp_path / "mixed.jsonl", 2)
    run(mixed, tmp_path / "run", STEPS)
    found, expected = steps_of(tmp_path / "run")[0], steps_of(trained)[0]
    assert found["new_logprobs"] == pytest.approx(expected["new_logprobs"], abs=1e-5)
    assert abs(found["ratio_new_old"] - 1.0) > 1e-4


def test_the_reference_policy_stays_where_it_is(rollouts, trained, tmp_path):
    flags = f"{STEPS}{KL}--load {trained} --finetune --ref-load {trained}"
    run(rollouts, tmp_path / "run", flags)
    kl = [step["kl_loss"] for step in steps_of(tmp_path / "run")]
    assert kl[0] == pytest.approx(0.0, abs=1e-6) and kl[1] > 1e-5 and kl[2] > kl[1]


def test_a_reference_that_follows_the_policy_is_noticed(rollouts, trained, tmp_path):
    flags = f"{STEPS}{KL}--load {trained} --finetune --ref-load {trained}"
    run(rollouts, tmp_path / "run", flags, prepare=_score_with_the_policy)
    assert max(step["kl_loss"] for step in steps_of(tmp_path / "run")) < 1e-6


def _score_with_the_policy(rank: int) -> None:
    from trainer.rollouts import Scoring

    filled: Any = Scoring.filled

    def follow(self: Any, samples: Sequence[Any], policy: list[Any]) -> Any:
        self._reference = policy
        return filled(self, samples, policy)

    Scoring.filled = follow


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (KL, "ref_log_probs"),
        (KL + "--ref-load nowhere", "--ref-load nowhere has neither Megatron's nor"),
    ],
)
def test_a_missing_reference_ends_all_ranks_with_a_line(rollouts, tmp_path, flags, message):
    assert message in end_of(rollouts, tmp_path / "run", STEPS + "--on-bad-row error " + flags)


def test_hugging_face_weights_are_trained_and_written_back(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    config = transformers.Qwen3Config(vocab_size=VOCABULARY, **sizes)
    torch.manual_seed(0)
    source = tmp_path / "source"
    model = transformers.Qwen3ForCausalLM(config)
    model.save_pretrained(source)
    good = without_log_probs(tmp_path / "rollouts.jsonl", 1)
    rows = [json.loads(line) for line in good.read_text().splitlines()]
    kept = [row for row in rows if max(row["response_ids"]) < VOCABULARY]
    good.write_text("".join(json.dumps(row) + "\n" for row in kept))
    flags = f"--hf-model {source} --save-hf {tmp_path}/out {STEPS}{KL}--ref-load {source} "
    flags += "--tensor-model-parallel-size 2 --sequence-parallel"
    run(good, tmp_path / "run", flags, model="")
    first = steps_of(tmp_path / "run")[0]
    assert first["kl_loss"] == pytest.approx(0.0, abs=1e-6)
    # The mean over rollouts of the mean log-prob of transformers' own model, of what the first step
    # held.
    means = []
    for row in kept[: int(first["docs"])]:
        tokens = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        with torch.no_grad():
            scores = model(tokens).logits[0].log_softmax(-1)
        length = len(row["response_ids"])
        picked = scores[-length - 1 : -1].gather(1, tokens[0, -length:, None])
        means.append(float(picked.mean()))
    # prompt_mean weighs tokens of a prompt group alike; metrics are means over rollouts.
    assert first["old_logprobs"] == pytest.approx(sum(means) / len(means), abs=1e-4)
    written = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for one, other in zip(written.parameters(), model.parameters(), strict=True):
        assert not torch.equal(one, other)
