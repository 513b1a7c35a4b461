"""Conversion of a Hugging Face folder to flags of Megatron's parser, and of its weights to GPTModel
and back by mbridge.

mbridge has each family's names and layouts. This file adds the names of layers without Transformer
Engine, experts over a separate group, and atomic writing of the folder.
"""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from mbridge.core.bridge import _MODEL_REGISTRY, Bridge
from mbridge.core.safetensor_io import SafeTensorIO
from megatron.core.utils import unwrap_model
from torch import Tensor
from transformers import AutoConfig

from megatron_pg.step.agreement import gather

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
}
"""The `model_type` of the config class and bridge for each architecture."""
MUST_BE = {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False}
MUST_BE |= {"sliding_window": None, "pretraining_tp": 1, "quantization_config": None}
"""Fields of config.json without a flag, with the only accepted value. A missing field or null is
accepted."""
ALWAYS = """
    --position-embedding-type rope --normalization RMSNorm --attention-dropout 0 --hidden-dropout 0
    --group-query-attention --swiglu --disable-bias-linear
"""
FIELDS = {
    "num-layers": "num_hidden_layers",
    "hidden-size": "hidden_size",
    "ffn-hidden-size": "intermediate_size",
    "num-attention-heads": "num_attention_heads",
    "vocab-size": "vocab_size",
    "max-position-embeddings": "max_position_embeddings",
    "norm-epsilon": "rms_norm_eps",
}
"""The flags of every family, and the flags with fields for their values."""
LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 8192}
"""Megatron's constants for scaled rotary positions (embeddings/rotary_pos_embedding.py)."""


class WeightsError(ValueError):
    """A folder that does not fit the model. The message names the field or parameter."""


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read the config.json of a Hugging Face folder, with the defaults of its family.

    Raises WeightsError if there is none, or if Megatron's model does not support it.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise WeightsError(f"{path} does not exist: give a folder that save_pretrained wrote")
    written: dict[str, Any] = json.loads(path.read_text())
    architecture = (written.get("architectures") or ["(none)"])[0]
    if architecture not in FAMILIES:
        raise WeightsError(
            f"{path} has the unsupported architecture {architecture}, expected "
            f"{', '.join(FAMILIES)}. Convert it with Megatron-Bridge, and start from its "
            "checkpoint with --load"
        )
    written["model_type"] = family = FAMILIES[architecture]
    try:
        config: dict[str, Any] = AutoConfig.for_model(**written).to_dict()
    except (KeyError, ValueError) as error:  # such as a rotary scaling without its factor
        shown = {name: written[name] for name in written if name.startswith("rope_")}
        raise WeightsError(f"{path} is incomplete: {error}, with {shown}") from error
    must_be = dict(MUST_BE) if family.startswith("qwen2") else MUST_BE | {"attention_bias": False}
    if config.get("use_sliding_window") is False:
        del must_be["sliding_window"]  # a window that is not used
    wrong = {n: config[n] for n, v in must_be.items() if config.get(n) not in (None, v)}
    rope = config["rope_parameters"]
    fixed = {"default": {}, "llama3": LLAMA_3}.get(rope["rope_type"])
    if fixed is None or fixed.items() - rope.items() or rope["rope_theta"] % 1:
        wrong["rope_parameters"] = rope
    if wrong:
        found = ", ".join(f"{name} {value!r}" for name, value in wrong.items())
        raise WeightsError(f"{path} has {found}, which Megatron's flags cannot express")
    return config


def megatron_arguments_of(config: dict[str, Any]) -> list[str]:
    """Return Megatron's flags for a config from `read_config`, without dropout."""
    rope, family = config["rope_parameters"], config["model_type"]
    heads = config["num_attention_heads"]
    values: dict[str, Any] = {flag: config[field] for flag, field in FIELDS.items()} | {
        "num-query-groups": config.get("num_key_value_heads") or heads,
        "kv-channels": config.get("head_dim") or config["hidden_size"] // heads,
        "rotary-base": int(rope["rope_theta"]),
        "rotary-percent": rope.get("partial_rotary_factor") or 1.0,
    }
    switches = {
        "untie-embeddings-and-output-weights": not config.get("tie_word_embeddings"),
        "add-qkv-bias": family.startswith("qwen2"),
        "qk-layernorm": family.startswith("qwen3"),
        "use-rope-scaling": (is_scaled := rope["rope_type"] == "llama3"),
    }
    if is_scaled:
        values["rope-scaling-factor"] = rope["factor"]
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
        layers, width = range(config["num_hidden_layers"]), config.get("moe_intermediate_size")
        sparse = [int((layer + 1) % step == 0 and layer not in dense) for layer in layers]
        values |= {
            "num-experts": experts,
            "moe-ffn-hidden-size": width or config["intermediate_size"],
            "moe-layer-freq": str(sparse).replace(" ", ""),
            "moe-router-topk": config["num_experts_per_tok"],
        }
        # Otherwise, the chosen experts' weights do not add up to 1.
        is_normalized = family == "mixtral" or config.get("norm_topk_prob")
        switches["moe-router-pre-softmax"] = not is_normalized
        if shared := config.get("shared_expert_intermediate_size"):
            values["moe-shared-expert-intermediate-size"] = shared
            switches["moe-shared-expert-gate"] = True
    words = [*ALWAYS.split(), *(f"--{name}" for name, is_on in switches.items() if is_on)]
    return words + [word for name, value in values.items() for word in (f"--{name}", str(value))]


