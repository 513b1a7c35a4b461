"""What a Hugging Face folder says, in Megatron's words: config.json in flags, tensors in parameters."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu

ARCHITECTURES: dict[str, list[str]] = {
    "LlamaForCausalLM": [],
    "Qwen2ForCausalLM": ["--add-qkv-bias"],
    "Qwen3ForCausalLM": ["--qk-layernorm"],
    "Qwen3MoeForCausalLM": ["--qk-layernorm"],
}
"""The flags that the name alone means."""

WHOLE, ROWS, COLUMNS = None, 0, 1
MAPPING: dict[str, tuple[Any, ...]] = {
    "embedding.word_embeddings.weight": (ROWS, "model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": (WHOLE, "model.norm.weight"),
    "output_layer.weight": (ROWS, "lm_head.weight"),
    # Below decoder.layers.N and model.layers.N. Transformer Engine has norms inside the linear layers.
    "input_layernorm.weight": (WHOLE, "input_layernorm.weight"),
    "self_attention.linear_qkv.layer_norm_weight": (WHOLE, "input_layernorm.weight"),
    "self_attention.linear_qkv.weight": (ROWS, *(f"self_attn.{x}_proj.weight" for x in "qkv")),
    "self_attention.linear_qkv.bias": (ROWS, *(f"self_attn.{x}_proj.bias" for x in "qkv")),
    "self_attention.q_layernorm.weight": (WHOLE, "self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": (WHOLE, "self_attn.k_norm.weight"),
    "self_attention.linear_proj.weight": (COLUMNS, "self_attn.o_proj.weight"),
    "pre_mlp_layernorm.weight": (WHOLE, "post_attention_layernorm.weight"),
    "mlp.linear_fc1.layer_norm_weight": (WHOLE, "post_attention_layernorm.weight"),
    "mlp.router.weight": (WHOLE, "mlp.gate.weight"),
    "mlp.linear_fc1.weight": (ROWS, "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": (COLUMNS, "mlp.down_proj.weight"),
    # Below mlp.experts.local_experts.E or, in Transformer Engine's groups, weightE; and below mlp.experts.E.
    "mlp.experts.linear_fc1.weight": (ROWS, "gate_proj.weight", "up_proj.weight"),
    "mlp.experts.linear_fc2.weight": (COLUMNS, "down_proj.weight"),
}
"""Megatron's parameter: what of it tensor parallelism cuts, and the tensors of `transformers` in it."""
LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.)?(linear_fc[12]\.weight)(\d*)")

MUST_BE: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "pretraining_tp": 1,
    "quantization_config": None,
}
"""Fields for whose other values there is no flag here; absent or null is right."""

LLAMA_3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Megatron's own constants beside --rope-scaling-factor (embeddings/rotary_pos_embedding.py, `_apply_scaling`)."""


class WeightsError(ValueError):
    """A folder that cannot be read, or that does not fit the model; the message names the field or the parameter."""


def read_config(folder: str | Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder, with the rotary embedding always in `rope_parameters`.

    Raises:
        WeightsError: there is none, or it asks for what is not built here.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise WeightsError(f"there is no {path}: name a folder that save_pretrained wrote")
    config: dict[str, Any] = json.loads(path.read_text())
    architecture = (config.get("architectures") or ["(none)"])[0]
    if architecture not in ARCHITECTURES:
        raise WeightsError(
            f"{path} is of the architecture {architecture}; known are {', '.join(ARCHITECTURES)}. "
            "Convert others with Megatron-Bridge, and start from its checkpoint with --load"
        )
    # `transformers` 5 has one field; before it there were two, and the kind of scaling was its `type`.
    rope = config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta", 10000.0),
        **(config.get("rope_scaling") or {}),
    }
    kind = rope.get("rope_type", rope.get("type", "default"))
    config["rope_parameters"] = {**rope, "rope_type": kind}
    wrong = [name for name, value in MUST_BE.items() if config.get(name) not in (None, value)]
    if kind not in ("default", "llama3") or rope["rope_theta"] % 1:
        wrong.append("rope_parameters")
    elif kind == "llama3" and LLAMA_3_SCALING.items() - rope.items():
        wrong.append("rope_parameters")
    if wrong:
        found = ", ".join(f"{name} {config[name]!r}" for name in wrong)
        raise WeightsError(f"{path} has {found}, for which there is no flag of Megatron's here")
    return config


