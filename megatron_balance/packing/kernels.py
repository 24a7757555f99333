"""Compiled code of packing. It calls none of another file: Numba's cache would not notice when that one changes.

There is no clock, no library random number and no fast-math in here: the same data give the same batches everywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from megatron_balance.kernels import compiled

# --- the order of documents

_STRIDE = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@compiled
def shuffle(order, state, first, end):
    """Put documents ``first`` to ``end - 1`` in places drawn from those up to their own (Fisher-Yates, inside out).

    Shuffles all of ``order`` when called for 0 to its size, at once or part by part. Draws are SplitMix64 (Steele, Lea and
    Flood 2014) modulo the number of places, which favours none by more than one part in 2^64 / places.

    Args:
        order: filled up to ``end``; uint32 or uint64 of shape [documents].
        state: of the generator, uint64; any number to begin with.

    Returns:
        The state to go on with.
    """
    for document in range(first, end):
        state += _STRIDE
        draw = (state ^ (state >> np.uint64(30))) * _MIX_1
        draw = (draw ^ (draw >> np.uint64(27))) * _MIX_2
        draw ^= draw >> np.uint64(31)
        place = np.int64(draw % np.uint64(document + 1))
        order[document] = order[place]
        order[place] = document
    return state


# --- the cut

# Columns of how far each data set has been read: as `Place` in stream.py, its counts included.
EPOCH, POSITION, FIRST, TOKENS, PIECES, DOCUMENTS, SPLIT, TRUNCATED, DROPPED, SKIPPED, LOST = range(11)
KEEP_REST, CUT_REST, DROP_LONG = range(3)  # what becomes of a document that is longer than a bin
DEALT, FULL = -1, -2  # why no more pieces were dealt, if not for a data set that needs its window moved
_DIGIT_BITS = 11


class Window(NamedTuple):
    """Some documents of each data set, in the order of their epoch.

    Attributes:
        begin: epoch and position of the first, int64 of shape [data sets, 2].
        filled: how many, int64 of shape [data sets].
        documents: numbers in the data set, int64 of shape [data sets, window].
        lengths: their tokens, of the same shape.
        sizes: documents of the whole data set, int64 of shape [data sets].
    """

    begin: np.ndarray
    filled: np.ndarray
    documents: np.ndarray
    lengths: np.ndarray
    sizes: np.ndarray


# What a piece costs here is a few nanoseconds: a nested call not inlined, or `return np.int64(0)`, would be most of it.


@numba.njit(inline="always")
def _pass_document(sizes, data_set, state):
    state[data_set, FIRST] = 0
    state[data_set, POSITION] += 1
    if state[data_set, POSITION] == sizes[data_set]:
        state[data_set, POSITION] = 0
        state[data_set, EPOCH] += 1


@compiled
def _seek(begin, filled, lengths, sizes, data_set, capacity, long_documents, state):
    """Tokens of a data set's next piece, having passed and counted the documents that give none.

    0 tokens mean that the window must be moved first.
    """
    while state[data_set, EPOCH] == begin[data_set, 0]:
        offset = state[data_set, POSITION] - begin[data_set, 1]
        if offset < 0 or offset >= filled[data_set]:
            break
        labels = lengths[data_set, offset] - 1
        if labels > capacity and long_documents == DROP_LONG:
            state[data_set, DROPPED] += 1
            state[data_set, LOST] += labels
        elif labels > 0:
            return min(labels - state[data_set, FIRST], capacity)
        else:
            state[data_set, SKIPPED] += 1
        _pass_document(sizes, data_set, state)
    return 0


@compiled
def _take(begin, lengths, sizes, data_set, tokens, long_documents, state):
    """Step a data set over the piece that ``_seek`` found."""
    end = state[data_set, FIRST] + tokens
    rest = lengths[data_set, state[data_set, POSITION] - begin[data_set, 1]] - 1 - end
    state[data_set, TOKENS] += tokens
    state[data_set, PIECES] += 1
    if rest > 0 and long_documents == KEEP_REST:
        state[data_set, FIRST] = end
        return
    state[data_set, DOCUMENTS] += 1
    state[data_set, SPLIT] += state[data_set, FIRST] > 0
    state[data_set, TRUNCATED] += rest > 0
    state[data_set, LOST] += rest
    _pass_document(sizes, data_set, state)


@compiled
def _next_data_set(start, finish, now):
    """Worst-case fair weighted fair queueing (Bennett and Zhang 1996, WF2Q): of those that are not ahead, who is done first."""
    chosen, soonest = -1, np.inf
    for data_set in range(start.size):
        if start[data_set] <= now and finish[data_set] < soonest:
            chosen, soonest = data_set, finish[data_set]
    return chosen if chosen >= 0 else start.argmin()  # by rounding alone all may seem ahead


@compiled
def deal_pieces(window, weights, rule, least, room, state, dealt, out):
    """Deal pieces until ``least`` are dealt and the next one would exceed ``room``.

    Args:
        window: a Window.
        weights: shares of the tokens, float64 of shape [data sets].
        rule: capacity of a bin in tokens, alignment, and what becomes of a longer document.
        state: how far each data set has been read, int64 of shape [data sets, columns]; updated.
        dealt: pieces and their room so far, int64 of shape [2]; updated.
        out: data set, document, first and end of each piece, int64 of shape [4, most pieces]; filled from ``dealt[0]`` on.

    Returns:
        DEALT; FULL if ``out`` is; or the data set whose window must be moved. In the last two cases, call again.
    """
    begin, filled, documents, lengths, sizes = window
    capacity, alignment, long_documents = rule
    data_sets = weights.size
    tokens = np.zeros(data_sets, np.int64)
    start = np.zeros(data_sets)
    finish = np.zeros(data_sets)
    for data_set in range(data_sets):
        tokens[data_set] = _seek(begin, filled, lengths, sizes, data_set, capacity, long_documents, state)
        if not tokens[data_set]:
            return data_set
        start[data_set] = state[data_set, TOKENS] / weights[data_set]
        finish[data_set] = (state[data_set, TOKENS] + tokens[data_set]) / weights[data_set]
    total = state[:, TOKENS].sum()
    weight = weights.sum()
    while dealt[0] < out.shape[1]:
        chosen = _next_data_set(start, finish, total / weight) if data_sets > 1 else 0
        piece, first = tokens[chosen], state[chosen, FIRST]
        taking = -(-piece // alignment) * alignment
        if dealt[0] >= least and dealt[1] + taking > room:
            return DEALT
        out[0, dealt[0]] = chosen
        out[1, dealt[0]] = documents[chosen, state[chosen, POSITION] - begin[chosen, 1]]
        out[2, dealt[0]] = first
        out[3, dealt[0]] = first + piece
        dealt[0] += 1
        dealt[1] += taking
        total += piece
        _take(begin, lengths, sizes, chosen, piece, long_documents, state)
        if dealt[0] >= least and dealt[1] + alignment > room:
            return DEALT  # without a look at the next document, which may be in an epoch that nobody needs
        tokens[chosen] = _seek(begin, filled, lengths, sizes, chosen, capacity, long_documents, state)
        if not tokens[chosen]:
            return chosen
        start[chosen] = state[chosen, TOKENS] / weights[chosen]
        finish[chosen] = (state[chosen, TOKENS] + tokens[chosen]) / weights[chosen]
    return FULL


@compiled
def step_over(window, rule, data_sets, state, done):
    """Step over pieces from number ``done`` on, whose data sets are given, int16 of shape [pieces]; ``state`` is updated.

    Returns:
        The number of the piece for whose data set the window must be moved first, or of pieces.
    """
    begin, filled, _, lengths, sizes = window
    capacity, _, long_documents = rule
    for piece in range(done, data_sets.size):
        data_set = np.int64(data_sets[piece])
        tokens = _seek(begin, filled, lengths, sizes, data_set, capacity, long_documents, state)
        if not tokens:
            return piece
        _take(begin, lengths, sizes, data_set, tokens, long_documents, state)
    return data_sets.size


@compiled
def count_pieces(lengths, rule, totals):
    """Add documents, labels, pieces and room of one reading of ``lengths`` to ``totals``, int64 of shape [4]."""
    capacity, alignment, long_documents = rule
    for document in range(lengths.size):
        labels = np.int64(lengths[document]) - 1
        if labels > capacity and long_documents != KEEP_REST:
            labels = capacity if long_documents == CUT_REST else np.int64(0)
        if labels <= 0:
            continue
        rest = labels % capacity
        totals[0] += 1
        totals[1] += labels
        totals[2] += labels // capacity + (rest > 0)
        totals[3] += labels - rest + -(-rest // alignment) * alignment


@compiled
def longest_first(sizes):
    """Order of ``sizes``, int64 of shape [n], from large to small, equal ones as they came: a radix sort."""
    count = sizes.size
    order = np.arange(count)
    other = np.empty(count, np.int64)
    digits = 1 << _DIGIT_BITS
    left = sizes.max() if count else 0
    shift = 0
    while left > 0:
        ends = np.zeros(digits + 1, np.int64)
        for size in sizes:
            ends[digits - ((size >> shift) & (digits - 1))] += 1
        for digit in range(1, digits + 1):
            ends[digit] += ends[digit - 1]
        for each in range(count):
            place = digits - 1 - ((sizes[order[each]] >> shift) & (digits - 1))
            other[ends[place]] = order[each]
            ends[place] += 1
        order, other = other, order
        left >>= _DIGIT_BITS
        shift += _DIGIT_BITS
    return order


@compiled
def first_fit(sizes, order, capacity, bins, free):
    """First fit, in the order given, of the first of all pieces: as many as ``bins`` has.

    Args:
        sizes: room of each piece, int64 of shape [pieces].
        order: numbers of pieces, int64 of shape [pieces].
        capacity: of a bin.
        bins: filled with the bin of each of the first pieces, -1 where none has room, int32.
        free: filled with a tournament of the bins' free room, int64 of shape [2 * leaves]: node i has the larger of nodes
            2i and 2i + 1, and bin b is node ``leaves + b``. The bins' leaves are given as 0, others as -1.

    Returns:
        Room of the pieces that found none.
    """
    leaves = free.size // 2
    for leaf in range(leaves, free.size):
        free[leaf] = capacity if free[leaf] >= 0 else -1
    for node in range(leaves - 1, 0, -1):
        free[node] = max(free[2 * node], free[2 * node + 1])
    homeless = np.int64(0)
    for piece in order:
        if piece >= bins.size:
            continue
        size = sizes[piece]
        if free[1] < size:
            bins[piece] = -1
            homeless += size
            continue
        node = 1
        while node < leaves:
            node = 2 * node + (free[2 * node] < size)
        bins[piece] = node - leaves
        free[node] -= size
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
    return homeless


@compiled
def fill_empty(order, bins, num_bins):
    """Give each empty bin the last piece, in ``order``, of the bin that has most: no bin exceeds its capacity by that.

    ``bins``, int32, is of the first pieces, at least ``num_bins`` of them, and updated.
    """
    held = np.zeros(num_bins, np.int64)
    for each in bins:
        held[each] += 1
    for empty in range(num_bins):
        if held[empty]:
            continue
        donor = held.argmax()
        for each in range(order.size - 1, -1, -1):
            piece = order[each]
            if piece < bins.size and bins[piece] == donor:
                bins[piece] = empty
                break
        held[donor] -= 1
        held[empty] += 1


# --- the placement

_MOST_SWAPS = 300  # pairs of bins that are looked through before a piece is said to fit nowhere


class Slots(NamedTuple):
    """The bins of a global batch while pieces are placed. Slot ``k * micro_batch_size + j`` is sequence j of micro-batch k.

    Attributes:
        room: tokens that each bin still takes, int64 [DP, M * micro_batch_size].
        load: cost of each micro-batch, [DP, M].
        lack: what each rank is below its share of all cost, [DP].
        head: last piece put into each bin, int64 [DP, M * micro_batch_size]; -1 in an empty one.
        below: piece of the same bin that was put there before, int64 [pieces]; -1 where there is none.
    """

    room: np.ndarray
    load: np.ndarray
    lack: np.ndarray
    head: np.ndarray
    below: np.ndarray


@compiled
def place_pieces(order, room, cost, targets, pull, empty_cost, capacity, data_size, micro_batch_size, lockstep):
    """Put the costliest piece first, each into the bin whose micro-batch is furthest below its target.

    Of the bins with room that one is taken for which ``(target - cost so far) + pull * (what its rank lacks)`` is largest;
    ties go to the lower rank, then the earlier micro-batch, in it to the bin with most room. The last pieces fill the bins
    that are still empty. Where nothing fits, two pieces of two bins change places so that it does.

    Args:
        order: numbers of the pieces by falling tokens, from ``longest_first``.
        room: tokens that each piece takes, int64 [pieces], at most ``capacity``; there are at least as many as bins.
        cost: of each piece, [pieces]; falls with the tokens.
        targets: cost that each micro-batch aims at, [M].
        pull: weight of what a rank lacks.
        empty_cost: of a micro-batch without pieces.
        capacity: tokens of a bin.
        data_size: data-parallel ranks.
        micro_batch_size: bins of a micro-batch.
        lockstep: ranks in a row whose micro-batches wait for one another: all aim at least at the costliest of them.

    Returns:
        The bin of each piece as ``Grid`` numbers them, int32 [pieces], and how many pieces were placed.
    """
    pieces, num_slots = order.size, targets.size * micro_batch_size
    slots = Slots(
        np.full((data_size, num_slots), capacity),
        np.full((data_size, targets.size), empty_cost),
        np.zeros(data_size),
        np.full((data_size, num_slots), -1),
        np.full(pieces, -1),
    )
    heights = np.empty((data_size // lockstep, targets.size))
    heights[:] = targets
    total = 0.0
    for place in range(pieces):
        total += cost[order[place]]
    slots.lack[:] = total / data_size
    # Two tournaments over the ranks, node i the larger of nodes 2i and 2i + 1, rank r at ``leaves + r``: how much each wants a
    # piece, and the largest piece for which another bin of it may be better. So no piece asks every rank.
    leaves = 1
    while leaves < data_size:
        leaves *= 2
    worth, wakes = np.full(2 * leaves, -np.inf), np.full(2 * leaves, -1)
    wakes[leaves : leaves + data_size] = capacity
    _play(wakes)
    best = np.zeros(data_size, dtype=np.int64)
    placed, empty = 0, data_size * num_slots
    while placed < pieces and pieces - placed > empty:
        piece = order[placed]
        needed = room[piece]
        while wakes[1] >= needed:
            node = 1
            while node < leaves:
                node = 2 * node + (wakes[2 * node] < needed)
            rank = node - leaves
            best[rank], gain, wakes[node] = _find_best(
                heights[rank // lockstep], slots.load[rank], slots.room[rank], needed, micro_batch_size
            )
            worth[node] = gain + pull * slots.lack[rank]
            while node > 1:
                node //= 2
                worth[node] = max(worth[2 * node], worth[2 * node + 1])
                wakes[node] = max(wakes[2 * node], wakes[2 * node + 1])
        if worth[1] == -np.inf:
            if not _make_room(slots, room, cost, needed, micro_batch_size):
                break
            wakes[leaves : leaves + data_size] = capacity
            _play(wakes)
            continue
        node = 1
        while node < leaves:
            node = 2 * node + (worth[2 * node] < worth[1])
        chosen = node - leaves
        empty -= slots.head[chosen, best[chosen]] < 0
        k = _put(slots, piece, chosen, best[chosen], needed, cost[piece], micro_batch_size)
        first, last = chosen, chosen
        group = chosen // lockstep
        if lockstep > 1 and slots.load[chosen, k] > heights[group, k]:
            heights[group, k] = slots.load[chosen, k]
            first, last = group * lockstep, group * lockstep + lockstep - 1
        for rank in range(first, last + 1):
            node = leaves + rank
            while node > 0 and wakes[node] < capacity:
                wakes[node] = capacity
                node //= 2
        placed += 1
    if pieces - placed <= empty:
        _one_to_each(slots, order[placed:], room, cost, targets, pull, micro_batch_size)
        placed = pieces
    return _bins_of(slots, micro_batch_size), placed


@compiled
def _play(tournament):
    """Set the inner nodes of a tournament by its leaves."""
    for node in range(tournament.size // 2 - 1, 0, -1):
        tournament[node] = max(tournament[2 * node], tournament[2 * node + 1])


@compiled
def _find_best(heights, load, room, needed, micro_batch_size):
    """Of a rank's bins with room for ``needed`` tokens the one whose micro-batch is furthest below its height.

    Args:
        heights, load: of the rank's micro-batches, [M].
        room: of its bins, [M * micro_batch_size].
        needed: tokens.
        micro_batch_size: bins of a micro-batch.

    Returns:
        That bin, how far its micro-batch is below (-inf where nothing has room), and the largest piece for which another bin
        may be better, one that has no room now.
    """
    best, best_gain, wakes, slot = -1, -np.inf, 0, 0
    for k in range(load.size):
        gain = heights[k] - load[k]
        if gain > best_gain:
            found, most = -1, 0
            for each in range(slot, slot + micro_batch_size):
                if room[each] > most:
                    found, most = each, room[each]
            if most >= needed:
                best, best_gain = found, gain
            elif most > wakes:
                wakes = most
        slot += micro_batch_size
    return best, best_gain, wakes


@compiled
def _put(slots, piece, rank, slot, needed, cost, micro_batch_size):
    """Put a piece into a bin; returns the micro-batch."""
    k = slot // micro_batch_size
    slots.below[piece] = slots.head[rank, slot]
    slots.head[rank, slot] = piece
    slots.room[rank, slot] -= needed
    slots.load[rank, k] += cost
    slots.lack[rank] -= cost
    return k


@compiled
def _one_to_each(slots, left, room, cost, targets, pull, micro_batch_size):
    """Give the pieces that are left to the empty bins, one to each, the costliest first."""
    data_size = slots.room.shape[0]
    best, worth = np.empty(data_size, dtype=np.int64), np.empty(data_size)
    for rank in range(data_size):
        best[rank], worth[rank] = _best_empty(slots, rank, targets, pull, micro_batch_size)
    for piece in left:
        chosen = np.argmax(worth)  # the first of equals
        _put(slots, piece, chosen, best[chosen], room[piece], cost[piece], micro_batch_size)
        best[chosen], worth[chosen] = _best_empty(slots, chosen, targets, pull, micro_batch_size)


@compiled
def _best_empty(slots, rank, targets, pull, micro_batch_size):
    """A rank's empty bin that wants a piece most, and how much; -1 and -inf where it has none."""
    chosen, chosen_worth = -1, -np.inf
    for slot in range(slots.room.shape[1]):
        if slots.head[rank, slot] < 0:
            k = slot // micro_batch_size
            worth = targets[k] - slots.load[rank, k] + pull * slots.lack[rank]
            if worth > chosen_worth:
                chosen, chosen_worth = slot, worth
    return chosen, chosen_worth


