"""Memory of the pipeline ranks under a split, and its limit."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_balance.costs.memory import ChainMemory


@dataclass(frozen=True)
class MemoryLimit:
    """What a split may occupy.

    Attributes:
        chain: memory of the elements.
        limit_bytes: of every pipeline rank's peak (``rank_peaks``).
    """

    chain: ChainMemory
    limit_bytes: float
