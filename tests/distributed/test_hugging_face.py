"""Hugging Face's weights in Megatron's model: held to `transformers`, which shares no code with the
converter.
"""

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracle import Objective, policy_loss
from tests.random_steps import random_step
from tests.token_layout import token_layout

from .launch import run_ranks
from .models import Sharding, relative_error

pytestmark = pytest.mark.full

transformers = pytest.importorskip("transformers")
pytest.importorskip("mbridge")
from trainer import hugging_face  # noqa: E402

from . import hugging_face_job  # noqa: E402
from .hugging_face_job import LEARNING_RATE, Job  # noqa: E402

WIDE = Sharding(tensor=2, pipeline=2, sequence_parallel=True)
WIDE_EXPERTS = Sharding(tensor=2, pipeline=2, sequence_parallel=True, expert=2)
VOCABULARY = 61
"""Neither divisible by the tensor-parallel size nor by what Megatron pads to."""
SAMPLES = random_step(3, num_samples=8, longest_prompt=6, longest_response=12)
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48}
COMMON |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
COMMON |= {"max_position_embeddings": 128}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
NORMALISED = {"norm_topk_prob": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA_3, "rms_norm_eps": 1e-5, "head_dim": 16}),
    "llama, one query group": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 moe": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 40}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 moe": ("Qwen3Moe", EXPERTS | NORMALISED | {"head_dim": 16, "mlp_only_layers": [1]}),
    "qwen3 moe, weights as they are": ("Qwen3Moe", EXPERTS),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model by name, written by `transformers` when it is first asked for."""

    @functools.cache
    def folder_of(name: str) -> Path:
        _write(name, folder := tmp_path_factory.mktemp("models") / name.replace(" ", "_"))
        return folder

    return folder_of


def _write(name: str, folder: Path) -> None:
    """Random parameters of the size at which every one of them tells in the logits."""
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
    model.save_pretrained(folder, max_shard_size="20KB")
    (folder / "tokenizer.json").write_text("{}")


def model_of(folder: Path, dtype: torch.dtype) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def expected_logits(folder: Path, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    with torch.no_grad():
        return logits_of(model_of(folder, dtype))


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
        mine = [part for part in parts if part and part.context_rank == rank]
        columns = {part.tensor_rank: part.local for part in mine}
        logits = torch.cat([columns[number] for number in sorted(columns)], 1)[:, :VOCABULARY]
        whole |= {row.token: values for row, values in zip(rows, logits, strict=True)}
    everything = torch.stack([whole[token] for token in range(sum(lengths))])
    return list(everything.split(lengths))


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    return relative_error(torch.cat(found), torch.cat(expected))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


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
        ("llama", WIDE),
        ("llama, one query group", Sharding(tensor=2)),
        ("qwen2", Sharding(tensor=2, sequence_parallel=True)),
        ("qwen2", WIDE),
        ("qwen2, tied", Sharding(pipeline=2)),
        ("qwen2 moe", WIDE_EXPERTS),
        ("qwen3", WIDE),
        ("qwen3", Sharding(pipeline=2, virtual_pipeline=2)),
        ("qwen3 moe", WIDE_EXPERTS),
        ("qwen3 moe", Sharding(tensor=2, sequence_parallel=True)),
        ("qwen3 moe, weights as they are", Sharding()),
        ("mixtral", WIDE_EXPERTS),
    ],
    ids=str,
)
def test_a_loaded_model_has_the_logits_of_transformers_and_goes_back_bit_for_bit(
    name: str, sharding: Sharding, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, copy = folder_of(name), tmp_path / "copy"
    job = Job(folder, SAMPLES, copy)
    results = run_ranks(hugging_face_job.load_and_save, sharding.world_size, sharding, job)
    expected, again = expected_logits(folder), expected_logits(copy)
    found = assembled([parts[0] for parts in results], sharding)
    assert largest_error(found, expected) <= 1e-5
    assert largest_error(again, expected) < 1e-6
    assert_same_weights(copy, folder)
    ours, theirs = (json.loads((each / "config.json").read_text()) for each in (copy, folder))
    assert ours == theirs
    assert (copy / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_step_at_tp_2_and_cp_2_is_that_of_transformers(name, folder_of, tmp_path):
    """Its gradient by the oracle's loss and autograd through the dense model, in float64 both."""
    folder, trained = folder_of(name), tmp_path / "trained"
    sharding = Sharding(tensor=2, context=2, sequence_parallel=True)
    job = Job(folder, SAMPLES, trained=trained, dtype=torch.float64)
    results = run_ranks(hugging_face_job.load_and_save, 4, sharding, job)

    model = model_of(folder, torch.float64)
    policy_loss(SAMPLES, logits_of(model), Objective()).loss.backward()
    found = tensors_of(trained)
    for name, parameter in model.named_parameters():
        update, expected = parameter.detach() - found[name], LEARNING_RATE * parameter.grad
        assert relative_error(update, expected) < 1e-6, name

    before, after = (expected_logits(each, torch.float64) for each in (folder, trained))
    assert largest_error(assembled([parts[1] for parts in results], sharding), after) < 1e-6
    assert largest_error(before, after) > 1e-3


