"""What measured costs depend on beside the model: the device and the software."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "flash-attn", "apex")


def device_name() -> str:
    """The GPU of this process, or its CPU and the threads that it uses."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(local_device())
    threads = torch.get_num_threads()
    return f"CPU, {_cpu_model()}, {threads} thread{'s' * (threads != 1)}"


def local_device() -> int:
    """Number of the GPU that this rank will use, also before Megatron has chosen it."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    return local_rank if local_rank < torch.cuda.device_count() else 0  # else each rank sees its own alone


def software() -> dict[str, str]:
    """Versions of what computes, as text."""
    versions = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    return versions | {package: version(package) for package in _PACKAGES}


def version(package: str) -> str:
    if package == "torch":
        return torch.__version__
    if package == "megatron-core":  # a checkout's, not the installed one's
        from megatron.core.package_info import __version__

        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
