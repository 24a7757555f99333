"""The CPU runtime: Megatron trains on a machine without a GPU.

Megatron asks for CUDA in many places where it only needs memory and arithmetic. `install` redirects these requests to the
CPU and to gloo. It is a layer of its own, chosen for a whole process before Megatron is imported; it changes no result of
a computation and never touches a machine that trains on GPUs.
"""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

from megatron_balance.cpu import torch_calls
from megatron_balance.cpu.dataset_helpers import provide_dataset_helpers
from megatron_balance.cpu.megatron_calls import HOOKS
from megatron_balance.megatron.registry import registry
from megatron_balance.reporting import say

__all__ = ["HOOKS", "adapt_arguments", "install", "is_installed", "name_missing_kernels", "prepare_megatron"]

_installed = False


def install() -> None:
    """Make this process train on the CPU. Call before the first Megatron import; a second call does nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    torch_calls.redirect()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron insists on it for TP; no meaning here
    _name_a_gpu()
    warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine|transformer-engine)", category=UserWarning)


def _name_a_gpu() -> None:
    """Megatron 0.15 compiles a CUDA helper on import; it takes a failed compilation, but not an unknown GPU."""
    if not os.environ.get("TORCH_CUDA_ARCH_LIST"):
        os.environ["TORCH_CUDA_ARCH_LIST"] = "8.0"


def is_installed() -> bool:
    """Whether this process trains on the CPU runtime."""
    return _installed


def prepare_megatron() -> None:
    """Adapt the loaded Megatron itself: the few places that torch's redirection cannot reach.

    Raises:
        BalanceError: this Megatron lacks one of them, or the dataset helpers are not compiled and cannot be.
    """
    from megatron.core.datasets import utils as dataset_utils
    from megatron.core.tensor_parallel import random as tensor_parallel_random
    from megatron.training import initialize

    for hook in HOOKS:
        registry.apply(hook)
    _name_a_gpu()  # up to 0.16 Megatron makes it empty, and writing a checkpoint starts a process that imports it again
    name_missing_kernels()
    if hasattr(initialize, "_warmup_jit_function"):
        initialize._warmup_jit_function = lambda *args, **kwargs: None
    if hasattr(initialize, "fused_kernels"):  # up to 0.16: CUDA kernels, compiled at start
        initialize.fused_kernels.load = lambda args: None
    # Megatron warns when code that seeds the GPU moves the CPU's generator; here they are one.
    logging.getLogger(tensor_parallel_random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
    provide_dataset_helpers(dataset_utils)


def name_missing_kernels() -> None:
    """Megatron 0.16 asks whether Transformer Engine's product for routers is None, but without the package leaves it undefined."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def adapt_arguments(args: Any) -> None:
    """Replace settings that only GPU kernels serve by those that compute the same on the CPU, and say so once.

    Args:
        args: Megatron's parsed arguments, before validation.
    """
    wanted = {
        "transformer_impl": "local",
        "gradient_accumulation_fusion": False,
        "no_persist_layer_norm": True,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
    }
    changed = {name: value for name, value in wanted.items() if getattr(args, name, value) != value}
    for name, value in changed.items():
        setattr(args, name, value)
    if changed:
        settings = ", ".join(f"{name}={value}" for name, value in changed.items())
        say(f"megatron-balance: the CPU has no kernels for some settings; using {settings}")
