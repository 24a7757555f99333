"""How much slower a job is than one in which nothing straggles, and which operations and workers that goes with.

S is the mean step as replayed over the mean step with every duration at its ideal. S_t leaves one kind of operation as it
was and makes all others ideal; S_w does so for all operations of a data-parallel or a pipeline rank, and takes the smaller of
a worker's two. M_S and M_W are the other way round: by which share of T - T_ideal the step gets shorter when the last
pipeline rank, or the slowest 3 % of the workers, are made ideal.

Source: "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI'25), sections 3 to 5.
"""

from __future__ import annotations

import numpy as np

from megatron_balance.diagnosis.replay import Replay
from megatron_balance.diagnosis.result import Slowdown
from megatron_balance.diagnosis.trace import Trace

SLOWEST_PERCENT = 3


def slowdown_of(trace: Trace, replay: Replay | None = None) -> Slowdown:
    """What the replay says of a trace whose steps are whole.

    Args:
        trace: from ``read_trace``.
        replay: of this trace, where there is one already.

    Raises:
        BalanceError: operations are missing (``cells.whole`` leaves out what is not whole), or wait in a circle.
    """
    replay = replay or Replay(trace)
    operations, stages, data_size = replay.operations(), trace.job.topology.pipeline_size, trace.job.topology.data_size
    steps_s = replay.steps_s(_as_they_were(replay, operations))
    actual_s, ideal_s, without_last_s = steps_s[0], steps_s[1], steps_s[2 + stages]
    stage_s, operation_s = steps_s[2 : 2 + stages], steps_s[3 + stages :]
    lane_s = replay.steps_of_lanes_s()
    ideal = ideal_s.mean()
    by_stage = stage_s.mean(axis=1) / ideal
    by_lane = _spread(lane_s.mean(axis=1) / ideal, replay.lanes, data_size)
    by_worker = np.minimum(by_stage[:, None], by_lane)
    stage_of_step = (stage_s / ideal_s).T
    lane_of_step = _spread((lane_s / ideal_s).T, replay.lanes, data_size)
    lost = actual_s.mean() - ideal
    return Slowdown(
        steps=replay.steps,
        recorded_s=replay.recorded_step_s,
        actual_s=actual_s,
        ideal_s=ideal_s,
        slowdown=float(actual_s.mean() / ideal),
        by_operation={
            operation: float(seconds.mean() / ideal) for operation, seconds in zip(operations, operation_s, strict=True)
        },
        by_worker=by_worker,
        by_stage=by_stage,
        by_dp_rank=by_lane,
        by_worker_per_step=np.minimum(stage_of_step[:, :, None], lane_of_step[:, None]),
        last_stage=_share(actual_s, without_last_s, lost) if stages > 1 else 0.0,
        slowest_workers=_share(actual_s, _without_slowest_s(replay, by_worker), lost),
    )


def _as_they_were(replay: Replay, operations: tuple[str, ...]) -> np.ndarray:
    """Which nodes each what-if leaves as they were: all, none, those of each stage, all but the last stage's, each operation's.

    Returns:
        bool [what-ifs, nodes].
    """
    of_stage = replay.nodes.stage == np.arange(replay.trace.job.topology.pipeline_size)[:, None]
    nodes = of_stage.shape[1]
    of_operation = [replay.is_operation(operation) for operation in operations]
    return np.concatenate(
        [np.ones((1, nodes), dtype=bool), np.zeros((1, nodes), dtype=bool), of_stage, ~of_stage[-1:], of_operation]
    )


def slowest_workers(by_worker: np.ndarray) -> np.ndarray:
    """The slowest 3 % of the workers, at least one, as (pipeline rank, data-parallel rank) rows; worst first."""
    known = np.flatnonzero(~np.isnan(by_worker))
    count = -(-by_worker.size * SLOWEST_PERCENT // 100)
    order = known[np.argsort(-by_worker.ravel()[known], kind="stable")]
    return np.stack(np.unravel_index(order[:count], by_worker.shape), axis=1)


def _without_slowest_s(replay: Replay, by_worker: np.ndarray) -> np.ndarray:
    seconds = replay.actual_s.copy()
    for stage, dp_rank in slowest_workers(by_worker):
        lane = int(np.searchsorted(replay.lanes, dp_rank))
        nodes = np.flatnonzero(replay.nodes.stage == stage)
        seconds[:, nodes, lane] = replay.ideal_s[nodes]
    return replay.steps_with_s(seconds)


def _share(actual_s: np.ndarray, without_s: np.ndarray, lost: float) -> float:
    return float((actual_s.mean() - without_s.mean()) / lost) if abs(lost) > 1e-12 * actual_s.mean() else 0.0


def _spread(values: np.ndarray, lanes: np.ndarray, data_size: int) -> np.ndarray:
    """Values of the lanes (last axis) at their data-parallel ranks, NaN for those that are not there."""
    spread = np.full((*values.shape[:-1], data_size), np.nan)
    spread[..., lanes] = values
    return spread
