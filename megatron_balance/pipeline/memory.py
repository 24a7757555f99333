"""Memory of the pipeline ranks under a split, and its limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_balance.costs.memory import ChainMemory
from megatron_balance.schedule.in_flight import in_flight
from megatron_balance.topology import Topology


@dataclass(frozen=True)
class MemoryLimit:
    """What a split may occupy.

    Attributes:
        chain: memory of the elements.
        limit_bytes: of every pipeline rank's peak (``rank_peaks``).
    """

    chain: ChainMemory
    limit_bytes: float


def rank_peaks(
    chain: ChainMemory, topology: Topology, layers: Sequence[int], mtp_stage: int | None = None
) -> np.ndarray:
    """Bytes of each pipeline rank's peak, [PP]: states, the worst activations in flight, the largest working memory.

    Args:
        chain: memory of the elements.
        topology: of the pipeline and the step.
        layers: of each stage.
        mtp_stage: stage of multi-token prediction; None is the last.
    """
    stops = np.cumsum(layers)
    stages = [list(chain.layers[stop - count : stop]) for stop, count in zip(stops, layers, strict=True)]
    stages[0].append(chain.embedding)
    stages[-1 if mtp_stage is None else mtp_stage].append(chain.mtp)
    stages[-1].append(chain.head)
    peaks = []
    for rank, flights in enumerate(in_flight(topology)):
        chunks = stages[rank :: topology.pipeline_size]
        kept = flights @ [sum(element.activation_bytes for element in chunk) for chunk in chunks]
        elements = [element for chunk in chunks for element in chunk]
        working = max((element.working_bytes for element in elements), default=0.0)
        peaks.append(sum(element.state_bytes for element in elements) + kept.max() + working)
    return np.array(peaks)
