"""Metadata and dependencies. `import megatron_pg` requires torch and NumPy. The rest are extras.

Author, repository and version come from CITATION.cff, also for mkdocs.yml (ci/site_hooks.py).
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

CITATION = Path(__file__).with_name("CITATION.cff").read_text()


def cited(field: str) -> str:
    """Return the value of a field in CITATION.cff, without a YAML library."""
    (value,) = re.findall(rf"^\s*(?:- )?{field}: (.+)$", CITATION, re.MULTILINE)
    return str(value)


REPOSITORY = cited("repository-code")

MEGATRON = ["megatron-core>=0.16,<0.21"]
# For rollout files, the plots, pages and tables of `explain`, and YAML in `migrate`.
TOOLS = ["jinja2>=3.1", "matplotlib>=3.8", "pyarrow>=15", "pyyaml>=6", "rich>=13"]
DOCS = [
    "jupyter-server-mathjax>=0.2.6",  # MathJax files: ci/site_hooks.py
    "matplotlib>=3.8",
    "mike>=2.1",
    "mkdocs>=1.6,<2",
    "mkdocs-material>=9.5,<10",
    "mkdocstrings-python>=2.0",
]
# In addition to examples/requirements.txt.
TEST = [
    "build>=1.2",
    "hypothesis>=6.100",
    "playwright>=1.50",  # tests/fast/test_rollout_page_in_browser.py, with Debian's chromium
    "pytest>=8",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.7",
    "scipy>=1.11",  # benchmarks/studies
    "spmd-types>=0.3.1,<0.4",  # tests/fast/typed_ranks.py, depends only on torch
    # Pinned, because other versions format and check differently.
    "mypy==2.4.1",
    "ruff==0.17.5",
]


def description() -> str:
    """Return README.md with links that also work on a package index."""
    text = Path(__file__).with_name("README.md").read_text()
    raw = REPOSITORY.replace("github.com", "raw.githubusercontent.com")
    text = re.sub(r"(!\[[^]]*\]\()(?!\w+:)", rf"\g<1>{raw}/main/", text)
    return re.sub(r"(\]\()(?!\w+:|#)", rf"\g<1>{REPOSITORY}/blob/main/", text)


setup(
    name="megatron_pg",
    version=cited("version"),
    description="The policy-gradient loss for RL on Megatron-Core, normalized right at any "
    "parallelism",
    long_description=description(),
    long_description_content_type="text/markdown",
    author=cited("name"),
    license=cited("license"),
    url=REPOSITORY,
    project_urls={
        "Documentation": f"{REPOSITORY}/blob/main/docs/index.md",
        "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    },
    keywords="reinforcement-learning policy-gradient GRPO DAPO PPO RLHF LLM Megatron megatron-core "
    "context-parallel",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["megatron_pg", "megatron_pg.*"]),
    package_data={"megatron_pg": ["py.typed", "migrate/*.toml", "explain/page/*"]},
    python_requires=">=3.12",
    install_requires=["torch>=2.6", "numpy>=1.26"],
    entry_points={
        "console_scripts": ["megatron-pg = megatron_pg.cli:main"],
        # `import verl` imports every entry point in this group.
        "verl.plugins": ["megatron_pg = megatron_pg.integrations.verl_plugin"],
    },
    extras_require={
        "megatron": MEGATRON,
        "te": ["transformer-engine[pytorch]>=2.11"],
        "quack": ["quack-kernels[cu13]>=0.6.5,<0.7"],
        "tools": TOOLS,
        "docs": DOCS,
        "test": TEST,
    },
)
