"""The sampler of examples/train.py, held to `transformers`, which shares no code with it, and
on-line steps.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from .launch import run_ranks
from .models import Sharding
from .trainer_run import TASK, TASK_MODEL, end_of, run, steps_of

pytestmark = pytest.mark.full

pytest.importorskip("reasoning_gym")
transformers = pytest.importorskip("transformers")

VOCABULARY, STOP, LONGEST = 61, 7, 24
STOPS = list(range(7, 20))
TASK_FLAGS = "--device cpu --seed 1 --lr 1e-3 --make-vocab-size-divisible-by 16 "
PROMPTS = [[5, 9, 3], [1, 2, 3, 4, 5, 6, 8, 9, 10, 11], [60], [12, 13, 14, 15]]


def write_llama(path: Path, **settings: Any) -> None:
    settings |= {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 256}
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **settings)
    transformers.LlamaForCausalLM(config).save_pretrained(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "hf"
    torch.manual_seed(3)
    ids = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": STOP}
    write_llama(path, num_hidden_layers=3, initializer_range=0.3, **ids)
    return path


def sample(
    sharding: Sharding, folder: Path, stops: list[int], seed: int | None
) -> list[tuple[Any, Any]]:
    """Tokens and log-probs of two answers to each prompt."""
    from trainer.hugging_face import load_hugging_face
    from trainer.sampler import Sampler

    from .hugging_face_job import Job, build

    chunks = build(sharding, Job(folder, []))
    load_hugging_face(chunks, folder)
    sampler = Sampler(
        chunks[0].module, vocab_size=VOCABULARY, stop_tokens=stops, max_new_tokens=LONGEST
    )
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    found = sampler.sample(PROMPTS, 2, temperature=0.7, generator=generator)
    return [(response.tokens, response.log_probs) for response in found]


@pytest.mark.parametrize(
    "sharding", [Sharding(), Sharding(tensor=2), Sharding(context=2)], ids=["one", "TP2", "CP2"]
)
def test_the_likeliest_tokens_are_those_of_transformers(folder: Path, sharding: Sharding) -> None:
    world_size = sharding.tensor * sharding.context
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for found in run_ranks(sample, world_size, sharding, folder, [STOP], None):
        for index, prompt in enumerate(PROMPTS):
            whole = model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=LONGEST, pad_token_id=0
            )[0].tolist()
            for tokens, log_probs in found[2 * index : 2 * index + 2]:
                assert tokens == whole[len(prompt) :]
                assert log_probs == pytest.approx(scores(model, prompt, tokens), abs=1e-4)


def test_sampled_tokens_have_their_log_probs(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (found,) = run_ranks(sample, 1, Sharding(), folder, STOPS, 1)
    (other,) = run_ranks(sample, 1, Sharding(), folder, STOPS, 2)
    assert [tokens for tokens, _ in found] != [tokens for tokens, _ in other]
    assert found[0][0] != found[1][0], "answers to one prompt differ"
    assert len({len(tokens) for tokens, _ in found}) > 1
    for index, (tokens, log_probs) in enumerate(found):
        assert not set(STOPS).intersection(tokens[:-1])
        assert tokens[-1] in STOPS or len(tokens) == LONGEST
        assert log_probs == pytest.approx(scores(model, PROMPTS[index // 2], tokens), abs=1e-4)


def scores(model: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    """Log-probs at temperature 0.7 of the whole sequence in one forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1] / 0.7
    picked = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])
    return [float(value) for value in picked]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "hf"
    write_model(path)
    return path


