"""How many micro-batches each chunk of a rank holds activations of, at the worst moments of a step."""

from __future__ import annotations

import numpy as np

from megatron_balance.schedule.order import schedule_order
from megatron_balance.topology import Topology


def in_flight(topology: Topology) -> tuple[np.ndarray, ...]:
    """The Pareto-maximal numbers of micro-batches in flight in each chunk at one time, one int array [k, V] a rank."""
    order = schedule_order(topology)
    chunks = np.arange(topology.virtual_size)
    change = np.where(order.is_backward, -1, 1)[..., None] * (order.chunk[..., None] == chunks)
    held = np.cumsum(change, axis=1)
    return tuple(_maximal(np.unique(moments, axis=0)) for moments in held)


def _maximal(moments: np.ndarray) -> np.ndarray:
    """The rows [k, V] that no other row is at least as large as in every place."""
    above = (moments[None] >= moments[:, None]).all(axis=2) & (moments[None] > moments[:, None]).any(axis=2)
    return moments[~above.any(axis=1)]