def carry_over(source: str | Path, folder: Path, dtype: torch.dtype) -> None:
    """Copies the config, with the weights' new dtype, the tokenizer and other text files into a folder of weights."""
    for file in Path(source).iterdir():
        if file.suffix in (".json", ".jinja", ".model", ".txt") and ".index." not in file.name:
            shutil.copyfile(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).split(".")[1]
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def megatron_arguments_of(config: dict[str, Any]) -> list[str]:
    """The flags of Megatron's parser that build the model of a config from `read_config`, without dropout."""
    heads, rope = config["num_attention_heads"], config["rope_parameters"]
    values: dict[str, Any] = {
        "num-layers": config["num_hidden_layers"],
        "hidden-size": config["hidden_size"],
        "ffn-hidden-size": config["intermediate_size"],
        "num-attention-heads": heads,
        "num-query-groups": config.get("num_key_value_heads") or heads,
        "kv-channels": config.get("head_dim") or config["hidden_size"] // heads,
        "vocab-size": config["vocab_size"],
        "max-position-embeddings": config["max_position_embeddings"],
        "position-embedding-type": "rope",
        "rotary-base": int(rope["rope_theta"]),
        "normalization": "RMSNorm",
        "norm-epsilon": config["rms_norm_eps"],
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
    }
    switches = ["--group-query-attention", "--swiglu", "--disable-bias-linear"]
    switches += ARCHITECTURES[config["architectures"][0]]
    if not config.get("tie_word_embeddings"):
        switches.append("--untie-embeddings-and-output-weights")
    if rope["rope_type"] == "llama3":
        switches.append("--use-rope-scaling")
        values["rope-scaling-factor"] = rope["factor"]
    if num_experts := config.get("num_experts") or config.get("num_local_experts"):
        step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
        layers = range(config["num_hidden_layers"])
        frequency = [int((layer + 1) % step == 0 and layer not in dense) for layer in layers]
        values |= {
            "num-experts": num_experts,  # `transformers` 5.23 writes the other name
            "moe-ffn-hidden-size": config["moe_intermediate_size"],
            "moe-router-topk": config["num_experts_per_tok"],
            "moe-layer-freq": str(frequency).replace(" ", ""),
        }
        if not config.get("norm_topk_prob"):  # the weights of the chosen experts do not add up to 1
            switches.append("--moe-router-pre-softmax")
    return [word for name, value in values.items() for word in (f"--{name}", str(value))] + switches


def differences(model: Any, config: dict[str, Any]) -> list[str]:
    """What a GPTModel computes otherwise than `config` says, and no shape shows, by flag."""
    ours, rope = model.config, config["rope_parameters"]
    pre_softmax = ours.num_moe_experts is not None and not config.get("norm_topk_prob")
    pairs = {
        "--position-embedding-type": (model.position_embedding_type, "rope"),
        "--rotary-base": (model.rotary_base, rope["rope_theta"]),
        "--use-rope-scaling": (model.rotary_scaling, rope["rope_type"] == "llama3"),
        "--rotary-percent": (model.rotary_percent, 1.0),
        "--rotary-interleaved": (ours.rotary_interleaved, False),
        "--normalization": (ours.normalization, "RMSNorm"),
        "--apply-layernorm-1p": (ours.layernorm_zero_centered_gamma, False),
        "--norm-epsilon": (ours.layernorm_epsilon, config["rms_norm_eps"]),
        "--swiglu": (ours.gated_linear_unit, True),
        "--moe-router-topk": (
            ours.moe_router_topk,
            config.get("num_experts_per_tok", ours.moe_router_topk),
        ),
        "--moe-router-pre-softmax": (ours.moe_router_pre_softmax, pre_softmax),
        "--untie-embeddings-and-output-weights": (
            not model.share_embeddings_and_output_weights,
            not config.get("tie_word_embeddings"),
        ),
    }
    return [
        f"{flag} is {found!r} in the model, and config.json means {meant!r}: take its flags from megatron_arguments_of"
        for flag, (found, meant) in pairs.items()
        if found != meant
    ]


def place_of(model: Any, name: str) -> tuple[str, str]:
    """The key in `MAPPING` of a parameter of a chunk, and what stands before the names that it has there."""
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        name = "embedding.word_embeddings.weight"  # the copy of the last pipeline stage
    if not (layer := LAYER.match(name)):
        return name, ""
    number = model.decoder.layers[int(layer[1])].layer_number - 1
    above, name = f"model.layers.{number}.", name[layer.end() :]
    if expert := EXPERT.fullmatch(name):
        local = model.config.num_moe_experts // mpu.get_expert_model_parallel_world_size()
        number = mpu.get_expert_model_parallel_rank() * local + int(expert[1] or expert[3])
        above, name = f"{above}mlp.experts.{number}.", f"mlp.experts.{expert[2]}"
    return name, above


if __name__ == "__main__":
    print(shlex.join(megatron_arguments_of(read_config(sys.argv[1]))))
