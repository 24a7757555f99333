"""From a trace to what held the job up, how much that costs, and the fix."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_balance.diagnosis.causes import Causes
from megatron_balance.diagnosis.checklist import Checklist
from megatron_balance.diagnosis.costs import RecordedSplit
from megatron_balance.diagnosis.fix import fixes_of
from megatron_balance.diagnosis.replay import Replay
from megatron_balance.diagnosis.result import Diagnosis, Slowdown
from megatron_balance.diagnosis.signals import Signals, signals_of
from megatron_balance.diagnosis.trace import Trace
from megatron_balance.diagnosis.whatif import slowdown_of
from megatron_balance.errors import BalanceError

_HOUR_S, _DAY_H = 3600.0, 24.0


def diagnose(
    trace: Trace,
    slowdown: Slowdown | None = None,
    *,
    replay: Replay | None = None,
    layers: Sequence[int] | None = None,
) -> Diagnosis:
    """Name what slows a job down.

    Args:
        trace: from ``read_trace``.
        slowdown: what the replay says, where it was asked before.
        replay: of this trace, where there is one already.
        layers: of each stage; stage ``chunk * PP + rank`` is a rank's chunk. None for those that the trace names; no
            split is proposed where it names none.

    Raises:
        BalanceError: as ``Replay``, or the layers are not of this job.
    """
    replay = replay or Replay(trace)
    slowdown = slowdown or slowdown_of(trace, replay)
    causes = Causes(replay, signals_of(replay))
    split = _split(replay, causes.signals, layers or trace.job.layers)
    named = causes.verdict(slowdown.slowdown)
    worker = _worker(replay, causes.signals)
    fixes = fixes_of(causes, split, named, worker)
    wasted = 1.0 - causes.ideal_s / causes.actual_s
    gpus = trace.job.world_size
    return Diagnosis(
        slowdown=slowdown,
        causes=causes.shares,
        verdict=named,
        worker=worker,
        checklist=Checklist(causes, split, fixes).checks(),
        fixes=fixes,
        waste_gpu_hours=wasted * gpus * float(slowdown.recorded_s.sum()) / _HOUR_S,
        waste_per_day_gpu_hours=wasted * gpus * _DAY_H,
        by_cause=causes.slowdowns,
    )


def recorded_split(trace: Trace, layers: Sequence[int], replay: Replay | None = None) -> RecordedSplit:
    """The job with the layers that its stages hold: what layers and head cost, and the costs file (``.table()``).

    Raises:
        BalanceError: forward and backward passes run as one, or the layers are not of this job.
    """
    replay = replay or Replay(trace)
    split = _split(replay, signals_of(replay), layers)
    if split is None:
        raise BalanceError("forward and backward passes run as one in this trace: it does not tell what layers cost")
    return split


def _split(replay: Replay, signals: Signals | None, layers: Sequence[int] | None) -> RecordedSplit | None:
    return None if layers is None or signals is None else RecordedSplit(replay, signals, tuple(layers))


def _worker(replay: Replay, signals: Signals | None) -> tuple[int, int] | None:
    """The slow worker, (DP rank, PP rank)."""
    if signals is None or signals.slow_worker is None:
        return None
    stage, lane = signals.slow_worker
    return int(replay.lanes[lane]), stage % replay.trace.job.topology.pipeline_size
