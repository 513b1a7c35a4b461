"""Metadata and dependencies. `import megatron_pg` needs torch and NumPy; everything else is an extra."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

MEGATRON = ["megatron-core>=0.15,<0.21"]
EXAMPLES = [
    "filelock>=3.12",
    "matplotlib>=3.8",
    "psutil>=5.9",  # for megatron.core.dist_checkpointing
    "pyarrow>=15",
    "reasoning-gym>=0.1.25",
    "rich>=13",
    "scipy>=1.11",
    "tensorboard>=2.15",
]
# What examples/trainer/ needs beside EXAMPLES to begin with Hugging Face's weights.
MODELS = ["accelerate>=1.0", "gguf>=0.17", "safetensors>=0.5", "transformers>=4.51"]
DOCS = ["matplotlib>=3.8", "mkdocs>=1.6,<2", "mkdocs-material>=9.5"]
TEST = [
    "build>=1.2",
    "hypothesis>=6.100",
    "pytest>=8",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    # Of one lane (tests/lanes.py).
    *[f'{package}; python_version >= "3.12"' for package in MODELS],
    # Pinned: another version formats and judges otherwise.
    "mypy==2.4.1",
    "ruff==0.17.5",
]

setup(
    name="megatron_pg",
    version="0.1.0",
    description="The policy-gradient loss for RL on Megatron-Core, normalised right at any parallelism",
    long_description=(HERE / "README.md").read_text() if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["megatron_pg", "megatron_pg.*"]),
    package_data={"megatron_pg": ["py.typed", "migrate/*.toml"]},
    python_requires=">=3.11",
    install_requires=["torch>=2.6", "numpy>=1.26"],
    entry_points={
        "console_scripts": ["megatron-pg = megatron_pg.cli:main"],
        # verl imports every entry point of this group when it is imported itself.
        "verl.plugins": ["megatron_pg = megatron_pg.integrations.verl_plugin"],
    },
    extras_require={
        "megatron": MEGATRON,
        "te": ["transformer-engine[pytorch]>=2.11"],
        "docs": DOCS,
        "examples": MEGATRON + EXAMPLES,
        "models": MEGATRON + EXAMPLES + MODELS,
        "test": MEGATRON + EXAMPLES + DOCS + TEST,
    },
)
