"""Clocks of ranks that disagree: found and set right by what all ranks end together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_balance.diagnosis.trace import CLIP, Trace
from megatron_balance.errors import BalanceError

_TOGETHER = CLIP  # a reduction over all ranks
LEAST_S = 0.01
_ANOTHER_RUN_S = 60.0


def aligned(trace: Trace) -> Trace:
    """The trace with clocks set right that are off by more than 10 ms and 2 % of a step; said in ``problems``.

    A reduction over all ranks ends everywhere at once, up to its own duration. Our recorder has compared the clocks itself, and
    notes with the reduction what a rank does of it alone: its traces are only looked at for files of two runs.

    Raises:
        BalanceError: a rank is more than a minute and ten steps away from the others, which no clock is.
    """
    rows = np.flatnonzero(trace.are(_TOGETHER))
    if not rows.size:
        return trace
    topology = trace.job.topology
    steps, step = np.unique(trace.step[rows], return_inverse=True)
    worker = trace.pp_rank[rows].astype(np.int64) * topology.data_size + trace.dp_rank[rows]
    present, worker = np.unique(worker, return_inverse=True)
    if rows.size != steps.size * present.size:
        return trace
    ends = np.empty((steps.size, present.size))
    ends[step, worker] = trace.end_s[rows]
    ahead = np.median(ends - np.median(ends, axis=1, keepdims=True), axis=0)
    if np.abs(ahead).max() <= LEAST_S:
        return trace
    step_s = float(np.median(_own_spans_s(trace, steps)))
    wrong = np.abs(ahead) > max(LEAST_S, 0.02 * step_s)
    if not wrong.any():
        return trace
    far_s = float(np.abs(ahead).max())
    if far_s > max(_ANOTHER_RUN_S, 10.0 * step_s):
        odd = np.divmod(present[np.abs(ahead).argmax()], topology.data_size)
        raise BalanceError(
            f"the steps of data-parallel rank {odd[1]} on pipeline rank {odd[0]} are {far_s:.0f} s away from those of the others: "
            "the files are of two runs, give those of one"
        )
    if trace.job.in_turn:
        return trace
    shift = np.zeros(topology.pipeline_size * topology.data_size)
    shift[present[wrong]] = ahead[wrong]
    mine = shift[trace.pp_rank.astype(np.int64) * topology.data_size + trace.dp_rank]
    line = (
        f"the clocks of {int(wrong.sum())} of {wrong.size} ranks are off by up to {far_s:.3g} s: they are set by "
        "the end of the gradient clipping, which all ranks reach together"
    )
    return replace(trace, start_s=trace.start_s - mine, end_s=trace.end_s - mine, problems=(*trace.problems, line))


def _own_spans_s(trace: Trace, steps: np.ndarray) -> np.ndarray:
    """Seconds of each step on the first worker's own clock."""
    mine = np.flatnonzero((trace.dp_rank == trace.dp_rank[0]) & (trace.pp_rank == trace.pp_rank[0]))
    step = np.searchsorted(steps, trace.step[mine])
    first, last = np.full(steps.size, np.inf), np.full(steps.size, -np.inf)
    np.minimum.at(first, step, trace.start_s[mine])
    np.maximum.at(last, step, trace.end_s[mine])
    return last - first
