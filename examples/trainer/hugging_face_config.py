"""The config.json of a Hugging Face folder as settings of Megatron's model, and as flags of its
parser.
"""

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "Glm4MoeForCausalLM": "glm4_moe",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "MiMoForCausalLM": "qwen2",
}
"""The `model_type` whose config class and whose bridge read the architecture."""

SIGMOID = ("glm4_moe", "deepseek_v3")
"""Those whose experts are rated by a sigmoid and chosen with a bias."""

MUST_BE: dict[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "pretraining_tp": 1,
    "quantization_config": None,
    "rope_interleave": True,
}
"""Fields of config.json that no flag can express: another value is refused. An absent field or null
is accepted."""

ROPE_MUST_BE: dict[str, dict[str, Any]] = {
    "default": {},
    "llama3": {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096},
}
"""Megatron's constants of each scaling of the rotary embedding (embeddings/rotary_pos_embedding.py,
MLATransformerConfig)."""

SAME_NAME = ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "v_head_dim")
FIELDS = dict(zip(SAME_NAME, SAME_NAME, strict=True)) | {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "layernorm_epsilon": "rms_norm_eps",
    "moe_router_topk": "num_experts_per_tok",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
}
"""The settings of the model and the fields of config.json that hold them."""

FLAGS = {
    "layernorm_epsilon": "norm-epsilon",
    "layernorm_zero_centered_gamma": "apply-layernorm-1p",
    "gated_linear_unit": "swiglu",
    "rotary_scaling": "use-rope-scaling",
    "num_moe_experts": "num-experts",
    "add_bias_linear": "disable-bias-linear",
    "share_embeddings_and_output_weights": "untie-embeddings-and-output-weights",
}
"""The flags that are not named like their setting."""
NEGATED = ("add_bias_linear", "share_embeddings_and_output_weights")
"""The settings that their flag switches off."""


