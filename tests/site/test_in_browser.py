"""The site in Chromium without a window, served as it will be: what a search finds, what a phone
shows, what is typeset.

    python -m pytest tests/site

It needs Debian's `chromium` and takes minutes without a GPU, so that CI does not run it.
"""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.fast.conftest import site  # noqa: F401 (a fixture)
from tests.fast.tables import TABLES
from tests.fast.test_rollout_page_in_browser import CHROMIUM, browser  # noqa: F401 (a fixture)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
TYPESET = "!window.MathJax?.Hub || MathJax.Hub.queue.pending == 0 && MathJax.isReady"
TALLEST = 25_000
"""The most pixels that a page of the reference may be high; in one page it was 76,000."""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:  # noqa: F811
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:  # noqa: F811
    opened = browser.new_page(viewport={"width": 1440, "height": 900}, base_url=address)
    opened.set_default_timeout(240_000)
    yield opened
    opened.close()


FOUND = {
    "--use-tis": "flags/",
    "--loss-aggregation-divisor": "flags/",
    "OOM": "troubleshooting/",
    "W&B": "trainer/",
    "loss_agg_mode": "their_words/",
}
"""What is typed, and a page among the results."""


def search(page: Any, typed: str) -> None:
    page.goto("")
    page.fill("input.md-search__input", typed)
    page.press("input.md-search__input", "End")  # the search listens for keys


@pytest.mark.parametrize("typed", FOUND)
def test_a_search_finds_its_page(page: Any, typed: str) -> None:
    search(page, typed)
    page.wait_for_selector(".md-search-result__item")
    links = page.eval_on_selector_all(
        "a.md-search-result__link", "all => all.map(each => new URL(each.href).pathname)"
    )
    assert any(link.endswith(FOUND[typed]) for link in links[:10]), links


def test_a_search_for_nothing_finds_nothing(page: Any) -> None:
    """The mutant: a search that shows every page would pass the tests above."""
    search(page, "--use-tortoise")
    page.wait_for_function(
        "document.querySelector('.md-search-result__meta').textContent.includes('No matching')"
    )
    assert not page.locator(".md-search-result__item").count()


def test_no_page_scrolls_sideways_on_a_phone(page: Any, site: Path) -> None:  # noqa: F811
    page.set_viewport_size({"width": 420, "height": 900})
    wide = {}
    for file in sorted(site.rglob("index.html")):
        name = str(file.parent.relative_to(site))
        page.goto(name)
        page.wait_for_function(TYPESET)
        if (width := page.evaluate("document.documentElement.scrollWidth")) != 420:
            wide[name] = width
    assert not wide, f"pixels that these pages are wide at 420: {wide}"
    # The mutant: a line that cannot break.
    page.evaluate("document.querySelector('article').innerHTML += `<p>${'x'.repeat(99)}</p>`")
    page.evaluate("document.querySelector('article p:last-child').style.overflowWrap = 'normal'")
    assert page.evaluate("document.documentElement.scrollWidth") > 420


def test_a_phone_stacks_a_flag_its_default_and_its_meaning(page: Any) -> None:
    row = "document.querySelector('article tbody tr').children"
    tops = f"[...{row}].map(cell => cell.getBoundingClientRect().top)"
    page.goto("flags/")
    assert len(set(page.evaluate(tops))) == 1  # the mutant: a wide screen
    page.set_viewport_size({"width": 420, "height": 900})
    assert len(set(page.evaluate(tops))) == 3
    width = f"Math.max(...[...{row}].map(cell => cell.getBoundingClientRect().right))"
    assert page.evaluate(width) <= 420


def test_no_cell_of_the_objectives_has_eight_lines(page: Any) -> None:
    page.goto("objectives/")
    page.wait_for_function(TYPESET)
    lines = """() => Math.max(...[...document.querySelectorAll('article td')].map(cell => {
        const style = getComputedStyle(cell);
        const height = cell.clientHeight - 2 * parseFloat(style.paddingTop);
        return height / parseFloat(style.lineHeight);
    }))"""
    assert page.evaluate(lines) < 8
    page.add_style_tag(content="article td:nth-child(3) { max-width: 3rem }")  # the mutant
    assert page.evaluate(lines) >= 8


def test_a_setting_in_a_formula_keeps_its_underscores(page: Any) -> None:
    """In MathJax's typewriter font `_` is a dash: `1 - eps_clip` looked like two subtractions."""
    page.goto("objectives/")
    page.wait_for_function(TYPESET)
    setting = page.locator("td .mtext:has-text('eps_clip_high') > span").first
    font = setting.evaluate("element => getComputedStyle(element).fontFamily")
    assert font.startswith("monospace"), font


def test_formulas_in_tables_are_typeset(page: Any) -> None:
    page.goto("objectives/")
    page.wait_for_function(TYPESET)
    cells = [
        cells[1]
        for name in ("aggregations", "objectives", "estimates", "corrections")
        for cells in TABLES[name][1]()[1:]
    ]
    formulas = sum(cell.count("$") // 2 for cell in cells)
    assert page.locator("td .MathJax").count() >= formulas > 60
    assert not page.locator(".merror, .MathJax_Error").count()
    assert "$" not in page.inner_text("article")


def test_no_page_of_the_reference_is_endless(page: Any, site: Path) -> None:  # noqa: F811
    pages = sorted(path.name for path in (site / "api").iterdir() if path.is_dir())
    heights = {}
    for name in pages:
        page.goto(f"api/{name}/")
        heights[name] = page.evaluate("document.documentElement.scrollHeight")
    assert len(pages) >= 8 and max(heights.values()) < TALLEST, heights


def test_no_line_ends_within_a_flag(page: Any) -> None:
    broken = (
        "() => [...document.querySelectorAll('.flag')].filter(e => e.getClientRects().length > "
        "1).length"
    )
    page.goto("recipes/")
    assert page.locator("pre .flag").count() > 100 and page.evaluate(broken) == 0
    page.add_style_tag(content=".md-typeset .flag { white-space: inherit }")  # the mutant
    assert page.evaluate(broken) > 0


def test_a_result_of_several_lines_is_one_row(page: Any) -> None:
    for name in ("loss", "megatron", "rollout_files"):
        page.goto(f"api/{name}/")
        results = page.locator("p:has(> .doc-section-title:text('Returns:')) + * tbody")
        assert results.count() and results.count() == results.locator("tr").count()
