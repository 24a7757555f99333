"""The cut: how many pieces of the stream make the next global batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from megatron_balance.errors import BalanceError
from megatron_balance.packing import kernels
from megatron_balance.packing.pieces import PieceRule, Pieces
from megatron_balance.packing.stream import Counts, Cursor, Stream

FILL = 0.985  # the rest leaves the placement some freedom
_TRIES = 12  # of a shorter run, where the pieces do not fit


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """What one optimizer step learns from: a run of the stream.

    Attributes:
        pieces: in the order of the stream.
        bins: a bin for each, in which all fit and none is empty, int32 of shape [pieces]: where they go if nobody knows better.
        num_bins: sequences of the global batch.
        start, stop: the stream's cursor before and after it.
    """

    pieces: Pieces
    bins: np.ndarray
    num_bins: int
    start: Cursor
    stop: Cursor

    @property
    def rule(self) -> PieceRule:
        return self.start.identity.rule

    @property
    def fill(self) -> float:
        """Share of the bins' tokens that pieces take, the padding of each to the alignment included."""
        return int(self.rule.room(self.pieces.tokens).sum()) / (self.num_bins * self.rule.seq_length)

    @property
    def counts(self) -> Counts:
        """What this batch deals, and what became of the documents that it passed."""
        return self.stop.counts - self.start.counts


def batches(stream: Stream, cursor: Cursor, sizes: Iterable[int]) -> Iterator[GlobalBatch]:
    """One global batch after the other from ``cursor`` on, of so many bins each."""
    for num_bins in sizes:
        batch = cut(stream, cursor, num_bins)
        yield batch
        cursor = batch.stop


def cut(stream: Stream, cursor: Cursor, num_bins: int) -> GlobalBatch:
    """The next global batch: the longest run from ``cursor`` on that first-fit-decreasing packs into the bins at 98.5 %.

    ``num_bins`` pieces always fit, one in each bin, and fewer would leave a bin empty: there are never fewer, whatever the
    fill.

    Raises:
        BalanceError: an epoch of all data sets does not fill the batch; or the cursor is not of this stream.
    """
    capacity = stream.rule.seq_length
    _check_size(stream, num_bins)
    pieces = stream.pieces(cursor, num_bins, ceiling(num_bins, capacity))
    sizes = stream.rule.room(pieces.tokens)
    count, bins = _fit(sizes, num_bins, capacity)
    stop = stream.after(cursor, count)
    run = Pieces(pieces.data_set[:count], pieces.document[:count], pieces.first[:count], pieces.end[:count])
    return GlobalBatch(run, bins, num_bins, cursor, stop)


def ceiling(num_bins: int, capacity: int) -> int:
    """Tokens that a run of more than ``num_bins`` pieces takes at most."""
    return int(FILL * num_bins * capacity)


def _fit(sizes: np.ndarray, num_bins: int, capacity: int) -> tuple[int, np.ndarray]:
    """The longest run found, at least ``num_bins`` pieces, that first-fit-decreasing packs, and the bin of each."""
    order = kernels.longest_first(sizes)
    leaves = 1 << (num_bins - 1).bit_length()
    free = np.full(2 * leaves, -1, np.int64)
    free[leaves : leaves + num_bins] = 0
    bins = np.empty(sizes.size, np.int32)
    taken = np.cumsum(sizes)
    fits, fails, tried = num_bins, sizes.size + 1, sizes.size
    for _ in range(_TRIES):
        if tried <= fits:
            break
        homeless = kernels.first_fit(sizes, order, tried, capacity, bins, free)
        if not homeless:
            fits = tried
        else:
            fails = tried
        if fails - fits <= 1:
            break
        shorter = int(np.searchsorted(taken, taken[tried - 1] - homeless, side="right"))
        tried = max(shorter, fits + 1) if homeless else (fits + fails) // 2
    kernels.first_fit(sizes, order, fits, capacity, bins, free)
    bins = bins[:fits]
    kernels.fill_empty(order[order < fits], bins, num_bins)
    return fits, bins


def _check_size(stream: Stream, num_bins: int) -> None:
    if num_bins < 1:
        raise BalanceError(f"a global batch of {num_bins} sequences holds nothing: it takes at least one")
