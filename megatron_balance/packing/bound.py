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

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array, csr_array, hstack, vstack

from megatron_balance.errors import BalanceError
from megatron_balance.packing.cost import BinCost
from megatron_balance.packing.grid import Grid
from megatron_balance.packing.pieces import PieceRule
from megatron_balance.schedule.order import schedule_order
from megatron_balance.schedule.simulate import build_program
from megatron_balance.topology import Topology

_TOLERANCE = 1e-6  # share of the bound, for the solver's feasibility tolerance of 1e-7
_MOST_OPERATIONS = 4096  # of a step, for which the program is solved: a few seconds
_SMALL = 1024  # operations up to which the simplex method is the faster one
_MOST_ORDERED = 2500  # variables that find the k cheapest micro-batches, of which there are M for each k


def lower_bound_s(tokens: np.ndarray, bin_cost: BinCost, rule: PieceRule, grid: Grid) -> float:
    """Seconds that a step with these pieces takes at least, wherever they are placed, without communication.

    At least the passes of the costliest piece through all stages, too. A step of more than 4096 operations gets a weaker
    bound in place of the program's: the work of a rank, and the way of the two cheapest micro-batches to and from the last one.

    Args:
        tokens: tokens of each piece, int64 of shape [pieces].
        bin_cost: what a bin costs; stages are equal.
        rule: capacity and alignment.
        grid: the bins and their schedule.

    Raises:
        BalanceError: there are no pieces, they do not fit into all bins, or Megatron would refuse the schedule.
    """
    topology, room = grid.topology, rule.room(np.asarray(tokens, dtype=np.int64))
    _check_room(room, rule, grid)
    piece_s = bin_cost.piece_s(tokens)
    micro_batch_empty_s = bin_cost.empty_s * topology.micro_batch_size
    total_s = piece_s.sum(axis=1) + grid.num_bins * bin_cost.empty_s
    longest_s = float(piece_s.sum(axis=0).max() + micro_batch_empty_s.sum())
    simple_s = max(longest_s, float(total_s.sum()) / (topology.data_size * topology.pipeline_size))
    numbers = _numbers(topology.num_microbatches)
    floors_s = _floors_s(numbers, piece_s.sum(axis=0), room, rule.seq_length, grid) + numbers * micro_batch_empty_s.sum()
    mean_s = total_s.sum() / (topology.data_size * topology.num_microbatches)
    if mean_s == 0.0:
        return 0.0
    step = _smallest_step(
        topology, total_s[0] / topology.data_size / mean_s, _forward_shares(bin_cost), numbers, floors_s / mean_s
    )
    return simple_s if step is None else max(simple_s, step * mean_s * (1 - _TOLERANCE))


def _check_room(room: np.ndarray, rule: PieceRule, grid: Grid) -> None:
    needed, there = int(room.sum()), grid.num_bins * rule.seq_length
    if room.size == 0:
        raise BalanceError("no pieces, so no step to bound")
    if needed > there or room.max() > rule.seq_length:
        raise BalanceError(
            f"pieces of {needed} tokens, the longest of {room.max()}, do not fit into {grid.num_bins} bins of "
            f"{rule.seq_length}: raise --global-batch-size or take fewer documents"
        )


def _numbers(num_microbatches: int) -> np.ndarray:
    """Numbers k of micro-batches, below all of them, of which any k are bounded together: all, or some spread evenly."""
    most = min(num_microbatches - 1, _MOST_FLOORS)
    return np.unique(np.linspace(1, num_microbatches - 1, most).round().astype(np.int64)) if most else np.empty(0, np.int64)


def _floors_s(numbers: np.ndarray, piece_s: np.ndarray, room: np.ndarray, capacity: int, grid: Grid) -> np.ndarray:
    """Seconds of pieces that any k micro-batches of the mean rank hold at least, for each k in ``numbers``."""
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
    return min(shares), max(shares)


