"""All compiled code: the simulator's pass over a step, and the search over splits.

It is one file because Numba's cache notices changes of a kernel's own file only: a kernel in another file would go on
running an old version of those it calls. There is no clock, no library random number and no fast-math in here, and
decisions compare sums of costs: the same job gets the same plan whenever and wherever it is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np


def compiled(kernel: Callable) -> Callable:
    """``kernel`` compiled at its first call, and kept on disk between runs where there is a folder to keep it in.

    Numba refuses to *define* a cached function when neither the package's folder nor the user's cache folder can be
    written, as in a read-only container, and to *call* one whose code does not fit on the disk or into a quota; the kernel is
    then compiled anew by each process.
    """
    try:
        function = numba.njit(cache=True)(kernel)
    except RuntimeError:
        return numba.njit(kernel)
    if hasattr(function, "_cache"):  # not with NUMBA_DISABLE_JIT, which leaves functions as they are
        function._cache = _Spared(function._cache)
    return function


class _Spared:
    """Numba's cache of a kernel, which may fail: numba itself lets only some of Windows' errors pass."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def load_overload(self, *args: Any) -> Any:
        with contextlib.suppress(OSError):
            return self._cache.load_overload(*args)
        return None

    def save_overload(self, *args: Any) -> None:
        with contextlib.suppress(OSError):
            self._cache.save_overload(*args)


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

# Share of the step that memory above a limit weighs while annealing, for each share of the limit: at first, and by how much
# it then shrinks with each split that is judged while the present one fits, and grows while it does not.
_PENALTY, _TIDE = 1.0, 0.003
_LOOK = 0.1  # of the time to judge a split is what looking at its memory takes


class Room(NamedTuple):
    """Memory of the elements, and how much a rank has.

    Attributes:
        limit_bytes: of every rank's peak; infinite without a limit.
        before: bytes of state and of activations of the first 0, 1, ..., n layers, [2, n + 1].
        ends: the same that embedding, multi-token prediction and head add to the stages, [2, stages].
        working: bytes that each layer takes while it runs, [n].
        end_working: bytes that the other elements of a stage take while they run, [stages].
        flights: micro-batches in flight in each chunk of a rank at one time, those of all ranks in turn, float [K, V].
        first_flight: row of ``flights`` where each rank begins, int64 [ranks + 1].
    """

    limit_bytes: float
    before: np.ndarray
    ends: np.ndarray
    working: np.ndarray
    end_working: np.ndarray
    flights: np.ndarray
    first_flight: np.ndarray


class Problem(NamedTuple):
    """What a split is judged by: the largest weighted step over the scenarios, among splits within the limits.

    Attributes:
        program: operations of one step.
        p2p_s: seconds of a transfer.
        before: forward and backward seconds of the first 0, 1, ..., n layers, [2, n + 1].
        ends: seconds that the other elements add, [scenarios, 2, stages]; scenario 0 is the given costs.
        weights: [scenarios].
        updates: seconds, once a step, that the first 0, 1, ..., n layers take to update, [n + 1].
        end_updates: the same that the other elements add to the stages, [stages].
        limit_s: a split whose step in scenario 0 is longer is worth infinity.
        tie_weight: weight of unevenness, which decides between splits of equal steps.
        least, most: layers that each stage holds at least and at most, int64 [stages].
        equal_layers: whether all layers cost the same, so that the step is convex in the stages' counts.
        ranks: pipeline ranks.
        room: memory.
    """

    program: Program
    p2p_s: float
    before: np.ndarray
    ends: np.ndarray
    weights: np.ndarray
    updates: np.ndarray
    end_updates: np.ndarray
    limit_s: float
    tie_weight: float
    least: np.ndarray
    most: np.ndarray
    equal_layers: bool
    ranks: int
    room: Room


@compiled
def judge_all(problem, splits):
    """What each split [count, stages] is worth, float [count]; infinite outside the limits."""
    durations, free, end = _scratch(problem)
    worths = np.empty(splits.shape[0])
    for i in range(worths.size):
        if _excess(problem, splits[i]) > 0.0:
            worths[i] = np.inf
        else:
            worths[i] = _judge(problem, splits[i], durations, free, end)
    return worths


