"""Lower bounds on the step that any split can reach, and the splits that a bound leaves open.

Without interleaving a stage's cost, all work before it and all work behind it follow from its first and its last
layer. So does a floor under the step, and both the smallest floor of a whole split and the splits under a given cap come
from dynamic programming over (stage, first layer). Interleaved, a rank's work gives a floor; ``cuts.py`` raises it.
"""

from __future__ import annotations

import numpy as np

from megatron_balance.kernels import count_completions, enumerate_splits, smallest_floor
from megatron_balance.pipeline.case import Case

_ROUNDING = 1e-9


def floor_bound(case: Case, step_s: float = np.inf) -> tuple[float, np.ndarray]:
    """Seconds that every split's step takes at least, and the splits [count, stages] that this suggests.

    Infinite where no split keeps within the limits, as far as this can tell: exactly without interleaving.

    Args:
        case: whose splits are meant.
        step_s: the step of some split that keeps within the limits; knowing it saves time.
    """
    bound_s, layers = smallest_floor(case.problem, case.floors, step_s * (1 + _ROUNDING))
    if not case.floors.interleaved:
        return bound_s, layers[None]
    nothing = np.empty((0, case.topology.num_stages), dtype=np.int64)
    return (bound_s if np.isinf(bound_s) else rank_bound_s(case)), nothing


def rank_bound_s(case: Case) -> float:
    """Seconds that a step takes at least, whatever the split, from the work of a rank.

    A rank computes all its passes after the first micro-batch has come down to it and before the last one goes back
    up, and then updates. Two floors follow: the mean over the ranks, and the largest rank when whole layers, counted at
    the price of the cheapest, are dealt out as evenly as the other elements let them.
    """
    problem, ranks, microbatches = case.problem, case.topology.pipeline_size, case.topology.num_microbatches
    cheapest = min(layer.total_s for layer in case.costs.layers)
    cheapest_update = min(layer.update_s for layer in case.costs.layers)
    ends, least = problem.ends[0].sum(axis=0), problem.least
    first_row = (ends + least * cheapest)[:ranks]
    way = np.cumsum(first_row) - first_row + 2 * np.arange(ranks) * problem.p2p_s
    total = case.costs.total
    mean = way.mean() + (microbatches * total.total_s + total.update_s) / ranks
    step = microbatches * cheapest + cheapest_update
    load = way + (microbatches * ends + problem.end_updates + least * step).reshape(-1, ranks).sum(axis=0)
    for _ in range(len(case.costs.layers) - least.sum()):
        load[np.argmin(load)] += step
    return max(float(mean), float(load.max()))


def open_splits(case: Case, cap_s: float, most: int) -> np.ndarray | None:
    """All splits [count, stages] whose floors are at most ``cap_s``; None where they are more than ``most``.

    Interleaved, that is all splits within the limits of the layers.
    """
    completions = count_completions(case.problem, case.floors, cap_s)
    if completions[0, 0] > most:
        return None
    return enumerate_splits(case.problem, case.floors, cap_s, completions)
