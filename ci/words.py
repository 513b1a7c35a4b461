"""Print the words of pages and code, and how often they use habits that make prose hard to read.

    python ci/words.py             # user pages (README.md, docs/*.md), docs/records, and code
    python ci/words.py --pages     # also every user page

Rates are per 1,000 words of prose, without fenced and indented code, hidden blocks, generated
tables, formulas and code spans. `all` counts like `wc -w`, and `read` omits generated tables and
blocks that only tests see. Code is the docstrings, comments and messages of megatron_pg.
"""

import argparse
import ast
import re
import tokenize
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
    "is no": r"\b(?:is|are|was) no\b(?! (?:longer|more|less))",
    "outer count, kept set": r"\b(?:outer counts?|kept sets?)\b",
    "British spelling": r"(?i)\b\w*(?:(?:mal|tim|ron|ral|ial)is(?:e|ing|ation)|avour|olour|aviour)",
}


def without(patterns: list[str], text: str) -> str:
    for pattern in patterns:
        text = re.sub(pattern, " ", text)
    return text


def prose(text: str) -> str:
    return re.sub(r"[|*#]+|-{3,}", " ", without(NOT_PROSE, text))


def code_text(path: Path) -> str:
    """Join a module's comments and its strings with a space: docstrings, messages and help."""
    found, inner = [], set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            inner.update(map(id, node.values))
            literals = [x.value if isinstance(x, ast.Constant) else "X" for x in node.values]
            found.append("".join(literals))
        elif isinstance(node, ast.Constant) and id(node) not in inner:
            found += [node.value] if isinstance(node.value, str) else []
    with path.open("rb") as file:
        tokens = tokenize.tokenize(file.readline)
        found += [token.string for token in tokens if token.type == tokenize.COMMENT]
    lines = "\n".join(text for text in found if " " in text.strip()).splitlines()
    return "\n".join(map(str.strip, lines))


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
    report("code", list(map(code_text, sorted(ROOT.glob("megatron_pg/**/*.py")))))


if __name__ == "__main__":
    main()
