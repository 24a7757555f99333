"""Compiled code of packing. It calls none of another file: Numba's cache would not notice when that one changes.

There is no clock, no library random number and no fast-math in here: the same data give the same batches everywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from megatron_balance.kernels import compiled

# --- the order of documents


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
