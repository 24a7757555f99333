"""The ways to fill bins: those of a grid piece by piece after targets, or from bins that are already filled; and first fit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_balance.packing.cost import BinCost
from megatron_balance.packing.grid import Grid
from megatron_balance.packing.kernels import deal_longest_first, first_fit, longest_first, place_pieces
from megatron_balance.packing.pieces import PieceRule


@dataclass(frozen=True, eq=False)
class Load:
    """The pieces of a global batch as something to place.

    Attributes:
        room: tokens that each piece takes in a bin, int64 of shape [pieces].
        piece_s: forward and backward seconds that each adds to its bin, shape [2, pieces].
        empty_s: forward and backward seconds of a bin besides its pieces, shape [2].
        seq_length: capacity of a bin.
    """

    room: np.ndarray
    piece_s: np.ndarray
    empty_s: np.ndarray
    seq_length: int

    @classmethod
    def of(cls, tokens: np.ndarray, bin_cost: BinCost, rule: PieceRule) -> Load:
        """The load of pieces of ``tokens`` tokens, shape [pieces]."""
        tokens = np.asarray(tokens, dtype=np.int64)
        return cls(rule.room(tokens), bin_cost.piece_s(tokens), bin_cost.empty_s, rule.seq_length)

    @cached_property
    def cost(self) -> np.ndarray:
        """Seconds of each piece, forward and backward, shape [pieces]."""
        return self.piece_s[0] + self.piece_s[1]

    @cached_property
    def order(self) -> np.ndarray:
        """Pieces by falling tokens, shape [pieces]."""
        return longest_first(self.room)

    def mean_s(self, grid: Grid) -> float:
        """Seconds of a micro-batch on average."""
        bins = grid.num_bins
        total_s = float(np.add.accumulate(self.cost)[-1]) + bins * float(self.empty_s.sum())  # summed alike everywhere
        return total_s * grid.topology.micro_batch_size / bins


def first_fit_bins(room: np.ndarray, capacity: int) -> np.ndarray:
    """Bin of each piece, int32 of shape [pieces]: the longest first, each into the first bin with room."""
    order = longest_first(room)
    leaves = 1 << (room.size - 1).bit_length()
    free, bins = np.zeros(2 * leaves, np.int64), np.empty(room.size, np.int32)
    first_fit(room, order, capacity, bins, free)
    return bins


def fill_bins(load: Load, grid: Grid, targets: np.ndarray, pull: float) -> np.ndarray | None:
    """The bin of each piece, the costliest placed first, where its micro-batch is furthest below its target.

    Args:
        load: at least as many pieces as bins.
        grid: where the bins are run.
        targets: cost that each micro-batch aims at, in units of the mean one, shape [M].
        pull: weight of what a rank lacks of its share, per micro-batch.

    Returns:
        Bins as ``Grid`` numbers them, int32 of shape [pieces]; None where some piece fitted nowhere.
    """
    topology = grid.topology
    empty_s = float(load.empty_s.sum()) * topology.micro_batch_size
    bins, placed = place_pieces(
        load.order,
        load.room,
        load.cost,
        targets * load.mean_s(grid),
        pull / topology.num_microbatches,
        empty_s,
        load.seq_length,
        topology.data_size,
        topology.micro_batch_size,
        grid.lockstep_size,
    )
    return bins if placed == bins.size else None


def order_bins(load: Load, grid: Grid, targets: np.ndarray, bins: np.ndarray) -> np.ndarray:
    """Filled bins given to ranks and places: the costliest first to the rank with least, there to the highest target.

    Bins of like cost share a micro-batch, and micro-batches of like cost run in lockstep.

    Args:
        load: the pieces.
        grid: where the bins are run.
        targets: as for ``fill_bins``.
        bins: bin of each piece, numbers below ``grid.num_bins``, shape [pieces].

    Returns:
        Bins as ``Grid`` numbers them, int32 of shape [pieces].
    """
    topology, lockstep = grid.topology, grid.lockstep_size
    groups, together = topology.data_size // lockstep, lockstep * topology.micro_batch_size
    cost = np.bincount(bins, load.cost, grid.num_bins)
    costliest = np.argsort(-cost, kind="stable")
    rows = np.add.accumulate(cost[costliest].reshape(-1, together), axis=1)[:, -1]
    places = np.argsort(-targets, kind="stable")
    group, held = deal_longest_first(np.arange(rows.size), rows, groups)
    first = (places[held] * topology.data_size + group * lockstep) * topology.micro_batch_size
    numbers = np.empty(grid.num_bins, dtype=np.int32)
    numbers[costliest] = (first[:, None] + np.arange(together)).ravel()
    return numbers[bins]
