"""What a plan is compared with: stock Megatron's concatenation, packing in order, and first-fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megatron_balance.errors import BalanceError
from megatron_balance.packing import kernels
from megatron_balance.packing.bins import first_fit_bins
from megatron_balance.packing.cost import BinCost
from megatron_balance.packing.grid import Grid
from megatron_balance.packing.pieces import PieceRule


@dataclass(frozen=True, eq=False)
class Packed:
    """Pieces in bins.

    Attributes:
        tokens: of each piece, int64 of shape [pieces].
        bins: bin of each as ``grid`` numbers them, int32 of shape [pieces].
        grid: the bins: the grid asked for, with more micro-batches where it has too few.
    """

    tokens: np.ndarray
    bins: np.ndarray
    grid: Grid


def concatenate_and_chop(tokens: np.ndarray, rule: PieceRule, grid: Grid) -> Packed:
    """Stock Megatron: documents one behind the other, cut wherever a bin is full, bins dealt in this order.

    A document attends to itself alone, so that its parts are the pieces (``--reset-attention-mask``, or packed sequences). The
    last bins are empty if there are too few documents. Nothing is padded, whatever the alignment.

    Args:
        tokens: of each document or piece in the order of the data, shape [documents].
        rule: capacity of the bins.
        grid: where the bins are run.
    """
    parts, bins = chop(tokens, rule.seq_length)
    return Packed(parts, bins.astype(np.int32), _at_least(grid, int(bins[-1]) + 1))


def in_order(tokens: np.ndarray, rule: PieceRule, grid: Grid) -> Packed:
    """Whole pieces in the order of the data, a new bin where the next does not fit, bins dealt round: ``dp_balanced``.

    Where the micro-batches do not come out even, the last bin of several pieces loses its last one to a bin of its own, until
    they do: so does Megatron's scheduler of that name, which knows no cost.

    Raises:
        BalanceError: fewer pieces than bins, or a piece longer than a bin.
    """
    tokens = np.asarray(tokens, dtype=np.int64)
    room = _checked_room(tokens, rule)
    bins = next_fit(room, rule.seq_length)
    grid = _at_least(grid, int(bins[-1]) + 1)
    grid.check_filled_by(tokens.size)
    more = np.arange(bins[-1] + 1, grid.num_bins)
    follows = np.flatnonzero(np.diff(bins, prepend=-1) == 0)  # not the first of its bin
    bins[follows[::-1][: more.size]] = more
    return Packed(tokens, bins.astype(np.int32), grid)


def first_fit(tokens: np.ndarray, bin_cost: BinCost, rule: PieceRule, grid: Grid) -> Packed:
    """First-fit-decreasing bins, dealt to ranks of equal cost and put in an order that keeps the pipeline's ends short.

    Of the bins the costliest is dealt first, to the rank with the least cost that still takes one; a rank's costly ones run in
    the middle of the step. An empty bin gets a piece of the bin that has most.

    Raises:
        BalanceError: fewer pieces than bins, or a piece longer than a bin.
    """
    tokens = np.asarray(tokens, dtype=np.int64)
    bins = first_fit_bins(_checked_room(tokens, rule), rule.seq_length)
    grid = _at_least(grid, int(bins.max()) + 1)
    grid.check_filled_by(tokens.size)
    kernels.fill_empty(kernels.longest_first(rule.room(tokens)), bins, grid.num_bins)
    cost = np.bincount(bins, bin_cost.piece_s(tokens).sum(axis=0), grid.num_bins)
    return Packed(tokens, deal_small_ends(cost, grid)[bins], grid)


def chop(tokens: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and bin, each int64 of shape [parts], of what is left of documents cut after every ``capacity`` tokens."""
    ends = np.cumsum(tokens, dtype=np.int64)
    edges = np.union1d(ends, np.arange(capacity, int(ends[-1]), capacity))
    starts = np.concatenate(([0], edges[:-1]))
    parts = edges - starts
    return parts[parts > 0], starts[parts > 0] // capacity


def next_fit(room: np.ndarray, capacity: int) -> np.ndarray:
    """Bin of each piece, int64 of shape [pieces], in order: a bin is closed by the first piece that does not fit."""
    ends = np.concatenate(([0], np.cumsum(room)))
    first, firsts = 0, []
    while first < room.size:
        firsts.append(first)
        first = int(np.searchsorted(ends, ends[first] + capacity, side="right")) - 1
    return np.repeat(np.arange(len(firsts)), np.diff([*firsts, room.size]))


def deal_small_ends(cost: np.ndarray, grid: Grid) -> np.ndarray:
    """Number in the grid, int32 of shape [bins], of bins that cost ``cost``: ranks alike, the costly ones in their middle."""
    topology = grid.topology
    each = topology.num_microbatches * topology.micro_batch_size
    rank, turn = kernels.deal_longest_first(np.argsort(-cost, kind="stable"), cost, topology.data_size)
    row, j = np.divmod(turn, topology.micro_batch_size)
    k = _small_ends(each // topology.micro_batch_size)[row]
    return ((k * topology.data_size + rank) * topology.micro_batch_size + j).astype(np.int32)


def _small_ends(count: int) -> np.ndarray:
    """Places of the largest, second largest, ... of ``count``: in the middle, then left and right of it in turn."""
    places = np.empty(count, np.int64)
    places[np.concatenate((np.arange(0, count, 2)[::-1], np.arange(1, count, 2)))] = np.arange(count)
    return places


def _at_least(grid: Grid, num_bins: int) -> Grid:
    """The grid, with as many micro-batches as so many bins need; the interleaved schedule takes whole groups of them."""
    topology = grid.topology
    multiple = topology.group_size if topology.virtual_size > 1 else 1
    needed = -(-num_bins // (topology.data_size * topology.micro_batch_size))
    if needed <= topology.num_microbatches:
        return grid
    return replace(grid, topology=replace(topology, num_microbatches=-(-needed // multiple) * multiple))


def _checked_room(tokens: np.ndarray, rule: PieceRule) -> np.ndarray:
    room = rule.room(tokens)
    if room.size and room.max() > rule.seq_length:
        raise BalanceError(
            f"a piece of {room.max()} tokens does not fit into a bin of {rule.seq_length}: raise --seq-length"
        )
    return room