@compiled
def anneal(problem, start, threshold, evaluations, seed):
    """Move layers between stages, from those on the critical path to those off it.

    Memory above the limit is punished, not forbidden, so that the way between two splits that fit may lead through some
    that do not. How much is found on the way: under a tight limit most splits that fit are islands, and a penalty that ebbs
    on an island until some way leads off it, and then rises until one ends on the next, needs no tuning to the job.

    Args:
        problem: the Problem.
        start: layers of each stage, int64 [stages].
        threshold: loss that is accepted at first, as a share of the best worth; 0 accepts only what is no worse.
        evaluations: splits to judge.
        seed: of the proposals.

    Returns:
        The best split met that fits, and its worth: never worse than the start's. Where none fitted, the one with the least
        memory above the limit, and infinity.
    """
    durations, free, end = _scratch(problem)
    pull = np.empty((2, start.size))
    layers, best, moved = start.copy(), start.copy(), start.copy()
    excess = _excess(problem, layers)
    worth = _judge(problem, layers, durations, free, end)
    best_worth, best_excess, penalty = worth, excess, _PENALTY
    _pull_of_stages(problem, end, layers, excess, penalty, pull)
    state = np.uint64(seed + start.size)
    judged, look = 1.0, 0.0 if problem.room.limit_bytes == np.inf else _LOOK
    for _ in range(20 * evaluations):
        if judged >= evaluations:
            break
        state, added = _move(problem, state, pull, layers, moved)
        if added == np.inf:
            continue
        punished = worth * (1.0 + penalty * excess)
        allowed = punished + threshold * min(best_worth, punished) * (1.0 - judged / evaluations)
        # In a convex problem the present critical path tells how much the move costs at least.
        floor = worth + added if problem.equal_layers else 0.0
        if floor > allowed:
            continue
        moved_excess = _excess(problem, moved)
        judged += look
        if floor * (1.0 + penalty * moved_excess) > allowed:
            continue
        moved_worth = _judge(problem, moved, durations, free, end)
        judged += 1
        if moved_worth * (1.0 + penalty * moved_excess) <= allowed:
            worth, excess = moved_worth, moved_excess
            layers[:] = moved
            _pull_of_stages(problem, end, layers, excess, penalty, pull)
            if excess < best_excess or (excess == best_excess and worth < best_worth):
                best_worth, best_excess = worth, excess
                best[:] = layers
        penalty *= 1.0 - _TIDE if excess == 0.0 else 1.0 + _TIDE
    return best, best_worth if best_excess == 0.0 else np.inf


