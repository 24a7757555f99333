"""Replay of recorded steps with other durations.

The durations of a trace are a table [steps, operations of a step, data-parallel ranks]. A pass, the optimizer, and whatever
else a rank does alone lasts from its start to its end; a transfer or collective only from when its last peer has started:
what was spent in waiting for that peer follows from the other durations. Transfers of one call begin when the last of all their
peers has started. The graph of ``graph.py`` turns durations into starts
and ends, for all steps and all what-ifs at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_balance.diagnosis.cells import Cells, cells_of
from megatron_balance.diagnosis.graph import Group, Nodes, calls_of, groups_of, is_exchange
from megatron_balance.diagnosis.trace import (
    BEGIN,
    CLIP,
    EMBEDDING,
    FINISH,
    GATHER,
    LAYERNORM,
    PASSES,
    PAUSE,
    SCATTER,
    SEPARATE,
    TRANSFERS,
    Trace,
    of_kinds,
)
from megatron_balance.errors import BalanceError

# Their ideal duration is the median, as one slow transfer would spoil the mean; everything else has its mean.
COMMUNICATION = (*TRANSFERS, GATHER, SCATTER, SEPARATE, LAYERNORM, EMBEDDING, CLIP, FINISH)
OPERATION_OF = {name: f"{name.split('-')[0]}-pp-comm" for name in TRANSFERS}  # both ends of a transfer count as one
_EARLIEST_S = -0.01  # a transfer that ends this long before its peer starts is no transfer but a clock's error
_AT_ONCE = 1 << 15  # durations of an operation that are replayed at once, so that they stay in the cache


@dataclass(frozen=True)
class Moments:
    """Starts and ends of all operations, shape [steps, nodes, lanes], in seconds since their step began."""

    start_s: np.ndarray
    end_s: np.ndarray


class Replay:
    """The recorded steps as durations and dependencies.

    Attributes:
        trace: what was recorded.
        steps: numbers of the steps, int64 [steps].
        nodes: the operations of a step, by kind, pipeline rank, chunk and micro-batch.
        lanes: data-parallel ranks whose operations are all there, int64 [lanes].
        groups: the operations in an order in which each comes after what it waits for.
        start_s, end_s: as recorded, on the trace's clock, shape [steps, nodes, lanes].
        actual_s: durations, of transfers and collectives only what follows the last peer's start; [steps, nodes, lanes].
        ideal_s: durations when nothing straggles: the mean of their kind, for communication the median; [nodes].
    """

    def __init__(self, trace: Trace) -> None:
        """Raises BalanceError: the trace lacks operations of some step (see ``cells.whole``), or they wait in a circle."""
        self.trace = trace
        cells = cells_of(trace)
        self.lanes = np.unique(cells.row_lane)
        self.steps = cells.steps
        start_s, end_s = (cells.table(values)[:, :, self.lanes] for values in (trace.start_s, trace.end_s))
        if np.isnan(start_s).any() or cells.place.size != start_s.size:
            raise BalanceError("the trace lacks operations of some steps or has some twice")
        names = ("kind", "stage", "chunk", "microbatch", "order")
        labels = {name: getattr(cells, name) for name in names}
        kinds = trace.kinds
        in_turn, stages = trace.job.in_turn, trace.job.topology.pipeline_size
        if PAUSE in kinds and not in_turn:  # there every pause is within some operation
            pauses = _Pauses.of(trace, cells, self.lanes, start_s, end_s)
            start_s, end_s = np.concatenate([start_s, pauses.start_s], 1), np.concatenate([end_s, pauses.end_s], 1)
            more = (kinds.index(PAUSE), np.arange(stages), -1, -1, 0)
            labels = {
                name: np.concatenate([labels[name], np.broadcast_to(value, stages)])
                for name, value in zip(names, more, strict=True)
            }
        self.nodes = Nodes(kinds=kinds, **labels)
        self.start_s, self.end_s = start_s, end_s
        calls = calls_of(self.nodes, stages, start_s, end_s) if in_turn else None
        cell = start_s[0, :, 0], end_s[0, :, 0]
        self.groups = groups_of(self.nodes, trace.job.topology, *cell, calls, trace.job.sends_ahead)
        self._calls = [call for of_rank in calls or () for call in of_rank if len(call) > 1]

    @cached_property
    def actual_s(self) -> np.ndarray:
        begin_s, exchanges = self.start_s.copy(), [group for group in self.groups if group.transfers]
        for group in exchanges:
            members = list(group.members)
            last_s = self.start_s[:, [*members, *group.sent]].max(axis=1, keepdims=True)
            begin_s[:, members] = last_s.max(axis=2, keepdims=True) if group.all_lanes else last_s
        for call in self._calls:
            begin_s[:, call] = begin_s[:, call].max(axis=1, keepdims=True)
        seconds = self.end_s - begin_s
        if self.trace.job.in_turn:  # clocks were compared, and a rank may end its step long before the last
            return seconds
        moved = [member for group in exchanges for member in group.members]
        seconds[:, moved] = np.where(seconds[:, moved] <= _EARLIEST_S, 0.0, seconds[:, moved])
        return seconds

    @cached_property
    def paused_s(self) -> np.ndarray:
        """Seconds of each operation but exchanges that are noted pauses of the garbage collector, [steps, nodes, lanes]."""
        trace = self.trace
        if not trace.job.in_turn:
            return np.where(self.is_operation(PAUSE)[:, None], self.actual_s, 0.0)
        own = self.nodes.are(*(name for name in self.nodes.kinds if name == BEGIN or not is_exchange(name)))
        paused = np.zeros_like(self.start_s)
        for row in np.flatnonzero(trace.are(PAUSE)):
            step, lane = np.searchsorted(self.steps, trace.step[row]), np.searchsorted(self.lanes, trace.dp_rank[row])
            mine = np.flatnonzero(own & (self.nodes.stage == trace.pp_rank[row]))
            end_s = self.end_s[step, mine, lane]  # what lies before its last peer came is no time of the operation
            first_s = np.maximum(end_s - self.actual_s[step, mine, lane], trace.start_s[row])
            last_s = np.minimum(end_s, trace.end_s[row])
            paused[step, mine, lane] += np.maximum(last_s - first_s, 0.0)
        return paused

    @cached_property
    def ideal_s(self) -> np.ndarray:
        ideal = np.empty(self.nodes.kind.size)
        for kind, name in enumerate(self.nodes.kinds):
            mine = self.nodes.kind == kind
            if mine.any():
                average = np.median if name in COMMUNICATION else np.mean
                ideal[mine] = average(self.actual_s[:, mine])
        return ideal

    @property
    def recorded_step_s(self) -> np.ndarray:
        """Seconds of each step as recorded, shape [steps]."""
        return self.end_s.max(axis=(1, 2)) - self.began_s

    @cached_property
    def began_s(self) -> np.ndarray:
        """Where each step begins, on the trace's clock; in turn, where the last rank has ended the step before. [steps]"""
        begins = self.is_operation(BEGIN)
        if not (self.trace.job.in_turn and begins.any()):
            return self.start_s.min(axis=(1, 2))
        return self.start_s[:, begins].max(axis=(1, 2))

    def operations(self) -> tuple[str, ...]:
        """Kinds of operations as the slowdowns name them: both ends of a transfer are one."""
        present = np.unique(self.nodes.kind)
        return tuple(
            dict.fromkeys(OPERATION_OF.get(self.nodes.kinds[kind], self.nodes.kinds[kind]) for kind in present)
        )

    def is_operation(self, operation: str) -> np.ndarray:
        """Whether each node is of such a kind, bool [nodes]."""
        return self.nodes.are(*(name for name in self.nodes.kinds if OPERATION_OF.get(name, name) == operation))

    def steps_s(self, chosen: np.ndarray) -> np.ndarray:
        """Seconds of each step with the chosen operations as they were and all others ideal.

        Args:
            chosen: bool [what-ifs, nodes].

        Returns:
            Shape [what-ifs, steps].
        """
        lanes, steps = self.lanes.size, self.steps.size
        result = np.empty((chosen.shape[0], steps))
        each = max(1, _AT_ONCE // (chosen.shape[0] * lanes))
        rows = [np.flatnonzero(chosen[:, node]) for node in range(chosen.shape[1])]
        for first in range(0, steps, each):
            part = slice(first, min(first + each, steps))
            actual = self.actual_s[part]
            shape = (chosen.shape[0], actual.shape[0], lanes)

            def durations(node: int, actual=actual, shape=shape) -> np.ndarray:
                seconds = np.full(shape, self.ideal_s[node])
                seconds[rows[node]] = actual[:, node]
                return seconds

            result[:, part] = run(self.groups, durations)
        return result

    def steps_of_lanes_s(self) -> np.ndarray:
        """Seconds of each step with one data-parallel rank as it was and all others ideal, shape [lanes, steps].

        All ideal ranks are alike, so that one stands for all.
        """
        lanes, steps = self.lanes.size, self.steps.size
        result = np.empty((lanes, steps))
        each = max(1, _AT_ONCE // (2 * lanes))
        for first in range(0, steps, each):
            part = slice(first, min(first + each, steps))
            actual = self.actual_s[part]
            shape = (*actual[:, 0].shape, min(lanes, 2))

            def durations(node: int, actual=actual, shape=shape) -> np.ndarray:
                seconds = np.full(shape, self.ideal_s[node])
                seconds[..., 0] = actual[:, node]
                return seconds

            result[:, part] = run(self.groups, durations).T
        return result

    def steps_with_s(self, seconds: np.ndarray) -> np.ndarray:
        """Seconds of each step with these durations [steps, nodes, lanes], shape [steps]."""
        return run(self.groups, lambda node: seconds[:, node])

    def moments(self, seconds: np.ndarray | None = None) -> Moments:
        """When each operation starts and ends with these durations, by default as they were.

        Args:
            seconds: shape [steps, nodes, lanes], or whatever of it broadcasts (``ideal_s[:, None]``).
        """
        seconds = np.broadcast_to(self.actual_s if seconds is None else seconds, self.actual_s.shape)
        moments = Moments(np.empty(seconds.shape), np.empty(seconds.shape))
        run(self.groups, lambda node: seconds[:, node], moments)
        return moments


def run(
    groups: tuple[Group, ...], durations: Callable[[int], np.ndarray], moments: Moments | None = None
) -> np.ndarray:
    """Seconds of steps whose operations last so long.

    Args:
        groups: the operations in order.
        durations: seconds of a node, any shape [..., lanes].
        moments: filled with the starts and ends of all operations, [steps, nodes, lanes], where durations are [steps, lanes].

    Returns:
        The last end, shape [...].
    """
    kept, dropped = _lives(groups)
    ends: dict[int, np.ndarray] = {}
    step_s = None
    for group, drop in zip(groups, dropped, strict=True):
        seconds = [durations(member) for member in group.members]
        starts = [_latest(ends, waits, seconds[0]) for waits in group.waits]
        if group.transfers:
            start = starts[0]
            for other in starts[1:]:
                start = np.maximum(start, other)
            if group.all_lanes:
                start = start.max(axis=-1, keepdims=True)
            begins = [start] * len(starts)
        else:
            begins = starts
        for member, begin, duration, launched in zip(group.members, begins, seconds, starts, strict=True):
            end = begin + duration
            if moments is not None:
                moments.start_s[:, member], moments.end_s[:, member] = launched, end
            if member in kept:
                ends[member] = end
            if kept.get(member, 0) == 0:
                last = end.max(axis=-1)
                step_s = last if step_s is None else np.maximum(step_s, last)
        for node in drop:
            del ends[node]
    return step_s


def _lives(groups: tuple[Group, ...]) -> tuple[dict[int, int], list[list[int]]]:
    """How often each node is waited for, and the nodes that nobody waits for any more after each group."""
    last: dict[int, int] = {}
    kept: dict[int, int] = {}
    for number, group in enumerate(groups):
        for waits in group.waits:
            for node in waits:
                last[node] = number
                kept[node] = kept.get(node, 0) + 1
    dropped: list[list[int]] = [[] for _ in groups]
    for node, number in last.items():
        dropped[number].append(node)
    return kept, dropped


def _latest(ends: dict[int, np.ndarray], waits: tuple[int, ...], like: np.ndarray) -> np.ndarray:
    if not waits:
        return np.zeros_like(like)
    latest = ends[waits[0]]
    for node in waits[1:]:
        latest = np.maximum(latest, ends[node])
    return latest


@dataclass(frozen=True)
class _Pauses:
    """Pauses of the garbage collector that hold up a rank between its passes, one node a pipeline rank: [steps, PP, lanes]."""

    start_s: np.ndarray
    end_s: np.ndarray

    @classmethod
    def of(
        cls,
        trace: Trace,
        cells: Cells,
        lanes: np.ndarray,
        start_s: np.ndarray,
        end_s: np.ndarray,
    ) -> _Pauses:
        """A pause inside a pass is part of that pass and not counted again; those between passes count after the last."""
        stages = trace.job.topology.pipeline_size
        rows = np.flatnonzero(trace.are(PAUSE))
        step = np.searchsorted(cells.steps, trace.step[rows])
        step_at = np.minimum(step, cells.steps.size - 1)
        lane = np.minimum(np.searchsorted(lanes, trace.dp_rank[rows]), lanes.size - 1)
        known = (cells.steps[step_at] == trace.step[rows]) & (lanes[lane] == trace.dp_rank[rows])
        rows, step, lane = rows[known], step_at[known], lane[known]
        stage = trace.pp_rank[rows].astype(np.int64)
        first_s, last_s = trace.start_s[rows], trace.end_s[rows]
        is_pass = (cells.chunk >= 0) & of_kinds(cells.kind, trace.kinds, PASSES)
        begun = np.full((cells.steps.size, stages, lanes.size), -np.inf)
        apart = np.ones(rows.size, dtype=bool)
        for number in range(stages):
            passes = np.flatnonzero(is_pass & (cells.stage == number))
            begun[:, number] = end_s[:, passes].max(axis=1)
            mine = np.flatnonzero(stage == number)
            for node in passes:
                begin, end = start_s[step[mine], node, lane[mine]], end_s[step[mine], node, lane[mine]]
                apart[mine] &= ~((first_s[mine] >= begin) & (first_s[mine] < end) & (last_s[mine] <= end))
        paused = np.zeros(begun.shape)
        np.add.at(paused, (step[apart], stage[apart], lane[apart]), (last_s - first_s)[apart])
        return cls(begun, begun + paused)
