"""Memory of the pipeline ranks under a split, and its limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_balance.costs.devices import Device
from megatron_balance.costs.memory import ChainMemory, ElementMemory
from megatron_balance.errors import BalanceError
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
    """Bytes that each pipeline rank holds at its worst moment, float of shape [PP].

    That is the states of its elements, the activations in flight where they are largest, and the largest working bytes
    of one element.

    Args:
        chain: memory of the elements.
        topology: sizes of the schedule.
        layers: number of layers of each stage.
        mtp_stage: stage of multi-token prediction; None is the last.

    Raises:
        BalanceError: the split does not fit the chain, or Megatron would refuse the schedule.
    """
    stages = [ElementMemory.together(stage) for stage in _elements(chain, topology, layers, mtp_stage)]
    # Stages in their order are the chunks' rows of ranks.
    held = np.array([(stage.state_bytes, stage.activation_bytes, stage.working_bytes) for stage in stages])
    states, activations, working = held.T.reshape(3, topology.virtual_size, topology.pipeline_size)
    flights = [moments @ own for moments, own in zip(in_flight(topology), activations.T, strict=True)]
    return states.sum(axis=0) + np.array([flight.max() for flight in flights]) + working.max(axis=0)


def limit_like(
    chain: ChainMemory, topology: Topology, layers: Sequence[int], mtp_stage: int | None = None
) -> MemoryLimit:
    """The limit that a layout known to fit sets: its worst rank's peak.

    Raises:
        BalanceError: the layout does not fit the chain, or Megatron would refuse the schedule.
    """
    return MemoryLimit(chain, float(rank_peaks(chain, topology, layers, mtp_stage).max()))


def device_limit_bytes(device: Device) -> float | None:
    """What a rank may occupy of ``device``: its memory less the reserve; None where no memory is known (CPU)."""
    return None if device.memory_bytes is None else device.memory_bytes - device.reserve_bytes


def _elements(
    chain: ChainMemory, topology: Topology, layers: Sequence[int], mtp_stage: int | None
) -> list[list[ElementMemory]]:
    """The elements of each stage."""
    stages = topology.num_stages
    mtp_stage = stages - 1 if mtp_stage is None else mtp_stage
    if len(layers) != stages or sum(layers) != len(chain.layers) or min(layers) < 0:
        raise BalanceError(
            f"{sum(layers)} layers on {len(layers)} stages do not fit {len(chain.layers)} layers on {stages} stages: give "
            "each stage its number of layers"
        )
    if not 0 <= mtp_stage < stages:
        raise BalanceError(f"stage {mtp_stage} of multi-token prediction is none of stages 0 to {stages - 1}")
    stops = np.cumsum(layers)
    elements = [list(chain.layers[stop - count : stop]) for stop, count in zip(stops, layers, strict=True)]
    elements[0].append(chain.embedding)
    elements[mtp_stage].append(chain.mtp)
    elements[-1].append(chain.head)
    return elements
