"""How long a packed step takes: the schedule's simulation with micro-batches that differ."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from megatron_balance.errors import BalanceError
from megatron_balance.kernels import Program, packed_steps
from megatron_balance.packing.grid import Grid
from megatron_balance.schedule.order import schedule_order
from megatron_balance.schedule.simulate import build_program


class StepJudge:
    """Judges what the data-parallel ranks of a grid are given; built once, then one pass over the operations a rank.

    The stages are equal: each takes ``1 / (PP * V)`` of a micro-batch's seconds. Transfers take no time. Ranks that run in
    lockstep wait for the slowest of them in every pass, so that the step of a lockstep group is that of the element-wise
    maximum of its ranks' micro-batches.
    """

    def __init__(self, grid: Grid) -> None:
        """Put all operations of a step in order.

        Raises:
            BalanceError: Megatron would refuse this schedule, or lockstep groups do not divide the data-parallel ranks.
        """
        topology = grid.topology
        if topology.data_size % grid.lockstep_size:
            raise BalanceError(
                f"{topology.data_size} data-parallel ranks do not divide into groups of {grid.lockstep_size} that share their "
                "experts: change --expert-model-parallel-size"
            )
        self.grid = grid
        self.program = _program(grid)

    def step_s(self, micro_batch_s: np.ndarray) -> float:
        """Seconds of the step: those of the slowest rank.

        Args:
            micro_batch_s: forward and backward seconds of each micro-batch in all stages together, shape [2, DP, M].
        """
        return float(self.rank_steps(micro_batch_s).max())

    def rank_steps(self, micro_batch_s: np.ndarray) -> np.ndarray:
        """Seconds of the step of each lockstep group, shape [DP / lockstep_size]; arguments as for ``step_s``."""
        return packed_steps(self.program, self.grid.topology.pipeline_size, self.stage_s(micro_batch_s))

    def stage_s(self, micro_batch_s: np.ndarray) -> np.ndarray:
        """Forward, then backward seconds of one stage for the micro-batches of each lockstep group, [groups, 2 * M]."""
        topology = self.grid.topology
        data_size, microbatches = topology.data_size, topology.num_microbatches
        if micro_batch_s.shape != (2, data_size, microbatches):
            raise ValueError(f"seconds of shape [2, {data_size}, {microbatches}] needed, not {micro_batch_s.shape}")
        groups = data_size // self.grid.lockstep_size
        slowest = micro_batch_s.reshape(2, groups, self.grid.lockstep_size, microbatches).max(axis=2)
        return slowest.transpose(1, 0, 2).reshape(groups, 2 * microbatches) / topology.num_stages

    def ideal_s(self, micro_batch_s: np.ndarray) -> float:
        """Seconds of a step in which no rank ever waits; arguments as for ``step_s``."""
        topology = self.grid.topology
        total_s = float(np.add.accumulate(micro_batch_s.ravel())[-1])  # summed in one order everywhere
        return total_s / (topology.data_size * topology.pipeline_size)

    def step_over_ideal(self, micro_batch_s: np.ndarray) -> float:
        """The step over one in which no rank ever waits; arguments as for ``step_s``."""
        return self.step_s(micro_batch_s) / self.ideal_s(micro_batch_s)


@lru_cache(maxsize=64)
def judge_of(grid: Grid) -> StepJudge:
    """The judge of a grid, kept for the next batch."""
    return StepJudge(grid)


def micro_batch_s(bins: np.ndarray, piece_s: np.ndarray, empty_s: np.ndarray, grid: Grid) -> np.ndarray:
    """Forward and backward seconds of the micro-batches of a placement, shape [2, DP, M].

    Args:
        bins: bin of each piece as ``Grid`` numbers them, shape [pieces].
        piece_s: forward and backward seconds that each piece adds to its bin, shape [2, pieces].
        empty_s: forward and backward seconds of a bin besides its pieces, shape [2].
        grid: where the bins are run.
    """
    topology = grid.topology
    data_size, microbatches = topology.data_size, topology.num_microbatches
    cell = bins // topology.micro_batch_size  # k * DP + r
    cells = data_size * microbatches
    seconds = np.array([np.bincount(cell, weights, cells) for weights in piece_s])
    seconds += np.asarray(empty_s)[:, None] * topology.micro_batch_size
    return seconds.reshape(2, microbatches, data_size).transpose(0, 2, 1)


def _program(grid: Grid) -> Program:
    """The schedule's program, its durations looked up by direction and micro-batch alone."""
    topology = grid.topology
    order = schedule_order(topology)
    program = build_program(topology, order)
    is_backward = program.cost // topology.num_stages
    microbatch = order.microbatch.ravel()[program.slot]
    return program._replace(cost=is_backward * np.int32(topology.num_microbatches) + microbatch)
