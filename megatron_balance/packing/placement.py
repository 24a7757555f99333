"""Which bin each piece of a global batch goes to: close to a profile of cost over the step, by the schedule's simulation.

Equal micro-batches are not the fastest: a step waits at both of its ends, and whenever the micro-batches behind a costly one
are cheaper. So each place in the step has a target cost (``profile.py``), and the costliest piece is put first, each into the
bin with room whose micro-batch is furthest below its target.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_balance.errors import BalanceError
from megatron_balance.kernels import Shape, improve_placement
from megatron_balance.packing.bins import Load, fill_bins, order_bins
from megatron_balance.packing.cost import BinCost
from megatron_balance.packing.grid import Grid
from megatron_balance.packing.pieces import PieceRule
from megatron_balance.packing.profile import Profile
from megatron_balance.packing.step import judge_of, micro_batch_s

PROFILE, FALLBACK = "profile", "fallback"
EVALUATIONS = 1500  # about 5 ms for 8 pipeline ranks and 20 micro-batches: most of what there is to gain
_SEED = 1


@dataclass(frozen=True, eq=False)
class Placement:
    """The bins of a global batch's pieces.

    Attributes:
        bins: bin of each piece as ``Grid`` numbers them, int32 of shape [pieces].
        method: how they came about: ``profile``, or ``fallback``: the bins given, put in a good order.
        step_s: seconds of the step, simulated.
        ideal_s: seconds of a step in which no rank ever waits.
    """

    bins: np.ndarray
    method: str
    step_s: float
    ideal_s: float


def place(
    tokens: np.ndarray,
    bin_cost: BinCost,
    rule: PieceRule,
    grid: Grid,
    profile: Profile,
    fallback: np.ndarray,
    evaluations: int = EVALUATIONS,
) -> Placement:
    """The better of two placements by simulation, improved: that of the profile, and the bins given in a good order.

    Deterministic: no clock, draws of a fixed seed, equal pieces in their own order.

    Args:
        tokens: of each piece, shape [pieces].
        bin_cost: seconds of a bin.
        rule: capacity of the bins and alignment of the pieces.
        grid: where the bins are run.
        profile: cost that each micro-batch aims at.
        fallback: bins that hold all pieces, as numbers below ``grid.num_bins`` in any order, shape [pieces].
        evaluations: simulated steps of one rank to improve it with, by exchanges; 0 leaves it as it is.

    Raises:
        BalanceError: fewer pieces than bins, or bins that do not hold the pieces given.
    """
    load = Load.of(tokens, bin_cost, rule)
    _check(load, grid, fallback)
    targets = profile.targets(grid.topology)
    ordered = order_bins(load, grid, targets, fallback)
    placements = [_judged(ordered, FALLBACK, load, grid)]
    filled = fill_bins(load, grid, targets, profile.alpha)
    if filled is not None:
        placements.insert(0, _judged(filled, PROFILE, load, grid))
    best = min(placements, key=_step)
    if evaluations:
        improved = _improved(best.bins, load, grid, evaluations)
        best = min(best, _judged(improved, best.method, load, grid), key=_step)
    return best


def _improved(bins: np.ndarray, load: Load, grid: Grid, evaluations: int) -> np.ndarray:
    topology, judge = grid.topology, judge_of(grid)
    size = topology.micro_batch_size
    return improve_placement(
        judge.program,
        topology.pipeline_size,
        Shape(topology.data_size, topology.num_microbatches, size, grid.lockstep_size),
        bins,
        load.room,
        load.piece_s / topology.num_stages,
        load.empty_s * size / topology.num_stages,
        load.seq_length,
        evaluations,
        _SEED,
    )


def _step(placement: Placement) -> float:
    return placement.step_s


def _judged(bins: np.ndarray, method: str, load: Load, grid: Grid) -> Placement:
    judge, seconds = judge_of(grid), micro_batch_s(bins, load.piece_s, load.empty_s, grid)
    return Placement(bins, method, judge.step_s(seconds), judge.ideal_s(seconds))


def _check(load: Load, grid: Grid, bins: np.ndarray) -> None:
    pieces, num_bins = load.room.size, grid.num_bins
    grid.check_filled_by(pieces)
    if bins.shape != load.room.shape or bins.min() < 0 or bins.max() >= num_bins:
        raise BalanceError(f"the bins given are not numbers of {num_bins} bins for {pieces} pieces")
    held = np.bincount(bins, minlength=num_bins)
    if held.min() == 0:
        raise BalanceError(f"bin {int(held.argmin())} of those given is empty")
    fullest = int(np.bincount(bins, load.room, num_bins).max())
    if fullest > load.seq_length:
        raise BalanceError(f"a bin given holds {fullest} tokens, {load.seq_length} fit")