@compiled
def _bins_of(slots, micro_batch_size):
    """The bin of each piece as ``Grid`` numbers them, int32 [pieces]; -1 where it has none."""
    data_size, num_slots = slots.room.shape
    bins = np.full(slots.below.size, -1, dtype=np.int32)
    for rank in range(data_size):
        for slot in range(num_slots):
            k, j = slot // micro_batch_size, slot % micro_batch_size
            piece = slots.head[rank, slot]
            while piece >= 0:
                bins[piece] = (k * data_size + rank) * micro_batch_size + j
                piece = slots.below[piece]
    return bins


@compiled
def _make_room(slots, room, cost, needed, micro_batch_size):
    """Swap two pieces of two bins so that one of these takes ``needed`` tokens; False where none can.

    Bins with most room are tried first, and of two of them that swap which moves fewest tokens.
    """
    num_slots = slots.room.shape[1]
    bins, tried = np.argsort(-slots.room.ravel(), kind="mergesort"), 0
    for first in range(bins.size):
        rank, slot = bins[first] // num_slots, bins[first] % num_slots
        for second in range(bins.size):
            other_rank, other_slot = bins[second] // num_slots, bins[second] % num_slots
            lacking, most = needed - slots.room[rank, slot], slots.room[other_rank, other_slot]
            if lacking > most or tried == _MOST_SWAPS:
                break
            if first != second:
                tried += 1
                if _swap(slots, room, cost, rank, slot, other_rank, other_slot, micro_batch_size, lacking, most):
                    return True
    return False


