"""Where ROLL comes from: the work tree `ROLL` in the folder that TRAINERS names. Nothing of it is stored here."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

from .stand_ins import stand_in_for

STAND_INS = (
    "ray", "codetiming", "transfer_queue", "opentelemetry", "imageio", "torchdata", "pandas", "datasets", "peft",
    "dacite", "accelerate",
)  # fmt: skip
"""Packages that ROLL's modules import and of which the tests call nothing."""


def find_roll() -> str | None:
    """Why ROLL cannot be imported here, or None where it can; its work tree goes on the path of this process."""
    tree = Path(os.environ.get("TRAINERS", "")) / "ROLL"
    if not os.environ.get("TRAINERS") or not (tree / "roll").is_dir():
        return "no ROLL here: name the folder that holds its work tree, TRAINERS=folder"
    missing = [
        name for name in ("tensordict", "transformers") if importlib.util.find_spec(name) is None
    ]
    if missing:
        return f"ROLL needs {', '.join(missing)}, which is not installed here"
    os.environ.setdefault("ROLL_LOG_DIR", tempfile.mkdtemp())  # or it writes where it is run
    for folder in (tree, tree / "mcore_adapter" / "src"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    stand_in_for(*STAND_INS)
    return None
