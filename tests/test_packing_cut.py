"""Global batches: runs of the stream without a gap, whose fallback bins hold them, and which are as full as they can be."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from packed_data import behind, blend, blends, pieces_of, rows, rules, stream, wlb_like

from megatron_balance.errors import BalanceError
from megatron_balance.packing import kernels
from megatron_balance.packing.cut import batches, cut
from megatron_balance.packing.documents import Blend, Documents
from megatron_balance.packing.pieces import PieceRule
from megatron_balance.packing.stream import Counts, Cursor, Stream

compiling = settings(deadline=None)  # the first example may wait for the compiler
SEEDS = st.integers(0, 2**53 - 1)
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def first_fit_decreasing(sizes: list[int], num_bins: int, capacity: int) -> list[int] | None:
    """Bin of each size, or None where one finds no room."""
    free, bins = [capacity] * num_bins, [-1] * len(sizes)
    for piece in sorted(range(len(sizes)), key=lambda piece: -sizes[piece]):
        bins[piece] = next((number for number, room in enumerate(free) if room >= sizes[piece]), -1)
        if bins[piece] < 0:
            return None
        free[bins[piece]] -= sizes[piece]
    return bins


def check_bins(batch) -> None:
    rule = batch.rule
    assert len(batch.pieces) == batch.bins.size
    load = np.bincount(batch.bins, rule.room(batch.pieces.tokens), minlength=batch.num_bins)
    assert load.size == batch.num_bins and load.min() > 0 and load.max() <= rule.seq_length
    assert batch.fill == pytest.approx(load.sum() / (batch.num_bins * rule.seq_length))


@compiling
@given(blends(least_documents=8), rules(), SEEDS, SIZES)
def test_batches_of_any_sizes_lose_and_repeat_nothing(of, rule, seed, sizes):
    cursor, dealt = stream(of, rule, seed).start, []
    for num_bins in sizes:  # each batch cut by a process of its own, from the cursor that the last one stored
        dealer = stream(of, rule, seed)
        try:
            batch = cut(dealer, cursor, num_bins)
        except BalanceError:
            assert_too_few(of, rule, num_bins)
            continue
        check_bins(batch)
        dealt += rows(batch.pieces)
        assert batch.start == cursor and batch.stop.counts == cursor.counts + batch.counts
        assert batch.counts.pieces == len(batch.pieces) and batch.counts.tokens == batch.pieces.tokens.sum()
        cursor = Cursor.from_json(json.loads(json.dumps(batch.stop.to_json())))
    dealer = stream(of, rule, seed)
    assert dealt == rows(dealer.pieces(dealer.start, len(dealt)))
    assert cursor == behind(dealer, dealer.start, len(dealt))


def test_data_that_fill_the_first_batch_fill_all():
    """Of a little less than an epoch each: where in an epoch a batch begins is not what it may fail for."""
    rule, filled = PieceRule(64), 0
    for seed in range(12):
        lengths = np.random.default_rng(seed).integers(2, 60, 60)
        of = Blend.of([Documents.of("few", lengths)])
        num_bins = int(np.ceil(rule.room(lengths - 1).sum() / 0.98 / 64))
        dealer = stream(of, rule, seed)
        try:
            batch = cut(dealer, dealer.start, num_bins)
        except BalanceError:
            continue
        for _ in range(20):
            batch = cut(dealer, batch.stop, num_bins)
            check_bins(batch)
        filled += 1
    assert filled > 1


def assert_too_few(of, rule: PieceRule, num_bins: int) -> None:
    pieces = [
        end - first for each in of.data_sets for length in each.lengths for first, end in pieces_of(int(length), rule)
    ]
    assert len(pieces) < num_bins or rule.room(np.array(pieces)).sum() < num_bins * rule.seq_length


@compiling
@given(blends(least_documents=8), rules(), SEEDS, st.integers(1, 9))
def test_a_run_ends_where_the_next_piece_would_not_fit(of, rule, seed, num_bins):
    dealer = stream(of, rule, seed)
    try:
        batch = cut(dealer, dealer.start, num_bins)
    except BalanceError:
        assume(False)
    count = len(batch.pieces)
    sizes = rule.room(dealer.pieces(dealer.start, count + 1).tokens).tolist()
    target = 0.985 * num_bins * rule.seq_length
    nearer = abs(sum(sizes) - target) < abs(sum(sizes[:-1]) - target)
    assert not nearer or first_fit_decreasing(sizes, num_bins, rule.seq_length) is None
    packed = first_fit_decreasing(sizes[:-1], num_bins, rule.seq_length)
    if count == num_bins:
        assert sorted(batch.bins.tolist()) == [*range(num_bins)]
    elif len(set(packed)) == num_bins:
        assert batch.bins.tolist() == packed
    if sum(sizes[:-2]) >= target:
        assert count == num_bins


@compiling
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), st.integers(1, 20), st.integers(1, 60))
def test_kernels_pack_like_a_plain_first_fit_decreasing(sizes, num_bins, count):
    sizes, count = np.array(sizes), min(count, len(sizes))
    order = kernels.longest_first(sizes)
    np.testing.assert_array_equal(order, np.argsort(-sizes, kind="stable"))
    leaves = 1 << (num_bins - 1).bit_length()
    free, bins = np.full(2 * leaves, -1), np.empty(count, np.int32)
    free[leaves : leaves + num_bins] = 0
    homeless = kernels.first_fit(sizes, order, 5000, bins, free)
    packed = first_fit_decreasing(sizes[:count].tolist(), num_bins, 5000)
    assert homeless == sizes[:count][bins < 0].sum()
    assert packed is None if homeless else bins.tolist() == packed


@pytest.mark.parametrize("seq_length", [4096, 8192, 32768])
@pytest.mark.parametrize("sets", [1, 3])
def test_large_batches_are_full_and_leave_room(seq_length, sets):
    lengths = wlb_like()
    of = blend(*np.array_split(lengths, sets), weights=[5, 3, 2][:sets])
    dealer = stream(of, PieceRule(seq_length))
    made = list(batches(dealer, dealer.start, [256, 300, 512, 256] * 8))
    for batch in made:
        check_bins(batch)
    fills = [batch.fill for batch in made]
    assert min(fills) >= 0.98 and max(fills) <= 0.985


def test_an_epoch_cut_into_batches_deals_each_label_once():
    lengths = np.random.default_rng(3).lognormal(np.log(200), 1.4, 3000).astype(np.int32)
    of = blend(lengths)
    dealer, seen = stream(of, PieceRule(512)), np.zeros(int(np.maximum(lengths - 1, 0).sum()), int)
    begins = np.cumsum(np.maximum(lengths - 1, 0)) - np.maximum(lengths - 1, 0)
    for batch in batches(dealer, dealer.start, [2**each for each in range(6)] + [64] * 1000):
        for _, document, first, end in rows(batch.pieces):
            seen[begins[document] + first : begins[document] + end] += 1
        if batch.stop.places[0].epoch == 2:
            break
    assert set(seen.tolist()) <= {2, 3} and batch.stop.counts.tokens == seen.sum()
    assert (seen == 3).sum() < 64 * 512  # the last batch ends within the third epoch


def test_tiny_pieces_reach_every_bin():
    of = blend([3] * 2000)
    dealer = stream(of, PieceRule(100))
    batch = cut(dealer, dealer.start, 10)
    check_bins(batch)
    assert len(batch.pieces) == 492 and sorted(np.bincount(batch.bins).tolist())[0] == 42


@pytest.mark.parametrize(
    ("policy", "counts"),
    [
        ("split", Counts(tokens=32, pieces=4)),
        ("truncate", Counts(tokens=32, pieces=4, documents=4, truncated=4, lost=4 * 32)),
    ],
)
def test_documents_longer_than_a_bin_fill_bins(policy, counts):
    dealer = stream(blend([41] * 9), PieceRule(8, 1, policy))
    batch = cut(dealer, dealer.start, 4)
    check_bins(batch)
    assert batch.fill == 1.0 and batch.bins.tolist() == [0, 1, 2, 3]
    assert batch.counts == counts


def test_dropped_and_skipped_documents_are_counted():
    of = blend([41, 9, 1, 9, 0, 41, 9])
    dealer = Stream(of, PieceRule(8, 1, "drop"), 0, lambda *_: np.arange(7))
    batch = cut(dealer, dealer.start, 3)
    assert rows(batch.pieces) == [(0, 1, 0, 8), (0, 3, 0, 8), (0, 6, 0, 8)]
    assert batch.counts == Counts(tokens=24, pieces=3, documents=3, dropped=2, skipped=2, lost=80)
    assert batch.stop.epochs == 1


def test_padding_to_the_alignment_takes_room():
    dealer = stream(blend([6] * 40), PieceRule(16, 8))
    batch = cut(dealer, dealer.start, 4)
    check_bins(batch)
    assert len(batch.pieces) == 8 and batch.fill == 1.0 and batch.counts.tokens == 40


@pytest.mark.parametrize(
    ("lengths", "num_bins", "said"),
    [
        ([9], 1, "1 documents with 8 tokens to learn from, in 1 pieces.*1 sequences of 64 tokens takes up to 64"),
        ([60, 60, 1], 3, "2 documents with 118 tokens.*3 sequences of 64"),
        ([2] * 900, 256, "900 documents with 900 tokens"),
        ([30, 30, 30], 2, "3 documents with 87 tokens"),
    ],
)
def test_fewer_documents_than_one_global_batch(lengths, num_bins, said):
    dealer = stream(blend(lengths), PieceRule(64))
    with pytest.raises(BalanceError, match=said):
        cut(dealer, dealer.start, num_bins)


def test_one_document_may_be_a_batch():
    dealer = stream(blend([300]), PieceRule(64))
    made = [cut(dealer, dealer.start, 4), cut(dealer, dealer.start, 2)]
    assert [rows(batch.pieces) for batch in made] == [[(0, 0, 64 * k, 64 * k + 64) for k in range(n)] for n in (4, 2)]
    with pytest.raises(BalanceError, match="global batch of 0 sequences"):
        cut(dealer, dealer.start, 0)


def test_batches_of_a_blend_never_change():
    of = blend([5, 9, 1, 30, 4] * 3, [7, 7, 7] * 3, [3, 12, 0] * 3, weights=[5, 3, 2])
    dealer = Stream(
        of, PieceRule(16), 3, lambda place, epoch: np.roll(np.arange(of.data_sets[place].lengths.size), epoch)
    )
    made = [(len(batch.pieces), batch.bins.tolist()) for batch in batches(dealer, dealer.start, [2, 3, 4])]
    assert made == [(5, [1, 0, 0, 0, 1]), (3, [0, 1, 2]), (9, [0, 2, 2, 3, 0, 1, 1, 2, 3])]
    assert dealer.identity.data == "a312e23abfe7426cedb539783e6fdb04ad635a1ea3cb2ffeeb9cdef009370b56"
