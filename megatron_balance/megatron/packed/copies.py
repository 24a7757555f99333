"""Copies to the GPU that a process does not wait for."""

from __future__ import annotations

import torch

from megatron_balance import cpu


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` on this process's GPU; as it is where the job trains on the CPU.

    Only from pinned memory can it be copied while the process goes on: from other memory CUDA waits for what was queued before.
    What the loader's collate made is pinned already, what was cut from it is not. Torch keeps pinned blocks for later
    micro-batches, and reuses none that is still copied from.
    """
    if cpu.is_installed() or not torch.cuda.is_available():
        return tensor
    return tensor.pin_memory().cuda(non_blocking=True)
