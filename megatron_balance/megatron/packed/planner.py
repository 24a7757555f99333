"""The global batches of a job, cut and placed when they are asked for; the same in every process, without a word between them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_balance.packing.cut import GlobalBatch, cut
from megatron_balance.packing.pieces import Pieces, by_bin
from megatron_balance.packing.placement import Placement
from megatron_balance.packing.stream import Cursor, Stream

_KEPT = 4  # global batches: loader workers and the trainer are at most a few apart


@dataclass(frozen=True, eq=False)
class Window:
    """A global batch among the items, placed when a bin of it is asked for.

    Attributes:
        first: its first item.
        batch: its documents.
        place: places a global batch.
    """

    first: int
    batch: GlobalBatch
    place: Callable[[GlobalBatch], Placement]

    @property
    def stop(self) -> int:
        """The item behind its last."""
        return self.first + self.batch.num_bins

    @cached_property
    def placement(self) -> Placement:
        """The bins of its pieces; numbers behind its items' are those of more micro-batches, in second slots of the first items."""
        return self.place(self.batch)

    @cached_property
    def _by_bin(self) -> tuple[np.ndarray, np.ndarray]:
        return by_bin(self.placement.bins, 2 * self.batch.num_bins)

    def pieces(self, item: int, slot: int = 0) -> Pieces:
        """What a slot of item ``item`` holds."""
        order, starts = self._by_bin
        number = item - self.first + slot * self.batch.num_bins
        return self.batch.pieces.take(order[starts[number] : starts[number + 1]])


class Planner:
    """Bins by number of item, which Megatron counts from the start of training, batch after batch."""

    def __init__(
        self,
        stream: Stream,
        start: tuple[int, Cursor],
        batch_size: Callable[[int], int],
        place: Callable[[GlobalBatch], Placement],
    ) -> None:
        """
        Args:
            stream: pieces of documents without end.
            start: an item that begins a global batch, and the cursor where that batch begins.
            batch_size: bins of the global batch that begins with an item.
            place: places a global batch.
        """
        self._stream, self._start, self._batch_size, self._place = stream, start, batch_size, place
        self._next = start
        self._kept: OrderedDict[int, Window] = OrderedDict()

    def pieces(self, item: int) -> Pieces:
        """What item ``item`` holds."""
        return self.window(item).pieces(item)

    def extra_pieces(self, item: int) -> Pieces:
        """What the second slot of item ``item`` holds."""
        return self.window(item).pieces(item, slot=1)

    def window(self, item: int) -> Window:
        """The global batch that item ``item`` is in."""
        for window in self._kept.values():
            if window.first <= item < window.stop:
                return window
        if item < self._next[0]:  # behind what is kept
            self._next = self._start
            self._kept.clear()
        while True:
            window = self._cut_next()
            if item < window.stop:
                return window

    def cursor(self, item: int) -> Cursor:
        """Where the global batch begins that item ``item`` begins."""
        if item == self._next[0]:
            return self._next[1]
        window = self.window(item)
        if window.first != item:
            raise ValueError(f"item {item} is inside the global batch that begins with {window.first}")
        return window.batch.start

    def _cut_next(self) -> Window:
        first, cursor = self._next
        window = Window(first, cut(self._stream, cursor, self._batch_size(first)), self._place)
        self._next = window.stop, window.batch.stop
        self._kept[first] = window
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return window
