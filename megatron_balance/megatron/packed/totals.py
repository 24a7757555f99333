"""What the trainer knows of the global batch that it trains on: said in the items, by the loader, which cuts and places it anyway.

So no step waits for a global batch to be cut or placed once more, whose documents are more the more ranks there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from megatron_balance.megatron.packed.planner import Planner, Window

TOTALS, NEXT = "batch_totals", "next_cursor"


@dataclass(frozen=True)
class BatchTotals:
    """A global batch in a few numbers.

    Attributes:
        stop: the item behind its last.
        tokens: of its pieces.
        squares: of the tokens of each piece, summed.
        fill: share of the bins' tokens that pieces take.
        step_s: seconds of its step, simulated.
        ideal_s: seconds of a step in which no rank ever waits.
        rolled_shares: labels that remain at each depth of multi-token prediction over all labels.
    """

    stop: int
    tokens: int
    squares: float
    fill: float
    step_s: float
    ideal_s: float
    rolled_shares: tuple[float, ...] = ()

    @classmethod
    def of(cls, window: Window, depths: int = 0) -> BatchTotals:
        """The totals of ``window``, which this places; ``depths`` is ``--mtp-num-layers``."""
        batch, placement, tokens = window.batch, window.placement, window.batch.pieces.tokens
        lengths = tokens.astype(float)
        squares, shares = float(lengths @ lengths), tuple(rolled_shares(tokens, depths))
        return cls(window.stop, int(tokens.sum()), squares, batch.fill, placement.step_s, placement.ideal_s, shares)

    @classmethod
    def of_row(cls, row: Sequence[float]) -> BatchTotals:
        """What ``row`` said."""
        stop, tokens, squares, fill, step_s, ideal_s, *shares = row
        return cls(int(stop), int(tokens), squares, fill, step_s, ideal_s, tuple(shares))

    @property
    def row(self) -> np.ndarray:
        """All of it as float64 of shape [6 + depths], in which whole numbers are exact."""
        values = (self.stop, self.tokens, self.squares, self.fill, self.step_s, self.ideal_s)
        return np.array([*values, *self.rolled_shares])


def rolled_shares(tokens: np.ndarray, depths: int) -> list[float]:
    """Labels that remain at each depth over all labels.

    Args:
        tokens: labels of each piece of a global batch, shape [pieces].
        depths: ``--mtp-num-layers``.
    """
    return [float(np.maximum(tokens - depth, 0).sum() / tokens.sum()) for depth in range(1, depths + 1)]


def totals_of(planner: Planner, depths: int, with_cursor: bool) -> Callable[[int], dict[str, np.ndarray]]:
    """What is sent with an item, by its number: ``TOTALS``, the row of its global batch.

    Args:
        planner: knows the global batches.
        depths: ``--mtp-num-layers``.
        with_cursor: whether ``NEXT`` is sent, too: where the next global batch begins, as `Cursor.table`.
    """

    @lru_cache(maxsize=2)
    def of(window: Window) -> dict[str, np.ndarray]:
        values = {TOTALS: BatchTotals.of(window, depths).row}
        return {**values, NEXT: window.batch.stop.table} if with_cursor else values

    return lambda item: of(planner.window(item))


class Told:
    """What items told of the global batch that is trained on, and of the one before.

    Of two, because a checkpoint may be saved when a step has run but does not count: where a fault was found in it.
    """

    def __init__(self) -> None:
        self._row: list[float] = []
        self._batches: deque[tuple[BatchTotals, Any]] = deque(maxlen=2)

    def note(self, item: Mapping[str, Any]) -> None:
        """Take what is said in a micro-batch of the loader's, of whose bins each says the same; one of evaluation says nothing."""
        if TOTALS not in item:
            return
        row = item[TOTALS][0].tolist()
        if row != self._row:
            self._row = row
            self._batches.append((BatchTotals.of_row(row), item[NEXT][0] if NEXT in item else None))

    def __bool__(self) -> bool:
        return bool(self._batches)

    @property
    def batch(self) -> BatchTotals:
        """The global batch that is trained on, or was last."""
        return self._batches[-1][0]

    def cursor_table(self, item: int) -> np.ndarray | None:
        """`Cursor.table` where the global batch begins that item ``item`` begins; None where nothing was told of it."""
        tables = [table for totals, table in self._batches if totals.stop == item and table is not None]
        return np.asarray(tables[-1]) if tables else None


told = Told()  # in this process