class WeightsError(ValueError):
    """A folder that cannot be read or does not fit the model; the message names the field or the
    parameter.
    """


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read the config.json of a Hugging Face folder, with the defaults of its family.

    A WeightsError says that there is none, or names what Megatron's model cannot do.
    """
    from transformers import AutoConfig

    path = Path(folder) / "config.json"
    if not path.is_file():
        raise WeightsError(f"there is no {path}: name a folder that save_pretrained wrote")
    written: dict[str, Any] = json.loads(path.read_text())
    architecture = (written.get("architectures") or ["(none)"])[0]
    if architecture not in FAMILIES:
        raise WeightsError(
            f"{path} is of the architecture {architecture}; known are {', '.join(FAMILIES)}. "
            "Convert others with Megatron-Bridge, and start from its checkpoint with --load"
        )
    written["model_type"] = family = FAMILIES[architecture]
    try:
        config: dict[str, Any] = AutoConfig.for_model(**written).to_dict()
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"{path} is refused by transformers: {error}") from error
    must_be = dict(MUST_BE)
    if family in SIGMOID:
        must_be["norm_topk_prob"] = True
    if family != "glm4_moe" and not family.startswith("qwen2"):
        must_be["attention_bias"] = False
    if config.get("use_sliding_window") is False:
        del must_be["sliding_window"]  # a window that is not used
    wrong = {n: config[n] for n, v in must_be.items() if config.get(n) not in (None, v)}
    rope = config["rope_parameters"]
    kind = rope["rope_type"]
    known = kind in ROPE_MUST_BE and (kind == "yarn") <= (family == "deepseek_v3")
    if not known or ROPE_MUST_BE[kind].items() - rope.items() or rope["rope_theta"] % 1:
        wrong["rope_parameters"] = rope
    # Megatron rates a group by its best k / topk_group experts, `transformers` by its best two.
    groups = config.get("n_group") or 1
    if groups > 1 and config["num_experts_per_tok"] != 2 * config["topk_group"]:
        wrong |= {"n_group": groups, "topk_group": config["topk_group"]}
    if wrong:
        found = ", ".join(f"{name} {value!r}" for name, value in wrong.items())
        raise WeightsError(f"{path} has {found}, for which there is no flag of Megatron's here")
    return config


def carry_over(source: str | Path, folder: Path, dtype: torch.dtype) -> None:
    """Copy the config, with the weights' new dtype, the tokenizer and other text files into a
    folder of weights.
    """
    for file in Path(source).iterdir():
        if file.suffix in (".json", ".jinja", ".model", ".txt") and ".index." not in file.name:
            shutil.copyfile(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).split(".")[1]
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    """Name the attributes of GPTModel and its TransformerConfig that a config from `read_config`
    determines.
    """
    rope, family = config["rope_parameters"], config["model_type"]
    heads = config["num_attention_heads"]
    is_latent = family == "deepseek_v3"
    settings = {name: config.get(field) for name, field in FIELDS.items()} | {
        "position_embedding_type": "rope",
        "rotary_base": int(rope["rope_theta"]),
        "rotary_percent": rope.get("partial_rotary_factor") or 1.0,
        "rotary_interleaved": False,
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": False,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "share_embeddings_and_output_weights": bool(config.get("tie_word_embeddings")),
        "add_qkv_bias": family.startswith("qwen2") or bool(config.get("attention_bias")),
        "qk_layernorm": family.startswith("qwen3") or is_latent or bool(config.get("use_qk_norm")),
    }
    if is_latent:
        is_scaled = rope["rope_type"] == "yarn"
        settings |= {"multi_latent_attention": True, "rope_type": "yarn" if is_scaled else "rope"}
        settings["rotary_scaling_factor"] = rope["factor"] if is_scaled else None
        settings["mscale"] = rope.get("mscale", 1.0)
        settings["mscale_all_dim"] = rope.get("mscale_all_dim", 0.0)
    else:
        is_scaled = rope["rope_type"] == "llama3"
        settings["num_query_groups"] = config.get("num_key_value_heads") or heads
        settings["kv_channels"] = config.get("head_dim") or config["hidden_size"] // heads
        settings["rotary_scaling"] = is_scaled
        settings["rope_scaling_factor"] = rope["factor"] if is_scaled else None
    settings |= _experts(config)
    return {name: value for name, value in settings.items() if value is not None}


def _experts(config: dict[str, Any]) -> dict[str, Any]:
    kinds = ("num_experts", "num_local_experts", "n_routed_experts")
    number = next((config[kind] for kind in kinds if config.get(kind)), None)
    if number is None:
        return {}
    size = config.get("moe_intermediate_size") or config["intermediate_size"]
    first, step = config.get("first_k_dense_replace") or 0, config.get("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or ()
    is_sigmoid = config["model_type"] in SIGMOID
    is_normalised = config["model_type"] == "mixtral" or config.get("norm_topk_prob")
    gated = config.get("shared_expert_intermediate_size")
    shared = gated or size * (config.get("n_shared_experts") or 0)
    groups = config.get("n_group") or 1
    return {
        "num_moe_experts": number,
        "moe_ffn_hidden_size": size,
        "moe_layer_freq": [
            int(layer >= first and (layer + 1) % step == 0 and layer not in dense)
            for layer in range(config["num_hidden_layers"])
        ],
        "moe_router_pre_softmax": not is_normalised,  # the weights of the chosen do not add up to 1
        "moe_shared_expert_gate": bool(gated),
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_router_score_function": "sigmoid" if is_sigmoid else "softmax",
        "moe_router_enable_expert_bias": is_sigmoid,
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": config["topk_group"] if groups > 1 else None,
    }


def megatron_arguments_of(config: dict[str, Any]) -> list[str]:
    """Give the flags of Megatron's parser that build the model of a config from `read_config`,
    without dropout.
    """
    values = settings_of(config)
    values["group_query_attention"] = "num_query_groups" in values
    values |= {name: config[name] for name in ("vocab_size", "max_position_embeddings")}
    values |= {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    if config["model_type"] in SIGMOID:
        # Nothing but the gradient changes a policy, and `transformers` routes in float32.
        values |= {"moe_router_bias_update_rate": 0.0, "moe_router_dtype": "fp32"}
    words: list[str] = []
    for name, value in values.items():
        flag = f"--{FLAGS.get(name, name).replace('_', '-')}"
        if isinstance(value, bool):
            words += [flag] * (value != (name in NEGATED))
        else:
            words += [flag, str(value).replace(" ", "")]
    return words


def differences(model: Any, config: dict[str, Any]) -> list[str]:
    """Compare the settings of a GPTModel with those of `config`; one line for each that differs, by
    flag.
    """
    problems = []
    for name, meant in settings_of(config).items():
        found = getattr(model, name, getattr(model.config, name, meant))
        if found != meant and name != "moe_layer_freq":  # the parameters' names show that one
            flag = FLAGS.get(name, name).replace("_", "-")
            if name in NEGATED:
                found, meant = not found, not meant
            values = f"{found!r} in the model, and config.json means {meant!r}"
            problems.append(f"--{flag} is {values}: take its flags from megatron_arguments_of")
    return problems


if __name__ == "__main__":
    print(shlex.join(megatron_arguments_of(read_config(sys.argv[1]))))
