"""A lower bound on the step that any placement of given pieces can reach: one small linear program.

A rank's step T(c) is the longest path through the schedule, a maximum of linear functions of the seconds c_k of its
micro-batches, so it is convex, and it never falls where some c_k grows. The step of all ranks is the largest of theirs, which is
at least their mean, which is at least T of the mean rank. Ranks that wait for one another in every micro-batch (``lockstep``)
run as one whose micro-batches are the longest of theirs, so that this holds for them, too.

What is known of the mean rank, whatever the placement: its micro-batches carry the total over the data-parallel size; and any k
of them carry at least the cheapest way of holding those tokens for which the others have no room, a fractional knapsack that
takes the pieces by what they cost for each token of room. A forward pass takes such a share of its micro-batch's seconds as some
part of the cost has. The bound is the smallest T(c) over all such c.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array, csr_array, hstack, vstack

from megatron_balance.errors import BalanceError
from megatron_balance.packing.cost import BinCost
from megatron_balance.packing.grid import Grid
from megatron_balance.packing.pieces import PieceRule
from megatron_balance.schedule.order import check_schedule, schedule_order
from megatron_balance.schedule.simulate import build_program
from megatron_balance.topology import Topology

_TOLERANCE = 1e-6  # share of the bound, for the solver's feasibility tolerance of 1e-7
_MOST_OPERATIONS = 8192  # of a step, for which the program is solved: a few seconds
_SMALL = 1024  # operations up to which the simplex method is the faster one
_MOST_ORDERED = 2500  # variables that find the k cheapest micro-batches, of which there are M for each k


def lower_bound_s(tokens: np.ndarray, bin_cost: BinCost, rule: PieceRule, grid: Grid) -> float:
    """Seconds that a step with these pieces takes at least, wherever they are placed, without communication.

    At least the passes of the costliest piece through all stages, too. A step of more than 8192 operations gets a weaker
    bound than the program's: the work of a rank, and the way of two cheap micro-batches through the other ranks.

    Args:
        tokens: tokens of each piece, int64 of shape [pieces].
        bin_cost: what a bin costs; stages are equal.
        rule: capacity and alignment.
        grid: the bins and their schedule.

    Raises:
        BalanceError: there are no pieces, they do not fit into all bins, or Megatron would refuse the schedule.
    """
    topology, tokens = grid.topology, np.asarray(tokens, dtype=np.int64)
    check_schedule(topology)
    _check_room(rule.room(tokens), rule, grid)
    longest_s = bin_cost.piece_s(tokens).sum(axis=0).max() + bin_cost.empty_s.sum() * topology.micro_batch_size
    mean = _MeanRank.of(tokens, bin_cost, rule, grid)
    return max(float(longest_s), mean.rough_step_s(topology), mean.step_s(topology))


def _check_room(room: np.ndarray, rule: PieceRule, grid: Grid) -> None:
    needed, there = int(room.sum()), grid.num_bins * rule.seq_length
    if room.size == 0:
        raise BalanceError("no pieces, so no step to bound")
    if needed > there or room.max() > rule.seq_length:
        raise BalanceError(
            f"pieces of {needed} tokens, the longest of {room.max()}, do not fit into {grid.num_bins} bins of "
            f"{rule.seq_length}: raise --global-batch-size or take fewer documents"
        )


@dataclass(frozen=True, eq=False)
class _MeanRank:
    """What is known of the mean rank's micro-batches, whatever the placement.

    Attributes:
        total_s, forward_s: seconds of all of them; of their forward passes.
        shares: of a micro-batch's seconds that its forward passes take, at least and at most.
        numbers: ascending numbers k of micro-batches, int64 of shape [floors].
        floors_s: seconds that any k of them take at least, shape [floors].
    """

    total_s: float
    forward_s: float
    shares: tuple[float, float]
    numbers: np.ndarray
    floors_s: np.ndarray

    @classmethod
    def of(cls, tokens: np.ndarray, bin_cost: BinCost, rule: PieceRule, grid: Grid) -> _MeanRank:
        topology, piece_s = grid.topology, bin_cost.piece_s(tokens)
        empty_s = bin_cost.empty_s * topology.micro_batch_size
        total_s = piece_s.sum(axis=1) / topology.data_size + topology.num_microbatches * empty_s
        numbers = _numbers(topology.num_microbatches)
        held_s = _held_s(numbers, piece_s.sum(axis=0), rule.room(tokens), rule.seq_length, grid)
        return cls(
            float(total_s.sum()),
            float(total_s[0]),
            _forward_shares(bin_cost),
            numbers,
            held_s + numbers * empty_s.sum(),
        )

    def rough_step_s(self, topology: Topology) -> float:
        """The last rank's work, after one micro-batch has come down to it and before one goes back up from it."""
        least_share = min(self.shares[0], 1 - self.shares[1])
        of_two = self.floors_s[self.numbers == 2].sum()  # of the first and the last, if there are two and it is known
        way_s = (topology.pipeline_size - 1) / topology.num_stages * least_share * of_two
        return self.total_s / topology.pipeline_size + way_s

    def step_s(self, topology: Topology) -> float:
        """The smallest step of such micro-batches; 0 where the linear program is too large or the solver gives up."""
        microbatches, operations = topology.num_microbatches, 2 * topology.num_stages * topology.num_microbatches
        if self.total_s == 0.0 or operations > _MOST_OPERATIONS:
            return 0.0
        unit_s = self.total_s / microbatches
        result = linprog(
            **_program(topology, self.forward_s / unit_s, self.shares, self.numbers, self.floors_s / unit_s),
            bounds=(0, None),
            method="highs" if operations <= _SMALL else "highs-ipm",
        )
        return float(result.fun) * unit_s * (1 - _TOLERANCE) if result.status == 0 else 0.0


