"""Compiled code of packing. It calls none of another file: Numba's cache would not notice when that one changes.

There is no clock, no library random number and no fast-math in here: the same data give the same batches everywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_balance.kernels import compiled

# --- the order of documents


# --- the cut


# --- the placement

_MOST_SWAPS = 300  # pairs of bins that are looked through before a piece is said to fit nowhere


@compiled
def sort_pieces(tokens, longest):
    """Numbers of the pieces by falling tokens, equal ones in their own order, int64 [pieces]; counted, in linear time.

    Args:
        tokens: of each piece, int64 of shape [pieces], at most ``longest``.
        longest: largest number of tokens.
    """
    first = np.zeros(longest + 2, dtype=np.int64)  # place of the first piece of longest - t tokens
    for piece in range(tokens.size):
        first[longest - tokens[piece] + 1] += 1
    for place in range(longest + 1):
        first[place + 1] += first[place]
    order = np.empty(tokens.size, dtype=np.int64)
    for piece in range(tokens.size):
        place = longest - tokens[piece]
        order[first[place]] = piece
        first[place] += 1
    return order


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
        order: numbers of the pieces by falling tokens, from ``sort_pieces``.
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
    best, gain = np.zeros(data_size, dtype=np.int64), np.zeros(data_size)
    wakes = np.full(data_size, capacity)  # largest piece for which another bin of the rank may be better
    total = 0.0
    for place in range(pieces):
        total += cost[order[place]]
    slots.lack[:] = total / data_size
    placed, empty = 0, data_size * num_slots
    while placed < pieces and pieces - placed > empty:
        piece = order[placed]
        needed = room[piece]
        chosen, chosen_worth = -1, -np.inf
        for rank in range(data_size):
            if wakes[rank] >= needed:
                best[rank], gain[rank], wakes[rank] = _find_best(
                    heights[rank // lockstep], slots.load[rank], slots.room[rank], needed, micro_batch_size
                )
            worth = gain[rank] + pull * slots.lack[rank]
            if worth > chosen_worth:
                chosen, chosen_worth = rank, worth
        if chosen < 0:
            if not _make_room(slots, room, cost, needed, micro_batch_size):
                break
            wakes[:] = capacity
            continue
        empty -= slots.head[chosen, best[chosen]] < 0
        k = _put(slots, piece, chosen, best[chosen], needed, cost[piece], micro_batch_size)
        wakes[chosen] = capacity
        group = chosen // lockstep
        if lockstep > 1 and slots.load[chosen, k] > heights[group, k]:
            heights[group, k] = slots.load[chosen, k]
            wakes[group * lockstep : (group + 1) * lockstep] = capacity
        placed += 1
    if pieces - placed <= empty:
        _fill_empty(slots, order[placed:], room, cost, targets, pull, micro_batch_size)
        placed = pieces
    return _bins_of(slots, micro_batch_size), placed


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
def _fill_empty(slots, left, room, cost, targets, pull, micro_batch_size):
    """Give the pieces that are left to the empty bins, one to each, the costliest first."""
    data_size, num_slots = slots.room.shape
    for piece in left:
        chosen, chosen_slot, chosen_worth = -1, -1, -np.inf
        for rank in range(data_size):
            for slot in range(num_slots):
                if slots.head[rank, slot] < 0:
                    k = slot // micro_batch_size
                    worth = targets[k] - slots.load[rank, k] + pull * slots.lack[rank]
                    if worth > chosen_worth:
                        chosen, chosen_slot, chosen_worth = rank, slot, worth
        _put(slots, piece, chosen, chosen_slot, room[piece], cost[piece], micro_batch_size)


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
