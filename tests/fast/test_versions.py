"""Which versions of Megatron-Core are accepted, and what a refusal says."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_pg.critic
import megatron_pg.megatron
from megatron_pg.check.report import KNOWN_MISTAKES, mistakes_in
from megatron_pg.config import versions
from megatron_pg.config.versions import SUPPORTED_RANGE, UnsupportedMegatronError, parse_version
from tests.fast.refusals import assert_refused

ROOT = Path(__file__).parents[2]


def test_versions_are_read() -> None:
    texts = ("0.19.2", "0.16.0rc1", "0.18.0+abc123", "0.20")
    assert [*map(parse_version, texts)] == [(0, 19, 2), (0, 16, 0), (0, 18, 0), (0, 20, 0)]
    assert_refused("'main'", parse_version, "main", error=UnsupportedMegatronError)


ACCEPTED, REFUSED = [(0, 16, 0), (0, 19, 2), (0, 20, 9)], [(0, 15, 3), (0, 21, 0), (1, 0, 0)]


@pytest.mark.parametrize("version", ACCEPTED + REFUSED)
def test_other_versions_are_refused_with_the_range(version, monkeypatch) -> None:
    monkeypatch.setattr(versions, "megatron_core_version", lambda: version)
    if version in ACCEPTED:
        versions.require_supported_version()
        return
    words, error = f"{'.'.join(map(str, version))} | >=0.16,<0.21", UnsupportedMegatronError
    assert_refused(words, versions.require_supported_version, error=error)


def test_without_megatron_an_import_says_what_to_install() -> None:
    """In a process of its own, where `megatron` cannot be imported; what needs no Megatron works
    there.
    """
    code = (
        "import sys; sys.modules['megatron'] = None\n"
        "import megatron_pg.critic, megatron_pg.megatron\n"
        "from megatron_pg.megatron.scale_contract import scale_contract\n"
        "for package in (megatron_pg.critic, megatron_pg.megatron):\n"
        "    for name in package.__all__:\n"
        "        try: getattr(package, name)\n"
        "        except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert len(said) == len(megatron_pg.critic.__all__) + len(megatron_pg.megatron.__all__)
    assert all("pip install 'megatron-core>=0.16,<0.21'" in line for line in said)


LAZY = {
    "import megatron_pg; import megatron_pg.step as other": "step",
    "import megatron_pg.critic; import megatron_pg.critic.gae": "gae",
    "import megatron_pg.megatron; import megatron_pg.megatron.scale_contract": "scale_contract",
}
"""Imports of a package whose exports are imported later, and of one of its modules."""


@pytest.mark.parametrize("imports", LAZY)
def test_completion_lists_the_exports_before_they_are_imported(imports: str) -> None:
    package = imports.partition(";")[0].partition(" ")[2]
    code = f"import sys; sys.modules['megatron'] = None; {imports}; names = dir({package})\n"
    code += f"print(*{package}.__all__, '|', *names)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    exports, listed = (part.split() for part in done.stdout.split("|"))
    assert {*exports, LAZY[imports]} <= {*listed} and listed == sorted(listed)
    module = importlib.import_module(package)
    importlib.import_module(f"{package}.{LAZY[imports]}")
    # Everything else that is listed is a module of the package, or has a special name.
    others = [name for name in {*listed} - {*exports} if not name.startswith("__")]
    assert all(vars(module)[name].__name__ == f"{package}.{name}" for name in others)


def test_a_name_that_is_not_exported_is_refused() -> None:
    with pytest.raises(AttributeError, match="ValueStap"):
        megatron_pg.megatron.ValueStap  # noqa: B018


def test_every_page_says_the_same_range() -> None:
    pages = [ROOT / "setup.py", ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    texts = {str(page.relative_to(ROOT)): page.read_text() for page in pages}
    ranges = {page: set(re.findall(r"megatron-core ?>=[^`'\"* ]*", texts[page])) for page in texts}
    assert {page: found for page, found in ranges.items() if found - {SUPPORTED_RANGE}} == {}
    named = {page for page, found in ranges.items() if found}
    assert {"setup.py", "README.md", "docs/megatron_versions.md"} <= named


def test_known_mistakes_of_a_version() -> None:
    versions = ((0, 16, 1), (0, 18, 2), (0, 19, 2))
    old, middle, new = (" ".join(mistakes_in(version)) for version in versions)
    assert "multi-token prediction without labels fails" in old and "right from 0.17" in old
    assert "issue 1652" in middle and "issue 2417" not in middle
    assert "issue 1652" not in new and "issue 2417" in new
    for (first, fixed), mistakes in KNOWN_MISTAKES.items():
        assert first < fixed and mistakes and all(mistakes.values())
