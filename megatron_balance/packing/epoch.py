"""All documents of some data sets, each once, in as few bins as can be: what evaluation on a whole data set runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_balance.packing.bins import first_fit_bins
from megatron_balance.packing.documents import Blend, Documents, nothing_to_learn
from megatron_balance.packing.pieces import PieceRule, Pieces, by_bin


@dataclass(frozen=True, eq=False)
class Epoch:
    """One epoch of every data set, first-fit-decreasing.

    Attributes:
        every: its pieces.
        bins: bin of each, int32 of shape [pieces].
        num_bins: rounded up to what the ranks can share evenly; the bins beyond those needed are empty.
    """

    every: Pieces
    bins: np.ndarray
    num_bins: int

    @classmethod
    def of(cls, blend: Blend, rule: PieceRule, multiple: int = 1) -> Epoch:
        """The epoch of a blend, whatever its weights, in a multiple of so many bins.

        Raises:
            BalanceError: a data set gives no piece.
        """
        parts = [epoch_pieces(documents, rule, number) for number, documents in enumerate(blend.data_sets)]
        names = ("data_set", "document", "first", "end")
        every = Pieces(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
        bins = first_fit_bins(rule.room(every.tokens), rule.seq_length)
        return cls(every, bins, -(-(int(bins.max()) + 1) // multiple) * multiple)

    @cached_property
    def _by_bin(self) -> tuple[np.ndarray, np.ndarray]:
        return by_bin(self.bins, self.num_bins)

    def pieces(self, item: int) -> Pieces:
        """What bin ``item`` holds."""
        order, starts = self._by_bin
        return self.every.take(order[starts[item] : starts[item + 1]])


def epoch_pieces(documents: Documents, rule: PieceRule, data_set: int = 0) -> Pieces:
    """The pieces of a data set's documents, in their own order.

    Raises:
        BalanceError: there are none.
    """
    labels = rule.kept_labels(np.maximum(np.asarray(documents.lengths, dtype=np.int64) - 1, 0))
    capacity = rule.seq_length
    if not labels.any():
        raise nothing_to_learn(documents, rule)
    counts = -(-labels // capacity)
    document = np.repeat(np.arange(labels.size), counts)
    first = (np.arange(document.size) - np.repeat(np.cumsum(counts) - counts, counts)) * capacity
    end = np.minimum(first + capacity, labels[document])
    return Pieces(np.full(document.size, data_set, np.int16), document, first, end)


def epoch_squares(documents: Documents, rule: PieceRule) -> tuple[float, float]:
    """Sum of the squares of the tokens of a data set's pieces, and sum of the tokens, without making the pieces."""
    squares = tokens = 0.0
    for lengths in documents.chunks():
        labels = rule.kept_labels(np.maximum(lengths.astype(np.int64) - 1, 0))
        whole, rest = np.divmod(labels.astype(np.float64), rule.seq_length)
        squares += float(rest @ rest) + float(whole.sum()) * rule.seq_length**2
        tokens += float(labels.sum())
    return squares, tokens
