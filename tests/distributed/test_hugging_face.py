"""Hugging Face's weights in Megatron's model: held to `transformers`, which shares no code with the converter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lanes import in_one_lane
from tests.oracle import Objective, policy_loss
from tests.random_steps import random_step
from tests.token_layout import token_layout

from .launch import run_ranks
from .models import Sharding, relative_error

pytestmark = in_one_lane

VOCABULARY = 61
"""Neither divisible by the tensor-parallel size nor by what Megatron pads to."""
SAMPLES = random_step(3, num_samples=8, longest_prompt=6, longest_response=12)
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA_3, "rms_norm_eps": 1e-5, "head_dim": 16}),
    "llama, one query group": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3 moe, weights as they are": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model by name, written by `transformers` when it is first asked for."""
    made: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("models") / name.replace(" ", "_")
            _write(name, made[name])
        return made[name]

    return folder_of


def _write(name: str, folder: Path) -> None:
    """Random parameters of the size at which every one of them tells in the logits."""
    import transformers

    family, changes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**COMMON | changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if "norm" in parameter_name:
                parameter.copy_(1.0 + 0.2 * values)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * values)
            else:
                parameter.copy_(values / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


def model_of(folder: Path, dtype: torch.dtype) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def logits_of(model: Any) -> list[Tensor]:
    """[total_length, vocabulary] of each sample, alone."""
    return [model(torch.tensor([sample.tokens])).logits[0] for sample in SAMPLES]


def assembled(parts: list[Any], sharding: Sharding) -> list[Tensor]:
    """The same from the ranks' parts of a pack, by the layout of `tests.token_layout`."""
    lengths = [len(sample.tokens) for sample in SAMPLES]
    responses = [sample.response_length for sample in SAMPLES]
    multiple = sharding.context * sharding.tensor if sharding.sequence_parallel else 1
    layout = token_layout(lengths, responses, sharding.context, multiple)
    whole: dict[int, Tensor] = {}
    for rank, rows in enumerate(layout):
        mine = sorted(
            (part for part in parts if part and part.context_rank == rank),
            key=lambda p: p.tensor_rank,
        )
        columns = {part.tensor_rank: part.local for part in mine}
        logits = torch.cat([columns[number] for number in sorted(columns)], 1)[:, :VOCABULARY]
        assert len(logits) == len(rows)
        whole |= {
            row.token: logits[place] for place, row in enumerate(rows) if row.token is not None
        }
    everything = torch.stack([whole[token] for token in range(sum(lengths))])
    return list(everything.split(lengths))


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    return relative_error(torch.cat(found), torch.cat(expected))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {
        n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()
    }


def assert_same_weights(found: Path, expected: Path) -> None:
    ours, theirs = tensors_of(found), tensors_of(expected)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert ours[name].dtype == theirs[name].dtype
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize(
    ("name", "sharding"),
    [
        ("llama", Sharding()),
        ("llama, one query group", Sharding(tensor=2)),
        ("qwen2", Sharding(tensor=2, sequence_parallel=True)),
        ("qwen3", Sharding()),
        ("qwen3", Sharding(pipeline=2)),
        ("qwen3", Sharding(pipeline=2, virtual_pipeline=2)),
        ("qwen3 moe", Sharding()),
        ("qwen3 moe", Sharding(tensor=2, sequence_parallel=True, expert=2)),
        ("qwen3 moe, weights as they are", Sharding()),
    ],
    ids=str,
)
def test_a_loaded_model_has_the_logits_of_transformers_and_goes_back_bit_for_bit(
    name: str, sharding: Sharding, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    from .hugging_face_job import Job, load_and_save

    folder, copy = folder_of(name), tmp_path / "copy"
    job = Job(folder, SAMPLES, copy, file_bytes=20000)
    results = run_ranks(load_and_save, sharding.world_size, sharding, job)
    with torch.no_grad():
        expected = logits_of(model_of(folder, torch.float32))
        again = logits_of(model_of(copy, torch.float32))
    found = assembled([parts[0] for parts in results], sharding)
    assert largest_error(found, expected) <= 1e-5
    assert largest_error(again, expected) < 1e-6
    assert_same_weights(copy, folder)
    assert len(list(copy.glob("*.safetensors"))) > 1
    assert json.loads((copy / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )
    assert (copy / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_step_at_tp_2_and_cp_2_is_that_of_transformers(
    name: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its gradient by the oracle's loss and autograd through the dense model, in float64 both."""
    from .hugging_face_job import LEARNING_RATE, Job, load_and_save

    folder, trained = folder_of(name), tmp_path / "trained"
    sharding = Sharding(tensor=2, context=2, sequence_parallel=True)
    job = Job(folder, SAMPLES, trained=trained, dtype=torch.float64)
    results = run_ranks(load_and_save, 4, sharding, job)

    model = model_of(folder, torch.float64)
    policy_loss(SAMPLES, logits_of(model), Objective()).loss.backward()
    found = tensors_of(trained)
    for parameter_name, parameter in model.named_parameters():
        update = parameter.detach() - found[parameter_name]
        assert relative_error(update, LEARNING_RATE * parameter.grad) < 1e-6, parameter_name

    with torch.no_grad():
        before, after = logits_of(model), logits_of(model_of(trained, torch.float64))
    assert largest_error(assembled([parts[1] for parts in results], sharding), after) < 1e-6
    assert largest_error(before, after) > 1e-3
