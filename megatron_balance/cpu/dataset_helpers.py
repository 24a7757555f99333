"""Megatron's compiled dataset helpers: found, or about to be compiled."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from megatron_balance.errors import BalanceError


def provide_dataset_helpers(dataset_utils: Any) -> None:
    """Give Megatron its compiled `helpers_cpp`, or leave it to Megatron's own compile step where that can work.

    Wheels ship the extension; a source checkout compiles it with `make` in its first training run. Its Makefile asks
    whichever `python3` comes first on PATH, so the running interpreter must.
    """
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp"):
        dataset_utils.compile_helpers = lambda: None
        return
    if installed := _installed_helpers():
        spec = importlib.util.spec_from_file_location("megatron.core.datasets.helpers_cpp", installed)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[spec.name] = module
        dataset_utils.compile_helpers = lambda: None
        return
    folder = Path(dataset_utils.__file__).parent
    search = os.pathsep.join([str(Path(sys.executable).parent), sysconfig.get_config_var("BINDIR"), os.environ["PATH"]])
    needed = ("make", os.environ.get("CXX", "g++"), "python3-config")
    missing = [name for name in needed if not shutil.which(name, path=search)]
    if importlib.util.find_spec("pybind11") is None:
        missing.append("pybind11")
    if missing:
        # A wheel carries the helpers, and a checkout of the same Python can use them.
        package = "pybind11" if missing == ["pybind11"] else "megatron-core"
        raise BalanceError(
            f"{folder} has no compiled helpers_cpp, and to compile it {', '.join(missing)} is missing."
            f" Run: {sys.executable} -m pip install {package}"
        )
    os.environ["PATH"] = search


def _installed_helpers() -> Path | None:
    """The extension of an installed megatron-core wheel that a checkout on `sys.path` shadows."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for folder in sys.path:
        candidate = Path(folder) / "megatron" / "core" / "datasets" / f"helpers_cpp{suffix}"
        if candidate.is_file():
            return candidate
    return None