def test_on_line_steps_and_going_on(models: Path, tmp_path: Path) -> None:
    """A byte tokenizer and a random model: its answers are wrong, and a run that goes on asks and
    hears the same.
    """
    settings = json.dumps({"size": 64, "min_terms": 2, "max_terms": 2}, separators=(",", ":"))
    flags = (
        f"--hf-model {models} --task chain_sum --task-settings {settings} --prompts-per-step 4 "
        f"--samples-per-prompt 3 "
        "--max-response-tokens 6 --held-out-tasks 4 --train-iters 4 --save-interval 2 "
        "--max-tokens-per-microbatch 512 "
        "--context-parallel-size 2 --entropy-coef 0.01 "
    )
    said = run_task(tmp_path / "whole", flags)
    # Six numbers, then a question without what all questions have in common, the answer and the
    # reward.
    shown = re.findall(
        r"^ step \d: (.*)\n((?:    ['\"]\W*\d.* -> .*reward 0['\"]\n){2})", said, re.MULTILINE
    )
    assert len(shown) == 4, said
    assert all(numbers.count(" | ") == 5 for numbers, _ in shown), shown
    assert all("final answer" not in answers for _, answers in shown), shown
    for number in range(1, 5):
        path = tmp_path / f"whole/rollouts/step_{number:06d}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len({row["group_index"] for row in rows}) == 4 and len(rows) == 12
        assert all(
            row["rollout_log_probs"] == pytest.approx(row["log_probs"], abs=1e-3) for row in rows
        )
    page = (tmp_path / "whole/rollouts.html").read_text()
    assert "chain_sum · ppo" in page and '"name": "step 4"' in page
    steps = steps_of(tmp_path / "whole")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert all(step["ratio_new_old"] == pytest.approx(1.0, abs=1e-5) for step in steps)
    assert all(step["grad_norm"] > 0 and 1 <= step["response_length"] <= 6 for step in steps)
    run_task(tmp_path / "parts", flags + "--exit-interval 2 ")
    run_task(tmp_path / "parts", flags)
    assert steps_of(tmp_path / "parts") == steps
    parts, whole = ((tmp_path / name / "rollouts.html").read_text() for name in ("parts", "whole"))
    assert parts == whole
    lines = (tmp_path / "whole/held_out.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 4]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--sequence-parallel --tensor-model-parallel-size 2", "--sequence-parallel and --task"),
        ("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size and --task"),
        ("--num-layers 3", "--num-layers and --hf-model are mutually exclusive"),
        ("--replay-sampling-set", "--replay-sampling-set and --task"),
        ("--docs-per-step 4", "--docs-per-step and --task"),
        ("--rollout-files x.jsonl", "give either --rollout-files or --task"),
        ("--max-response-tokens 300", "--max-position-embeddings 256: prompts have"),
        ("--prompts-per-step 20000", "distinct training tasks, but a round needs 20000"),
        ("--held-out-tasks -1", "--held-out-tasks is -1: give 1 or more"),
        ("--samples-per-prompt 0", "--samples-per-prompt is 0: give 1 or more"),
        ('--task-settings {"min_terms":5,"max_terms":2}', "max_terms must be >= min_terms"),
        ('--task-settings {"terms":5}', "unexpected keyword argument 'terms'"),
        ("--task-settings 3", "--task-settings 3 of --task chain_sum: "),
    ],
)
def test_what_the_sampler_cannot_do_is_refused(models, tmp_path, flags, message):
    given = (
        f"--hf-model {models} --task chain_sum --train-iters 2 --save-interval 2 "
        f"--max-tokens-per-microbatch 512 "
    )
    assert message in end_of(None, tmp_path / "run", given + flags, model="", base=TASK_FLAGS)


def test_rounds_go_on_where_data_parallel_ranks_stopped(tmp_path: Path) -> None:
    """In the middle of a round of two steps, whose second half is in the checkpoint."""
    task = {"base": TASK + "--context-parallel-size 1 --save-interval 3 ", "model": TASK_MODEL}
    run(None, tmp_path / "whole", "--train-iters 4", **task)
    run(None, tmp_path / "parts", "--train-iters 4 --exit-interval 3", **task)
    assert len(steps_of(tmp_path / "parts")) == 3
    run(None, tmp_path / "parts", "--train-iters 4", **task)
    assert steps_of(tmp_path / "parts") == (steps := steps_of(tmp_path / "whole"))
    assert steps[3]["kl_new_old"] > steps[2]["kl_new_old"] == pytest.approx(0.0, abs=1e-6)
    assert [step["staleness"] for step in steps] == [0, 1, 0, 1]
    assert [step["policy_version"] for step in steps] == [0, 0, 2, 2]


def run_task(folder: Path, flags: str) -> str:
    return run(None, folder, flags, model="", base=TASK_FLAGS)


def write_model(path: Path) -> None:
    """A random Llama, and a tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*alphabet, "<|im_end|>"])}
    bytes_alone = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytes_alone, eos_token="<|im_end|>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}>"
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    of_tokens = {"vocab_size": len(vocabulary), "eos_token_id": vocabulary["<|im_end|>"]}
    write_llama(path, num_hidden_layers=2, **of_tokens)
