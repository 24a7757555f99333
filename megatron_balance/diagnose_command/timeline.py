"""A step as it was recorded beside the one in which nothing straggles: what the page draws, and a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_balance.diagnose_command.report import printable
from megatron_balance.diagnosis.replay import Moments, Replay, run
from megatron_balance.diagnosis.trace import PASSES, PAUSE, TRANSFERS, of_kinds
from megatron_balance.trace_events import FIRST_PROCESS, labels, operation

REAL, IDEAL = "real", "ideal"
_STREAMS = {**dict.fromkeys(PASSES, 0), **{name: 2 + place for place, name in enumerate(TRANSFERS)}}
_ONCE = 1  # the stream of data-parallel communication and the optimizer
_STREAM_NAMES = ("compute", "once a step", *TRANSFERS)
_LANES = 1000  # thread numbers between workers' streams: more operations than this never overlap in one


@dataclass(frozen=True, eq=False)
class StepTimeline:
    """The operations of one step, an array element each.

    Attributes:
        step: its number.
        kinds: names of the operations.
        kind: number in ``kinds``.
        dp_rank, pp_rank, chunk, microbatch: as in `Trace`.
        start_s, end_s: seconds since the step began.
        working_s: how long it lasts without the wait for a peer, which is in front: what of a transfer or collective moves data.
    """

    step: int
    kinds: tuple[str, ...]
    kind: np.ndarray
    dp_rank: np.ndarray
    pp_rank: np.ndarray
    chunk: np.ndarray
    microbatch: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray
    working_s: np.ndarray

    @property
    def step_s(self) -> float:
        return float(self.end_s.max()) if self.end_s.size else 0.0

    def are(self, *names: str) -> np.ndarray:
        """Whether each operation is of one of these kinds, bool."""
        return of_kinds(self.kind, self.kinds, names)

    def only(self, shown: np.ndarray) -> StepTimeline:
        """The operations for which ``shown`` is true."""
        labels = (self.kind, self.dp_rank, self.pp_rank, self.chunk, self.microbatch)
        times = (self.start_s, self.end_s, self.working_s)
        return StepTimeline(self.step, self.kinds, *(array[shown] for array in (*labels, *times)))

    @property
    def computes(self) -> np.ndarray:
        """Which operations are forward or backward passes."""
        return self.are(*PASSES)

    @property
    def last_dp_rank(self) -> int:
        """The data-parallel rank whose passes end last: all others wait for it."""
        end_s = np.where(self.computes, self.end_s, -np.inf)
        return int(self.dp_rank[np.argmax(end_s)])

    @property
    def transfers(self) -> np.ndarray:
        """Which operations are transfers between stages."""
        return self.are(*TRANSFERS)


def step_timelines(replay: Replay, step: int) -> dict[str, StepTimeline]:
    """A step as it was recorded, and as it would have been with every duration at its ideal.

    Args:
        replay: of the trace.
        step: number of one of its steps.
    """
    place = int(np.searchsorted(replay.steps, step))
    shape = replay.actual_s[place : place + 1].shape
    ideal_s = np.broadcast_to(replay.ideal_s[:, None], shape[1:])
    moments = Moments(np.empty(shape), np.empty(shape))
    run(replay.groups, lambda node: ideal_s[node][None], moments)
    recorded = replay.start_s[place], replay.end_s[place], replay.actual_s[place]
    return {
        REAL: _timeline(replay, step, *recorded),
        IDEAL: _timeline(replay, step, moments.start_s[0], moments.end_s[0], ideal_s),
    }


def _timeline(replay: Replay, step: int, start_s: np.ndarray, end_s: np.ndarray, working_s: np.ndarray) -> StepTimeline:
    """Of starts, ends and durations of shape [nodes, lanes]."""
    nodes, first_s = replay.nodes, float(start_s.min())
    labels = (nodes.kind, replay.lanes, nodes.stage, nodes.chunk, nodes.microbatch)
    rows = (each[None, :] if each is replay.lanes else each[:, None] for each in labels)
    arrays = (np.broadcast_to(each, start_s.shape).ravel() for each in rows)
    start, end = start_s.ravel() - first_s, end_s.ravel() - first_s
    end = np.maximum(start, end)
    timeline = StepTimeline(step, nodes.kinds, *arrays, start, end, np.clip(working_s.ravel(), 0.0, end - start))
    # Each rank has a node for pauses, had it any or not.
    return timeline.only(~timeline.are(PAUSE) | (end > start))


# --- the trace for Perfetto


def perfetto(timelines: Mapping[str, StepTimeline], job: str) -> str:
    """The steps in the Trace Event Format's JSON object form, a process for each group and data-parallel rank.

    Threads are a pipeline rank's streams; operations that overlap in one stream get lanes of their own, as events of a thread
    must nest.
    """
    events: list[dict[str, Any]] = []
    for group, (name, timeline) in enumerate(timelines.items()):
        events.extend(_group(group, name, timeline))
    other = {"job": printable(job), "step": next(iter(timelines.values())).step}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}, separators=(",", ":"))


def _group(group: int, name: str, timeline: StepTimeline) -> Iterator[dict[str, Any]]:
    dp_ranks = np.unique(timeline.dp_rank)
    base = FIRST_PROCESS + group * (int(dp_ranks.max(initial=0)) + 1)
    for dp_rank in dp_ranks.tolist():
        process = base + dp_rank
        yield from labels("process", process, 0, f"{name} step {timeline.step}, DP rank {dp_rank}", process)
    stream = np.array([_STREAMS.get(kind, _ONCE) for kind in timeline.kinds], dtype=np.int64)[timeline.kind]
    key = (timeline.dp_rank.astype(np.int64) << 32) + timeline.pp_rank.astype(np.int64) * len(_STREAM_NAMES) + stream
    order = np.lexsort((-timeline.end_s, timeline.start_s, key))
    threads: set[tuple[int, int]] = set()
    free: list[float] = []
    last = None
    for row in order.tolist():
        if key[row] != last:
            last, free = key[row], []
        start_us, end_us = round(1e6 * float(timeline.start_s[row])), round(1e6 * float(timeline.end_s[row]))
        lane = next((place for place, until in enumerate(free) if until <= start_us), len(free))
        free[lane : lane + 1] = [end_us]
        process, pp_rank = base + int(timeline.dp_rank[row]), int(timeline.pp_rank[row])
        thread = 1 + (pp_rank * len(_STREAM_NAMES) + int(stream[row])) * _LANES + lane
        if (process, thread) not in threads:
            threads.add((process, thread))
            lanes = f" ({lane + 1})" if lane else ""
            words = f"PP rank {pp_rank}: {_STREAM_NAMES[stream[row]]}{lanes}"
            yield from labels("thread", process, thread, words, thread)
        yield _event(timeline, row, process, thread, start_us, end_us)


def _event(timeline: StepTimeline, row: int, process: int, thread: int, start_us: int, end_us: int) -> dict[str, Any]:
    kind, microbatch = printable(timeline.kinds[timeline.kind[row]]), int(timeline.microbatch[row])
    return operation(
        process,
        thread,
        kind if microbatch < 0 else f"{kind} {microbatch}",
        kind,
        start_us,
        end_us - start_us,
        microbatch=microbatch,
        chunk=int(timeline.chunk[row]),
        waits_us=max(0, end_us - start_us - round(1e6 * float(timeline.working_s[row]))),
    )
