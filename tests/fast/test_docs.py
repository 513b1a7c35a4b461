"""The documentation is true: its Python runs, its outputs are what its commands print, its links
lead somewhere.

On each page the fenced `python` blocks run in order in one namespace. A block whose first line is
`# name.py` is that file: it is written where the page's other blocks can import it. An HTML comment
that begins with `<!-- python` is a block that only the test sees, for what a snippet takes as
given. Blocks of other languages are not run, except a `bash` block that begins with `cat > `, which
writes a file for the page, and one with a `megatron-pg explain` or `migrate` command whose output
follows as a `text` block.
"""

import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import megatron_pg as megatron_pg_package
import megatron_pg.critic as megatron_pg_critic
import megatron_pg.megatron as megatron_pg_megatron
from megatron_pg import PolicyLossConfig, rollout_files
from megatron_pg.cli import main as megatron_pg
from megatron_pg.config import versions
from megatron_pg.loss.metrics import DERIVED, METRICS, metric_names
from tests.fast.refusals import assert_words
from tests.fast.tables import typeset

ROOT = Path(__file__).parents[2]
RECORDS = sorted(ROOT.glob("docs/records/*.md"))
API = sorted(ROOT.glob("docs/api/*.md"))
PAGES = sorted([*ROOT.glob("README.md"), *ROOT.glob("docs/*.md"), *API, *RECORDS])
FENCE = re.compile(r"(?ms)^```(\w+)[^\n]*\n(.*?)^```$|^<!-- (python)\n(.*?)^-->$")
FILE_NAME = re.compile(r"# (\w+\.py)$", re.MULTILINE)
LAUNCH_LINE = (
    "train.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1"
)
"""What a page's script was started with: as much as Megatron's own parser asks for."""
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def blocks(page: Path) -> list[tuple[str, str, int]]:
    """(language, text, first line number) of every block."""
    text = page.read_text()
    return [
        (match[1] or match[3], match[2] or match[4], text.count("\n", 0, match.start()) + 2)
        for match in FENCE.finditer(text)
    ]


def python_of(page: Path) -> list[tuple[str, int]]:
    return [(text, line) for language, text, line in blocks(page) if language == "python"]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory that modules can be imported from; what was imported there is
    forgotten.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", LAUNCH_LINE.split())
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def write_files(page: Path, folder: Path) -> None:
    """Write the files that the page's `cat > ` commands make."""
    for language, text, _ in blocks(page):
        if language == "bash" and text.startswith("cat > "):
            subprocess.run(["bash", "-c", text], cwd=folder, check=True)


@pytest.mark.parametrize("page", filter(python_of, PAGES), ids=name_of)
def test_python_blocks_run(page, folder):
    write_files(page, folder)
    needs_training = any("megatron.training" in text for text, _ in python_of(page))
    if needs_training and not versions.has_megatron_training():
        pytest.skip("this Megatron-Core has no megatron.training")
    namespace: dict[str, object] = {"__name__": "page"}
    for text, line in python_of(page):
        if match := FILE_NAME.match(text):
            (folder / match[1]).write_text(text)
        # The line numbers of a traceback are those of the page.
        exec(compile("\n" * (line - 1) + text, str(page), "exec"), namespace)


