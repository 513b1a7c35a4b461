"""What mkdocs.yml adds to every build of the site: the files of MathJax, and links to the papers
that are named.
"""

import re
import shutil
from importlib import resources
from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Takes the repository from CITATION.cff, where alone it stands."""
    text = Path(config["config_file_path"]).with_name("CITATION.cff").read_text()
    config["repo_url"] = text.partition("repository-code: ")[2].split()[0]
    config["repo_name"] = "GitHub"
    return config


def on_post_build(config: Any) -> None:
    """Puts MathJax, of the package jupyter-server-mathjax, beside the pages: nothing is fetched
    from elsewhere.
    """
    source = Path(str(resources.files("jupyter_server_mathjax"))) / "static"
    unused = shutil.ignore_patterns("localization")
    shutil.copytree(source, Path(config["site_dir"]) / "mathjax", ignore=unused, dirs_exist_ok=True)


def on_page_content(html: str, **_: Any) -> str:
    """The page with a link where its text, outside of links and code, names a paper of arXiv."""
    parts, inside = re.split(r"(<[^>]+>)", html), 0
    for index, part in enumerate(parts):
        if tag := re.match(r"<(/?)(a|code|pre|h\d)\b", part):
            inside += -1 if tag[1] else 1
        elif not inside:
            paper = r"arXiv:(\d{4}\.\d{4,5})"
            parts[index] = re.sub(paper, r'<a href="https://arxiv.org/abs/\1">\g<0></a>', part)
    return "".join(parts)
