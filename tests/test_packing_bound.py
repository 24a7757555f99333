"""The lower bound of a packed step: below every placement, and what can be worked out by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.errors import BalanceError
from megatron_balance.packing.bound import lower_bound_s
from megatron_balance.packing.cost import FIXED, SHAPES, VARIABLE, BinCost, SequenceCost
from megatron_balance.packing.grid import Grid
from megatron_balance.packing.pieces import PieceRule
from megatron_balance.packing.step import StepJudge, micro_batch_s
from megatron_balance.topology import Topology

RULE = PieceRule(seq_length=16)
RATIO = SequenceCost.of_ratio(8.0)
WINDOWED = SequenceCost((1.0, 3.0), ((None, 0.1, 0.15), (4, 0.3, 0.9)))  # forward passes take 1/4 to 2/5
GRIDS = (
    Grid(Topology(pipeline_size=2, num_microbatches=3)),
    Grid(Topology(pipeline_size=3, num_microbatches=2, data_size=2)),
    Grid(Topology(pipeline_size=2, num_microbatches=2, data_size=2), lockstep_size=2),
    Grid(Topology(pipeline_size=2, num_microbatches=2, virtual_size=2, data_size=2)),
    Grid(Topology(pipeline_size=2, num_microbatches=2, micro_batch_size=2)),
    Grid(Topology(pipeline_size=1, num_microbatches=2, data_size=2)),
)


def smallest_step_s(tokens: np.ndarray, bin_cost: BinCost, rule: PieceRule, grid: Grid) -> float:
    """Of all placements that fit, empty bins included; infinite where none fits."""
    judge, room, piece_s = StepJudge(grid), rule.room(tokens), bin_cost.piece_s(tokens)
    best = np.inf
    for bins in itertools.product(range(grid.num_bins), repeat=tokens.size):
        if np.bincount(bins, room).max() <= rule.seq_length:
            seconds = micro_batch_s(np.array(bins), piece_s, bin_cost.empty_s, grid)
            best = min(best, judge.step_s(seconds))
    return best


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, RULE.seq_length), min_size=1, max_size=5),
    st.sampled_from(GRIDS),
    st.sampled_from((RATIO, WINDOWED)),
    st.sampled_from(SHAPES),
    st.sampled_from((1, 4)),
)
def test_no_placement_is_below(
    tokens: list[int], grid: Grid, sequence: SequenceCost, shapes: str, alignment: int
) -> None:
    tokens, rule, bin_cost = np.array(tokens), PieceRule(16, alignment), BinCost(sequence, 16, shapes)
    best_s = smallest_step_s(tokens, bin_cost, rule, grid)
    if np.isfinite(best_s):
        assert 0 < lower_bound_s(tokens, bin_cost, rule, grid) <= best_s * (1 + 1e-9)


def test_full_equal_bins_leave_no_choice() -> None:
    grid = Grid(Topology(pipeline_size=4, num_microbatches=6, data_size=2))
    tokens = np.full(grid.num_bins, RULE.seq_length)
    bin_cost = BinCost(RATIO, RULE.seq_length, VARIABLE)
    one_s = 8.0 * 16 + 16**2
    assert lower_bound_s(tokens, bin_cost, RULE, grid) == pytest.approx((6 + 3) / 4 * one_s, rel=1e-5)


def test_one_micro_batch_passes_all_stages() -> None:
    grid = Grid(Topology(pipeline_size=4, num_microbatches=1, data_size=2))
    bin_cost = BinCost(RATIO, RULE.seq_length, VARIABLE)
    mean_s = (8.0 * 18 + 16**2 + 2**2) / 2
    longest_s = 8.0 * 16 + 16**2
    assert longest_s > mean_s
    assert lower_bound_s(np.array([16, 2]), bin_cost, RULE, grid) == pytest.approx(longest_s)
    assert lower_bound_s(np.array([16, 16]), bin_cost, RULE, grid) == pytest.approx(longest_s)


def test_light_ends_beat_equal_bins() -> None:
    """Half of the room is free, so that the ends can be empty: the step is that of the work alone and one way down and up."""
    grid = Grid(Topology(pipeline_size=2, num_microbatches=4))
    bin_cost = BinCost(SequenceCost((1.0, 2.0), ()), RULE.seq_length, VARIABLE)
    tokens = np.ones(32, dtype=np.int64)
    bound_s = lower_bound_s(tokens, bin_cost, RULE, grid)
    judge = StepJudge(grid)
    best_s = min(
        judge.step_s(np.multiply.outer((1.0, 2.0), [counts]))
        for counts in itertools.product(range(17), repeat=4)
        if sum(counts) == 32
    )
    assert bound_s <= best_s == pytest.approx(bound_s, rel=0.02)
    assert best_s < (4 + 1) / 4 * 3.0 * 32 / 2


def test_padding_belongs_to_the_bins() -> None:
    grid = Grid(Topology(pipeline_size=2, num_microbatches=4))
    bin_cost = BinCost(SequenceCost((1.0, 2.0), ()), RULE.seq_length, FIXED)
    assert lower_bound_s(np.array([1]), bin_cost, RULE, grid) == pytest.approx((4 + 1) / 2 * 3.0 * 16, rel=1e-5)


def test_a_long_step_gets_a_weaker_bound() -> None:
    grid = Grid(Topology(pipeline_size=8, num_microbatches=1024))
    tokens = np.full(grid.num_bins, RULE.seq_length)
    bound_s = lower_bound_s(tokens, BinCost(RATIO, RULE.seq_length, VARIABLE), RULE, grid)
    one_s = 8.0 * 16 + 16**2
    assert 1024 / 8 * one_s < bound_s <= (1024 + 7) / 8 * one_s


def test_too_many_tokens_are_refused() -> None:
    grid = Grid(Topology(pipeline_size=2, num_microbatches=2))
    with pytest.raises(BalanceError, match="33 tokens, the longest of 11, do not fit into 2 bins of 16"):
        lower_bound_s(np.full(3, 11), BinCost(RATIO, 16), RULE, grid)
    with pytest.raises(BalanceError, match="no pieces"):
        lower_bound_s(np.array([], dtype=np.int64), BinCost(RATIO, 16), RULE, grid)
