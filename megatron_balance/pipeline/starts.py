"""Splits that are good before any search: what Megatron's own flags give, and the classic rules."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

from megatron_balance.costs.chain import ChainCosts
from megatron_balance.pipeline.chain import end_costs, least_layers, prefix_costs
from megatron_balance.topology import Topology


def starting_splits(costs: ChainCosts, topology: Topology) -> np.ndarray:
    """Layers of each stage for several splits without empty stages, int64 of shape [count, stages].

    Raises:
        BalanceError: more stages than elements.
    """
    num_layers, stages = len(costs.layers), topology.num_stages
    least = least_layers(num_layers, stages)
    if stages == 1:
        return np.array([[num_layers]], dtype=np.int64)
    splits = [
        *_flags(num_layers, stages),
        *_rows(num_layers, topology, round(sum(costs.in_layers(costs.head)) / 2)),
        *_smallest_maximum(costs, least),
    ]
    return np.array([split for split in splits if (split >= least).all()], dtype=np.int64)


def _flags(num_layers: int, stages: int) -> Iterator[np.ndarray]:
    """Megatron's uniform split, and those in which embedding, loss or both count as a layer."""
    for embedding in (0, 1):
        for loss in (0, 1):
            if (num_layers + embedding + loss) % stages == 0:
                split = np.full(stages, (num_layers + embedding + loss) // stages)
                split[0] -= embedding
                split[-1] -= loss
                yield split


def _rows(num_layers: int, topology: Topology, head_layers: int) -> Iterator[np.ndarray]:
    """One level a chunk row, the last stage lightened by the head, what is left over from the last row's start on.

    The other variant counts the head as nothing; it always exists, which keeps the list from being empty.
    """
    stages = topology.num_stages
    for relief in (head_layers, 0):
        level = min((num_layers + relief) // stages, num_layers // (stages - 1))
        split = np.full(stages, level)
        split[-1] -= min(relief, level)
        turn = np.arange(stages).reshape(-1, topology.pipeline_size)[::-1].ravel()
        split[turn[: num_layers - split.sum()]] += 1
        yield split


def _smallest_maximum(costs: ChainCosts, least: np.ndarray) -> Iterator[np.ndarray]:
    """Splits with the smallest possible largest stage, filled from the front and filled from the back."""
    before = prefix_costs(costs).sum(axis=0)
    ends = end_costs(costs, least.size).sum(axis=0)
    caps = np.unique(before[None, :] - before[:, None] + ends[[0, least.size // 2, -1], None, None])
    cap = caps[bisect_left(caps, True, key=lambda cap: _filled(before, ends, least, cap) is not None)]
    yield _filled(before, ends, least, cap)
    yield _filled((before[-1] - before)[::-1], ends[::-1], least[::-1], cap)[::-1]


def _filled(before: np.ndarray, ends: np.ndarray, least: np.ndarray, cap: float) -> np.ndarray | None:
    """Stages filled in turn up to ``cap`` seconds, leaving the later ones what they need; None where that is too few.

    Args:
        before: seconds of the first 0, 1, ..., n layers.
        ends: seconds that embedding and head add to each stage.
        least: layers that each stage holds at least.
        cap: seconds; a billionth more is let pass, as sums in another order differ by less.
    """
    stops = [0]
    spare = before.size - 1 - least.sum()
    for extra, fewest in zip(ends, least, strict=True):
        start = stops[-1]
        room = cap * (1 + 1e-9) - extra
        fitting = np.searchsorted(before, before[start] + room, side="right") - 1 - start
        taken = min(fitting, fewest + spare)
        if taken < fewest:
            return None
        spare -= taken - fewest
        stops.append(start + taken)
    return np.diff(stops) if spare == 0 else None
