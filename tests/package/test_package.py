"""What `python -m build` makes: a wheel that works by itself, an sdist that can be built from,
their metadata.
"""

import re
import shutil
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

from tests import progress

ROOT = Path(__file__).parents[2]
UNTRACKED = shutil.ignore_patterns("__pycache__", "*.egg-info", "runs")
EXTRAS = {"megatron", "te", "quack", "tools", "docs", "test"}
SHIPPED = ("megatron_pg", "benchmarks", "ci", "docs", "examples", "tests")
"""Folders of the sdist."""
FILES = (
    "setup.py pyproject.toml MANIFEST.in README.md LICENSE CHANGELOG.md CITATION.cff "
    "CONTRIBUTING.md Dockerfile mkdocs.yml"
)


def run(*command: str | Path, cwd: Path) -> str:
    """What a command that must succeed prints."""
    done = progress.run(command, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    # Of a copy: setuptools writes build/ and egg-info beside setup.py.
    for name in SHIPPED:
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=UNTRACKED)
    for name in FILES.split():
        shutil.copy(ROOT / name, folder / "source")
    # Without isolation, which would fetch setuptools from a package index.
    build = ("-m", "build", "--no-isolation", "--outdir", folder / "dist")
    run(sys.executable, *build, cwd=folder / "source")
    return folder / "dist"


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin/ of a new environment with the wheel; its dependencies are those of this
    environment.
    """
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder)
    (wheel,) = built.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--no-deps")
    run(*pip, "--no-index", "--quiet", wheel, cwd=folder)
    (site,) = folder.glob("lib/python*/site-packages")
    # A .pth file that is named in another's folder is not read: an editable install of the project
    # stays out.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_the_wheel_works_where_only_it_is_installed(installed: Path, tmp_path: Path) -> None:
    code = "import megatron_pg; print(megatron_pg.__file__)"
    where = run(installed / "python", "-I", "-c", code, cwd=tmp_path)
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
    data = (
        "py.typed migrate/verl.toml explain/page/page.html explain/page/page.css "
        "explain/page/page.js"
    )
    assert {f"megatron_pg/{name}" for name in data.split()} <= set(names)


def test_the_sdist_has_all_of_the_project(built: Path) -> None:
    """The package, documentation, examples, tests and what runs them; and nothing that a build has
    left.
    """
    (sdist,) = built.glob("*.tar.gz")
    names = {name.partition("/")[2] for name in tarfile.open(sdist).getnames()}
    assert names >= {*FILES.split(), "PKG-INFO"}
    source = built.parent / "source"
    found = [path for folder in SHIPPED for path in (source / folder).rglob("*") if path.is_file()]
    assert names >= {str(path.relative_to(source)) for path in found}
    assert not [name for name in names if name.endswith((".pyc", ".so")) or ".venv" in name]


@pytest.fixture(scope="module")
def metadata(built: Path) -> Metadata:
    archive = zipfile.ZipFile(next(built.glob("*.whl")))
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return Metadata.from_email(archive.read(name), validate=True)


def test_the_metadata_is_valid_and_says_what_is_installed(metadata: Metadata) -> None:
    assert metadata.name == "megatron_pg"
    assert str(metadata.license_expression or metadata.license) == "Apache-2.0"
    assert metadata.description_content_type == "text/markdown"
    assert "Three commands" in (metadata.description or "")
    required = {each.name for each in metadata.requires_dist or [] if each.marker is None}
    assert required == {"torch", "numpy"}
    assert set(metadata.provides_extra or []) == EXTRAS
    assert metadata.author and metadata.keywords
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.12"} <= {*metadata.classifiers}
    labels = {"Documentation", "Changelog", "Issues"}
    assert labels <= set(metadata.project_urls or {})


def test_the_page_on_an_index_has_no_link_into_the_source(metadata: Metadata) -> None:
    """README's links lead to files; those of the metadata to the repository, which every file names
    alike.
    """
    links = re.findall(r"\]\(([^)]+)\)", metadata.description or "")
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", metadata.description or "")
    assert pictures and all(link.startswith("https://raw.") for link in pictures)
    urls = (metadata.project_urls or {}).values()
    (repository,) = (url.removesuffix("/issues") for url in urls if url.endswith("/issues"))
    for link in links:
        path = link.partition("/main/")[2].partition("#")[0]
        assert not path or (ROOT / path).exists(), link
    # A person may decide on another one: setup.py and the site read it from one place, and README
    # has the line that clones it.
    naming = [name for name in FILES.split() if repository in (ROOT / name).read_text()]
    assert naming == ["README.md", "CITATION.cff"]
    assert f"git clone {repository} " in (ROOT / "README.md").read_text()


def test_every_extra_installs_what_some_part_of_the_project_says() -> None:
    """A remedy in an error, a page or a script names an extra that there is."""
    named, extras = set(), re.compile(r"(?:megatron_pg|['\"]\.|\$ROOT)\[([a-z,]+)\]['\"]")
    for path in [ROOT / "README.md", *(p for f in SHIPPED for p in (ROOT / f).rglob("*"))]:
        if path.suffix in (".py", ".md", ".sh") and path != Path(__file__):
            for names in extras.findall(path.read_text()):
                named |= set(names.split(","))
    assert named <= EXTRAS and EXTRAS - {"te"} <= named


def test_the_image_takes_nothing_that_git_ignores() -> None:
    """README's commands leave environments of gigabytes beside the source."""
    ignored, left_out = (
        {line.removeprefix("**/").strip("/") for line in (ROOT / name).read_text().splitlines()}
        for name in (".gitignore", ".dockerignore")
    )
    # Compiled files lie in __pycache__.
    assert ignored - {"*.py[cod]"} <= left_out


def test_the_image_and_the_workflows_run_what_there_is() -> None:
    """Files that a Dockerfile and workflows name; neither is run here."""
    image = (ROOT / "Dockerfile").read_text()
    assert "FROM ${BASE}" in image and "ARG BASE=nvcr.io/nvidia/pytorch:" in image
    workflows = [path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml")]
    for text in (image, *workflows):
        for script in re.findall(r"(?:ci|examples)/[\w/.]+", text):
            assert (ROOT / script.rstrip(".")).exists(), script
    for command in re.findall(r"^bash (\S+)", (ROOT / "README.md").read_text(), re.MULTILINE)[:2]:
        assert f"bash {command}" in image
    both = "bash ci/${{ github.event_name == 'schedule' && 'full' || 'test' }}.sh"
    assert sum(both in text for text in workflows) == 1
