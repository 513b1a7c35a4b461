"""What `python -m build` makes: a wheel that works by itself, an sdist that can be built from, their metadata."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

ROOT = Path(__file__).parents[2]
UNTRACKED = shutil.ignore_patterns("__pycache__")


def run(*command: str | Path, cwd: Path) -> str:
    """What a command that must succeed prints."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    # Of a copy: setuptools writes build/ and egg-info beside setup.py.
    shutil.copytree(ROOT / "megatron_pg", folder / "source/megatron_pg", ignore=UNTRACKED)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    # Without isolation, which would fetch setuptools from a package index.
    build = ("-m", "build", "--no-isolation", "--outdir", folder / "dist")
    run(sys.executable, *build, cwd=folder / "source")
    return folder / "dist"


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin/ of a new environment with the wheel; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder)
    (wheel,) = built.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--no-deps")
    run(*pip, "--no-index", "--quiet", wheel, cwd=folder)
    (site,) = folder.glob("lib/python*/site-packages")
    # A .pth file that is named in another's folder is not read: an editable install of the project stays out.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_the_wheel_works_where_only_it_is_installed(installed: Path, tmp_path: Path) -> None:
    where = run(
        *(installed / "python", "-I", "-c", "import megatron_pg; print(megatron_pg.__file__)"),
        cwd=tmp_path,
    )
    assert Path(where.strip()).is_relative_to(installed.parent)
    version = run(installed / "megatron-pg", "--version", cwd=tmp_path)
    assert re.match(r"megatron.pg \d+\.\d+\.\d+", version), version
    table = run(installed / "megatron-pg", "explain", "--lengths", "2,4,1,3", cwd=tmp_path)
    assert "sample_mean" in table


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"megatron_pg"}
    source = built.parent / "source"
    files = {str(path.relative_to(source)) for path in source.glob("megatron_pg/**/*.py")}
    assert files == {name for name in names if name.endswith(".py")}
    assert {"megatron_pg/py.typed", "megatron_pg/migrate/verl.toml"} <= set(names)


def test_the_sdist_has_what_a_packager_looks_for(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    names = {name.partition("/")[2] for name in tarfile.open(sdist).getnames()}
    assert names >= {"LICENSE", "README.md", "setup.py", "pyproject.toml", "PKG-INFO"}
    assert names >= {"megatron_pg/py.typed", "megatron_pg/migrate/verl.toml"}


def test_the_metadata_is_valid_and_says_what_is_installed(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Metadata.from_email(archive.read(name), validate=True)
    assert metadata.name == "megatron_pg"
    assert str(metadata.license_expression or metadata.license) == "Apache-2.0"
    assert metadata.description_content_type == "text/markdown"
    assert "Two commands" in (metadata.description or "")
    required = {each.name for each in metadata.requires_dist or [] if each.marker is None}
    assert required == {"torch", "numpy"}
    extras = {"megatron", "te", "models", "docs", "examples", "test"}
    assert set(metadata.provides_extra or []) == extras
