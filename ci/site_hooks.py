"""What mkdocs.yml adds to every build of the site: the files of MathJax, links to the papers that
are named, and the pages as Markdown, with llms.txt as their index.
"""

import re
import shutil
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

FLAGS = "flags.md"
"""The page that a search for a flag shows first. On a phone its tables have one cell per line."""
DIRECTIVE = re.compile(r"(?m)^::: (\S+)\n(?: {4}.*\n)*")
markdown_of: dict[str, str] = {}
"""Of each page's source: its Markdown, as a reader sees it."""
order: list[str] = []
"""The sources of the pages in the navigation."""


def on_config(config: Any) -> Any:
    """Take the repository from CITATION.cff, the only file that names it."""
    text = Path(config["config_file_path"]).with_name("CITATION.cff").read_text()
    config["repo_url"] = text.partition("repository-code: ")[2].split()[0]
    config["repo_name"] = "GitHub"
    return config


def on_nav(nav: Any, **_: Any) -> None:
    order[:] = [page.file.src_uri for page in nav.pages]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    """Keep the page without comments, which hold what only tests read."""
    if page.file.src_uri == FLAGS:
        page.meta["search"] = {"boost": 4}
    text = re.sub(r"(?s)<!--.*?-->\n*", "", markdown)
    markdown_of[page.file.src_uri] = DIRECTIVE.sub(lambda found: reference(found[1]), text)


@cache
def package() -> Any:
    import griffe

    return griffe.load("megatron_pg", allow_inspection=False, resolve_aliases=True)


def reference(path: str) -> str:
    """Return signature and docstring of a public name, then those of its methods."""
    named = package()[path.partition(".")[2]]
    named = named.final_target if named.is_alias else named
    methods = [each for each in named.members.values() if each.is_function and each.docstring]
    parts = []
    for each in [named, *methods]:
        signature = each.signature() if each.is_function or each.is_class else each.value
        docstring = each.docstring.value if each.docstring else ""
        title = path if each is named else f"{path}.{each.name}"
        parts.append(f"## `{title}`\n\n```python\n{signature}\n```\n\n{docstring}\n")
    return "\n".join(parts)


def on_post_build(config: Any) -> None:
    """Write MathJax, of the package jupyter-server-mathjax, and the Markdown next to the pages."""
    site = Path(config["site_dir"])
    source = Path(str(resources.files("jupyter_server_mathjax"))) / "static"
    unused = shutil.ignore_patterns("localization")
    shutil.copytree(source, site / "mathjax", ignore=unused, dirs_exist_ok=True)
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}.", ""]
    for name in [*order, *sorted(markdown_of.keys() - set(order))]:
        text = markdown_of[name]
        (site / name).write_text(text)
        title, opening = [*text.strip().split("\n\n"), ""][:2]
        opening = " ".join(opening.split())
        sentence = re.match(r"([A-Z].*?)[.:](?=\s|$)", opening)
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", sentence[1]) if sentence else ""
        lines.append(f"- [{title.removeprefix('# ')}]({name})" + (f": {plain}." if plain else ""))
    (site / "llms.txt").write_text("\n".join(lines) + "\n")


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Link the papers of arXiv that are named outside of links and code."""
    parts, inside = re.split(r"(<[^>]+>)", html), 0
    for index, part in enumerate(parts):
        if tag := re.match(r"<(/?)(a|code|pre|h\d)\b", part):
            inside += -1 if tag[1] else 1
        elif part == "<table>" and page.file.src_uri == FLAGS:
            parts[index] = '<div class="stacked"><table>'
        elif part == "</table>" and page.file.src_uri == FLAGS:
            parts[index] = "</table></div>"
        elif not inside:
            paper = r"arXiv:(\d{4}\.\d{4,5})"
            parts[index] = re.sub(paper, r'<a href="https://arxiv.org/abs/\1">\g<0></a>', part)
    return "".join(parts)