def load_hugging_face(chunks: Sequence[torch.nn.Module], folder: str | Path) -> None:
    """Load a folder's weights into the model. Every rank of the world calls it, before an optimizer
    copies them.

    `chunks` are this rank's chunks of a GPTModel, wrapped or not, at any TP, PP, VPP and EP, built
    with the folder's flags. Raises WeightsError on every rank, before any change, with the missing
    or unused tensors.
    """
    models = unwrap_model(list(chunks))
    bridge, views = _bridge(models[0], read_config(folder)), [_view(model) for model in models]
    mine = set()
    for view in views:
        for name in bridge._weight_name_mapping_mcore_local_to_global(view).values():
            mine.update(bridge._weight_name_mapping_mcore_to_hf(name))
    needed = set().union(*gather(mine, dist.group.WORLD))
    there = set(SafeTensorIO(str(folder)).load_hf_weight_names())
    missing = sorted(needed - there)
    # A tied output layer is the embedding. Old checkpoints have a constant rotary tensor.
    known = needed | {"lm_head.weight"} if models[0].share_embeddings_and_output_weights else needed
    left = [name for name in sorted(there - known) if "rotary_emb.inv_freq" not in name]
    if missing or left:
        found = f"{', '.join(missing[:9])} missing, and {', '.join(left[:9])} unused"
        raise WeightsError(f"{folder} does not fit the model: {found}")
    with torch.no_grad():
        bridge.load_weights(views, str(folder), memory_efficient=True)


def save_hugging_face(
    chunks: Sequence[torch.nn.Module], folder: str | Path, source: str | Path
) -> None:
    """Write the model as a folder that `transformers` loads. Every rank of the world calls it.

    Weights keep their dtype. config.json, tokenizer and file names come from `source`. The folder's
    name ends in `.partial` until it is complete.
    """
    models, folder = unwrap_model(list(chunks)), Path(folder)
    bridge, is_writer = _bridge(models[0], read_config(source)), dist.get_rank() == 0
    partial = folder.with_name(f"{folder.name}.partial")
    if is_writer:
        shutil.rmtree(partial, ignore_errors=True)  # a killed run's
    dist.barrier()
    bridge.safetensor_io = SafeTensorIO(str(source))
    with torch.no_grad():
        bridge.save_weights([_view(model) for model in models], str(partial))
    if is_writer:
        for file in Path(source).iterdir():
            if file.suffix in (".json", ".jinja", ".model", ".txt") and ".index." not in file.name:
                shutil.copyfile(file, partial / file.name)
        config = json.loads((partial / "config.json").read_text())
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(bridge.dtype)[6:]
        (partial / "config.json").write_text(json.dumps(config, indent=2))
        partial.rename(folder)
    dist.barrier()


def _view(model: Any) -> Any:
    """Return a view of a chunk for mbridge, with tensor names of Transformer Engine's layers."""

    def renamed(name: str) -> str:
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            return "embedding.word_embeddings.weight"  # the copy of the last pipeline stage
        if not (layer := re.match(r"decoder\.layers\.(\d+)\.", name)):
            return name
        if not hasattr(model.decoder.layers[int(layer[1])].mlp, "router"):
            name = name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
        name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        return re.sub(r"local_experts\.(\d+)\.(linear_fc\d\.weight)", r"\2\1", name)

    whole = model.state_dict(keep_vars=True)
    tensors = {renamed(name): tensor for name, tensor in whole.items() if "_extra" not in name}
    methods = {"state_dict": lambda: tensors, "named_parameters": tensors.items}
    return SimpleNamespace(decoder=model.decoder, **methods)


def _bridge(model: Any, config: dict[str, Any]) -> Any:
    """Build mbridge's converter between a folder with `config` and GPTModels like `model`."""
    family: Any = _MODEL_REGISTRY[config["model_type"]]

    class FamilyBridge(family):  # type: ignore[misc]
        # Dense layers between layers with experts.
        _MLP_MAPPING = Bridge._MLP_MAPPING | family._MLP_MAPPING

        def _build_config(self) -> Any:
            return model.config

        def _adjust_mapping_for_shared_weights(self) -> None:
            """Do not change a table that bridges share. `_view` names tied weights."""

        def _weight_merge_across_tp(
            self, name: str, weights: list[Tensor], local: Tensor
        ) -> Tensor:
            """Merge experts over their own group if it is a different one."""
            if ".mlp.experts." not in name:
                return super()._weight_merge_across_tp(name, weights, local)  # type: ignore[no-any-return]
            if len(weights) != self.mpu.etp_size:
                weights = [torch.empty_like(local) for _ in range(self.mpu.etp_size)]
                dist.all_gather(weights, local.contiguous(), group=self.mpu.etp_group)
            if "linear_fc2" in name:
                return torch.cat(weights, 1)
            gates, ups = zip(*(weight.chunk(2) for weight in weights), strict=True)
            return torch.cat([*gates, *ups])

    fields = config | {"head_dim": config.get("head_dim") or model.config.kv_channels}
    fields["save_pretrained"] = lambda _: None  # config.json is copied
    bridge = FamilyBridge(SimpleNamespace(**fields), dtype=next(model.parameters()).dtype)
    bridge.make_vocab_size_divisible_by = 1  # otherwise, mbridge pads the vocabulary
    bridge.vocab_size, bridge.padded_vocab_size = config["vocab_size"], model.vocab_size
    return bridge
