"""Compiled code of packing. It calls none of another file: Numba's cache would not notice when that one changes.

There is no clock, no library random number and no fast-math in here: the same data give the same batches everywhere.
"""

from __future__ import annotations

import numba  # noqa: F401
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


# --- the placement
