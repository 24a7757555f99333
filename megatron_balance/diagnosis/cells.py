"""Which operation of a step each row of a trace is, and which steps are whole.

An operation of a step, a *node*, is the same on all data-parallel ranks and in all steps: a pass by its pipeline rank, chunk
and micro-batch; anything else by its kind, its pipeline rank, and how many of them its rank started before it in the step. A
*cell* is one step of one data-parallel rank. The rows of a trace fill the table of nodes by cells, once each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_balance.diagnosis.trace import PASSES, PAUSE, Sequences, Trace, of_kinds
from megatron_balance.errors import BalanceError

_MOST_SHOWN = 3


@dataclass(frozen=True, eq=False)
class Cells:
    """Where the rows of a trace stand.

    Attributes:
        rows: the rows that are in the table, all but pauses of the garbage collector, which may be any number.
        row_node, row_step, row_lane: node, index of the step and data-parallel rank of each of them.
        steps: numbers of the steps, int64 [steps].
        kind, stage, chunk, microbatch: of each node, [nodes]; chunk and micro-batch are -1 where the rows do not tell.
        order: how many of its kind its pipeline rank starts before it in a step (passes: ``chunk * M + micro-batch``), [nodes].
        lanes: data-parallel ranks of the job.
    """

    rows: np.ndarray
    row_node: np.ndarray
    row_step: np.ndarray
    row_lane: np.ndarray
    steps: np.ndarray
    kind: np.ndarray
    stage: np.ndarray
    chunk: np.ndarray
    microbatch: np.ndarray
    order: np.ndarray
    lanes: int

    @cached_property
    def place(self) -> np.ndarray:
        """Place of each row in the table [steps, nodes, lanes], flattened."""
        return (self.row_step * self.kind.size + self.row_node) * self.lanes + self.row_lane

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.steps.size, self.kind.size, self.lanes

    def table(self, values: np.ndarray) -> np.ndarray:
        """Values of the trace's rows, float64 [steps, nodes, lanes]; NaN where no row is."""
        table = np.full(self.shape, np.nan)
        table.ravel()[self.place] = values[self.rows]
        return table

    def counts(self) -> np.ndarray:
        """Rows in each place, [steps, nodes, lanes]."""
        return np.bincount(self.place, minlength=int(np.prod(self.shape))).reshape(self.shape)


def cells_of(trace: Trace) -> Cells:
    """Number the operations of a step and find each row's.

    Raises:
        BalanceError: there are no rows, or a step would have more operations than the trace has rows.
    """
    topology = trace.job.topology
    rows = np.flatnonzero(~trace.are(PAUSE))
    if not rows.size:
        raise BalanceError("the trace has no operations: give one of a job that trained at least one step")
    noted = trace if rows.size == trace.kind.size else take(trace, rows)
    steps = trace.steps
    row_step, row_lane = np.searchsorted(steps, noted.step), noted.dp_rank.astype(np.int64)
    families = len(trace.kinds) * topology.pipeline_size
    family = noted.kind.astype(np.int64) * topology.pipeline_size + noted.pp_rank
    order = _order_of_rows(noted, (row_step * topology.data_size + row_lane) * families + family)
    width = int(order.max()) + 1
    if families * width > max(64 * rows.size, 1 << 20):
        raise BalanceError(
            f"a step of {width} operations of one kind on a rank does not fit a trace of {rows.size} rows: "
            "its micro-batch numbers are damaged"
        )
    code = family * width + order
    present = np.flatnonzero(np.bincount(code, minlength=families * width))
    number = np.full(families * width, -1, dtype=np.int64)
    number[present] = np.arange(present.size)
    row_node = number[code]
    labels = np.full((2, present.size), -1, dtype=np.int64)
    labels[0, row_node], labels[1, row_node] = noted.chunk, noted.microbatch
    family_of, order_of = np.divmod(present, width)
    kind_of, stage_of = np.divmod(family_of, topology.pipeline_size)
    return Cells(rows, row_node, row_step, row_lane, steps, kind_of, stage_of, *labels, order_of, topology.data_size)


def _order_of_rows(noted: Trace, family: np.ndarray) -> np.ndarray:
    """``Cells.order`` of each row. Rows of a ``family`` are of one kind and one rank in one step."""
    of_pass = noted.are(*PASSES)
    order = np.empty(family.size, dtype=np.int64)
    chunk = noted.chunk[of_pass].astype(np.int64)
    order[of_pass] = chunk * noted.job.topology.num_microbatches + noted.microbatch[of_pass]
    order[~of_pass] = _turn_in_group(family[~of_pass], noted.start_s[~of_pass])
    return order


def _turn_in_group(group: np.ndarray, start_s: np.ndarray) -> np.ndarray:
    """How many rows of the same group start before each row."""
    by_time = np.argsort(start_s, kind="stable")
    by_group = by_time[np.argsort(group[by_time], kind="stable")]
    ordered = group[by_group]
    first = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    turn = np.empty(group.size, dtype=np.int64)
    turn[by_group] = np.arange(group.size) - np.repeat(first, np.diff(np.r_[first, group.size]))
    return turn


