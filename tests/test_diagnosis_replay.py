"""The replay of a trace: the published slowdowns, and those of made traces whose durations are known."""

from __future__ import annotations

import json

import numpy as np
import pytest
from traces import is_kind, levelled, made_step_s, made_trace, paused, public_folder, public_trace, slowed

from megatron_balance.diagnosis.replay import Replay
from megatron_balance.diagnosis.trace import BACKWARD, FORWARD
from megatron_balance.diagnosis.whatif import slowdown_of
from megatron_balance.topology import Topology


def _published(name: str, kind: str) -> dict:
    return json.loads((public_folder() / f"{kind}-{name}.json").read_text())


@pytest.mark.parametrize("name", ["ST", "SE"])
def test_published_slowdowns(name):
    slowdown, published = slowdown_of(public_trace(name)), _published(name, "result")
    close = lambda value: pytest.approx(value, rel=1e-6)  # noqa: E731
    assert slowdown.slowdown == close(published["blocking_slowdown"])
    assert slowdown.by_operation == close(published["blocking_decompose_by_optype"])
    by_lane, by_stage = (published[f"blocking_decompose_by_{axis}"] for axis in ("dp_rank", "stage"))
    assert dict(enumerate(slowdown.by_dp_rank)) == close({int(rank): value for rank, value in by_lane.items()})
    assert dict(enumerate(slowdown.by_stage)) == close({int(rank): value for rank, value in by_stage.items()})
    assert slowdown.last_stage == close(_published(name, "ms")["Ms"])
    assert slowdown.slowest_workers == close(_published(name, "mw")["Mw"])
    for ours, theirs in (("recorded_s", "base"), ("actual_s", "nodelay"), ("ideal_s", "noblk")):
        steps = dict(zip(slowdown.steps.tolist(), getattr(slowdown, ours).tolist(), strict=True))
        assert steps == close({int(step): value for step, value in published[f"step_t_{theirs}"].items()})


@pytest.mark.parametrize("name", ["ST", "SE"])
def test_published_slowdowns_of_each_step(name):
    slowdown, published = slowdown_of(public_trace(name)), _published(name, "result")
    for index, step in enumerate(slowdown.steps):
        by_lane, by_stage = (
            published[f"blocking_decompose_by_{axis}_per_step"][str(step)] for axis in ("dp_rank", "stage")
        )
        expected = [
            [min(by_stage[str(stage)], by_lane[str(lane)]) for lane in range(len(by_lane))]
            for stage in range(len(by_stage))
        ]
        assert slowdown.by_worker_per_step[index] == pytest.approx(np.array(expected), rel=1e-6)


TOPOLOGIES = [
    Topology(1, 4, data_size=2),
    Topology(2, 1, data_size=1),
    Topology(4, 8, data_size=3),
    Topology(4, 2, data_size=2),
    Topology(2, 4, 2, data_size=2),
    Topology(4, 8, 3, data_size=2),
    Topology(4, 10, 2, data_size=1, microbatch_group_size=6),
]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_made_traces_are_recovered_exactly(topology):
    random = np.random.default_rng(1)
    shape = (3, topology.data_size, topology.num_stages, topology.num_microbatches)
    forward_s, backward_s = random.uniform(0.1, 1.0, shape), random.uniform(0.2, 2.0, shape)
    trace = made_trace(topology, forward_s, backward_s)
    slowdown = slowdown_of(trace)
    actual_s = made_step_s(topology, forward_s, backward_s)
    mean = [np.full(shape, seconds.mean()) for seconds in (forward_s, backward_s)]
    ideal_s = made_step_s(topology, *mean)
    assert slowdown.recorded_s == pytest.approx(actual_s, rel=1e-12)
    assert slowdown.actual_s == pytest.approx(actual_s, rel=1e-12)
    assert slowdown.ideal_s == pytest.approx(ideal_s, rel=1e-12)
    assert slowdown.slowdown == pytest.approx(actual_s.mean() / ideal_s.mean(), rel=1e-12)
    only_forward_s = made_step_s(topology, forward_s, mean[1])
    assert slowdown.by_operation["forward-compute"] == pytest.approx(only_forward_s.mean() / ideal_s.mean(), rel=1e-12)
    for lane in range(topology.data_size):
        one = [average.copy() for average in mean]
        one[0][:, lane], one[1][:, lane] = forward_s[:, lane], backward_s[:, lane]
        assert slowdown.by_dp_rank[lane] == pytest.approx(
            made_step_s(topology, *one).mean() / ideal_s.mean(), rel=1e-12
        )
    for rank in range(topology.pipeline_size):
        mine = np.arange(topology.num_stages) % topology.pipeline_size == rank
        one = [average.copy() for average in mean]
        one[0][:, :, mine], one[1][:, :, mine] = forward_s[:, :, mine], backward_s[:, :, mine]
        assert slowdown.by_stage[rank] == pytest.approx(made_step_s(topology, *one).mean() / ideal_s.mean(), rel=1e-12)


def test_moments_are_those_of_the_simulator():
    topology = Topology(4, 8, 2, data_size=2)
    random = np.random.default_rng(2)
    shape = (2, 2, topology.num_stages, topology.num_microbatches)
    replay = Replay(made_trace(topology, random.uniform(1, 2, shape), random.uniform(1, 2, shape)))
    moments = replay.moments()
    passes = is_kind(replay, FORWARD) | is_kind(replay, BACKWARD)
    assert moments.start_s[:, passes] == pytest.approx(replay.start_s[:, passes], abs=1e-12)
    assert moments.end_s == pytest.approx(replay.end_s, abs=1e-12)


def test_levelled_trace_has_no_slowdown():
    trace = made_trace(Topology(4, 8, data_size=4), np.linspace(1, 2, 4)[:, None], 2.0)
    slowdown = slowdown_of(levelled(trace))
    assert slowdown.slowdown == pytest.approx(1.0, rel=1e-12)
    assert slowdown.by_worker == pytest.approx(np.ones((4, 4)), rel=1e-12)
    assert (slowdown.last_stage, slowdown.slowest_workers) == (0.0, 0.0)


def test_slowed_worker_stands_out():
    trace = slowed(made_trace(Topology(4, 8, data_size=8), np.full((4, 8, 4, 8), 1.0), 2.0), 5, 2, 1.5)
    slowdown = slowdown_of(trace)
    assert np.unravel_index(slowdown.by_worker.argmax(), slowdown.by_worker.shape) == (2, 5)
    assert slowdown.slowest_workers == pytest.approx(1.0, abs=0.02)
    assert slowdown.slowdown == pytest.approx(slowdown.by_worker.max(), rel=0.02)


def test_pauses_in_passes_are_not_counted_twice():
    trace = made_trace(Topology(2, 4, data_size=2), np.full((5, 2, 2, 4), 1.0), 2.0)
    silent, noted = (slowdown_of(paused(trace, 0.5, 0.3, recorded=recorded)) for recorded in (False, True))
    assert noted.actual_s == pytest.approx(silent.actual_s, rel=1e-12)
    assert noted.slowdown == pytest.approx(silent.slowdown, rel=1e-12) and silent.slowdown > 1.02
    assert silent.by_operation["backward-compute"] == pytest.approx(1.0)