def _smallest_step(
    topology: Topology, forward: float, shares: tuple[float, float], numbers: np.ndarray, floors: np.ndarray
) -> float | None:
    """The linear program, in units of the mean micro-batch; None if the solver gives up.

    Args:
        topology: of the schedule.
        forward: all forward passes of the mean rank.
        shares: of a micro-batch that its forward passes take, at least and at most.
        numbers, floors: any ``numbers[i]`` micro-batches take at least ``floors[i]``.
    """
    microbatches = topology.num_microbatches
    path = _path_rows(topology)
    operations = path.shape[1] - 2 * microbatches
    share = _share_rows(microbatches, operations, shares)
    floor = _floor_rows(microbatches, operations, numbers)
    columns = floor.shape[1]
    rows = vstack([_widened(path, columns), _widened(share, columns), floor], format="csr")
    least = np.concatenate((np.zeros(path.shape[0] + share.shape[0] + numbers.size * microbatches), floors))
    first, stop = operations, operations + microbatches
    sums = np.zeros((2, columns))
    sums[0, first:stop] = 1.0
    sums[1, stop : stop + microbatches] = 1.0
    step = np.zeros(columns)
    step[operations - 1] = 1.0
    result = linprog(
        step,
        A_ub=-rows,
        b_ub=-least,
        A_eq=csr_array(sums),
        b_eq=(microbatches, forward),
        bounds=(0, None),
        method="highs",
    )
    return float(result.fun) if result.status == 0 else None


def _widened(rows: csr_array, columns: int) -> csr_array:
    return hstack([rows, csr_array((rows.shape[0], columns - rows.shape[1]))], format="csr")


def _path_rows(topology: Topology) -> csr_array:
    """Rows ``row @ x >= 0`` that make x[N] the end of the step.

    Columns: ends of the N operations, the end of the step, seconds of each micro-batch [M], its forward seconds [M].
    """
    order = schedule_order(topology)
    program = build_program(topology, order)
    operations, microbatches, stages = program.slot.size, topology.num_microbatches, topology.num_stages
    place, each = np.arange(operations), order.chunk.shape[1]
    last = np.flatnonzero(program.slot % each == each - 1)
    after = np.concatenate((place, place, last_of := np.full(last.size, operations)))
    before = np.concatenate((program.previous, program.sender, last))
    works = np.concatenate((np.ones(2 * operations, dtype=bool), np.zeros(last_of.size, dtype=bool)))
    row = np.arange(after.size)
    waits = before != operations
    source = np.minimum(after, operations - 1)
    microbatch = order.microbatch.ravel()[program.slot[source]]
    total, forward = operations + 1 + microbatch, operations + 1 + microbatches + microbatch
    is_backward = program.cost[source] >= stages
    behind = works & is_backward
    entries = (
        (row, after, 1.0),
        (row[waits], before[waits], -1.0),
        (row[behind], total[behind], -1.0 / stages),
        (row[works], forward[works], np.where(is_backward[works], 1.0, -1.0) / stages),
    )
    return _assembled(entries, (after.size, operations + 1 + 2 * microbatches))


def _share_rows(microbatches: int, operations: int, shares: tuple[float, float]) -> csr_array:
    """Rows that keep the forward seconds of a micro-batch between two shares of its seconds."""
    row = np.arange(microbatches)
    total, forward = operations + row, operations + microbatches + row
    entries = (
        (row, forward, 1.0),
        (row, total, -shares[0]),
        (microbatches + row, forward, -1.0),
        (microbatches + row, total, shares[1]),
    )
    return _assembled(entries, (2 * microbatches, operations + 2 * microbatches))


def _floor_rows(microbatches: int, operations: int, numbers: np.ndarray) -> csr_array:
    """Rows of "the k smallest sum to at least ...": ``k * t_k - sum_j z_kj``, where ``z_kj >= t_k - c_j`` and z, t >= 0."""
    count = numbers.size
    first_t = operations + 2 * microbatches
    first_z = first_t + count
    k, j = (grid.ravel() for grid in np.meshgrid(np.arange(count), np.arange(microbatches), indexing="ij"))
    row, z = np.arange(k.size), first_z + np.arange(k.size)
    last = k.size + np.arange(count)
    entries = (
        (row, z, 1.0),
        (row, first_t + k, -1.0),
        (row, operations + j, 1.0),
        (last, first_t + np.arange(count), numbers.astype(float)),
        (k.size + k, z, -1.0),
    )
    return _assembled(entries, (k.size + count, first_z + k.size))


def _assembled(entries: tuple[tuple[np.ndarray, np.ndarray, np.ndarray | float], ...], shape: tuple[int, int]) -> csr_array:
    row, column = (np.concatenate([entry[place] for entry in entries]) for place in (0, 1))
    value = np.concatenate([np.broadcast_to(value, row.shape) for row, _, value in entries])
    return coo_array((value, (row, column)), shape=shape).tocsr()