def whole(trace: Trace) -> Trace:
    """The trace without what is not whole: operations that few ranks have, ranks and steps that lack some or have some twice.

    What is left out is said in ``problems``. A data-parallel rank that is left out keeps its number.

    Raises:
        BalanceError: nothing is left, or a pipeline rank has no pass in any step.
    """
    trace = _with_all_ranks(trace)
    cells = cells_of(trace)
    counts = cells.counts()
    wanted_lanes = counts.any(axis=(0, 1))
    usual = (counts[:, :, wanted_lanes] > 0).mean(axis=(0, 2)) >= 0.5
    good = (counts == 1).all(axis=1) if usual.all() else (counts[:, usual] == 1).all(axis=1)  # [steps, lanes]
    _check_stages(trace, cells, usual)
    return trace if good.all() and usual.all() else _without(trace, cells, counts, usual, good)


def _with_all_ranks(trace: Trace) -> Trace:
    """The trace without steps of which some pipeline rank has nothing in any replica, as when its recorder gave up."""
    steps, stages = trace.steps, trace.job.topology.pipeline_size
    there = np.zeros((steps.size, stages), dtype=bool)
    there[np.searchsorted(steps, trace.step), trace.pp_rank] = True
    complete = there.all(axis=1)
    if complete.all() or not complete.any():
        return trace
    line = (
        f"{int((~complete).sum())} of {steps.size} steps ({_some(steps[~complete])}) have nothing of pipeline rank"
        f" {_some(np.flatnonzero(~there.all(axis=0)))}, and are left out"
    )
    kept = take(trace, complete[np.searchsorted(steps, trace.step)])
    return replace(kept, sequences=_of_steps(trace.sequences, complete), problems=(*trace.problems, line))


def _of_steps(sequences: Sequences | None, steps: np.ndarray) -> Sequences | None:
    if sequences is None:
        return None
    return sequences.at(steps)


def _check_stages(trace: Trace, cells: Cells, usual: np.ndarray) -> None:
    stages = np.unique(cells.stage[usual & of_kinds(cells.kind, trace.kinds, PASSES)])
    missing = np.setdiff1d(np.arange(trace.job.topology.pipeline_size), stages)
    if missing.size:
        raise BalanceError(
            f"no forward or backward pass of pipeline rank {_some(missing)} of {trace.job.topology.pipeline_size} is in the "
            "trace: add the files of those ranks, or correct pp_size"
        )


def _without(trace: Trace, cells: Cells, counts: np.ndarray, usual: np.ndarray, good: np.ndarray) -> Trace:
    problems = list(trace.problems)
    twice = (counts > 1).any(axis=(1, 2))
    lanes_ok = good.mean(axis=0) >= 0.5
    if twice.all() and not lanes_ok.any():
        step = int(cells.steps[0])
        raise BalanceError(
            f"every step has operations twice (step {step}: {int((counts[0] > 1).sum())} of them): the files are of "
            "two runs, or their numbers are damaged; diagnose the files of one run"
        )
    if not lanes_ok.all():
        lost = np.flatnonzero(~lanes_ok)
        problems.append(
            f"data-parallel rank {_some(lost)} of {lanes_ok.size} lacks operations in most steps and is left out: files of "
            "its ranks are missing, cut off or of another run"
        )
    if not lanes_ok.any():
        raise BalanceError(
            "no data-parallel rank has all its operations in most steps: files are missing, cut off or of several runs"
        )
    steps_ok = good[:, lanes_ok].all(axis=1)
    if not steps_ok.all():
        lost = cells.steps[~steps_ok]
        why = "operations twice, as in files of two runs" if twice[~steps_ok].all() else "not all their operations"
        problems.append(f"{lost.size} of {steps_ok.size} steps ({_some(lost)}) have {why}, and are left out")
    if not steps_ok.any():
        raise BalanceError(f"none of the {steps_ok.size} steps has all its operations once: {problems[-1]}")
    rare = ~usual & counts[np.ix_(steps_ok, np.ones(usual.size, dtype=bool), lanes_ok)].any(axis=(0, 2))
    if rare.any():
        names = sorted({trace.kinds[kind] for kind in cells.kind[rare]})
        problems.append(
            f"{int(rare.sum())} operations of a step ({', '.join(names)}) are in fewer than half of the steps and are left out"
        )
    keep = np.zeros(trace.kind.size, dtype=bool)
    keep[cells.rows] = usual[cells.row_node]
    keep |= trace.are(PAUSE)
    keep &= lanes_ok[trace.dp_rank] & steps_ok[np.searchsorted(cells.steps, trace.step)]
    return replace(take(trace, keep), sequences=_of_steps(trace.sequences, steps_ok), problems=tuple(problems))


def take(trace: Trace, rows: np.ndarray) -> Trace:
    """The trace with these rows only."""
    names = ("kind", "step", "dp_rank", "pp_rank", "chunk", "microbatch", "start_s", "end_s", "embedding_s")
    return replace(trace, **{name: values[rows] for name in names if (values := getattr(trace, name)) is not None})


def _some(numbers: np.ndarray) -> str:
    shown = ", ".join(str(number) for number in numbers[:_MOST_SHOWN])
    return shown if numbers.size <= _MOST_SHOWN else f"{shown} and {numbers.size - _MOST_SHOWN} more"
