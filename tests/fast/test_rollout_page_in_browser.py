"""The page of rollouts in Chromium without a window: what a person sees, clicks and reads there,
opened from a disk.

It needs Debian's `chromium`, which .ci/run installs, and is skipped without.
"""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fast.test_rollout_page import Row, clipped_tokens, log_ratios, page_of, write_steps

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page") / "rollouts"


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[Row]:
    """Three steps of five prompts with four responses; a text of a token would end a script."""
    folder.mkdir()
    steps = write_steps(folder, 3, 5)
    texts = ", ".join(f'"{token}": "w{token} "' for token in range(99) if token != 3)
    tokens = folder.with_suffix(".json")
    tokens.write_text(f'{{{texts}, "3": "</script>"}}')
    page_of(folder, tokenizer=tokens)
    return [row | {"step": number} for number, step in enumerate(steps) for row in step]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def opened(browser: Any, rows: list[Row], folder: Path) -> Iterator[Any]:
    """The page as it opens, 1440 pixels wide; no error, and nothing from elsewhere, by the end of a
    test.
    """
    page, errors, urls = browser.new_page(viewport={"width": 1440, "height": 900}), [], []
    page.on("pageerror", lambda error: errors.append(error))
    page.on("request", lambda request: urls.append(request.url))
    page.goto(folder.with_suffix(".html").as_uri())
    yield page
    assert not errors and urls == [folder.with_suffix(".html").as_uri()]
    page.close()


def cells(page: Any, column: int) -> list[str]:
    return page.locator(f"tr.response td:nth-child({column})").all_inner_texts()


def colored(page: Any) -> list[str]:
    """The color of every token of the rows: empty where it has none."""
    return page.eval_on_selector_all(
        "tr.response .t", "all => all.map(each => each.style.background)"
    )


def test_every_response_is_a_row_and_numbers_sort(opened: Any, rows: list[Row]) -> None:
    assert "60 responses in 15 prompt groups, 3 steps" in opened.inner_text("#counts")
    opened.click("#next")
    assert len(cells(opened, 1)) == 10 and "51 to 60 of 60" in opened.inner_text("#pages")
    names = opened.locator("th").all_inner_texts()
    sorts = {
        "reward ↓": [r["reward"] for r in rows],
        "tokens ↓": [len(r["response_ids"]) for r in rows],
    }
    for name, values in sorts.items():
        column = [each.split(" ")[0] for each in names].index(name.split(" ")[0])
        for expected in (sorted(values, reverse=True), sorted(values)):
            opened.click(f"th:nth-child({column + 1}) button")
            assert [float(text) for text in cells(opened, column + 1)] == expected[:50]
        assert opened.get_attribute(f"th:nth-child({column + 1})", "aria-sort") == "ascending"
    largest = [
        max((abs(x) for x in log_ratios(row, "new_old") if x is not None), default=0)
        for row in rows
    ]
    opened.click("th:nth-child(7) button")
    shown = [abs(float(text.replace("−", "-"))) for text in cells(opened, 7) if text != "–"]
    assert shown == pytest.approx(sorted(largest, reverse=True)[: len(shown)], abs=1e-3)


def test_tokens_have_the_colors_of_their_numbers(opened: Any, rows: list[Row]) -> None:
    opened.select_option("#step", "0")
    first = [row for row in rows if row["step"] == 0]
    mask = [bool(kept) for row in first for kept in row["loss_mask"]]
    advantages = [a for row in first for a in row["advantages"]]
    ratios = [x for row in first for x in log_ratios(row, "old_rollout")]
    for choice, values in {"advantage": advantages, "old_rollout": ratios}.items():
        opened.check(f"#color input[value={choice}]", force=True)
        for color, value, kept in zip(colored(opened), values, mask, strict=True):
            expected = "" if not kept else "--high" if value > 0 else "--low"
            assert expected in color and (color != "") == kept
    opened.check("#color input[value=clip]", force=True)
    assert sum("0.5)" in color for color in colored(opened)) == sum(map(clipped_tokens, first)) > 0
    opened.check("#color input[value=mask]", force=True)
    assert [color != "" for color in colored(opened)] == mask
    assert opened.locator("tr.response .t.off").count() == mask.count(False) > 0


def test_a_bar_of_zero_lies_at_the_bottom(browser: Any, tmp_path: Path) -> None:
    """Where all bars are 0, too."""
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for step in write_steps(folder, 2, 1):
        for row in step:
            row["reward"] = 0.0
        (folder / f"step_{step[0]['group_index']:06d}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in step)
        )
    page_of(folder)
    page = browser.new_page()
    page.goto(folder.with_suffix(".html").as_uri())
    places = page.eval_on_selector_all(
        "#steps figure:first-child rect.bar", "bars => bars.map(each => each.getAttribute('y'))"
    )
    page.close()
    assert places == ["100", "100"]


def test_a_step_a_word_and_a_prompt_are_found(opened: Any, rows: list[Row]) -> None:
    opened.click("#steps figure:first-child rect.hit >> nth=1")
    assert set(cells(opened, 1)) == {"step 1"} and len(cells(opened, 1)) == 20
    opened.fill("#find", "w17 ")
    with_word = [
        row for row in rows if row["step"] == 1 and 17 in row["prompt_ids"] + row["response_ids"]
    ]
    assert len(cells(opened, 1)) == len(with_word) > 0
    opened.fill("#find", "")
    assert opened.url.endswith("#step=1&color=advantage&sort=step")
    opened.click("tr.response >> nth=5")
    detail = opened.locator("tr.detail")
    row = [row for row in rows if row["step"] == 1][5]
    assert "</script>" in detail.locator("p.whole >> nth=0").inner_text()
    assert detail.locator("div.one").count() == 4
    words = "".join(f"w{token} " if token != 3 else "</script>" for token in row["response_ids"])
    assert detail.locator("div.one.this .whole").inner_text().split() == words.split()
    detail.locator("div.one.this .t >> nth=0").hover()
    tip = opened.inner_text("#tip")
    assert f"token {row['response_ids'][0]}" in tip
    if (log_ratio := log_ratios(row, "new_old")[0]) is not None:
        shown = float(tip.split("new / old ")[1].split(" ")[0].replace("−", "-"))
        assert math.isclose(shown, log_ratio, abs_tol=1e-4)


def test_a_link_opens_what_was_seen_and_a_phone_does_not_scroll_sideways(browser, rows, folder):
    page = browser.new_page(viewport={"width": 420, "height": 900})
    page.goto(
        f"{folder.with_suffix('.html').as_uri()}#step=2&color=clip&sort=tokens&down=1&open=44"
    )
    assert page.locator("tr.detail").count() == 1
    lengths = [
        int(text.split()[-1]) for text in page.locator("td[data-name=tokens]").all_inner_texts()
    ]
    expected = sorted((len(row["response_ids"]) for row in rows if row["step"] == 2), reverse=True)
    assert lengths == expected
    assert page.evaluate("document.documentElement.scrollWidth") == 420
    page.close()
