"""All compiled code: the simulator's pass over a step, and the search over splits.

It is one file because Numba's cache notices changes of a kernel's own file only: a kernel in another file would go on
running an old version of those it calls. There is no clock, no library random number and no fast-math in here, and
decisions compare sums of costs: the same job gets the same plan whenever and wherever it is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numba
import numpy as np


def compiled(kernel: Callable) -> Callable:
    """``kernel`` compiled at its first call, and kept on disk between runs where there is a folder to keep it in.

    Numba refuses to *define* a cached function when neither the package's folder nor the user's cache folder can be
    written, as in a read-only container; the kernel is then compiled anew by each process.
    """
    try:
        return numba.njit(cache=True)(kernel)
    except RuntimeError:
        return numba.njit(kernel)


# --- a step


class Program(NamedTuple):
    """All operations of a step in an order in which each comes after what it waits for. Arrays of shape [N], int32.

    Attributes:
        rank: pipeline rank.
        cost: index of the operation's duration in a row of costs, ``is_backward * stages + stage``.
        previous: place in this program of the operation before it on the same rank; N where there is none.
        sender: place of the operation on another rank whose output it needs; N where it needs none.
        slot: place in the rank-by-rank order, ``rank * 2 * M * V + i``.
    """

    rank: np.ndarray
    cost: np.ndarray
    previous: np.ndarray
    sender: np.ndarray
    slot: np.ndarray


@compiled
def run_program(program, durations, p2p_s, free, end):
    """Run all operations once and return the seconds of the step.

    Args:
        program: a Program of N operations.
        durations: seconds, looked up with ``program.cost``.
        p2p_s: seconds of a transfer.
        free: scratch, [PP].
        end: filled with the end of each operation, [N + 1]; the last place, "waits for nothing", gets -inf.
    """
    free[:] = 0.0
    operations = program.cost.size
    end[operations] = -np.inf
    step = 0.0
    for i in range(operations):
        rank = program.rank[i]
        finish = max(free[rank], end[program.sender[i]] + p2p_s) + durations[program.cost[i]]
        free[rank] = finish
        end[i] = finish
        step = max(step, finish)
    return step


@compiled
def waited_for(program, end, p2p_s, place):
    """Place of the operation that kept operation ``place`` from starting earlier; N where nothing did."""
    before, source = program.previous[place], program.sender[place]
    return before if end[before] >= end[source] + p2p_s else source


@compiled
def mark_critical(program, end, p2p_s, critical):
    """Mark in ``critical`` [N] the operations of a critical path, walked back from the one that ends last."""
    place = np.int32(np.argmax(end))
    while place != critical.size:
        critical[place] = True
        place = waited_for(program, end, p2p_s, place)


@compiled
def sort_operations(sender, ranks):
    """Slots in an order in which each comes after its sender and after the slot before it on its rank.

    Returns that order [N], and the place of each slot in it [N + 1] (slot N, "nothing", has place N).
    """
    slots = sender.size
    each = slots // ranks
    order = np.empty(slots, dtype=np.int32)
    place = np.full(slots + 1, -1, dtype=np.int32)
    place[slots] = slots
    following = np.arange(ranks) * each
    done = 0
    while done < slots:
        done_before = done
        for rank in range(ranks):
            while following[rank] < (rank + 1) * each and place[sender[following[rank]]] >= 0:
                order[done] = following[rank]
                place[following[rank]] = done
                following[rank] += 1
                done += 1
        if done == done_before:
            raise RuntimeError("the operations of the schedule wait for one another in a circle")
    return order, place


# --- the search over splits


class Problem(NamedTuple):
    """What a split is judged by: the largest weighted step over the scenarios, among splits within a limit.

    Attributes:
        program: operations of one step.
        p2p_s: seconds of a transfer.
        before: forward and backward seconds of the first 0, 1, ..., n layers, [2, n + 1].
        ends: seconds that embedding and head add, [scenarios, 2, stages]; scenario 0 is the given costs.
        weights: [scenarios].
        limit_s: a split whose step in scenario 0 is longer is worth infinity.
        tie_weight: weight of unevenness, which decides between splits of equal steps.
        least: layers that each stage holds at least, int64 [stages].
        equal_layers: whether all layers cost the same, so that the step is convex in the stages' counts.
        ranks: pipeline ranks.
    """

    program: Program
    p2p_s: float
    before: np.ndarray
    ends: np.ndarray
    weights: np.ndarray
    limit_s: float
    tie_weight: float
    least: np.ndarray
    equal_layers: bool
    ranks: int


@compiled
def judge_all(problem, splits):
    """What each split [count, stages] is worth, float [count]."""
    durations, free, end = _scratch(problem)
    worths = np.empty(splits.shape[0])
    for i in range(worths.size):
        worths[i] = _judge(problem, splits[i], durations, free, end)
    return worths


@compiled
def anneal(problem, start, threshold, evaluations):
    """Move single layers between stages, from those on the critical path to those off it.

    Args:
        problem: the Problem.
        start: layers of each stage, int64 [stages].
        threshold: loss that is accepted at first, as a share of the best worth; 0 accepts only what is no worse.
        evaluations: splits to judge.

    Returns:
        The best split met, and its worth: never worse than the start's.
    """
    durations, free, end = _scratch(problem)
    stages = start.size
    pull = np.empty(stages)
    layers, best = start.copy(), start.copy()
    worth = _judge(problem, layers, durations, free, end)
    best_worth = worth
    _pull_of_stages(problem, end, pull)
    state = np.uint64(stages)
    judged = 1
    for _ in range(20 * evaluations):
        if judged >= evaluations:
            break
        state, giver, taker = _propose(state, pull)
        allowance = threshold * best_worth * (1.0 - judged / evaluations)
        if giver == taker or layers[giver] <= problem.least[giver]:
            continue
        # In a convex problem the present critical path tells how much the move costs at least.
        if problem.equal_layers and pull[taker] - pull[giver] > allowance:
            continue
        layers[giver] -= 1
        layers[taker] += 1
        moved_worth = _judge(problem, layers, durations, free, end)
        judged += 1
        if moved_worth <= worth + allowance:
            worth = moved_worth
            _pull_of_stages(problem, end, pull)
            if worth < best_worth:
                best_worth = worth
                best = layers.copy()
        else:
            layers[giver] += 1
            layers[taker] -= 1
    return best, best_worth


@compiled
def _propose(state, pull):
    """The generator's next state, and two stages: of two drawn each, the one on, and the one off the critical path."""
    state, giver = _pick(state, pull.size)
    state, other_giver = _pick(state, pull.size)
    state, taker = _pick(state, pull.size)
    state, other_taker = _pick(state, pull.size)
    if pull[other_giver] > pull[giver]:
        giver = other_giver
    if pull[other_taker] < pull[taker]:
        taker = other_taker
    return state, giver, taker


