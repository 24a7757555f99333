"""How long one training step takes, from the seconds that each stage needs for a forward and a backward pass.

An operation starts when its rank has finished the one before it (``order.py``) and its input has arrived: the output
of the stage before for a forward pass, the gradient of the stage after for a backward pass. A transfer holds up nobody
but its receiver, for ``p2p_s`` seconds.

A combined forward and backward pass (``overlap_moe``) takes as long as both, as they share the processor and only their
communication, which is in no cost, hides behind the other's work; the outputs of both leave at its end. Approximated: its
forward part may begin before the gradient for its backward part has arrived, where Megatron waits for both before the first
layer; and the output of a forward part, which leaves before the last weight gradient and the loss are computed, leaves after
them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_balance.errors import BalanceError
from megatron_balance.kernels import Program, mark_critical, run_program, sort_operations
from megatron_balance.schedule.order import Order, schedule_order
from megatron_balance.topology import Topology


@dataclass(frozen=True)
class Timeline:
    """One simulated step. Operation [rank, i] is the i-th that pipeline rank ``rank`` runs.

    Attributes:
        order: kind, chunk and micro-batch of every operation, arrays of shape [PP, 2 * M * V].
        start_s, end_s: seconds since the step began, shape [PP, 2 * M * V].
        critical: bool, shape [PP, 2 * M * V]; the operations of one critical path, a chain without slack from the
            first operation of the step to its last. Their durations and the hops between them add up to ``step_s``.
    """

    order: Order
    start_s: np.ndarray
    end_s: np.ndarray
    critical: np.ndarray

    @property
    def step_s(self) -> float:
        return float(self.end_s[:, -1].max())

    @property
    def busy_s(self) -> np.ndarray:
        """Seconds that each pipeline rank computes, shape [PP]."""
        return (self.end_s - self.start_s).sum(axis=1)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they wait."""
        return 1.0 - float(self.busy_s.mean()) / self.step_s


def build_program(topology: Topology, order: Order) -> Program:
    """The operations of ``order``, sorted topologically."""
    slots, ranks, each = order.chunk.size, topology.pipeline_size, order.chunk.shape[1]
    rank = np.repeat(np.arange(ranks), each)
    is_backward = order.is_backward.ravel().astype(np.int64)
    microbatch = order.microbatch.ravel()
    stage = order.chunk.ravel() * np.int64(ranks) + rank
    cost = is_backward * topology.num_stages + stage
    slot_of = np.empty((2 * topology.num_stages, topology.num_microbatches), dtype=np.int32)
    slot_of[cost, microbatch] = np.arange(slots)
    receives = stage != np.where(is_backward, topology.num_stages - 1, 0)
    sending = cost + np.where(receives, 2 * is_backward - 1, 0)
    source = slot_of[sending, microbatch]
    source += order.combined.ravel()[source]  # what a combined pass computes leaves when its backward half ends
    sender = np.where(receives, source, np.int32(slots))
    slot, place = sort_operations(sender, ranks)
    before = np.where(slot % each == 0, slots, slot - 1)
    return Program(rank[slot].astype(np.int32), cost[slot].astype(np.int32), place[before], place[sender[slot]], slot)


class Simulator:
    """Simulates steps of one topology; built once, then a single pass over the operations for each set of costs."""

    def __init__(self, topology: Topology, p2p_s: float = 0.0) -> None:
        """Put all operations of a step in order.

        Args:
            topology: sizes of the pipeline and the step.
            p2p_s: seconds from the end of an operation to the arrival of its output on the next rank.

        Raises:
            BalanceError: Megatron would refuse this schedule, or ``p2p_s`` is not a time.
        """
        if not 0 <= p2p_s < math.inf:
            raise BalanceError(f"the time of a transfer must be zero or more seconds, not {p2p_s}")
        self.topology = topology
        self.p2p_s = float(p2p_s)
        self.order = schedule_order(topology)
        self.program = build_program(topology, self.order)

    def step_s(self, forward_s: np.ndarray, backward_s: np.ndarray) -> float:
        """Seconds of a step in which stage s takes ``forward_s[s]`` and ``backward_s[s]`` for each micro-batch.

        Args:
            forward_s, backward_s: shape [stages], or [stages, M] where the micro-batches differ; stage
                ``chunk * PP + rank`` is chunk ``chunk`` of pipeline rank ``rank``.
        """
        return self._run(*self._durations(forward_s, backward_s))[0]

    def timeline(self, forward_s: np.ndarray, backward_s: np.ndarray) -> Timeline:
        """The same step with the start and end of every operation, and one critical path."""
        program, durations = self._durations(forward_s, backward_s)
        _, end = self._run(program, durations)
        critical = np.zeros(program.slot.size, dtype=bool)
        mark_critical(program, end, self.p2p_s, critical)
        return Timeline(
            self.order,
            start_s=self._by_rank(end[:-1] - durations[program.cost]),
            end_s=self._by_rank(end[:-1]),
            critical=self._by_rank(critical),
        )

    def _durations(self, forward_s: np.ndarray, backward_s: np.ndarray) -> tuple[Program, np.ndarray]:
        """A row of durations, and the program that looks its operations up in it."""
        durations = np.array([forward_s, backward_s], dtype=np.float64)
        stages, microbatches = self.topology.num_stages, self.topology.num_microbatches
        if durations.shape == (2, stages):
            return self.program, durations.ravel()
        if durations.shape == (2, stages, microbatches):
            return self._program_by_microbatch, durations.ravel()
        raise ValueError(f"costs of shape [{stages}] or [{stages}, {microbatches}] needed, not {durations.shape[1:]}")

    @cached_property
    def _program_by_microbatch(self) -> Program:
        microbatch = self.order.microbatch.ravel()[self.program.slot]
        return self.program._replace(cost=self.program.cost * np.int32(self.topology.num_microbatches) + microbatch)

    def _run(self, program: Program, durations: np.ndarray) -> tuple[float, np.ndarray]:
        free, end = np.empty(self.topology.pipeline_size), np.empty(program.slot.size + 1)
        return run_program(program, durations, self.p2p_s, free, end), end

    def _by_rank(self, values: np.ndarray) -> np.ndarray:
        """Values of the program's operations [N] in the order of each rank, shape [PP, 2 * M * V]."""
        by_rank = np.empty_like(values)
        by_rank[self.program.slot] = values
        return by_rank.reshape(self.order.chunk.shape)
