"""The replay of a trace: the published slowdowns, and those of made traces whose durations are known."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from traces import (
    is_kind,
    levelled,
    made_step_s,
    made_trace,
    paused,
    public_folder,
    public_trace,
    replayed,
    slowed,
    turns,
)

from megatron_balance.diagnosis.causes import Causes
from megatron_balance.diagnosis.cells import take
from megatron_balance.diagnosis.graph import Nodes, calls_of
from megatron_balance.diagnosis.replay import Replay
from megatron_balance.diagnosis.result import GARBAGE
from megatron_balance.diagnosis.signals import signals_of
from megatron_balance.diagnosis.trace import BACKWARD, COMBINED, FORWARD, TRANSFERS, Job, Trace
from megatron_balance.diagnosis.whatif import slowdown_of
from megatron_balance.schedule.order import schedule_order
from megatron_balance.topology import Topology


def _published(name: str, kind: str) -> dict:
    return json.loads((public_folder() / f"{kind}-{name}.json").read_text())


@pytest.mark.parametrize("name", ["ST", "SE"])
def test_published_slowdowns(name):
    slowdown, published = slowdown_of(public_trace(name)), _published(name, "result")
    close = lambda value: pytest.approx(value, rel=1e-7)  # noqa: E731
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
        assert slowdown.by_worker_per_step[index] == pytest.approx(np.array(expected), rel=1e-7)


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
    sends = is_kind(replay, "forward-send") | is_kind(replay, "backward-send")  # wait for those before them
    assert moments.start_s[:, ~sends] == pytest.approx(replay.start_s[:, ~sends], abs=1e-12)
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


@pytest.mark.parametrize("transfers", ["labelled", "not recorded", "for all passes", "for all but the first"])
@pytest.mark.parametrize("topology", [Topology(4, 8, data_size=2), Topology(2, 4, 3, data_size=2)], ids=str)
def test_transfers_however_they_are_recorded(topology, transfers):
    random = np.random.default_rng(3)
    shape = (2, topology.data_size, topology.num_stages, topology.num_microbatches)
    forward_s, backward_s = random.uniform(0.1, 1.0, shape), random.uniform(0.2, 2.0, shape)
    trace = made_trace(topology, forward_s, backward_s, labelled=transfers != "not recorded")
    names = np.array(trace.kinds)[trace.kind]
    is_transfer = np.isin(names, TRANSFERS)
    if transfers == "not recorded":
        trace = take(trace, ~is_transfer)
    if transfers.startswith("for all"):
        trace = _with_idle_transfers(trace, names, transfers == "for all passes")
    slowdown = slowdown_of(trace)
    assert slowdown.actual_s == pytest.approx(made_step_s(topology, forward_s, backward_s), rel=1e-12)


def _with_idle_transfers(trace: Trace, names: np.ndarray, first: bool) -> Trace:
    """The trace with transfers of no length for passes without a peer, and without any labels of transfers.

    Args:
        trace: whose transfers are labelled.
        names: of its operations.
        first: whether a rank's first forward pass has one, too.
    """
    topology = trace.job.topology
    stage = trace.chunk * topology.pipeline_size + trace.pp_rank
    last = topology.num_stages - 1
    extra = []
    for way, begins in (("forward", 0), ("backward", last)):
        passes = names == f"{way}-compute"
        for end, at in (("recv", begins), ("send", last - begins)):
            rows = np.flatnonzero(passes & (stage == at))
            if (way, end) == ("forward", "recv") and not first:
                rows = rows[trace.microbatch[rows] > 0]
            when = trace.start_s[rows] if end == "recv" else trace.end_s[rows]
            extra.append((rows, trace.kinds.index(f"{way}-{end}"), when))
    rows = np.concatenate([np.arange(names.size), *(rows for rows, _, _ in extra)])
    count = [each.size for each, _, _ in extra]
    longer = take(trace, rows)
    kind, when = longer.kind.copy(), np.concatenate([each for _, _, each in extra])
    kind[names.size :] = np.repeat([number for _, number, _ in extra], count)
    start_s, end_s = longer.start_s.copy(), longer.end_s.copy()
    start_s[names.size :] = end_s[names.size :] = when
    is_transfer = np.isin(np.array(trace.kinds)[kind], TRANSFERS)
    chunk, microbatch = (np.where(is_transfer, -1, values) for values in (longer.chunk, longer.microbatch))
    return replace(longer, kind=kind, start_s=start_s, end_s=end_s, chunk=chunk, microbatch=microbatch)


def test_operations_in_turn():
    """A rank that sends is held up until the other comes, and two transfers of one call end together."""
    random = np.random.default_rng(5)
    recorded_s, other_s = random.uniform(0.5, 1.5, (2, 3, 2, 2, 5))
    trace, expected = turns(recorded_s), turns(other_s)
    replay = Replay(trace)
    began_s = 100.0 * np.arange(3)[:, None, None] + 1.0
    moments = replay.moments()
    assert moments.start_s == pytest.approx(replay.start_s - began_s, abs=1e-9)
    assert moments.end_s == pytest.approx(replay.end_s - began_s, abs=1e-9)
    moved = np.array([name in TRANSFERS for name in replay.nodes.kinds])[replay.nodes.kind]
    assert replay.actual_s[:, moved] == pytest.approx(np.full((3, int(moved.sum()), 1), 0.25))
    seconds = np.where(moved[:, None], replay.actual_s, Replay(expected).actual_s)
    assert replay.steps_with_s(seconds) == pytest.approx(Replay(expected).recorded_step_s, abs=1e-9)


def test_transfers_that_once_look_like_one_call_are_none():
    """Clocks tick in microseconds: what takes no time in one step begins and ends with its neighbour there."""
    names = ("forward-send", "backward-recv", FORWARD)
    nodes = Nodes(names, np.arange(3), *(np.zeros(3, dtype=int) for _ in range(4)))
    start_s = np.array([[1.0, 1.0, 0.0], [11.0, 11.0, 10.0]])[:, :, None]
    end_s = np.array([[1.0, 1.0, 1.0], [11.0, 11.5, 11.0]])[:, :, None]
    assert calls_of(nodes, 1, start_s, end_s) == [[(2,), (0,), (1,)]]
    assert calls_of(nodes, 1, start_s[:1], end_s[:1]) == [[(2,), (0, 1)]]


def test_sends_ahead_of_their_receivers():
    """The second micro-batch arrives long before its receiver comes for it, and its sender has gone on."""
    ranks = (
        [("step-begin", 1.0), (FORWARD, 2.0), ("forward-send", 2.1), (FORWARD, 3.1), ("forward-send", 3.2),
         ("backward-recv", 6.4), (BACKWARD, 7.4), ("backward-recv", 10.52), (BACKWARD, 11.52), ("step-end", 12.52)],
        [("step-begin", 1.0), ("forward-recv", 2.2), (FORWARD, 4.2), (BACKWARD, 6.2), ("backward-send", 6.3),
         ("forward-recv", 6.32), (FORWARD, 8.32), (BACKWARD, 10.32), ("backward-send", 10.42), ("step-end", 12.52)],
    )  # fmt: skip
    rows = []
    for rank, turn in enumerate(ranks):
        ends = [end_s for _, end_s in turn]
        for at, ((name, end_s), start_s) in enumerate(zip(turn, [0.0, *ends], strict=False)):
            which = [each for each, _ in turn[:at]].count(name) if name in (FORWARD, BACKWARD) else -1
            rows.append((name, rank, which, start_s, end_s))
    names, rank, which, start_s, end_s = (np.array(column) for column in zip(*rows, strict=True))
    kinds = tuple(dict.fromkeys(names.tolist()))
    kind, nothing = np.array([kinds.index(name) for name in names]), np.zeros_like(rank)
    job = Job("made", Topology(2, 2), 2, in_turn=True, sends_ahead=True)
    chunk = np.where(which >= 0, 0, -1)
    replay = Replay(Trace(job, kind, kinds, nothing, nothing, rank, chunk, which, start_s, end_s))
    assert replay.moments().end_s == pytest.approx(replay.end_s)
    passes = np.isin(np.array(kinds)[replay.nodes.kind], (FORWARD, BACKWARD)) & (replay.nodes.stage == 1)
    faster = np.where(passes[:, None], replay.actual_s / 2, replay.actual_s)
    assert replay.steps_with_s(faster) == pytest.approx([8.52])


def test_a_pause_is_within_an_operation_of_those_in_turn():
    trace = turns(np.ones((3, 2, 2, 4)))
    begin = trace.kinds.index("step-begin")
    row = np.flatnonzero((trace.kind == begin) & (trace.pp_rank == 1))[1]
    names = ("step", "dp_rank", "pp_rank", "chunk", "microbatch", "start_s", "end_s")
    more = {name: np.append(getattr(trace, name), getattr(trace, name)[row]) for name in names}
    paused = replace(trace, kinds=(*trace.kinds, "gc"), kind=np.append(trace.kind, len(trace.kinds)), **more)
    replay = Replay(paused)
    assert replay.paused_s.sum() == pytest.approx(0.5)
    assert Causes(replay, signals_of(replay)).extra_s(GARBAGE).sum() == pytest.approx(0.5)
    assert replay.steps_with_s(replay.actual_s) == pytest.approx(Replay(trace).recorded_step_s)


def test_a_pause_before_the_last_rank_has_come_is_no_loss():
    trace = turns(np.ones((3, 2, 2, 4)))
    first = np.flatnonzero((trace.kind == trace.kinds.index("step-begin")) & (trace.pp_rank == 0))
    start_s = trace.start_s.copy()
    start_s[first] -= 3.0  # these end their step early, and wait
    names = ("step", "dp_rank", "pp_rank", "chunk", "microbatch")
    more = {name: np.append(getattr(trace, name), getattr(trace, name)[first[1]]) for name in names}
    more |= {"start_s": np.append(start_s, start_s[first[1]]), "end_s": np.append(trace.end_s, start_s[first[1]] + 2.5)}
    paused = replace(trace, kinds=(*trace.kinds, "gc"), kind=np.append(trace.kind, len(trace.kinds)), **more)
    assert Replay(paused).paused_s.sum() == 0.0
    later = replace(paused, end_s=np.append(trace.end_s, trace.start_s[first[1]] + 0.25))
    assert Replay(later).paused_s.sum() == pytest.approx(0.25)


def test_combined_passes():
    """A pass forward and backward at once waits for what both need, and gives both at its end."""
    topology = Topology(2, 6, 2, overlap_moe=True)
    order, random = schedule_order(topology), np.random.default_rng(4)
    rows: list[list[tuple[str, int, int, list[tuple], list[tuple], float]]] = []
    for rank in range(2):
        turn, at = [], 0
        while at < order.chunk.shape[1]:
            both = bool(order.combined[rank, at])
            gives = [
                (bool(order.is_backward[rank, i]), int(order.chunk[rank, i]) * 2 + rank, int(order.microbatch[rank, i]))
                for i in range(at, at + 1 + both)
            ]
            needs = [(back, stage + (1 if back else -1), which) for back, stage, which in gives]
            kind = COMBINED if both else (BACKWARD if gives[0][0] else FORWARD)
            turn.append((kind, gives[0][1] // 2, gives[0][2], needs, gives, random.uniform(0.5, 1.5)))
            at += 1 + both
        rows.append(turn)
    given, columns, free, place = {}, [], [0.0, 0.0], [0, 0]
    while any(place[rank] < len(rows[rank]) for rank in range(2)):
        for rank in range(2):
            while place[rank] < len(rows[rank]):
                kind, chunk, which, needs, gives, seconds = rows[rank][place[rank]]
                needs = [need for need in needs if 0 <= need[1] < topology.num_stages]
                if any(need not in given for need in needs):
                    break
                start_s = max([free[rank], *(given[need] for need in needs)])
                free[rank] = start_s + seconds
                given |= dict.fromkeys(gives, free[rank])
                columns.append((kind, rank, chunk, which, start_s, free[rank]))
                place[rank] += 1
    kinds = (FORWARD, BACKWARD, COMBINED)
    kind, rank, chunk, which, start_s, end_s = (np.array(column) for column in zip(*columns, strict=True))
    nothing = np.zeros(kind.size, dtype=np.int64)
    number = np.array([kinds.index(each) for each in kind])
    assert (number == 2).any()
    trace = Trace(Job("", topology, 2), number, kinds, nothing, nothing, rank, chunk, which, start_s, end_s)
    replay = Replay(trace)
    assert replay.moments().end_s == pytest.approx(replay.end_s, rel=1e-12)
    assert COMBINED in slowdown_of(trace).by_operation


def test_where_the_recorded_order_has_a_circle_the_schedules_counts():
    trace = made_trace(Topology(2, 4), np.full((1, 1, 2, 4), 1.0), 2.0)
    start_s, end_s = trace.start_s.copy(), trace.end_s.copy()
    mine = (trace.pp_rank == 1) & (trace.microbatch >= 0)
    start_s[mine], end_s[mine] = -end_s[mine], -start_s[mine]  # the second rank runs backwards in time
    damaged = replace(trace, start_s=start_s, end_s=end_s)
    actual_s = slowdown_of(damaged).actual_s  # in the order of Megatron's schedule
    assert actual_s == pytest.approx(slowdown_of(trace).actual_s, rel=1e-12)


def test_pauses_between_passes_count():
    trace = made_trace(Topology(2, 4, data_size=2), np.full((5, 2, 2, 4), 1.0), 2.0)
    replay = Replay(trace)
    seconds = replay.actual_s.copy()
    last = np.flatnonzero(is_kind(replay, "gc"))[0]
    seconds[:, last, 1] = 0.5
    slowdown = slowdown_of(replayed(trace, replay, seconds))
    assert slowdown.actual_s == pytest.approx(slowdown_of(trace).actual_s + 0.5, rel=1e-12)
    assert slowdown.by_operation["gc"] == pytest.approx(1.0 + 0.375 / slowdown.ideal_s[0], rel=1e-12)


def test_gradients_that_are_reduced_while_the_pipeline_runs():
    """The reduction begins at the second chunk's last backward pass and is over long after the first chunk's."""
    topology = Topology(2, 2, 2, data_size=2)
    trace = made_trace(topology, np.full((1, 2, 4, 2), 1.0), 2.0)
    names = np.array(trace.kinds)[trace.kind]
    scatter = names == "grads-reduce-scatter"
    of_chunk = (names == BACKWARD) & (trace.chunk == 1)
    begun_s = np.array([trace.end_s[of_chunk & (trace.pp_rank == rank)].max() for rank in trace.pp_rank[scatter]])
    over_s = begun_s.max() + 30.0
    start_s, end_s, chunk = trace.start_s.copy(), trace.end_s.copy(), trace.chunk.copy()
    start_s[scatter], end_s[scatter], chunk[scatter] = begun_s, over_s, 1
    for name, first_s, last_s in (("optimizer-clip-main-grad", 0.0, 1.0), ("optimizer", 1.0, 3.0)):
        start_s[names == name], end_s[names == name] = over_s + first_s, over_s + last_s
    replay = Replay(replace(trace, start_s=start_s, end_s=end_s, chunk=chunk))
    moments = replay.moments()
    scatters = is_kind(replay, "grads-reduce-scatter")
    assert moments.start_s[:, scatters] == pytest.approx(replay.start_s[:, scatters], rel=1e-12)
    assert moments.end_s == pytest.approx(replay.end_s, rel=1e-12)


def test_transfers_that_end_before_they_begin_take_no_time():
    trace = made_trace(Topology(2, 4), np.full((1, 1, 2, 4), 1.0), 2.0)
    wrong = trace.kind == trace.kinds.index("forward-recv")
    replay = Replay(replace(trace, start_s=trace.start_s - 3.0 * wrong, end_s=trace.end_s - 3.0 * wrong))
    assert replay.actual_s.min() == 0.0
    assert replay.steps_with_s(replay.actual_s) == pytest.approx(slowdown_of(trace).actual_s, rel=1e-12)
