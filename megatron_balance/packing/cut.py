"""The cut: how many pieces of the stream make the next global batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from megatron_balance.errors import BalanceError
from megatron_balance.packing import kernels
from megatron_balance.packing.pieces import PieceRule, Pieces
from megatron_balance.packing.stream import Counts, Cursor, EpochTotals, Stream

FILL = 0.985  # the rest leaves the placement some freedom
MANY_BINS = 256  # from here on no run exceeds that fill
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

    With fewer than 256 bins a single piece matters: the run then comes as near to 98.5 % as it can, from below or above.
    ``num_bins`` pieces always fit, one in each bin, and fewer would leave a bin empty: there are never fewer, whatever the
    fill.

    Raises:
        BalanceError: an epoch of all data sets does not fill the batch; or the cursor is not of this stream.
    """
    if num_bins < 1:
        raise BalanceError(f"a global batch of {num_bins} sequences holds nothing: it takes at least one")
    capacity = stream.rule.seq_length
    whole = num_bins * capacity
    epoch = stream.epoch(num_bins, whole)
    if epoch.pieces < num_bins or 2 * epoch.room < whole:  # else two epochs fill the batch
        raise _too_few(epoch, num_bins, capacity)
    pieces = stream.pieces(cursor, num_bins, whole)
    sizes = stream.rule.room(pieces.tokens)
    count, bins = _fit(sizes[: _aim(sizes, num_bins, capacity)], num_bins, capacity)
    if (
        epoch.room < whole and epoch.pieces < count and cursor == stream.start
    ):  # at the start or never: no run ends for it
        raise _too_few(epoch, num_bins, capacity)
    run = Pieces(pieces.data_set[:count], pieces.document[:count], pieces.first[:count], pieces.end[:count])
    return GlobalBatch(run, bins, num_bins, cursor, stream.after(cursor, run))


def _aim(sizes: np.ndarray, num_bins: int, capacity: int) -> int:
    """Pieces that the batch would have if all packed well."""
    target = FILL * num_bins * capacity
    taken = np.cumsum(sizes)
    count = int(np.searchsorted(taken, target, side="right"))
    if num_bins < MANY_BINS and 0 < count < sizes.size and taken[count] - target < target - taken[count - 1]:
        count += 1
    return max(count, num_bins)


def _fit(sizes: np.ndarray, num_bins: int, capacity: int) -> tuple[int, np.ndarray]:
    """The longest run found, at least ``num_bins`` pieces, that first-fit-decreasing packs, and the bin of each."""
    order = kernels.longest_first(sizes)
    leaves = 1 << (num_bins - 1).bit_length()
    free = np.full(2 * leaves, -1, np.int64)
    free[leaves : leaves + num_bins] = 0
    taken = np.cumsum(sizes)
    fits, fails, tried = num_bins, sizes.size + 1, sizes.size
    bins = np.arange(num_bins, dtype=np.int32)
    for _ in range(_TRIES):
        packed = np.empty(tried, np.int32)
        homeless = kernels.first_fit(sizes, order, capacity, packed, free)
        shorter = 0
        if homeless:
            fails = tried
            shorter = int(np.searchsorted(taken, taken[tried - 1] - homeless, side="right"))
        else:
            fits, bins = tried, packed
        if fails - fits <= 1:
            break
        tried = shorter if shorter > fits else (fits + fails) // 2
    kernels.fill_empty(order, bins, num_bins)
    return fits, bins


def _too_few(epoch: EpochTotals, num_bins: int, capacity: int) -> BalanceError:
    return BalanceError(
        f"all data hold {epoch.documents} documents with {epoch.labels} tokens to learn from, in {epoch.pieces} pieces, and one"
        f" global batch of {num_bins} sequences of {capacity} tokens takes up to {num_bins * capacity}: lower the global batch"
        " size or add documents"
    )