def test_weights_are_cast_to_the_dtype_of_the_model(folder_of, tmp_path):
    source, copy = folder_of("qwen3 moe"), tmp_path / "copy"
    job = Job(source, SAMPLES, copy, dtype=torch.bfloat16)
    run_ranks(hugging_face_job.convert, 2, Sharding(tensor=2), job)
    found, expected = tensors_of(copy), tensors_of(source)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.bfloat16()), name
    assert json.loads((copy / "config.json").read_text())["dtype"] == "bfloat16"


def test_wrong_converters_are_caught(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    expected = expected_logits(folder)
    (found,) = run_ranks(hugging_face_job.mutants, 1, Job(folder, SAMPLES))
    assert len(found) == 2
    for name, logits in found.items():
        assert largest_error(assembled([logits], Sharding()), expected) > 1e-2, name


def test_the_names_of_transformer_engine_mean_the_same(folder_of: Callable[[str], Path]) -> None:
    """A mixture of experts with a dense layer, under the names that its fused and grouped layers
    have.
    """
    folder = folder_of("qwen3 moe")
    found = run_ranks(hugging_face_job.load_by_transformer_engines_names, 1, Job(folder, SAMPLES))
    assert largest_error(assembled(found, Sharding()), expected_logits(folder)) <= 1e-5


def changed(source: Path, folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> Job:
    """A folder with other tensors, all in one file."""
    from safetensors.torch import save_file

    ignored = shutil.ignore_patterns("*.safetensors", "*.index.json")
    shutil.copytree(source, folder, ignore=ignored)
    change(tensors := tensors_of(source))
    save_file(tensors, folder / "model.safetensors")
    return Job(folder, SAMPLES)


def test_what_does_not_fit_is_named_on_every_rank_and_changes_nothing(folder_of, tmp_path):
    """By both stages of a pipeline, the first of which has none of the last layer."""
    source, last = folder_of("llama"), "model.layers.3.self_attn.k_proj.weight"
    bias = last.replace("weight", "bias")
    jobs = {
        "missing": changed(source, tmp_path / "missing", lambda tensors: tensors.pop(last)),
        "left": changed(source, tmp_path / "left", lambda t: t.update({bias: torch.zeros(32)})),
    }
    expected = {"missing": f"{last} missing", "left": f"and {bias} unused"}
    for said in run_ranks(hugging_face_job.load_errors, 2, Sharding(pipeline=2), jobs):
        assert said.keys() == jobs.keys()
        for name, words in expected.items():
            assert f"{jobs[name].source} does not fit the model: " in said[name]
            assert words in said[name], said[name]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM, expected LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters"),
        ({"rope_parameters": {**LLAMA_3, "high_freq_factor": 2.0}}, "rope_parameters"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_a_config_that_no_flags_mean_is_refused(changes, words, folder_of, tmp_path):
    config = json.loads((folder_of("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(hugging_face.WeightsError, match=re.escape(words)):
        hugging_face.read_config(tmp_path)


def test_the_flags_of_an_older_config(tmp_path: Path) -> None:
    """Of Qwen3-30B-A3B, as the model was published: without `rope_parameters`, and with
    `num_experts`.
    """
    config = {
        **{"architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu", "hidden_size": 2048},
        **{"intermediate_size": 6144, "max_position_embeddings": 40960, "vocab_size": 151936},
        **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
        **{"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
        **{"moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": []},
        **{"num_hidden_layers": 3, "rms_norm_eps": 1e-06, "tie_word_embeddings": False},
        **{"rope_scaling": None, "rope_theta": 1000000.0, "use_sliding_window": False},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = """
        --num-layers 3 --hidden-size 2048 --ffn-hidden-size 6144
        --num-attention-heads 32 --group-query-attention
        --num-query-groups 4 --kv-channels 128 --vocab-size 151936 --max-position-embeddings 40960
        --position-embedding-type rope --rotary-base 1000000
        --rotary-percent 1.0 --normalization RMSNorm
        --norm-epsilon 1e-06 --attention-dropout 0 --hidden-dropout 0
        --swiglu --disable-bias-linear --qk-layernorm
        --untie-embeddings-and-output-weights --num-experts 128
        --moe-ffn-hidden-size 768 --moe-router-topk 8
        --moe-layer-freq [1,1,1]
    """
    flags = hugging_face.megatron_arguments_of(hugging_face.read_config(tmp_path))
    assert sorted(flags) == sorted(expected.split())


def test_the_page_has_every_family() -> None:
    page = (Path(__file__).parents[2] / "docs/models.md").read_text()
    for name in hugging_face.FAMILIES:
        assert f"`{name}`" in page, name