def _numbers(num_microbatches: int) -> np.ndarray:
    """Numbers k below all micro-batches of which any k are bounded together: all of them, or some, the small ones first."""
    most = min(num_microbatches - 1, _MOST_ORDERED // num_microbatches)
    spread = np.linspace(1, num_microbatches - 1, max(0, most)).round().astype(np.int64)
    return np.union1d(np.arange(1, min(num_microbatches, 3)), spread)


def _held_s(numbers: np.ndarray, piece_s: np.ndarray, room: np.ndarray, capacity: int, grid: Grid) -> np.ndarray:
    """Seconds of the pieces that any k micro-batches of the mean rank hold at least, for each k in ``numbers``."""
    topology = grid.topology
    order = np.argsort(piece_s / room, kind="stable")
    held = np.concatenate(([0], np.cumsum(room[order])))
    cost_s = np.concatenate(([0.0], np.cumsum(piece_s[order])))
    elsewhere = (topology.num_microbatches - numbers) * topology.data_size * topology.micro_batch_size * capacity
    return np.interp(np.maximum(held[-1] - elsewhere, 0), held, cost_s) / topology.data_size


def _forward_shares(bin_cost: BinCost) -> tuple[float, float]:
    """Smallest and largest share that forward passes have of some part of the cost."""
    parts = [bin_cost.sequence.linear, *((forward, backward) for _, forward, backward in bin_cost.sequence.quadratic)]
    shares = [forward / (forward + backward) for forward, backward in parts if forward + backward > 0]
    return min(shares, default=0.0), max(shares, default=1.0)


# --- the linear program, in units of the mean micro-batch
#
# Variables: ends of the N operations, end of the step, seconds of each micro-batch [M], its forward seconds [M], and to say
# "the k cheapest" for each number k: a threshold, and by how much each micro-batch is below it [M].


def _program(
    topology: Topology, forward: float, shares: tuple[float, float], numbers: np.ndarray, floors: np.ndarray
) -> dict[str, Any]:
    """Arguments of ``linprog``; those of this function as in ``_MeanRank``."""
    microbatches = topology.num_microbatches
    path = _path_rows(topology)
    first = path.shape[1] - 2 * microbatches  # column of the first micro-batch's seconds
    stop = first + microbatches
    share, floor = _share_rows(microbatches, first, shares), _floor_rows(microbatches, first, numbers)
    columns = floor.shape[1]
    rows = vstack([_widened(path, columns), _widened(share, columns), floor], format="csr")
    least = np.zeros(rows.shape[0])
    least[rows.shape[0] - floors.size :] = floors
    sums, step = np.zeros((2, columns)), np.zeros(columns)
    sums[0, first:stop] = sums[1, stop : stop + microbatches] = step[first - 1] = 1.0
    return {"c": step, "A_ub": -rows, "b_ub": -least, "A_eq": csr_array(sums), "b_eq": (microbatches, forward)}


def _widened(rows: csr_array, columns: int) -> csr_array:
    return hstack([rows, csr_array((rows.shape[0], columns - rows.shape[1]))], format="csr")


def _path_rows(topology: Topology) -> csr_array:
    """Rows ``row @ x >= 0``: an operation ends its duration after what it waits for, and the step ends after all of them."""
    order = schedule_order(topology)
    program = build_program(topology, order)
    operations, microbatches, stages = program.slot.size, topology.num_microbatches, topology.num_stages
    each = order.chunk.shape[1]
    last = np.flatnonzero(program.slot % each == each - 1)  # of each rank
    operation = np.tile(np.arange(operations), 2)
    before = np.concatenate((program.previous, program.sender))  # ``operations`` where it waits for nothing
    microbatch = order.microbatch.ravel()[program.slot[operation]]
    is_backward = program.cost[operation] >= stages
    row, end = np.arange(operation.size), operation.size + np.arange(last.size)
    waits = before < operations
    total, forward = operations + 1 + microbatch, operations + 1 + microbatches + microbatch
    entries = (
        (row, operation, 1.0),
        (row[waits], before[waits], -1.0),
        (row[is_backward], total[is_backward], -1.0 / stages),
        (row, forward, np.where(is_backward, 1.0, -1.0) / stages),  # backward seconds are the rest of the total
        (end, np.full(last.size, operations), 1.0),
        (end, last, -1.0),
    )
    return _assembled(entries, (row.size + end.size, operations + 1 + 2 * microbatches))


def _share_rows(microbatches: int, first: int, shares: tuple[float, float]) -> csr_array:
    """Rows that keep the forward seconds of a micro-batch between two shares of its seconds."""
    row = np.arange(microbatches)
    total, forward = first + row, first + microbatches + row
    entries = (
        (row, forward, 1.0),
        (row, total, -shares[0]),
        (microbatches + row, forward, -1.0),
        (microbatches + row, total, shares[1]),
    )
    return _assembled(entries, (2 * microbatches, first + 2 * microbatches))


def _floor_rows(microbatches: int, first: int, numbers: np.ndarray) -> csr_array:
    """Rows of "the k cheapest take at least": ``k * t_k - sum_j z_kj``, after those of ``z_kj >= t_k - c_j``."""
    first_t = first + 2 * microbatches
    first_z = first_t + numbers.size
    k, j = (each.ravel() for each in np.indices((numbers.size, microbatches)))
    row, z = np.arange(k.size), first_z + np.arange(k.size)
    t, last = first_t + np.arange(numbers.size), k.size + np.arange(numbers.size)
    entries = (
        (row, z, 1.0),
        (row, first_t + k, -1.0),
        (row, first + j, 1.0),
        (last, t, numbers.astype(np.float64)),
        (k.size + k, z, -1.0),
    )
    return _assembled(entries, (k.size + numbers.size, first_z + k.size))


def _assembled(
    entries: tuple[tuple[np.ndarray, np.ndarray, np.ndarray | float], ...], shape: tuple[int, int]
) -> csr_array:
    row, column = (np.concatenate([entry[place] for entry in entries]) for place in (0, 1))
    value = np.concatenate([np.broadcast_to(value, row.shape) for row, _, value in entries])
    return coo_array((value, (row, column)), shape=shape).tocsr()
