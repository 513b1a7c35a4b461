"""Where verl comes from: installed, or a work tree `verl` in the folder that TRAINERS names. Nothing of it is stored here.

pip install --no-deps verl==0.9.1 tensordict==0.10.0 omegaconf hydra-core   # and more: docs/migrating.md
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from .stand_ins import stand_in_for

STAND_INS = (
    "ray", "torchdata", "cachetools", "fastapi", "uvicorn", "aiohttp", "pandas", "zmq", "codetiming", "datasets",
    "accelerate", "peft", "dill", "pylatexenc",
)  # fmt: skip
"""Packages that verl's modules import and of which the tests call nothing."""


def find_verl() -> str | None:
    """Why verl cannot be imported here, or None where it can; a work tree goes on the path of this process."""
    tree = Path(os.environ.get("TRAINERS", "")) / "verl"
    if os.environ.get("TRAINERS") and (tree / "verl").is_dir():
        sys.path.insert(0, str(tree))
    needed = ("verl", "tensordict", "omegaconf", "hydra", "transformers")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if not missing:
        stand_in_for(*STAND_INS)
        return None
    return f"no {', '.join(missing)} here: install verl 0.9.1, or name a folder that holds its work tree, TRAINERS=folder"
