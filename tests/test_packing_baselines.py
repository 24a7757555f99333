"""What a plan is compared with, on cases small enough to follow by hand, and on random ones for what must always hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.errors import BalanceError
from megatron_balance.packing.baselines import (
    Packed,
    concatenate_and_chop,
    deal_small_ends,
    first_fit,
    in_order,
)
from megatron_balance.packing.bins import first_fit_bins
from megatron_balance.packing.cost import VARIABLE, BinCost, SequenceCost
from megatron_balance.packing.grid import Grid
from megatron_balance.packing.pieces import PieceRule
from megatron_balance.topology import Topology

RULE = PieceRule(seq_length=10)
COST = BinCost(SequenceCost.of_ratio(10.0), RULE.seq_length, VARIABLE)


def grid_of(data_size: int, num_microbatches: int = 1, **sizes: int) -> Grid:
    return Grid(Topology(2, num_microbatches, data_size=data_size, **sizes))


def contents(packed: Packed) -> list[list[int]]:
    return [packed.tokens[packed.bins == each].tolist() for each in range(packed.grid.num_bins)]


def test_documents_are_chopped_where_a_bin_is_full() -> None:
    packed = concatenate_and_chop(np.array([4, 0, 9, 7, 20, 3]), RULE, grid_of(2))
    assert contents(packed) == [[4, 6], [3, 7], [10], [10], [3], []]
    assert packed.grid.topology.num_microbatches == 3


def test_in_order_closes_a_bin_at_the_first_piece_that_does_not_fit() -> None:
    packed = in_order(np.array([6, 3, 5, 5, 1, 9, 2, 2]), RULE, grid_of(3))
    assert contents(packed) == [[6, 3], [5, 5], [1], [2], [2], [9]]  # two more for the second micro-batch of three


def test_in_order_makes_whole_groups_of_micro_batches_when_interleaved() -> None:
    packed = in_order(np.full(12, 4), RULE, grid_of(1, 2, virtual_size=2, microbatch_group_size=4))
    assert packed.grid.topology.num_microbatches == 8
    assert contents(packed) == [[4, 4]] * 4 + [[4]] * 4


def test_first_fit_decreasing() -> None:
    room = np.array([3, 6, 5, 2, 4, 8])
    assert first_fit_bins(room, 10).tolist() == [2, 1, 2, 0, 1, 0]


def test_ranks_get_the_costliest_bins_first_and_run_them_in_the_middle() -> None:
    cost = np.array([5.0, 1.0, 4.0, 2.0, 9.0, 3.0])
    number = deal_small_ends(cost, grid_of(2, 3))
    k, rank = np.divmod(number, 2)
    assert rank.tolist() == [1, 0, 1, 1, 0, 0]  # 9, 3, 1 and 5, 4, 2
    assert k.tolist() == [1, 0, 2, 0, 1, 2]


def test_sequences_of_a_micro_batch_cost_alike() -> None:
    cost = np.arange(8.0)
    number = deal_small_ends(cost, grid_of(1, 4, micro_batch_size=2))
    assert sorted(number.tolist()) == list(range(8))
    assert number[[6, 7]].tolist() in ([3, 2], [2, 3], [5, 4], [4, 5])  # together in a middle micro-batch
    assert {number[0] // 2, number[1] // 2} in ({0}, {3})


lengths = st.lists(st.integers(1, RULE.seq_length), min_size=12, max_size=60).map(np.array)


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(1, 3), st.integers(1, 2), st.sampled_from((1, 2)))
def test_every_way_keeps_all_tokens_within_the_bins(tokens: np.ndarray, data_size: int, mbs: int, virtual: int) -> None:
    grid = grid_of(data_size, 2, micro_batch_size=mbs, virtual_size=virtual)
    ways = [concatenate_and_chop(tokens, RULE, grid)]
    for pack in (lambda: in_order(tokens, RULE, grid), lambda: first_fit(tokens, COST, RULE, grid)):
        try:
            ways.append(packed := pack())
        except BalanceError as error:
            assert "cannot fill" in str(error)
            continue
        assert packed.tokens.tolist() == tokens.tolist()
        assert np.bincount(packed.bins, minlength=packed.grid.num_bins).min() > 0
    for packed in ways:
        held = np.bincount(packed.bins, packed.tokens, packed.grid.num_bins)
        assert held.size == packed.grid.num_bins and held.sum() == tokens.sum() and held.max() <= RULE.seq_length
        assert packed.grid.topology.num_microbatches % (2 if virtual == 2 else 1) == 0


def test_padding_to_the_alignment_counts() -> None:
    aligned = PieceRule(seq_length=8, alignment=4)
    tokens = np.array([1, 1, 5, 3])
    assert contents(in_order(tokens, aligned, grid_of(1))) == [[1, 1], [5], [3]]
    assert contents(first_fit(tokens, replace(COST, seq_length=8), aligned, grid_of(1))) == [[1, 1], [5], [3]]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(BalanceError, match="a piece of 11 tokens does not fit into a bin of 10"):
        in_order(np.array([11]), RULE, grid_of(1))
    with pytest.raises(BalanceError, match="3 pieces of documents cannot fill 4 bins"):
        first_fit(np.array([1, 1, 1]), COST, RULE, grid_of(4))
