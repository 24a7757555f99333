"""The stream of pieces: each label once an epoch, shares of the blend, and cursors that continue exactly."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_data import behind, blend, blends, counts_before, pieces_of, read, rows, rules, shuffled, stream

from megatron_balance.errors import BalanceError
from megatron_balance.packing.pieces import PieceRule
from megatron_balance.packing.stream import Cursor, Stream
from megatron_balance.reading import DamageError

compiling = settings(deadline=None)  # the first example may wait for the compiler
SEEDS = st.integers(0, 2**53 - 1)


def through_json(cursor: Cursor) -> Cursor:
    return Cursor.from_json(json.loads(json.dumps(cursor.to_json())))


@compiling
@given(blends(), rules(), SEEDS, st.integers(0, 300))
def test_each_data_set_is_read_in_its_order_and_counted(of, rule, seed, count):
    dealer = stream(of, rule, seed)
    dealt = rows(dealer.pieces(dealer.start, count))
    cursor = behind(dealer, dealer.start, count)
    assert len(dealt) == count
    for data_set, place in enumerate(cursor.places):
        mine = [piece[1:] for piece in dealt if piece[0] == data_set]
        assert mine == list(islice(read(of, rule, seed, data_set), len(mine)))
        assert place.counts == counts_before(of, rule, seed, data_set, place)
        assert (place.counts.tokens, place.counts.pieces) == (sum(end - first for _, first, end in mine), len(mine))


@compiling
@given(blends(), rules(), SEEDS)
def test_an_epoch_deals_every_label_once(of, rule, seed):
    dealer = stream(of, rule, seed)
    once = [
        sorted(
            (document, *piece)
            for document, length in enumerate(each.lengths.tolist())
            for piece in pieces_of(length, rule)
        )
        for each in of.data_sets
    ]
    dealt = rows(dealer.pieces(dealer.start, 30 * sum(map(len, once))))
    for data_set, expected in enumerate(once):
        mine = [piece[1:] for piece in dealt if piece[0] == data_set]
        for begin in range(0, len(mine) - len(expected) + 1, len(expected)):
            assert sorted(mine[begin : begin + len(expected)]) == expected


@compiling
@given(blends(), SEEDS)
def test_pieces_of_split_documents_cover_all_labels(of, seed):
    dealer = stream(of, PieceRule(7), seed)
    pieces = rows(dealer.pieces(dealer.start, 200))
    for data_set, each in enumerate(of.data_sets):
        labels = int(np.maximum(each.lengths - 1, 0).sum())
        dealt = [
            (document, label)
            for place, document, first, end in pieces
            if place == data_set
            for label in range(first, end)
        ]
        for begin in range(0, len(dealt) - labels + 1, labels):
            epoch = dealt[begin : begin + labels]
            assert len(set(epoch)) == labels and all(label < each.lengths[document] - 1 for document, label in epoch)


@compiling
@given(blends(), rules(), SEEDS)
def test_shares_are_within_a_piece_at_all_times(of, rule, seed):
    dealer = stream(of, rule, seed)
    dealt = rows(dealer.pieces(dealer.start, 300))
    largest = max(end - first for _, _, first, end in dealt)
    weights = [Fraction(weight) / sum(map(Fraction, of.weights)) for weight in of.weights]
    taken = [0] * len(weights)
    for data_set, _, first, end in dealt:
        taken[data_set] += end - first
        total = sum(taken)
        assert all(abs(mine - weight * total) <= largest for mine, weight in zip(taken, weights, strict=True))


@compiling
@given(blends(), rules(), SEEDS, st.lists(st.integers(0, 60), max_size=6))
def test_a_stop_anywhere_changes_nothing(of, rule, seed, runs):
    whole = stream(of, rule, seed)
    cursor, resumed = whole.start, []
    for run in runs:
        dealer = stream(of, rule, seed)  # as a process started anew
        resumed += rows(dealer.pieces(cursor, run))
        cursor = through_json(behind(dealer, cursor, run))
    assert resumed == rows(whole.pieces(whole.start, sum(runs)))
    assert cursor == behind(whole, whole.start, sum(runs))


@compiling
@given(blends(), rules(), SEEDS, st.integers(0, 40), st.integers(0, 400))
def test_a_run_is_as_long_as_its_room(of, rule, seed, least, room):
    dealer = stream(of, rule, seed)
    run = dealer.pieces(dealer.start, least, room)
    more = dealer.pieces(dealer.start, len(run) + 1)
    taken = np.cumsum(rule.room(more.tokens))
    assert rows(more)[:-1] == rows(run)
    assert len(run) == max(least, int((taken <= room).sum()))


def test_long_epochs_are_read_window_by_window():
    sets = [np.random.default_rng(each).integers(2, 9, 150_000) for each in range(2)]
    of = blend(*sets, weights=[2, 1])
    dealer = stream(of, PieceRule(8))
    pieces = dealer.pieces(dealer.start, 450_000)
    for data_set, lengths in enumerate(sets):
        mine = pieces.document[pieces.data_set == data_set]
        order = np.concatenate([shuffled(of, 0)(data_set, epoch) for epoch in range(3)])
        assert mine.size > 130_000
        np.testing.assert_array_equal(mine, order[: mine.size])
        np.testing.assert_array_equal(pieces.tokens[pieces.data_set == data_set], lengths[mine] - 1)
    middle = behind(dealer, dealer.start, 300_000)
    np.testing.assert_array_equal(dealer.pieces(middle, 150_000).document, pieces.document[300_000:])


def test_order_of_a_blend_never_changes():
    of = blend([5, 9, 1, 30, 4], [7, 7, 7], [3, 12, 0], weights=[5, 3, 2])
    dealer = Stream(
        of, PieceRule(8), 3, lambda data_set, epoch: np.roll(np.arange(of.data_sets[data_set].lengths.size), epoch)
    )
    assert rows(dealer.pieces(dealer.start, 20)) == GOLDEN


GOLDEN = [
    *[(0, 0, 0, 4), (2, 0, 0, 2), (1, 0, 0, 6), (0, 1, 0, 8), (1, 1, 0, 6), (0, 3, 0, 8), (2, 1, 0, 8), (0, 3, 8, 16)],
    *[
        (1, 2, 0, 6),
        (2, 1, 8, 11),
        (0, 3, 16, 24),
        (2, 0, 0, 2),
        (1, 2, 0, 6),
        (0, 3, 24, 29),
        (1, 0, 0, 6),
        (0, 4, 0, 3),
    ],
    *[(0, 4, 0, 3), (2, 1, 0, 8), (0, 0, 0, 4), (0, 1, 0, 8)],
]


def test_epochs_are_asked_for_when_they_are_reached():
    of, asked = blend([3, 3, 1]), []

    def orders(data_set: int, epoch: int) -> np.ndarray:
        asked.append((data_set, epoch))
        return np.arange(3)

    dealer = Stream(of, PieceRule(4), 0, orders)
    assert not asked
    middle = behind(dealer, dealer.start, 2)
    assert asked == [(0, 0)] and middle.epochs == 0
    assert behind(dealer, middle, 1).epochs == 1 and asked == [(0, 0), (0, 1)]


def test_lengths_and_orders_may_be_mapped_files(tmp_path):
    lengths, order = np.array([4, 9, 2, 6], np.int32), np.array([2, 0, 3, 1], np.uint32)
    for name, array in (("lengths", lengths), ("order", order)):
        (tmp_path / name).write_bytes(b"header" + array.tobytes())
    mapped = {
        name: np.memmap(tmp_path / name, kind, "r", offset=6)
        for name, kind in (("lengths", np.int32), ("order", np.uint32))
    }
    of = blend(lengths)
    object.__setattr__(of.data_sets[0], "lengths", mapped["lengths"])
    dealer = Stream(of, PieceRule(4), 0, lambda *_: mapped["order"])
    pieces = [(0, 2, 0, 1), (0, 0, 0, 3), (0, 3, 0, 4), (0, 3, 4, 5), (0, 1, 0, 4), (0, 1, 4, 8), (0, 2, 0, 1)]
    assert rows(dealer.pieces(dealer.start, 7)) == pieces


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ((blend([4, 5, 6]), PieceRule(4), 2), "seed 1.*seed 2"),
        ((blend([4, 5, 6]), PieceRule(8), 1), "bins of 4 tokens.*bins of 8 tokens"),
        ((blend([4, 5, 6]), PieceRule(4, 2), 1), "alignment 1.*alignment 2"),
        ((blend([4, 5, 6]), PieceRule(4, 1, "drop"), 1), "documents split.*documents drop"),
        ((blend([4, 5, 7]), PieceRule(4), 1), "data [0-9a-f]{12}.*data [0-9a-f]{12}"),
        ((blend([4, 5, 6], [4, 5, 6]), PieceRule(4), 1), "data "),
    ],
)
def test_a_cursor_of_another_stream_is_refused(other, said):
    mine = stream(blend([4, 5, 6]), PieceRule(4), 1)
    cursor = behind(mine, mine.start, 2)
    with pytest.raises(BalanceError, match=said):
        stream(*other).pieces(cursor, 1)


def test_identity_is_of_contents_and_weights_not_of_names():
    def identity(*sets, weights, name="set"):
        of = blend(*sets, weights=weights)
        for documents in of.data_sets:
            object.__setattr__(documents, "name", name)
        return stream(of, PieceRule(4)).identity

    same = identity([4, 5], [6], weights=[1, 2])
    assert identity([4, 5], [6], weights=[1, 2], name="moved") == same
    assert identity([4, 5], [6], weights=[2, 1]) != same
    assert identity([6], [4, 5], weights=[1, 2]) != same


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "x"}, "format is 'x'"),
        ({"format_version": 9}, "format_version 9"),
        ({"seed": -1}, "seed is -1"),
        ({"places": []}, "places is"),
        ({"places": [{}]}, "lacks places"),
        ({"long_documents": "keep"}, "long_documents is 'keep'"),
        ({"alignment": 3}, "do not hold a whole number"),
        ({"extra": 1}, "unknown extra"),
    ],
)
def test_a_damaged_cursor_is_not_read(change, said):
    values = stream(blend([4, 5, 6]), PieceRule(4)).start.to_json()
    with pytest.raises(DamageError, match=said):
        Cursor.from_json(values | change)


@pytest.mark.parametrize(
    "change",
    [{"position": 3}, {"position": 2}, {"epoch": 1}, {"first": 3}, {"first": 8}, {"documents": 7}, {"skipped": 1}],
)
def test_a_cursor_that_contradicts_itself_is_refused(change):
    dealer = stream(blend([4, 5, 6]), PieceRule(4))
    values = behind(dealer, dealer.start, 2).to_json()
    assert values["places"][0][next(iter(change))] != next(iter(change.values()))
    values["places"][0] |= change
    with pytest.raises(BalanceError, match="damaged"):
        dealer.pieces(Cursor.from_json(values), 1)


@pytest.mark.parametrize("lengths", [[1], [0, 1, 1], []])
def test_data_without_a_label_are_refused(lengths):
    with pytest.raises(BalanceError, match=f"set 1: nothing to learn from, each of its {len(lengths)} documents"):
        stream(blend([5], lengths), PieceRule(4))


def test_data_of_which_all_is_dropped_are_refused():
    with pytest.raises(BalanceError, match="or has more than 5"):
        stream(blend([6, 1, 9]), PieceRule(4, 1, "drop"))
    dealer = stream(blend([6, 5, 9]), PieceRule(4, 1, "drop"))
    assert rows(dealer.pieces(dealer.start, 2)) == [(0, 1, 0, 4)] * 2


def test_wrong_orders_weights_and_seeds_are_refused():
    of = blend([5, 5])
    with pytest.raises(BalanceError, match="an order of 1 documents for a data set of 2"):
        dealer = Stream(of, PieceRule(4), 0, lambda *_: np.arange(1))
        dealer.pieces(dealer.start, 1)
    for weights in ([0.0], [-1.0], [float("nan")], [0.5, 0.5]):
        object.__setattr__(of, "weights", weights)
        with pytest.raises(BalanceError, match="weight"):
            stream(of, PieceRule(4))
    with pytest.raises(BalanceError, match="seed -1"):
        Stream(blend([5]), PieceRule(4), -1, shuffled(of, 0))
