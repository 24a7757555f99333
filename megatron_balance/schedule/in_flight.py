"""How many micro-batches each chunk of a rank holds activations of, at the worst moments of a step."""

from __future__ import annotations

import numpy as np

from megatron_balance.schedule.order import schedule_order
from megatron_balance.topology import Topology


def in_flight(topology: Topology) -> tuple[np.ndarray, ...]:
    """Micro-batches in flight in each chunk at the moments of a step that hold the most; 1F1B: ``min(PP - rank, M)``.

    A micro-batch is in flight in a chunk from the start of its forward pass there to the end of its backward pass.

    Returns:
        Of each pipeline rank the Pareto-maximal numbers, int64 of shape [k, V]: at no other moment are there at least as
        many in every chunk, and more in one.

    Raises:
        BalanceError: Megatron would refuse to run this schedule.
    """
    order = schedule_order(topology)
    of_chunk = order.chunk[..., None] == np.arange(topology.virtual_size)
    held = np.cumsum(of_chunk * np.where(order.is_backward, -1, 1)[..., None], axis=1)
    # Only a forward pass right before a backward pass ends a rise. All such moments of a rank hold as many micro-batches
    # in sum, those of the warm-up and one more, so that none is below another.
    full = ~order.is_backward[:, :-1] & order.is_backward[:, 1:]
    return tuple(np.unique(held[rank, :-1][full[rank]], axis=0) for rank in range(topology.pipeline_size))