def test_the_readme_prints_what_it_shows(capsys) -> None:
    readme = ROOT / "README.md"
    (code, _), shown = python_of(readme)[0], next(b for b in blocks(readme) if b[0] == "text")[1]
    exec(compile(code, "README.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out == shown


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    prose = re.sub(r"(?ms)^```.*?^```$", "", text)
    assert len(prose.split()) <= 600 and len(prose.splitlines()) <= 70


def command_blocks() -> list[tuple[Path, str, str]]:
    """(page, command, printed) of every command that is followed by its output."""
    pairs = ((page, *pair) for page in PAGES for pair in pairwise(blocks(page)))
    return [
        (page, command, printed)
        for page, (_, command, _), (following, printed, _) in pairs
        if command.startswith(("megatron-pg explain", "megatron-pg migrate"))
        and following == "text"
    ]


@pytest.mark.parametrize(("page", "command", "printed"), command_blocks())
def test_commands_print_what_the_page_says(page, command, printed, folder, capsys):
    write_files(page, folder)
    assert megatron_pg(shlex.split(command.replace("\\\n", " "))[1:]) == 0
    assert capsys.readouterr().out.strip() == printed.strip()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_files_lead_somewhere(page):
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing, f"{name_of(page)} links to {missing}"


def test_the_page_of_metrics_has_all_metrics_and_no_others():
    """Of every setting that adds some; the second table is the training script's."""
    settings = (
        PolicyLossConfig(kl_loss_coef=0.1, entropy_coef=0.1, pg_metrics="with_entropy"),
        PolicyLossConfig(use_tis=True, use_geometric_rejection=True, use_opsm=True),
        PolicyLossConfig(policy_loss="gspo"),
        PolicyLossConfig(distill_coef=0.1, distill_teacher="top_k"),
    )
    names = {name for config in settings for name in metric_names(config)}
    table = (ROOT / "docs/metrics.md").read_text().split("## Metrics of the loss")[1].split("##")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    names |= {row.name for row in [*METRICS, *DERIVED]} | {"router_agreement"}
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == names


def test_the_zigzag_figure_can_be_drawn():
    pytest.importorskip("matplotlib")
    draw = runpy.run_path(str(ROOT / "docs/figures/zigzag.py"))["draw"]
    assert len(draw().axes) == 1
    assert (ROOT / "docs/figures/zigzag.png").exists()


@pytest.mark.full
def test_the_site_builds(site):
    """Every page with a next or a previous one, its source to edit, and a switch for the dark."""
    pages = sorted([*site.glob("*/index.html"), *site.glob("api/*/index.html")])
    stems = {page.stem for page in PAGES if page not in RECORDS} - {"README", "index"}
    assert {page.parent.name for page in pages} >= stems | {"records", "api"}
    assert (site / "records/matrix/index.html").exists()
    for page in pages:
        words = 'md-footer__link | /edit/main/docs/ | data-md-color-scheme="slate"'
        assert_words(words, page.read_text())


@pytest.mark.full
def test_every_page_of_the_site_has_a_markdown_twin(site):
    """`llms.txt` lists them all. They have neither directives nor blocks that only tests see."""
    pages = [page for page in PAGES if page.name != "README.md"]
    names = {str(page.relative_to(ROOT / "docs")) for page in pages}
    assert set(LINK.findall((site / "llms.txt").read_text())) == names
    twins = {name: (site / name).read_text() for name in names}
    assert not [name for name, twin in twins.items() if re.search(r"^(:::|<!--)", twin, re.M)]
    assert_words("`megatron_pg.plan_step` | Args: | Raises:", twins["api/steps.md"])


@pytest.mark.full
def test_the_site_takes_nothing_from_elsewhere(site):
    """Scripts, styles, fonts and pictures lie beside the pages; MathJax and its font too."""
    for page in site.rglob("index.html"):
        elsewhere = r"<(?:script|img|link[^>]*stylesheet)[^>]*(?:src|href)=\"?(https?:[^\" >]+)"
        loaded = re.findall(elsewhere, page.read_text())
        assert not loaded, f"{page}: {loaded}"
    assert (site / "mathjax/MathJax.js").exists() and list(site.glob("mathjax/fonts/**/*.woff"))
    assert "STIX-Web" in (site / "site.js").read_text()
    assert (site / "aggregation/index.html").read_text().count('class="arithmatex"') > 8


@pytest.mark.full
def test_the_site_links_papers_and_shows_no_backslash_in_flags(site):
    html = (site / "objectives/index.html").read_text()
    assert '<a href="https://arxiv.org/abs/2402.03300">arXiv:2402.03300</a>' in html
    html += (site / "flags/index.html").read_text()
    assert not re.findall(r"<code>[^<]*\\[^<]*</code>", html)
    for code in re.findall(r"<pre.*?</pre>", html, re.DOTALL):
        assert "arxiv.org" not in code


@pytest.mark.full
def test_the_reference_has_all_that_is_exported(site):
    """By its docstrings: no name is without one, and the sections of an argument list are
    tables.
    """
    html = "".join(page.read_text() for page in site.glob("api/*/index.html"))
    for module in (megatron_pg_package, megatron_pg_megatron, megatron_pg_critic, rollout_files):
        for name in module.__all__:
            assert f'id="{module.__name__}.{name}"' in html, name
    assert html.count("Parameters:") > 20 and html.count("Raises:") > 20


def test_a_formula_keeps_its_letters() -> None:
    assert typeset("1/(N L) sum m x") == r"$\frac{1}{N L}\sum m x$"
    assert typeset("d^2 / 2 where A < 0, else sg(eps_clip)") == (
        r"$d^2/2$ where $A<0$, else $\operatorname{sg}(\texttt{eps_clip})$"
    )
