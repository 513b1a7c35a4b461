"""Hooks for every build of the site: copy MathJax, and link papers."""

import re
import shutil
from importlib import resources
from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Set the repository from CITATION.cff."""
    text = Path(config["config_file_path"]).with_name("CITATION.cff").read_text()
    config["repo_url"] = text.partition("repository-code: ")[2].split()[0]
    config["repo_name"] = "GitHub"
    return config


def on_post_build(config: Any) -> None:
    """Copy MathJax from jupyter-server-mathjax into the site, so that pages fetch nothing."""
    source = Path(str(resources.files("jupyter_server_mathjax"))) / "static"
    unused = shutil.ignore_patterns("localization")
    shutil.copytree(source, Path(config["site_dir"]) / "mathjax", ignore=unused, dirs_exist_ok=True)


def on_page_content(html: str, **_: Any) -> str:
    """Link arXiv ids in the page's text, except in links and code."""
    parts, inside = re.split(r"(<[^>]+>)", html), 0
    for index, part in enumerate(parts):
        if tag := re.match(r"<(/?)(a|code|pre|h\d)\b", part):
            inside += -1 if tag[1] else 1
        elif not inside:
            paper = r"arXiv:(\d{4}\.\d{4,5})"
            parts[index] = re.sub(paper, r'<a href="https://arxiv.org/abs/\1">\g<0></a>', part)
    return "".join(parts)
