"""Pieces of documents: what a bin holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_balance.errors import BalanceError

SPLIT, TRUNCATE, DROP = "split", "truncate", "drop"
LONG_DOCUMENTS = (SPLIT, TRUNCATE, DROP)


@dataclass(frozen=True)
class PieceRule:
    """How documents become pieces; part of the identity of a run of batches.

    Attributes:
        seq_length: capacity of a bin in tokens.
        alignment: a piece takes a multiple of so many tokens in its bin (TP, CP, kernels).
        long_documents: of a document with more labels than a bin holds: ``split`` it into bin-sized pieces and a rest,
            ``truncate`` it to the first, or ``drop`` it.
    """

    seq_length: int
    alignment: int = 1
    long_documents: str = SPLIT

    def __post_init__(self) -> None:
        if self.seq_length < 1 or self.alignment < 1:
            raise BalanceError(
                f"bins of {self.seq_length} tokens and an alignment of {self.alignment}: both must be positive"
            )
        if self.seq_length % self.alignment:
            raise BalanceError(
                f"bins of {self.seq_length} tokens do not hold a whole number of {self.alignment} tokens, to which pieces are"
                " padded: change --seq-length"
            )
        if self.long_documents not in LONG_DOCUMENTS:
            raise BalanceError(f"long documents: {self.long_documents!r} is none of {', '.join(LONG_DOCUMENTS)}")

    def kept_labels(self, labels: np.ndarray) -> np.ndarray:
        """Labels that pieces hold, of documents with ``labels`` labels."""
        if self.long_documents == SPLIT:
            return labels
        return np.where(labels > self.seq_length, 0 if self.long_documents == DROP else self.seq_length, labels)

    def room(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens that pieces of ``tokens`` tokens take in a bin, padding included."""
        return -(-tokens // self.alignment) * self.alignment


@dataclass(frozen=True, eq=False)
class Pieces:
    """Pieces of documents. Piece [first, end) has the inputs first to end - 1 and the labels first + 1 to end.

    Attributes:
        data_set: number in the blend, int16 of shape [pieces].
        document: number in its data set, int64 of shape [pieces].
        first, end: tokens of the document, int64 of shape [pieces]; ``end`` is at most the document's last token.
    """

    data_set: np.ndarray
    document: np.ndarray
    first: np.ndarray
    end: np.ndarray

    def __len__(self) -> int:
        return self.first.size

    @property
    def tokens(self) -> np.ndarray:
        """Inputs, which are as many as labels, int64 of shape [pieces]."""
        return self.end - self.first

    def take(self, which: np.ndarray) -> Pieces:
        """Some of them, in the order of ``which``."""
        return Pieces(*(values[which] for values in (self.data_set, self.document, self.first, self.end)))


def by_bin(bins: np.ndarray, num_bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the pieces, bin after bin and in their own order in each, int64 of shape [pieces]; where each bin's begin, and the
    end of the last, int64 of shape [num_bins + 1].
    """
    order = np.argsort(bins, kind="stable")
    return order, np.searchsorted(bins[order], np.arange(num_bins + 1))
