"""The site, for the tests that read it and those that look at it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a strict build writes."""
    for package in ("mkdocs", "mkdocstrings", "mike", "jupyter_server_mathjax"):
        pytest.importorskip(package)
    config, environment = str(ROOT / "mkdocs.yml"), {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    folder = tmp_path_factory.mktemp("site")
    # --quiet would hide what is strict.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return folder
