"""The documents that there are to pack: their lengths, whatever file holds them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Documents:
    """The lengths of one data set's documents. A document is one sequence of a Megatron index, as in ``GPTDataset``.

    A document of n tokens has n - 1 labels: tokens 0 to n - 2 are inputs, tokens 1 to n - 1 their labels. One of a single
    token, or of none, has nothing to learn from and is never placed.

    Attributes:
        name: prefix or file, as the user gave it.
        lengths: tokens of each document, int32 of shape [documents]; may be memory-mapped.
        content: hexadecimal digest of the lengths; equal lengths have equal digests.
    """

    name: str
    lengths: np.ndarray
    content: str


@dataclass(frozen=True)
class Blend:
    """Data sets with the share of all *tokens* that each is to give.

    Attributes:
        data_sets: at least one.
        weights: positive, their sum 1.
    """

    data_sets: tuple[Documents, ...]
    weights: tuple[float, ...]
