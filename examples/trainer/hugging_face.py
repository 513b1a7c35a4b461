"""Weights of a Hugging Face folder into Megatron-Core's GPTModel and back, tensor by tensor, by
mbridge.

mbridge has the names and layouts of each family. This file adds the names of layers without
Transformer Engine, the comparison of folder and model before anything is changed, and a folder that
is whole or absent.
"""

import itertools
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
from megatron.core.utils import unwrap_model
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_pg.step.agreement import gather

from .hugging_face_config import WeightsError, carry_over, differences, read_config


def load_hugging_face(chunks: Sequence[torch.nn.Module], folder: str | Path) -> None:
    """Give the model the weights of a folder; every rank of the world calls it, before an optimizer
    copies them.

    `chunks` are this rank's of a GPTModel, wrapped or not, at any TP, PP, VPP and EP. A
    WeightsError, on every rank and before anything is changed, names a tensor that is missing, left
    over, of another shape or unreadable, or a setting.
    """
    bridge, views, needed, problems = _compared(chunks, config := read_config(folder))
    files: dict[str, Any] = {}
    for path in sorted(Path(folder).glob("model*.safetensors")):
        try:
            file = safe_open(path, "pt")
            files |= dict.fromkeys(file.keys(), file)
        except (SafetensorError, OSError) as error:
            problems.append(f"{path} cannot be read ({error}): copy it anew")
    for name, shape in needed.items():
        has = tuple(files[name].get_slice(name).get_shape()) if name in files else "missing"
        if has != shape:
            problems.append(f"{name} in {folder} is {has}, and the model needs {shape}")
    known = set().union(*_agree(problems, set(needed)))
    # A tied output layer is the embedding; old checkpoints have a constant of the rotary embedding.
    known |= {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    # Layers after the last one, and MiMo's `mtp_layers`, are for multi-token prediction.
    ignored = rf"rotary_emb\.inv_freq$|^model\.(mtp_layers|layers\.{config['num_hidden_layers']})\."
    left = [name for name in files if name not in known and not re.search(ignored, name)]
    _agree([f"{name} in {folder} has no place in the model" for name in left])
    reader = SimpleNamespace(load_one_hf_weight=lambda name: files[name].get_tensor(name))
    bridge._get_safetensor_io = lambda _: reader
    with torch.no_grad():
        bridge.load_weights(views, str(folder), memory_efficient=True)


def save_hugging_face(
    chunks: Sequence[torch.nn.Module],
    folder: str | Path,
    source: str | Path,
    file_bytes: int = 5 * 10**9,
) -> None:
    """Write the model as a folder that `transformers` loads; every rank of the world calls it.

    Weights keep their dtype; config.json and tokenizer are those of `source`. The folder has its
    name once it is whole (`.partial` follows it until then). A safetensors file is full at
    `file_bytes`. A WeightsError, on every rank, says that the folder exists, or that the model is
    not that of `source`.
    """
    bridge, views, _, problems = _compared(chunks, read_config(source))
    folder, is_writer = Path(folder), dist.get_rank() == 0
    if is_writer and folder.exists():
        problems.append(f"{folder} exists: remove it or name another")
    _agree(problems)
    partial = folder.with_name(f"{folder.name}.partial")
    if is_writer:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        partial.mkdir(parents=True)
    tensors: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    number = 1
    with torch.no_grad():
        for name, tensor in bridge.export_weights(views):
            if not is_writer or name in places:  # a tied output layer is the embedding
                continue
            tensors[name] = tensor.detach().cpu().contiguous()
            places[name] = f"model-{number:05}.safetensors"
            if sum(tensor.nbytes for tensor in tensors.values()) >= file_bytes:
                save_file(tensors, partial / places[name], {"format": "pt"})
                tensors, number = {}, number + 1
    if is_writer:
        if tensors:
            save_file(tensors, partial / f"model-{number:05}.safetensors", {"format": "pt"})
        if len(set(places.values())) == 1:
            (partial / "model-00001.safetensors").rename(partial / "model.safetensors")
        else:
            index = {"metadata": {}, "weight_map": places}
            (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        carry_over(source, partial, bridge.dtype)
        partial.rename(folder)
    dist.barrier()


def _agree(problems: list[str], mine: Any = None) -> list[Any]:
    """Give what every rank has, by rank; the problems of any are raised on all."""
    problems_of_ranks, values = zip(*gather((problems, mine), dist.group.WORLD), strict=True)
    if different := dict.fromkeys(itertools.chain(*problems_of_ranks)):
        raise WeightsError("\n".join([*different][:12]))
    return list(values)


def _compared(
    chunks: Sequence[torch.nn.Module], config: dict[str, Any]
) -> tuple[Any, list[Any], dict[str, tuple[int, ...]], list[str]]:
    """Give mbridge's converter, the chunks as it takes them, the shapes of the tensors that they
    need, and problems.
    """
    models = unwrap_model(list(chunks))
    bridge, views = _bridge(models[0], config), [_view(model) for model in models]
    problems, shapes = differences(models[0], config), {}
    for view in views:
        for name, whole_name in bridge._weight_name_mapping_mcore_local_to_global(view).items():
            parameter = view.tensors[name]
            tensor = torch.empty_like(parameter, device="meta")
            if getattr(parameter, "tensor_model_parallel", False):
                size = bridge.mpu.etp_size if ".mlp.experts." in name else bridge.mpu.tp_size
                tensor = bridge._weight_merge_across_tp(whole_name, [tensor] * size, parameter)
            try:
                names, tensors = bridge._weight_to_hf_format(whole_name, tensor)
                shapes |= {n: tuple(t.shape) for n, t in zip(names, tensors, strict=True)}
            except NotImplementedError:
                problems.append(f"{whole_name} of the model has no place in a Hugging Face folder")
    return bridge, views, shapes, problems


def _view(model: Any) -> Any:
    """Give a chunk as mbridge reads it, its tensors under the names of Transformer Engine's
    layers.
    """

    def renamed(name: str) -> str:
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            return "embedding.word_embeddings.weight"  # the copy of the last pipeline stage
        if not (layer := re.match(r"decoder\.layers\.(\d+)\.", name)):
            return name
        if not hasattr(model.decoder.layers[int(layer[1])].mlp, "router"):
            name = name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
        if model.config.multi_latent_attention:
            name = re.sub(r"\.(q|kv)_layernorm\.", r".linear_\1_up_proj.layer_norm_", name)
        else:
            name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        return re.sub(r"local_experts\.(\d+)\.(linear_fc\d\.weight)", r"\2\1", name)

    whole = model.state_dict(keep_vars=True)
    tensors = {renamed(name): tensor for name, tensor in whole.items() if "_extra" not in name}
    methods = {"state_dict": lambda: tensors, "named_parameters": tensors.items}
    return SimpleNamespace(decoder=model.decoder, tensors=tensors, **methods)


def _bridge(model: Any, config: dict[str, Any]) -> Any:
    """Build mbridge's converter between a folder with `config` and GPTModels like `model`."""
    family: Any = _MODEL_REGISTRY[config["model_type"]]

    class FamilyBridge(family):  # type: ignore[misc]
        # Dense layers among those with experts.
        _MLP_MAPPING = Bridge._MLP_MAPPING | family._MLP_MAPPING

        def _build_config(self) -> Any:
            return model.config

        def _adjust_mapping_for_shared_weights(self) -> None:
            """Leave a table alone that the bridges of other models share; `_view` names tied
            weights.
            """

        def _weight_merge_across_tp(
            self, name: str, weights: list[Tensor], local: Tensor
        ) -> Tensor:
            """Merge experts over their own group, where that is not the tensor-parallel group
            too.
            """
            if ".mlp.experts." not in name:
                return super()._weight_merge_across_tp(name, weights, local)  # type: ignore[no-any-return]
            if len(weights) != self.mpu.etp_size:
                weights = [torch.empty_like(local) for _ in range(self.mpu.etp_size)]
                dist.all_gather(weights, local.contiguous(), group=self.mpu.etp_group)
            if "linear_fc2" in name:
                return torch.cat(weights, 1)
            gates, ups = zip(*(weight.chunk(2) for weight in weights), strict=True)
            return torch.cat([*gates, *ups])

    fields = config | {"num_nextn_predict_layers": 0}
    fields["head_dim"] = config.get("head_dim") or model.config.kv_channels
    bridge = FamilyBridge(SimpleNamespace(**fields), dtype=next(model.parameters()).dtype)
    bridge.make_vocab_size_divisible_by = 1  # where it is set, mbridge pads to the next number
    bridge.vocab_size, bridge.padded_vocab_size = config["vocab_size"], model.vocab_size
    return bridge