@compiled
def _scratch(problem):
    """Room for durations, the ranks' clocks and the ends of all operations."""
    return np.empty(2 * problem.least.size), np.empty(problem.ranks), np.empty(problem.program.cost.size + 1)


@compiled
def _judge(problem, layers, durations, free, end):
    """What a split is worth, less being better; ``end`` is left as the last simulated scenario filled it."""
    stages = layers.size
    worst = 0.0
    for scenario in range(problem.weights.size):
        stop = 0
        for stage in range(stages):
            start, stop = stop, stop + layers[stage]
            for kind in range(2):
                own = problem.before[kind, stop] - problem.before[kind, start]
                durations[kind * stages + stage] = own + problem.ends[scenario, kind, stage]
        step = run_program(problem.program, durations, problem.p2p_s, free, end)
        if scenario == 0 and step > problem.limit_s:
            return np.inf
        worst = max(worst, problem.weights[scenario] * step)
    return worst * (1.0 + problem.tie_weight * _unevenness(durations, stages))


@compiled
def _unevenness(durations, stages):
    """Variance of the stages' seconds over their squared mean."""
    total, squares = 0.0, 0.0
    for stage in range(stages):
        seconds = durations[stage] + durations[stages + stage]
        total += seconds
        squares += seconds * seconds
    return squares * stages / (total * total) - 1.0


@compiled
def _pull_of_stages(problem, end, pull):
    """Seconds that one more mean layer in each stage adds along the critical path, into ``pull`` [stages]."""
    pull[:] = 0.0
    stages, layers = pull.size, problem.before.shape[1] - 1
    place = np.int32(np.argmax(end))
    while place != end.size - 1:
        cost = problem.program.cost[place]
        pull[cost % stages] += problem.before[cost // stages, layers] / layers
        place = waited_for(problem.program, end, problem.p2p_s, place)


@compiled
def _pick(state, count):
    """Next state of a 64-bit linear congruential generator (Knuth's constants), and a number below ``count``."""
    state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
    return state, np.int64(state >> np.uint64(33)) % count


@compiled
def enumerate_splits(allowed, completions, count):
    """The splits of an OpenSplits in lexicographic order, int64 [count, stages]: depth first, without dead ends."""
    stages, places = allowed.shape[0], allowed.shape[1]
    splits = np.empty((count, stages), dtype=np.int64)
    stops = np.zeros(stages + 1, dtype=np.int64)  # stops[s + 1]: the layer behind stage s that is tried next
    found, stage = 0, 0
    while stage >= 0:
        first, stop = stops[stage], stops[stage + 1]
        while stop < places and not (allowed[stage, first, stop] and completions[stage + 1, stop] > 0):
            stop += 1
        if stop == places:
            stage -= 1
            if stage >= 0:
                stops[stage + 1] += 1
        elif stage < stages - 1:
            stops[stage + 1] = stop
            stage += 1
            stops[stage + 1] = stop
        else:
            stops[stage + 1] = stop
            for s in range(stages):
                splits[found, s] = stops[s + 1] - stops[s]
            found += 1
            stops[stage + 1] = stop + 1
    return splits