@compiled
def _move(problem, state, pull, layers, moved):
    """Fill ``moved`` with a split near ``layers``.

    One layer changes its stage. Interleaved, half of the moves stay on a rank or in a chunk row, and half of the former are
    made on two to eight ranks in a row at once.

    Returns:
        The generator's next state, and the seconds that the move adds to the critical path; infinite if it is none.
    """
    state, giver, taker = _propose(state, pull[1])
    ranks, width = problem.ranks, 1
    if ranks < layers.size:
        state, kind = _pick(state, 8)
        if kind < 3:
            taker += giver % ranks - taker % ranks
            if kind < 2:
                state, doublings = _pick(state, 4)
                width = min(1 << doublings, ranks - giver % ranks)
        elif kind == 3:
            taker += (giver // ranks - taker // ranks) * ranks
    if giver == taker:
        return state, np.inf
    moved[:] = layers
    added, done = 0.0, False
    for _ in range(width):
        if moved[giver] > problem.least[giver] and moved[taker] < problem.most[taker]:
            moved[giver] -= 1
            moved[taker] += 1
            added += pull[0, taker] - pull[0, giver]
            done = True
        giver, taker = giver + 1, taker + 1
    return state, added if done else np.inf


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
    update, _ = _update(problem, layers)
    worst = 0.0
    for scenario in range(problem.weights.size):
        stop = 0
        for stage in range(stages):
            start, stop = stop, stop + layers[stage]
            for kind in range(2):
                own = problem.before[kind, stop] - problem.before[kind, start]
                durations[kind * stages + stage] = own + problem.ends[scenario, kind, stage]
        step = run_program(problem.program, durations, problem.p2p_s, free, end) + update
        if scenario == 0 and step > problem.limit_s:
            return np.inf
        worst = max(worst, problem.weights[scenario] * step)
    return worst * (1.0 + problem.tie_weight * _unevenness(durations, stages))


@compiled
def _update(problem, layers):
    """Seconds of the update of the rank that updates longest, and that rank."""
    ranks = problem.ranks
    longest, longest_rank = -1.0, 0
    for rank in range(ranks):
        seconds, stop = 0.0, 0
        for stage in range(layers.size):
            stop += layers[stage]
            if stage % ranks == rank:
                seconds += problem.updates[stop] - problem.updates[stop - layers[stage]] + problem.end_updates[stage]
        if seconds > longest:
            longest, longest_rank = seconds, rank
    return longest, longest_rank


@compiled
def _excess(problem, layers):
    """Sum over the ranks of what their peaks are above the limit, as a share of it; 0 where all fit."""
    if problem.room.limit_bytes == np.inf:
        return 0.0
    excess, stops = 0.0, np.cumsum(layers)
    for rank in range(problem.ranks):
        peak = _peak(problem, layers, stops, rank)
        if peak > problem.room.limit_bytes * (1.0 + 1e-12):
            excess += peak / problem.room.limit_bytes - 1.0
    return excess


@compiled
def _peak(problem, layers, stops, rank):
    """Bytes of a rank's peak: state, the worst activations in flight, the largest working memory.

    ``stops`` [stages] is the layer behind each stage.
    """
    room, ranks = problem.room, problem.ranks
    first, last = room.first_flight[rank], room.first_flight[rank + 1]
    kept = np.zeros(last - first)
    state, working = 0.0, 0.0
    for stage in range(rank, layers.size, ranks):
        stop = stops[stage]
        start = stop - layers[stage]
        state += room.before[0, stop] - room.before[0, start] + room.ends[0, stage]
        activations = room.before[1, stop] - room.before[1, start] + room.ends[1, stage]
        for flight in range(first, last):
            kept[flight - first] += room.flights[flight, stage // ranks] * activations
        working = max(working, room.end_working[stage])
        for layer in range(start, stop):
            working = max(working, room.working[layer])
    return state + kept.max() + working


@compiled
def peaks_of(problem, layers):
    """Bytes of each rank's peak, [ranks]."""
    peaks, stops = np.empty(problem.ranks), np.cumsum(layers)
    for rank in range(peaks.size):
        peaks[rank] = _peak(problem, layers, stops, rank)
    return peaks


@compiled
def lighten(problem, start):
    """A split whose largest peak no move of one layer from that rank lowers, found by steepest descent."""
    layers = start.copy()
    ranks, stages = problem.ranks, start.size
    peaks = peaks_of(problem, layers)
    while True:
        heaviest = np.argmax(peaks)
        best, best_giver, best_taker = peaks.max(), -1, -1
        for giver in range(heaviest, stages, ranks):
            for taker in range(stages):
                if giver == taker or layers[giver] <= problem.least[giver] or layers[taker] >= problem.most[taker]:
                    continue
                layers[giver] -= 1
                layers[taker] += 1
                peak = peaks_of(problem, layers).max()
                if peak < best * (1.0 - 1e-12):
                    best, best_giver, best_taker = peak, giver, taker
                layers[giver] += 1
                layers[taker] -= 1
        if best_giver < 0:
            return layers
        layers[best_giver] -= 1
        layers[best_taker] += 1
        peaks = peaks_of(problem, layers)


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
def _pull_of_stages(problem, end, layers, excess, penalty, pull):
    """Seconds that one more mean layer in each stage adds along the critical path, into ``pull[0]`` [stages].

    The update that lasts longest is the path's end. In ``pull[1]`` the punishment of the memory that the layer adds counts,
    too, on ranks that are above the limit.
    """
    pull[:] = 0.0
    seconds, punished = pull[0], pull[1]
    stages, count = seconds.size, problem.before.shape[1] - 1
    place = np.int32(np.argmax(end))
    step = end[place]
    while place != end.size - 1:
        cost = problem.program.cost[place]
        seconds[cost % stages] += problem.before[cost // stages, count] / count
        place = waited_for(problem.program, end, problem.p2p_s, place)
    room, ranks, stops = problem.room, problem.ranks, np.cumsum(layers)
    _, updating = _update(problem, layers)
    for stage in range(updating, stages, ranks):
        seconds[stage] += problem.updates[count] / count
    punished[:] = seconds
    if excess == 0.0:
        return
    for rank in range(ranks):
        if _peak(problem, layers, stops, rank) <= room.limit_bytes:
            continue
        for stage in range(rank, stages, ranks):
            most = 0.0
            for flight in range(room.first_flight[rank], room.first_flight[rank + 1]):
                most = max(most, room.flights[flight, stage // ranks])
            added = (room.before[0, count] + most * room.before[1, count]) / count
            punished[stage] += penalty * step * added / room.limit_bytes


@compiled
def _pick(state, count):
    """Next state of a 64-bit linear congruential generator (Knuth's constants), and a number below ``count``."""
    state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
    return state, np.int64(state >> np.uint64(33)) % count


# --- splits without interleaving: a stage's floor follows from its first and its last layer


class Floors(NamedTuple):
    """What the floor under a step is made of, for a stage that holds layers i to j - 1.

    Attributes:
        microbatches: of a step.
        above: seconds of both passes of all other elements before each stage, and its transfers, [stages].
        behind: the same of all after it, [stages].
        later: stages behind, at most the micro-batches less one, int64 [stages].
        interleaved: whether the floors are those of an interleaved schedule: zero.
    """

    microbatches: int
    above: np.ndarray
    behind: np.ndarray
    later: np.ndarray
    interleaved: bool


@compiled
def stage_floors(problem, floors, stage, cap_s):
    """Seconds that a step takes at least when ``stage`` holds layers i to j - 1, its update included, [n + 1, n + 1].

    Infinite where it may not hold them or where they take more than ``cap_s``.

    Without interleaving a floor is the longest of a family of paths through one stage of the 1F1B schedule. The first
    micro-batch comes down to the stage, the last one goes back up from it, and in between the stage runs all its passes; or
    some of its micro-batches make a round trip through the stages behind, during which ``later`` other forward and backward
    passes (fewer at the step's ends) are skipped.
    """
    places, stages = problem.before.shape[1], problem.least.size
    seconds = np.full((places, places), np.inf)
    least, most = problem.least[stage], problem.most[stage]
    # Out of the loop: reading them there would take most of its time.
    forwards, backwards, updates = problem.before[0], problem.before[1], problem.updates
    own_forward, own_backward = problem.ends[0, 0, stage], problem.ends[0, 1, stage]
    own_update = problem.end_updates[stage]
    above, behind, later = floors.above[stage], floors.behind[stage], floors.later[stage]
    microbatches, interleaved = floors.microbatches, floors.interleaved
    trips_between = (microbatches - 1) // (later + 1) - 1
    room = problem.room
    limited = room.limit_bytes < np.inf and problem.ranks == stages
    limit_bytes = room.limit_bytes * (1.0 + 1e-12)
    states, activations, working_bytes = room.before[0], room.before[1], room.working
    own_state, own_activations, own_working = room.ends[0, stage], room.ends[1, stage], room.end_working[stage]
    flight = room.flights[room.first_flight[stage], 0] if limited else 0.0
    for start in range(1 if stage == 0 else places):
        working = own_working
        for stop in range(start, min(places, start + most + 1)):
            if stop > start:
                working = max(working, working_bytes[stop - 1])
            if limited:
                kept = flight * (activations[stop] - activations[start] + own_activations)
                if states[stop] - states[start] + own_state + kept + working > limit_bytes:
                    break
            floor = 0.0
            if not interleaved:
                forward = forwards[stop] - forwards[start] + own_forward
                backward = backwards[stop] - backwards[start] + own_backward
                path = above + forwards[start] + backwards[start] + microbatches * (forward + backward)
                path += updates[stop] - updates[start] + own_update
                if path > cap_s:
                    break
                back = behind + forwards[places - 1] - forwards[stop] + backwards[places - 1] - backwards[stop]
                first_trip, last_trip = max(back - later * forward, 0.0), max(back - later * backward, 0.0)
                if microbatches == later + 1:
                    floor = path + max(first_trip, last_trip)
                else:
                    between = trips_between * max(back - later * (forward + backward), 0.0)
                    floor = path + first_trip + last_trip + between
            if floor <= cap_s and stop - start >= least and (stage < stages - 1 or stop == places - 1):
                seconds[start, stop] = floor
    return seconds


@compiled
def smallest_floor(problem, floors, cap_s):
    """The smallest that the largest floor of a split's stages can be, and the layers of each stage that reach it.

    The former is infinite where no split keeps within the limits and ``cap_s``; the latter is then of no use.
    """
    stages, places = problem.least.size, problem.before.shape[1]
    rest = np.full(places, np.inf)
    rest[-1] = -np.inf
    choices = np.empty((stages, places), dtype=np.int64)
    for stage in range(stages - 1, -1, -1):
        seconds = stage_floors(problem, floors, stage, cap_s)
        reached = np.full(places, np.inf)
        for start in range(places):
            for stop in range(start, places):
                floor = max(seconds[start, stop], rest[stop])
                if floor < reached[start]:
                    reached[start] = floor
                    choices[stage, start] = stop
        rest = reached
    layers = np.zeros(stages, dtype=np.int64)
    start = 0
    if rest[0] < np.inf:
        for stage in range(stages):
            layers[stage] = choices[stage, start] - start
            start = choices[stage, start]
    return rest[0], layers


@compiled
def count_completions(problem, floors, cap_s):
    """In how many ways stages s, s + 1, ... can hold layers i to n - 1, floors at most ``cap_s``; [stages + 1, n + 1]."""
    stages, places = problem.least.size, problem.before.shape[1]
    completions = np.zeros((stages + 1, places))
    completions[stages, places - 1] = 1.0
    for stage in range(stages - 1, -1, -1):
        seconds = stage_floors(problem, floors, stage, cap_s)
        for start in range(places):
            for stop in range(start, places):
                if seconds[start, stop] < np.inf:
                    completions[stage, start] += completions[stage + 1, stop]
    return completions


@compiled
def enumerate_splits(problem, floors, cap_s, completions):
    """The splits that ``completions`` counts in lexicographic order, int64 [count, stages]: depth first, no dead ends."""
    stages, places = problem.least.size, problem.before.shape[1]
    allowed = np.empty((stages, places, places), dtype=np.bool_)
    for stage in range(stages):
        allowed[stage] = stage_floors(problem, floors, stage, cap_s) < np.inf
    splits = np.empty((int(completions[0, 0]), stages), dtype=np.int64)
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


# --- cuts: the length of every path through the operations is linear in the stages' seconds


@compiled
def find_paths(problem, durations, counts):
    """A longest path through each stage's busiest operation.

    Args:
        problem: the Problem.
        durations: seconds of the passes of each stage, [2 * stages].
        counts: filled with how often each path runs each pass, [stages, 2 * stages].

    Returns:
        The pipeline's seconds, and each path's, [stages].
    """
    program, operations = problem.program, problem.program.cost.size
    stages = problem.least.size
    free, end = np.empty(problem.ranks), np.empty(operations + 1)
    step = run_program(program, durations, problem.p2p_s, free, end)
    tail = np.zeros(operations + 1)  # seconds from an operation's end to the step's
    following = np.full(operations + 1, operations, dtype=np.int32)
    through, longest = np.full(stages, -np.inf), np.zeros(stages, dtype=np.int64)
    for i in range(operations - 1, -1, -1):
        stage = program.cost[i] % stages
        if end[i] + tail[i] > through[stage]:
            through[stage], longest[stage] = end[i] + tail[i], i
        seconds = tail[i] + durations[program.cost[i]]
        before, source = program.previous[i], program.sender[i]
        if seconds > tail[before]:
            tail[before], following[before] = seconds, i
        if seconds + problem.p2p_s > tail[source]:
            tail[source], following[source] = seconds + problem.p2p_s, i
    counts[:] = 0.0
    for stage in range(stages):
        place = np.int32(longest[stage])
        while place != operations:
            counts[stage, program.cost[place]] += 1.0
            place = waited_for(program, end, problem.p2p_s, place)
        place = following[longest[stage]]
        while place != operations:
            counts[stage, program.cost[place]] += 1.0
            place = following[place]
    return step, through


# --- a packed step


@compiled
def packed_steps(program, ranks, micro_batch_s):
    """Seconds of the step of each pipeline whose micro-batches differ, all stages being equal, [pipelines].

    Args:
        program: a Program whose ``cost`` is ``is_backward * M + micro-batch``.
        ranks: pipeline ranks.
        micro_batch_s: forward and backward seconds of one stage for each micro-batch, [pipelines, 2 * M].
    """
    free, end = np.empty(ranks), np.empty(program.cost.size + 1)
    steps = np.empty(micro_batch_s.shape[0])
    for pipeline in range(steps.size):
        steps[pipeline] = run_program(program, micro_batch_s[pipeline], 0.0, free, end)
    return steps


_TRIES = 100  # exchanges looked at for each one that is simulated
_PATIENCE = 30  # exchanges looked at for each piece since one made a step shorter: little is left to gain then
_MOST_BACK = 3  # pieces that one is exchanged for


class Shape(NamedTuple):
    """Data-parallel ranks, micro-batches, bins of a micro-batch, and ranks in a row that run in lockstep."""

    data_size: int
    microbatches: int
    micro_batch_size: int
    lockstep: int


class Packed(NamedTuple):
    """A placement while it is improved. A *cell* is a micro-batch with its bins, wherever in the step it stands.

    Attributes:
        room: tokens that each piece takes, int64 [pieces].
        seconds: forward and backward seconds of one stage for each piece, [2, pieces].
        free: tokens that each bin still takes, int64 [bins].
        held: pieces in each bin, int64 [bins].
        first: where the pieces of each bin begin in ``pieces``, int64 [bins + 1]; behind them is place for more.
        pieces: numbers of the pieces, bin by bin, int64.
        cells: cell that stands at each place ``k * DP + rank``, int64 [DP * M].
        load: forward and backward seconds of one stage for each place, [2, DP * M].
    """

    room: np.ndarray
    seconds: np.ndarray
    free: np.ndarray
    held: np.ndarray
    first: np.ndarray
    pieces: np.ndarray
    cells: np.ndarray
    load: np.ndarray


@compiled
def improve_placement(program, ranks, shape, bins, room, seconds, empty_s, capacity, evaluations, seed):
    """Exchange pieces and micro-batches of a placement so that the slowest step becomes shorter.

    An exchange takes place between two micro-batches, mostly of the slowest group of ranks, from one on its critical path to
    one off it, where the longer of the (one or two) steps concerned becomes shorter. A step is convex in the seconds of the
    micro-batches, so the critical path tells without a simulation how short it becomes at most. To accept worse steps for a
    while did not help.

    Args:
        program: a Program whose ``cost`` is ``is_backward * M + micro-batch``.
        ranks: pipeline ranks.
        shape: the Shape of the bins.
        bins: bin of each piece as ``Grid`` numbers them, int32 [pieces]; within ``capacity``.
        room: tokens that each piece takes, int64 [pieces].
        seconds: forward and backward seconds of one stage for each piece, [2, pieces].
        empty_s: the same of a micro-batch without pieces, [2].
        capacity: tokens of a bin.
        evaluations: steps of a group to simulate.
        seed: of the proposals.

    Returns:
        Bins of the pieces, int32 [pieces]: never a longer step, and again no bin is empty or above ``capacity``.
    """
    packed = _unpack(shape, bins, room, seconds, empty_s, capacity)
    load, cells, micro_batch_size = packed.load, packed.cells, shape.micro_batch_size
    free, end, other_end = np.empty(ranks), np.empty(program.cost.size + 1), np.empty(program.cost.size + 1)
    durations, pull, steps = _run_groups(program, shape, load, free, end)
    out, back = np.empty(_MOST_BACK, dtype=np.int64), np.empty(_MOST_BACK, dtype=np.int64)
    moved, before = np.empty(2), np.empty((2, 2))
    worst, judged, state = np.argmax(steps), 0, np.uint64(seed)
    patience, idle = _PATIENCE * bins.size, 0
    # A hundred exchanges are looked at for each that is simulated. In functions of their own, which would be handed all this in
    # tuples of arrays, the parts of this loop took five times as long, inlined or not.
    for _ in range(_TRIES * evaluations):
        if judged >= evaluations or idle == patience:
            break
        idle += 1
        state, group, other = _pick_groups(state, worst, steps.size)
        state, k = _pick_pass(state, pull[group], True)
        state, other_k = _pick_pass(state, pull[other], False)
        if group == other and not _is_apart(pull[group], k, other_k):
            continue
        state, rank = _pick(state, shape.lockstep)
        state, other_rank = _pick(state, shape.lockstep)
        place = k * shape.data_size + group * shape.lockstep + rank
        other_place = other_k * shape.data_size + other * shape.lockstep + other_rank
        if place == other_place:
            continue
        for each in range(2):
            before[each, 0], before[each, 1] = load[each, place], load[each, other_place]
            moved[each] = before[each, 0] - before[each, 1]
        state, kind = _pick(state, 8)
        num_out, num_back, first_bin, second_bin = 0, 0, 0, 0
        if kind > 0:  # otherwise all of both
            state, bin_ = _pick(state, micro_batch_size)
            state, other_bin = _pick(state, micro_batch_size)
            first_bin = cells[place] * micro_batch_size + bin_
            second_bin = cells[other_place] * micro_batch_size + other_bin
            if kind % 2:
                state, num_out, num_back = _pick_pieces(
                    state, room, packed.pieces, packed.first, packed.held, packed.free, first_bin, second_bin, out, back
                )
            else:
                state, num_back, num_out = _pick_pieces(
                    state, room, packed.pieces, packed.first, packed.held, packed.free, second_bin, first_bin, back, out
                )
            if num_out + num_back == 0:
                continue
            moved[:] = 0.0
            _add_seconds(moved, seconds, packed.pieces, out, num_out, 1.0)
            _add_seconds(moved, seconds, packed.pieces, back, num_back, -1.0)
        allowed = max(steps[group], steps[other])
        for each in range(2):
            load[each, place] = before[each, 0] - moved[each]
            load[each, other_place] = before[each, 1] + moved[each]
        added = _lengthen(load, durations[group], pull[group], k, group, shape)
        other_added = _lengthen(load, durations[other], pull[other], other_k, other, shape)
        if group == other:
            added += other_added
            other_added = added
        shortens = steps[group] + added < allowed and steps[other] + other_added < allowed
        if shortens:
            step = run_program(program, durations[group], 0.0, free, end)
            other_step = step
            shortens = step < allowed
            judged += 1
            if shortens and group != other:
                other_step = run_program(program, durations[other], 0.0, free, other_end)
                shortens = other_step < allowed
                judged += 1
        if shortens:
            steps[group], steps[other], idle = step, other_step, 0
            worst = np.argmax(steps)
            _pull_of_passes(program, end, pull[group])
            if group != other:
                _pull_of_passes(program, other_end, pull[other])
            if kind == 0:
                cells[place], cells[other_place] = cells[other_place], cells[place]
            else:
                _exchange(packed, first_bin, second_bin, out[:num_out], back[:num_back])
        else:
            for each in range(2):
                load[each, place], load[each, other_place] = before[each, 0], before[each, 1]
            _lengthen(load, durations[group], pull[group], k, group, shape)
            _lengthen(load, durations[other], pull[other], other_k, other, shape)
    return _bins_of(packed, shape)


@compiled
def _run_groups(program, shape, load, free, end):
    """Simulate all groups: seconds of their longest passes and how often a critical path runs each, [groups, 2 * M]; their steps.

    ``free`` and ``end`` are scratch, as for ``run_program``.
    """
    groups, passes = shape.data_size // shape.lockstep, 2 * shape.microbatches
    durations, pull, steps = np.zeros((groups, passes)), np.zeros((groups, passes)), np.empty(groups)
    for group in range(groups):
        for k in range(shape.microbatches):
            _lengthen(load, durations[group], pull[group], k, group, shape)
        steps[group] = run_program(program, durations[group], 0.0, free, end)
        _pull_of_passes(program, end, pull[group])
    return durations, pull, steps


@compiled
def _unpack(shape, bins, room, seconds, empty_s, capacity):
    """The placement as a Packed, each cell in its own place."""
    places = shape.data_size * shape.microbatches
    free = np.full(places * shape.micro_batch_size, capacity)
    held = np.zeros(free.size, dtype=np.int64)
    load = np.empty((2, places))
    load[0], load[1] = empty_s[0], empty_s[1]
    for piece in range(bins.size):
        held[bins[piece]] += 1
        free[bins[piece]] -= room[piece]
        load[:, bins[piece] // shape.micro_batch_size] += seconds[:, piece]
    first = np.zeros(free.size + 1, dtype=np.int64)
    for each in range(free.size):
        first[each + 1] = first[each] + 2 * held[each] + 2 * _MOST_BACK
    pieces = np.empty(first[-1], dtype=np.int64)
    held[:] = 0
    for piece in range(bins.size):
        pieces[first[bins[piece]] + held[bins[piece]]] = piece
        held[bins[piece]] += 1
    return Packed(room, seconds, free, held, first, pieces, np.arange(places), load)


@compiled
def _bins_of(packed, shape):
    """The bin of each piece as ``Grid`` numbers them, int32 [pieces]."""
    bins = np.empty(packed.room.size, dtype=np.int32)
    for place in range(packed.cells.size):
        for each in range(shape.micro_batch_size):
            inside = packed.cells[place] * shape.micro_batch_size + each
            for at in range(packed.first[inside], packed.first[inside] + packed.held[inside]):
                bins[packed.pieces[at]] = place * shape.micro_batch_size + each
    return bins


@compiled
def _pick_groups(state, worst, groups):
    """Mostly the worst group, and as often itself as any."""
    state, kind = _pick(state, 8)
    group = worst
    if kind < 2:
        state, group = _pick(state, groups)
    other = group
    if kind % 2:
        state, other = _pick(state, groups)
    return state, group, other


@compiled
def _pick_pass(state, pull, high):
    """Of two micro-batches drawn the one that is more often on the critical path, or less often."""
    microbatches = pull.size // 2
    state, one = _pick(state, microbatches)
    state, two = _pick(state, microbatches)
    more = pull[one] + 2.0 * pull[microbatches + one] >= pull[two] + 2.0 * pull[microbatches + two]
    return state, one if more == high else two


@compiled
def _is_apart(pull, k, other_k):
    """Whether the critical path runs some pass of micro-batch k more often than that of the other."""
    microbatches = pull.size // 2
    return pull[k] > pull[other_k] or pull[microbatches + k] > pull[microbatches + other_k]


@compiled
def _pick_pieces(state, room, pieces, first, held, free, single, many, ones, several):
    """A piece of bin ``single``, and up to three of bin ``many`` that take about as much room, the last one chosen to fit.

    Fills ``ones`` and ``several`` with their places in ``pieces``, and returns how many each holds; none if they do not fit.
    """
    if first[single] + held[single] + _MOST_BACK > first[single + 1] or first[many] + held[many] == first[many + 1]:
        return state, 0, 0
    state, one = _pick(state, held[single])
    ones[0] = first[single] + one
    size = room[pieces[ones[0]]]
    most, total, count = size + free[single], 0, 0
    state, extra = _pick(state, _MOST_BACK)
    for _ in range(extra):
        state, one = _pick(state, held[many])
        at = first[many] + one
        if (count == 0 or several[0] != at) and total + room[pieces[at]] <= most:
            several[count] = at
            total += room[pieces[at]]
            count += 1
    largest, largest_at = 0, -1
    for at in range(first[many], first[many] + held[many]):
        taken = (count > 0 and several[0] == at) or (count > 1 and several[1] == at)
        if largest < room[pieces[at]] <= most - total and not taken:
            largest, largest_at = room[pieces[at]], at
    if largest_at >= 0:
        several[count] = largest_at
        total += largest
        count += 1
    if total < size - free[many] or (count == 0 and held[single] == 1):
        return state, 0, 0
    return state, 1, count


@compiled
def _add_seconds(total, seconds, pieces, places, count, sign):
    """Add to ``total`` [2] the seconds [2, pieces] of the first ``count`` pieces at ``places``, or take them from it."""
    for each in range(count):
        for direction in range(2):
            total[direction] += sign * seconds[direction, pieces[places[each]]]


@compiled
def _lengthen(load, durations, pull, k, group, shape):
    """Set the longest passes of micro-batch k of a group; returns by how much the critical path becomes longer."""
    added = 0.0
    for direction in range(2):
        longest, at = 0.0, direction * shape.microbatches + k
        for rank in range(group * shape.lockstep, (group + 1) * shape.lockstep):
            longest = max(longest, load[direction, k * shape.data_size + rank])
        added += pull[at] * (longest - durations[at])
        durations[at] = longest
    return added


@compiled
def _pull_of_passes(program, end, pull):
    """Fill ``pull`` [2 * M] with how often a critical path runs each pass."""
    pull[:] = 0.0
    place = np.int32(np.argmax(end))
    while place != program.cost.size:
        pull[program.cost[place]] += 1.0
        place = waited_for(program, end, 0.0, place)


@compiled
def _exchange(packed, first_bin, second_bin, out, back):
    """Move pieces, given by their places, from the first bin to the second, and from that one back."""
    gone, come = packed.pieces[out], packed.pieces[back]
    for piece in gone:
        _take_out(packed, first_bin, piece)
    for piece in come:
        _take_out(packed, second_bin, piece)
    for piece in gone:
        _put_in(packed, second_bin, piece)
    for piece in come:
        _put_in(packed, first_bin, piece)


@compiled
def _take_out(packed, inside, piece):
    at = packed.first[inside]
    while packed.pieces[at] != piece:
        at += 1
    packed.held[inside] -= 1
    packed.pieces[at] = packed.pieces[packed.first[inside] + packed.held[inside]]
    packed.free[inside] += packed.room[piece]


@compiled
def _put_in(packed, inside, piece):
    packed.pieces[packed.first[inside] + packed.held[inside]] = piece
    packed.held[inside] += 1
    packed.free[inside] -= packed.room[piece]