@compiled
def _swap(slots, room, cost, rank, slot, other_rank, other_slot, micro_batch_size, lacking, most):
    """Swap a piece of the first bin for one of the other that is at least ``lacking``, at most ``most`` tokens smaller."""
    least, out, back = most + 1, -1, -1
    piece = slots.head[rank, slot]
    while piece >= 0:
        other = slots.head[other_rank, other_slot]
        while other >= 0:
            fewer = room[piece] - room[other]
            if lacking <= fewer < least:
                least, out, back = fewer, piece, other
            other = slots.below[other]
        piece = slots.below[piece]
    if out < 0:
        return False
    _replace(slots, rank, slot, out, back)
    slots.below[out], slots.below[back] = slots.below[back], slots.below[out]
    _replace(slots, other_rank, other_slot, back, out)
    dearer = cost[out] - cost[back]
    slots.room[rank, slot] += least
    slots.room[other_rank, other_slot] -= least
    slots.load[rank, slot // micro_batch_size] -= dearer
    slots.load[other_rank, other_slot // micro_batch_size] += dearer
    slots.lack[rank] += dearer
    slots.lack[other_rank] -= dearer
    return True


@compiled
def _replace(slots, rank, slot, piece, other):
    """Let the bin's list of pieces lead to ``other`` where it led to ``piece``."""
    above = slots.head[rank, slot]
    if above == piece:
        slots.head[rank, slot] = other
        return
    while slots.below[above] != piece:
        above = slots.below[above]
    slots.below[above] = other


@compiled
def deal_longest_first(order, cost, ranks):
    """Deal bins to the rank with the least cost so far that has not got its share of them.

    Args:
        order: numbers of bins, int64 of shape [bins]; ``ranks`` divides their number.
        cost: of each bin, float of shape [bins].
        ranks: that share the bins.

    Returns:
        Rank of each bin, and how many the rank had before it, each int64 of shape [bins].
    """
    rank_of, turn = np.empty(order.size, np.int64), np.empty(order.size, np.int64)
    leaves = 1
    while leaves < ranks:
        leaves *= 2
    load, held = np.full(2 * leaves, np.inf), np.zeros(ranks, np.int64)  # a tournament: node i is min(2i, 2i + 1)
    load[leaves : leaves + ranks] = 0.0
    for node in range(leaves - 1, 0, -1):
        load[node] = min(load[2 * node], load[2 * node + 1])
    for each in order:
        node = 1
        while node < leaves:
            node = 2 * node + (load[2 * node] > load[1])
        rank = node - leaves
        rank_of[each], turn[each] = rank, held[rank]
        held[rank] += 1
        load[node] = load[node] + cost[each] if held[rank] < order.size // ranks else np.inf
        while node > 1:
            node //= 2
            load[node] = min(load[2 * node], load[2 * node + 1])
    return rank_of, turn
