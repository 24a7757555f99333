"""Compiled code of packing. It calls none of another file: Numba's cache would not notice when that one changes.

There is no clock, no library random number and no fast-math in here: the same data give the same batches everywhere.
"""

from __future__ import annotations

import numba  # noqa: F401
import numpy as np

from megatron_balance.kernels import compiled

# --- the order of documents


# --- the cut

# Columns of what is known of each data set while pieces are dealt: where the next one begins, then what was dealt so far.
AT, FIRST, TOKENS, PIECES, DOCUMENTS, SPLIT, TRUNCATED, DROPPED, SKIPPED, LOST = range(10)
STATE_COLUMNS = 10
KEEP_REST, CUT_REST, DROP_LONG = range(3)  # what becomes of a document that is longer than a bin
DEALT, FULL = -1, -2  # why no more pieces were dealt, if not for a data set whose window is used up
_DIGIT_BITS = 11


@compiled
def _seek(lengths, filled, rule, state):
    """Tokens of a data set's next piece, having passed and counted the documents that give none; 0 at the window's end."""
    capacity, _, long_documents = rule
    while state[AT] < filled:
        labels = lengths[state[AT]] - 1
        if labels > capacity and long_documents == DROP_LONG:
            state[DROPPED] += 1
            state[LOST] += labels
        elif labels > 0:
            return min(labels - state[FIRST], capacity)
        else:
            state[SKIPPED] += 1
        state[AT] += 1
    return np.int64(0)


@compiled
def _take(lengths, tokens, rule, state):
    """Step a data set over its next piece."""
    end = state[FIRST] + tokens
    rest = lengths[state[AT]] - 1 - end
    state[TOKENS] += tokens
    state[PIECES] += 1
    if rest > 0 and rule[2] == KEEP_REST:
        state[FIRST] = end
        return
    state[DOCUMENTS] += 1
    state[SPLIT] += state[FIRST] > 0
    state[TRUNCATED] += rest > 0
    state[LOST] += rest
    state[FIRST] = 0
    state[AT] += 1


@compiled
def _next_data_set(start, finish, now):
    """Worst-case fair weighted fair queueing (Bennett and Zhang 1996, WF2Q): of those that are not ahead, who is done first."""
    chosen, earliest = -1, 0
    for data_set in range(start.size):
        if start[data_set] <= now and (chosen < 0 or finish[data_set] < finish[chosen]):
            chosen = data_set
        if start[data_set] < start[earliest]:
            earliest = data_set
    return chosen if chosen >= 0 else earliest  # by rounding alone all may seem ahead


@compiled
def deal_pieces(documents, lengths, filled, weights, rule, least, room, state, dealt, out):
    """Deal pieces until ``least`` are dealt and the next one would exceed ``room``.

    Args:
        documents, lengths: window of each data set, the next documents in its order, int64 of shape [data sets, window].
        filled: documents in each window, int64 of shape [data sets].
        weights: shares of the tokens, float64 of shape [data sets].
        rule: capacity of a bin in tokens, alignment, and what becomes of a longer document.
        state: int64 of shape [data sets, STATE_COLUMNS], ``AT`` counting from the window's begin; updated.
        dealt: pieces and their room so far, int64 of shape [2]; updated.
        out: data set, document, first and end of each piece, int64 of shape [4, most pieces]; filled from ``dealt[0]`` on.

    Returns:
        DEALT; FULL if ``out`` is; or the data set whose window is used up. In the last two cases, call again.
    """
    capacity, alignment, _ = rule
    data_sets = weights.size
    tokens = np.zeros(data_sets, np.int64)
    start = np.zeros(data_sets)
    finish = np.zeros(data_sets)
    total = np.int64(0)
    for data_set in range(data_sets):
        tokens[data_set] = _seek(lengths[data_set], filled[data_set], rule, state[data_set])
        if not tokens[data_set]:
            return data_set
        taken = state[data_set, TOKENS]
        start[data_set] = taken / weights[data_set]
        finish[data_set] = (taken + tokens[data_set]) / weights[data_set]
        total += taken
    weight = weights.sum()
    while dealt[0] < out.shape[1]:
        chosen = _next_data_set(start, finish, total / weight) if data_sets > 1 else 0
        piece, of = tokens[chosen], state[chosen]
        taking = -(-piece // alignment) * alignment
        if dealt[0] >= least and dealt[1] + taking > room:
            return DEALT
        out[0, dealt[0]] = chosen
        out[1, dealt[0]] = documents[chosen, of[AT]]
        out[2, dealt[0]] = of[FIRST]
        out[3, dealt[0]] = of[FIRST] + piece
        dealt[0] += 1
        dealt[1] += taking
        total += piece
        _take(lengths[chosen], piece, rule, of)
        if dealt[0] >= least and dealt[1] + alignment > room:
            return DEALT  # without a look at the next document, which may be in an epoch that nobody needs
        tokens[chosen] = _seek(lengths[chosen], filled[chosen], rule, of)
        if not tokens[chosen]:
            return chosen
        start[chosen] = of[TOKENS] / weights[chosen]
        finish[chosen] = (of[TOKENS] + tokens[chosen]) / weights[chosen]
    return FULL


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
def first_fit(sizes, order, count, capacity, bins, free):
    """First fit of the pieces below number ``count``, in the order given.

    Args:
        sizes: room of each piece, int64 of shape [pieces].
        order: numbers of pieces, int64 of shape [pieces].
        capacity: of a bin.
        bins: filled with the bin of each piece, -1 where none has room, int32 of shape [pieces].
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
        if piece >= count:
            continue
        size = sizes[piece]
        if free[1] < size:
            bins[piece] = -1
            homeless += size
            continue
        node = 1
        while node < leaves:
            node *= 2
            if free[node] < size:
                node += 1
        bins[piece] = node - leaves
        free[node] -= size
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
    return homeless


@compiled
def fill_empty(order, bins, num_bins):
    """Give each empty bin the last piece, in ``order``, of the bin that has most: no bin exceeds its capacity by that.

    There are at least as many pieces as bins; ``bins``, int32 of shape [pieces], is updated.
    """
    held = np.zeros(num_bins, np.int64)
    for each in bins:
        held[each] += 1
    for empty in range(num_bins):
        if held[empty]:
            continue
        donor = held.argmax()
        for each in range(order.size - 1, -1, -1):
            if bins[order[each]] == donor:
                bins[order[each]] = empty
                break
        held[donor] -= 1
        held[empty] += 1


# --- the placement
