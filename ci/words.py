"""Print the words of the user pages, and how often the habits that the style guide drops occur.

    python ci/words.py             # README.md and docs/*.md together, and docs/records
    python ci/words.py --pages     # every page of the first group too

Rates are per 1,000 words of prose. Prose leaves out fenced and indented code, hidden blocks,
generated tables, formulas and code spans. `all` counts as `wc -w` does, and `read` leaves out the
generated tables and the blocks that only the tests see.
"""

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_READ = [r"(?s)<!-- (?P<table>[\w -]+) begin -->.*?<!-- (?P=table) end -->", r"(?s)<!--.*?-->"]
NOT_PROSE = [
    *NOT_READ,
    r"(?ms)^```.*?^```$",
    r"(?s)\$\$.*?\$\$",
    r"(?m)^(?: {4}|\t)(?! *[-*\d]).*$",
    r"\$[^$\n]+\$",
    r"`[^`\n]+`",
    r"\]\([^)\s]*\)",
    r"https?://\S+",
]
HABITS = {
    "alone": r"\balone\b",
    "beside": r"\bbesides?\b",
    "in place of": r"\bin (?:the )?place of\b",
    "that of, those of": r"\b(?:that|those) of\b",
    "of its own, of their own": r"\bof (?:its|their) own\b",
    "where for if": r"(?:(?<=[,;:] )|(?<=\. )|(?m:^(?:[-*] )?))[Ww]here\b(?! to\b)",
    "a for per": (
        r"\b(?:once|twice|times|each|one|two|three|bytes|reduces?|numbers|line|words|tokens|weight)"
        r" an? (?:micro-batch|step|token|sample|sequence|row|rank|logit|weight|second|batch)\b"
    ),
    "(said": r"\(said\b",
    "semicolons": r";",
    "whose": r"\bwhose\b",
    "likewise": r"\blikewise\b",
    "whatever": r"\bwhatever\b",
    "but for except": r"(?:, but (?!(?:not|it|they|the|you|does|do|is|are)\b)|\ball but\b)",
    "no such": r"\bno such\b",
    "cannot stand": r"\bcannot stand\b",
}


def without(patterns: list[str], text: str) -> str:
    for pattern in patterns:
        text = re.sub(pattern, " ", text)
    return text


def prose(text: str) -> str:
    return re.sub(r"[|*#]+|-{3,}", " ", without(NOT_PROSE, text))


def counts(texts: list[str]) -> tuple[int, int, int]:
    """Count the words of all text, of what a reader sees, and of the prose."""
    versions = (texts, [without(NOT_READ, text) for text in texts], map(prose, texts))
    words = [sum(len(text.split()) for text in version) for version in versions]
    return words[0], words[1], words[2]


def report(name: str, texts: list[str]) -> None:
    total, read, words = counts(texts)
    print(f"{name}: all {total}, read {read}, prose {words}")
    for habit, pattern in HABITS.items():
        found = sum(len(re.findall(pattern, prose(text))) for text in texts)
        print(f"  {habit:26} {found:4}  {1000 * found / max(words, 1):6.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", action="store_true", help="Print every user page's words too.")
    arguments = parser.parse_args()
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
    if arguments.pages:
        print("   all   read  prose  page")
        for page in pages:
            total, read, words = counts([page.read_text()])
            print(f"{total:6} {read:6} {words:6}  {page.relative_to(ROOT)}")
    report("user pages", [page.read_text() for page in pages])
    report("records", [page.read_text() for page in sorted(ROOT.glob("docs/records/*.md"))])


if __name__ == "__main__":
    main()
