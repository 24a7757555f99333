"""Blends for the tests of packing, and what their pieces are, told by a few lines of plain Python."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from megatron_balance.packing.documents import Blend, Documents
from megatron_balance.packing.pieces import LONG_DOCUMENTS, PieceRule
from megatron_balance.packing.stream import Counts, Cursor, Place, Stream

DATA = Path(os.environ.get("MEGATRON_BALANCE_DATA", Path(__file__).parents[2] / "shared" / "data"))


def documents(lengths, name: str = "set") -> Documents:
    lengths = np.asarray(lengths, np.int32)
    return Documents(name, lengths, hashlib.sha256(lengths.tobytes()).hexdigest())


def blend(*sets, weights=None) -> Blend:
    weights = weights or [1.0] * len(sets)
    shares = tuple(weight / sum(weights) for weight in weights)
    return Blend(tuple(documents(lengths, f"set {number}") for number, lengths in enumerate(sets)), shares)


def shuffled(of: Blend, seed: int):
    """Orders of the epochs, which stand in for those of the index."""

    def order(data_set: int, epoch: int) -> np.ndarray:
        return np.random.default_rng([seed, data_set, epoch]).permutation(of.data_sets[data_set].lengths.size)

    return order


def stream(of: Blend, rule: PieceRule, seed: int = 0) -> Stream:
    return Stream(of, rule, seed, shuffled(of, seed))


def behind(dealer: Stream, cursor: Cursor, count: int) -> Cursor:
    """The cursor ``count`` pieces further on."""
    return dealer.after(cursor, dealer.pieces(cursor, count))


def pieces_of(length: int, rule: PieceRule) -> list[tuple[int, int]]:
    """First and end of each piece of a document of ``length`` tokens."""
    labels, most = max(length - 1, 0), rule.seq_length
    if rule.long_documents == "drop" and labels > most:
        return []
    if rule.long_documents == "truncate":
        labels = min(labels, most)
    return [(first, min(first + most, labels)) for first in range(0, labels, most)]


def read(of: Blend, rule: PieceRule, seed: int, data_set: int) -> Iterator[tuple[int, int, int]]:
    """A data set's endless pieces: document, first, end."""
    order, lengths = shuffled(of, seed), of.data_sets[data_set].lengths.tolist()
    for epoch in count():
        for document in order(data_set, epoch).tolist():
            yield from ((document, *piece) for piece in pieces_of(lengths[document], rule))


def counts_before(of: Blend, rule: PieceRule, seed: int, data_set: int, place: Place) -> Counts:
    """What has become of the documents before ``place``."""
    order, lengths = shuffled(of, seed), of.data_sets[data_set].lengths
    passed = [lengths[order(data_set, epoch)].tolist() for epoch in range(place.epoch + 1)]
    passed[-1] = passed[-1][: place.position]
    counts = Counts(tokens=place.first, pieces=place.first // rule.seq_length)
    for length in chain(*passed):
        labels, pieces = max(length - 1, 0), pieces_of(length, rule)
        dealt = sum(end - first for first, end in pieces)
        counts += Counts(
            tokens=dealt,
            pieces=len(pieces),
            documents=bool(pieces),
            split=len(pieces) > 1,
            truncated=0 < dealt < labels,
            dropped=not dealt and labels > 0,
            skipped=not labels,
            lost=labels - dealt,
        )
    return counts


def rows(pieces) -> list[tuple[int, int, int, int]]:
    """(data set, document, first, end) of each."""
    columns = (pieces.data_set, pieces.document, pieces.first, pieces.end)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def wlb_like_file() -> Path:
    path = DATA / "lengths" / "wlb-like.json"
    if not path.is_file():
        pytest.skip(f"{path} is absent: MEGATRON_BALANCE_DATA names the folder of public data")
    return path


def wlb_like() -> np.ndarray:
    return np.array(json.loads(wlb_like_file().read_text()), np.int32)


@st.composite
def rules(draw) -> PieceRule:
    alignment = draw(st.sampled_from([1, 1, 2, 4]))
    return PieceRule(alignment * draw(st.integers(1, 12)), alignment, draw(st.sampled_from(LONG_DOCUMENTS)))


@st.composite
def blends(draw, least_documents: int = 0) -> Blend:
    """One to four data sets of tiny documents, each with one at least that gives a piece under any rule."""
    lengths = st.lists(st.integers(0, 40), min_size=least_documents, max_size=least_documents + 12)
    sets = draw(st.lists(lengths, min_size=1, max_size=4))
    weights = [draw(st.integers(1, 20)) for _ in sets]
    return blend(*([2, *each] for each in sets), weights=weights)
