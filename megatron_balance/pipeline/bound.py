"""Lower bounds on the step that any split can reach, and the splits that a bound leaves open.

Without interleaving a stage's cost, all work before it and all work behind it follow from its first and its last
layer. So does a floor under the step (``stage_floors``), and both the smallest floor of a whole split and the splits
under a given cap come from dynamic programming over (stage, first layer).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_balance.costs.chain import ChainCosts
from megatron_balance.kernels import enumerate_splits
from megatron_balance.pipeline.chain import end_costs, least_layers, prefix_costs
from megatron_balance.topology import Topology


@dataclass(frozen=True)
class OpenSplits:
    """The splits into ``stages`` stages of which every stage's floor is at most ``cap_s``.

    Attributes:
        allowed: bool, [stages, n + 1, n + 1]; whether stage s may hold layers i to j - 1.
        completions: float, [stages + 1, n + 1]; in how many ways stages s, s + 1, ... can hold layers i to n - 1.
    """

    allowed: np.ndarray
    completions: np.ndarray

    @classmethod
    def under(cls, floors: np.ndarray, cap_s: float) -> OpenSplits:
        allowed = floors <= cap_s
        completions = np.zeros((floors.shape[0] + 1, floors.shape[1]))
        completions[-1, -1] = 1.0
        for stage in reversed(range(floors.shape[0])):
            completions[stage] = allowed[stage] @ completions[stage + 1]
        return cls(allowed, completions)

    @property
    def count(self) -> float:
        return float(self.completions[0, 0])

    def enumerate(self) -> np.ndarray:
        """All of them: layers of each stage, int64 of shape [count, stages], in lexicographic order."""
        return enumerate_splits(self.allowed, self.completions, int(self.count))


def stage_floors(costs: ChainCosts, topology: Topology, p2p_s: float) -> np.ndarray:
    """Seconds that a step takes at least when stage s holds layers i to j - 1, shape [stages, n + 1, n + 1].

    Infinite where a stage may not hold these layers, and zero where it may in an interleaved schedule, for which
    ``interleaved_bound_s`` stands.
    """
    n, stages = len(costs.layers), topology.num_stages
    first, last = np.ogrid[: n + 1, : n + 1]
    floors = np.zeros((stages, n + 1, n + 1))
    for stage, least in enumerate(least_layers(n, stages)):
        if topology.virtual_size == 1:
            floors[stage] = _floors_of_stage(costs, topology, p2p_s, stage)
        floors[stage, last - first < least] = np.inf
    floors[0, 1:] = np.inf
    floors[-1, :, :-1] = np.inf
    return floors


def _floors_of_stage(costs: ChainCosts, topology: Topology, p2p_s: float, stage: int) -> np.ndarray:
    """Seconds of the longest of a family of paths through one stage of the 1F1B schedule, shape [n + 1, n + 1].

    A path: the first micro-batch comes down to the stage, the last one goes back up from it, and in between the stage
    runs all its passes; or some of its micro-batches make a round trip through the stages behind, during which
    ``later`` other forward and backward passes (fewer at the step's ends) are skipped.
    """
    microbatches, stages = topology.num_microbatches, topology.num_stages
    later = min(stages - 1 - stage, microbatches - 1)
    before = prefix_costs(costs)
    forward, backward = before[:, None, :] - before[:, :, None] + end_costs(costs, stages)[:, stage, None, None]
    both = forward + backward
    above = before.sum(axis=0)[:, None] + (costs.embedding.total_s if stage > 0 else 0.0)
    behind = costs.total.total_s - above - both
    above, behind = above + 2 * stage * p2p_s, behind + 2 * (stages - 1 - stage) * p2p_s
    path = above + microbatches * both
    first_trip, last_trip = np.maximum(behind - later * forward, 0.0), np.maximum(behind - later * backward, 0.0)
    if microbatches == later + 1:
        return path + np.maximum(first_trip, last_trip)
    trips_between = (microbatches - 1) // (later + 1) - 1
    return path + first_trip + last_trip + trips_between * np.maximum(behind - later * both, 0.0)


def smallest_floor(floors: np.ndarray) -> tuple[float, np.ndarray]:
    """The smallest that the largest floor of a split's stages can be, and the layers of each stage that reach it.

    Args:
        floors: of ``stage_floors``, [stages, n + 1, n + 1].
    """
    stages, places = floors.shape[:2]
    rest = np.full(places, np.inf)
    rest[-1] = -np.inf
    choices = np.empty((stages, places), dtype=np.int64)
    for stage in reversed(range(stages)):
        floor = np.maximum(floors[stage], rest)
        choices[stage] = floor.argmin(axis=1)
        rest = floor.min(axis=1)
    layers, first = np.empty(stages, dtype=np.int64), 0
    for stage in range(stages):
        layers[stage] = choices[stage, first] - first
        first = choices[stage, first]
    return float(rest[0]), layers


def interleaved_bound_s(costs: ChainCosts, topology: Topology, p2p_s: float) -> float:
    """Seconds that a step takes at least under an interleaved schedule, whatever the split.

    A rank computes all its passes after the first micro-batch has come down to it and before the last one goes back
    up. Two floors follow: the mean over the ranks, and the largest rank when whole layers, counted at the price of the
    cheapest, are dealt out as evenly as embedding and head let them.
    """
    ranks, microbatches = topology.pipeline_size, topology.num_microbatches
    cheapest = min(layer.total_s for layer in costs.layers)
    rank = np.arange(ranks)
    way = np.where(rank > 0, costs.embedding.total_s + (rank - 1) * cheapest, 0.0) + 2 * rank * p2p_s
    mean = way.mean() + microbatches * costs.total.total_s / ranks
    layers = least_layers(len(costs.layers), topology.num_stages).reshape(-1, ranks).sum(axis=0)
    load = cheapest * layers
    load[0] += costs.embedding.total_s
    load[-1] += costs.head.total_s
    for _ in range(len(costs.layers) - layers.sum()):
        load[np.argmin(way + microbatches * load)] += cheapest
    return max(float(mean), float((way + microbatches * load).max()))
