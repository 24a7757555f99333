"""The endless stream of pieces that a blend gives, and the cursor into it: they depend on data, seed and rule alone."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megatron_balance import reading
from megatron_balance.errors import BalanceError
from megatron_balance.packing import kernels
from megatron_balance.packing.documents import Blend, Documents, nothing_to_learn
from megatron_balance.packing.pieces import DROP, LONG_DOCUMENTS, SPLIT, TRUNCATE, PieceRule, Pieces

Orders = Callable[[int, int], np.ndarray]  # (data set, epoch) -> its documents in the epoch's order, [documents]
_FORMAT, _FORMAT_VERSION = "megatron-balance packing cursor", 1
_WINDOWS = 1 << 20  # documents looked up at a time, in all data sets together
_WINDOW = (1 << 8, 1 << 16)  # least and most of one data set
_KEPT_EPOCHS = 2  # orders held of each data set: a batch may straddle two
_LONG = {SPLIT: kernels.KEEP_REST, TRUNCATE: kernels.CUT_REST, DROP: kernels.DROP_LONG}
_MOST_DATA_SETS = np.iinfo(np.int16).max


@dataclass(frozen=True)
class Counts:
    """What became of the documents of a data set, all epochs together. Each document counts once an epoch.

    Attributes:
        tokens: inputs of the pieces dealt, which are as many as labels.
        pieces: dealt.
        documents: dealt to their end.
        split, truncated: of these, in more than one piece; to the first piece only.
        dropped: longer than a bin, and left out for that.
        skipped: without a label.
        lost: labels of truncated and dropped documents that were not dealt.
    """

    tokens: int = 0
    pieces: int = 0
    documents: int = 0
    split: int = 0
    truncated: int = 0
    dropped: int = 0
    skipped: int = 0
    lost: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(operator.add, self.values(), other.values()))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*map(operator.sub, self.values(), other.values()))

    def values(self) -> tuple[int, ...]:
        return tuple(vars(self).values())


@dataclass(frozen=True)
class Place:
    """How far one data set has been read.

    Attributes:
        epoch: being read, from 0: as many have been finished.
        position: in the epoch's order, of the document that comes next.
        first: first token of its next piece; 0 but within a document that is split.
        counts: what has been dealt so far.
    """

    epoch: int = 0
    position: int = 0
    first: int = 0
    counts: Counts = Counts()


@dataclass(frozen=True)
class Identity:
    """What the order of pieces depends on.

    Attributes:
        data: hexadecimal digest of the blend: contents and weights in their order, whatever the files are called.
        seed: of the shuffles.
        rule: how documents become pieces.
    """

    data: str
    seed: int
    rule: PieceRule

    @classmethod
    def of(cls, blend: Blend, rule: PieceRule, seed: int) -> Identity:
        shares = zip(blend.data_sets, blend.weights, strict=True)
        blended = json.dumps([(documents.content, float(weight).hex()) for documents, weight in shares])
        return cls(hashlib.sha256(blended.encode()).hexdigest(), seed, rule)

    def __str__(self) -> str:
        return (
            f"data {self.data[:12]}, seed {self.seed}, bins of {self.rule.seq_length} tokens, alignment"
            f" {self.rule.alignment}, long documents {self.rule.long_documents}"
        )


@dataclass(frozen=True)
class Cursor:
    """A point in the stream: all before it has been dealt, nothing after it.

    Attributes:
        identity: of the stream that it belongs to.
        places: how far each data set of the blend has been read.
    """

    identity: Identity
    places: tuple[Place, ...]

    @property
    def counts(self) -> Counts:
        """What has been dealt so far, of all data sets."""
        return sum((place.counts for place in self.places), Counts())

    @property
    def epochs(self) -> int:
        """Epochs that every data set has finished; documents that give no piece are passed when the next piece is sought."""
        return min(place.epoch for place in self.places)

    @property
    def table(self) -> np.ndarray:
        """Its numbers, int64 of shape [data sets, 3 + kinds of counts]: a row of each place, as the kernels have it."""
        rows = [(place.epoch, place.position, place.first, *place.counts.values()) for place in self.places]
        return np.array(rows, np.int64)

    @classmethod
    def of_table(cls, identity: Identity, table: np.ndarray) -> Cursor:
        """The cursor that ``table`` is of."""
        places = (Place(*row[: kernels.TOKENS], Counts(*row[kernels.TOKENS :])) for row in table.tolist())
        return cls(identity, tuple(places))

    def to_json(self) -> dict[str, Any]:
        rule = self.identity.rule
        return {
            "format": _FORMAT,
            "format_version": _FORMAT_VERSION,
            "data": self.identity.data,
            "seed": self.identity.seed,
            "seq_length": rule.seq_length,
            "alignment": rule.alignment,
            "long_documents": rule.long_documents,
            "places": [
                {"epoch": place.epoch, "position": place.position, "first": place.first, **vars(place.counts)}
                for place in self.places
            ],
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Cursor:
        """The cursor that ``to_json`` gave.

        Raises:
            DamageError: what is wrong with ``values``.
        """
        reading.check_format(values, _FORMAT, _FORMAT_VERSION, "a cursor of packed documents")
        values = {key: value for key, value in values.items() if key not in ("format", "format_version")}
        reading.check_keys(values, _READERS)
        read = {key: reader(values[key], key) for key, reader in _READERS.items()}
        try:
            rule = PieceRule(read["seq_length"], read["alignment"], read["long_documents"])
        except BalanceError as error:
            raise reading.DamageError(f"is damaged: {error}") from error
        return cls(Identity(read["data"], read["seed"], rule), read["places"])


def _places(value: Any, key: str) -> tuple[Place, ...]:
    reading.checked(value, key, isinstance(value, list) and bool(value), "a list of places")
    readers = dict.fromkeys(("epoch", "position", "first", *(field.name for field in fields(Counts))), reading.count)
    read = [reading.mapping(each, f"{key}[{number}]", readers) for number, each in enumerate(value)]
    return tuple(Place(each.pop("epoch"), each.pop("position"), each.pop("first"), Counts(**each)) for each in read)


def _policy(value: Any, key: str) -> str:
    return reading.checked(value, key, value in LONG_DOCUMENTS, f"one of {', '.join(LONG_DOCUMENTS)}")


_READERS: dict[str, reading.Reader] = {
    "data": reading.text,
    "seed": reading.count,
    "seq_length": reading.count,
    "alignment": reading.count,
    "long_documents": _policy,
    "places": _places,
}


@dataclass(frozen=True)
class EpochTotals:
    """What data give when each is read once.

    Attributes:
        documents: that give a piece.
        labels: of their pieces.
        pieces: of documents.
        room: tokens that the pieces take in bins.
    """

    documents: int
    labels: int
    pieces: int
    room: int


class _Reader:
    """Looks up the next documents of each data set, some thousands at a time; the data may be larger than memory."""

    def __init__(self, data_sets: tuple[Documents, ...], orders: Orders) -> None:
        self._orders = orders
        self._lengths = [np.asarray(documents.lengths) for documents in data_sets]
        self._kept: list[dict[int, np.ndarray]] = [{} for _ in data_sets]
        count, sizes = len(data_sets), np.array([lengths.size for lengths in self._lengths], np.int64)
        least, most = _WINDOW
        shape = count, min(max(_WINDOWS // count, least), most, int(sizes.max()))
        begin, filled = np.zeros((count, 2), np.int64), np.zeros(count, np.int64)
        self.window = kernels.Window(begin, filled, np.zeros(shape, np.int64), np.zeros(shape, np.int64), sizes)

    def move(self, data_set: int, place: np.ndarray) -> None:
        """Begin the window of a data set at (epoch, position)."""
        window = self.window
        epoch, position = place.tolist()
        chunk = self.order(data_set, epoch)[position : position + window.documents.shape[1]]
        window.begin[data_set] = place
        window.filled[data_set] = chunk.size
        window.documents[data_set, : chunk.size] = chunk
        window.lengths[data_set, : chunk.size] = self._lengths[data_set][chunk]

    def order(self, data_set: int, epoch: int) -> np.ndarray:
        """The documents in the order of an epoch."""
        kept = self._kept[data_set]
        order = kept.pop(epoch, None)
        if order is None:
            order = np.asarray(self._orders(data_set, epoch))
            documents = self._lengths[data_set].size
            if order.size != documents:
                raise BalanceError(
                    f"an order of {order.size} documents for a data set of {documents}: build its index anew"
                )
            if len(kept) == _KEPT_EPOCHS:
                del kept[next(iter(kept))]  # the one unused for longest
        kept[epoch] = order
        return order


class Stream:
    """The endless sequence of pieces of a blend: every data set epoch after epoch, each epoch in an order of its own.

    Which data set gives the next piece is decided by fair queueing in tokens: at no time has one given more or less than its
    share by more than one piece. How many pieces make a batch plays no part.

    Args:
        blend: the data sets; their lengths may be memory-mapped.
        rule: how documents become pieces.
        seed: of the shuffles; part of the identity here, used by ``orders``.
        orders: the documents of a data set in the order of an epoch, for (data set, epoch); asked when an epoch is reached.

    Raises:
        BalanceError: weights that are none, or a data set without a single piece.
    """

    def __init__(self, blend: Blend, rule: PieceRule, seed: int, orders: Orders) -> None:
        _check_blend(blend, seed)
        self.blend, self.rule = blend, rule
        self.identity = Identity.of(blend, rule, seed)
        self._rule = (np.int64(rule.seq_length), np.int64(rule.alignment), np.int64(_LONG[rule.long_documents]))
        for documents in blend.data_sets:
            self._check_data(documents)
        self._weights = np.array(blend.weights, np.float64)
        self._reader = _Reader(blend.data_sets, orders)
        self._out = np.empty((4, 1024), np.int64)
        self._known: tuple[Cursor | None, np.ndarray] = (None, np.empty(0, np.int64))
        self._uncounted = (chunk for documents in blend.data_sets for chunk in documents.chunks())
        self._counted = np.zeros(4, np.int64)

    @property
    def start(self) -> Cursor:
        return Cursor(self.identity, (Place(),) * len(self.blend.data_sets))

    def pieces(self, cursor: Cursor, least: int, room: int = 0) -> Pieces:
        """The pieces from ``cursor`` on: ``least`` of them, and more while all together take at most ``room`` tokens.

        Raises:
            BalanceError: the cursor belongs to another stream, or is damaged.
        """
        state, dealt = self._state(cursor), np.zeros(2, np.int64)
        while True:
            window, out = self._reader.window, self._out
            stopped = kernels.deal_pieces(window, self._weights, self._rule, least, room, state, dealt, out)
            if stopped == kernels.DEALT:
                break
            if stopped == kernels.FULL:
                self._out = np.concatenate([out, np.empty_like(out)], axis=1)
            else:
                self._reader.move(stopped, state[stopped, : kernels.FIRST])
        data_set, document, first, end = self._out[:, : dealt[0]]
        return Pieces(data_set.astype(np.int16), document.copy(), first.copy(), end.copy())

    def after(self, cursor: Cursor, pieces: Pieces) -> Cursor:
        """The cursor behind ``pieces``, which this stream gave from ``cursor`` on.

        Raises:
            BalanceError: the cursor belongs to another stream, or is damaged.
        """
        state, done = self._state(cursor), 0
        while (done := kernels.step_over(self._reader.window, self._rule, pieces.data_set, state, done)) < len(pieces):
            data_set = int(pieces.data_set[done])
            self._reader.move(data_set, state[data_set, : kernels.FIRST])
        cursor = Cursor.of_table(self.identity, state)
        self._known = cursor, state
        return cursor

    def check(self, cursor: Cursor) -> None:
        """Refuse a cursor of another stream, or one that this stream cannot have given.

        Raises:
            BalanceError: says why.
        """
        if cursor.identity != self.identity:
            raise BalanceError(
                f"the stored place in the data belongs to {cursor.identity}, and this run has {self.identity}: run with the"
                " former, or start without the stored place"
            )
        data_sets = self.blend.data_sets
        valid = len(cursor.places) == len(data_sets)
        if not (valid and all(map(self._may_be, range(len(data_sets)), cursor.places))):
            raise BalanceError("the stored place in the data is damaged, its numbers disagree: start without it")

    def _may_be(self, data_set: int, place: Place) -> bool:
        """Whether this stream can have read a data set up to ``place``."""
        lengths = self.blend.data_sets[data_set].lengths
        passed = place.counts.documents + place.counts.dropped + place.counts.skipped
        if place.position >= lengths.size or passed != place.epoch * lengths.size + place.position:
            return False
        if not place.first:
            return True
        labels = lengths[self._reader.order(data_set, place.epoch)[place.position]] - 1
        return self.rule.long_documents == SPLIT and place.first % self.rule.seq_length == 0 and place.first < labels

    def _state(self, cursor: Cursor) -> np.ndarray:
        """The cursor as the kernels' table, a copy of one's own."""
        known, state = self._known
        if cursor is not known:  # it was not made here: a stored one
            self.check(cursor)
            state = cursor.table
            self._known = cursor, state
        return state.copy()

    def epoch(self, enough_pieces: int, enough_room: int) -> EpochTotals:
        """What one epoch of all data sets gives, counted until it has ``enough_pieces`` that take ``enough_room`` tokens.

        Data of any size are thus measured in milliseconds.
        """
        while not (self._counted[2] >= enough_pieces and self._counted[3] >= enough_room):
            chunk = next(self._uncounted, None)
            if chunk is None:
                break
            kernels.count_pieces(chunk, self._rule, self._counted)
        return EpochTotals(*self._counted.tolist())

    def _check_data(self, documents: Documents) -> None:
        totals = np.zeros(4, np.int64)
        for chunk in documents.chunks():
            kernels.count_pieces(chunk, self._rule, totals)
            if totals[2]:
                return
        raise nothing_to_learn(documents, self.rule)


def _check_blend(blend: Blend, seed: int) -> None:
    weights, count = blend.weights, len(blend.data_sets)
    if not 0 < count <= _MOST_DATA_SETS or len(weights) != count:
        raise BalanceError(f"a blend of {count} data sets with {len(weights)} weights: give each data set one weight")
    if not all(0 < weight < float("inf") for weight in weights):
        raise BalanceError(f"weights of a blend must be above 0, not {min(weights)}: leave out what is not to be read")
    if not 0 <= seed < reading.MOST_WHOLE:
        raise BalanceError(f"seed {seed}: choose one from 0 to {reading.MOST_WHOLE - 1}")
