"""The recorder's parts that need no training: what a step's marks become, files, flags, and what the stages say."""

from __future__ import annotations

import argparse
import gc
import inspect
import resource
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_balance.diagnosis.costs import chain_of
from megatron_balance.diagnosis.trace_files import METADATA_KEY
from megatron_balance.errors import BalanceError
from megatron_balance.megatron.recorder import common_clock, hooks, live
from megatron_balance.megatron.recorder import recorder as recorder_room
from megatron_balance.megatron.recorder.common_clock import CommonClock
from megatron_balance.megatron.recorder.hooks import _backward, _combined, _forward, _step, _timed, _transfers
from megatron_balance.megatron.recorder.live import Live, _stages
from megatron_balance.megatron.recorder.marks import DeviceMarks, ProcessMarks, epoch_s
from megatron_balance.megatron.recorder.options import TraceOptions, prepare_folder, refuse_conflicts
from megatron_balance.megatron.recorder.parts import Parts, Row
from megatron_balance.megatron.recorder.recorder import Recorder, Step, _sizes, apart, in_turn
from megatron_balance.topology import Topology

pq = pytest.importorskip("pyarrow.parquet", reason="traces are written with pyarrow, of the extra 'trace'")


@pytest.fixture(autouse=True)
def _no_recorder_outlives_its_test() -> Iterator[None]:
    """One that is left within a step would go on to note the garbage of others, in memory that these may measure."""
    before = gc.callbacks[:]
    yield
    gc.callbacks[:] = before


def row(step: int) -> Row:
    return Row(step, "forward-compute", 1.7e9 + step, 0.25, 0, 0, 1, 3, 100, 60, 5200)


def parts(folder) -> Parts:
    return Parts(folder, 7, {"dp_rank": 1, "stage": 1, "rank": 7, "tp_rank": 0, "cp_rank": 0}, {"format": 1}, {})


def test_parts_are_joined_to_one_file_in_their_order(tmp_path):
    written = parts(tmp_path)
    for step in range(1, 13):
        written.write([row(step)])
    assert len(list(tmp_path.iterdir())) == 12
    written.join()
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00007.parquet"]
    table = pq.read_table(tmp_path / "rank-00007.parquet")
    assert table["step"].to_pylist() == list(range(1, 13)) and table.schema.metadata[METADATA_KEY] == b'{"format": 1}'
    assert table.to_pylist()[4] == {**row(5)._asdict(), "dp_rank": 1, "stage": 1, "rank": 7, "tp_rank": 0, "cp_rank": 0}


KILLED = """
import os, signal, sys
sys.path.insert(0, "tests")
from pathlib import Path
from test_recorder import parts, row
written = parts(Path(sys.argv[1]))
for step in range(1, 4):
    written.write([row(step)])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_written_reads_after_a_kill(tmp_path, request):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=request.config.rootpath)
    assert done.returncode == -9
    steps = [step for path in sorted(tmp_path.iterdir()) for step in pq.read_table(path)["step"].to_pylist()]
    assert steps == [1, 2, 3]


def test_a_full_disk_leaves_the_parts_before(tmp_path):
    written = parts(tmp_path)
    written.write([row(1)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError):
            written.write([row(2)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (path,) = tmp_path.iterdir()
    assert pq.read_table(path)["step"].to_pylist() == [1]


def test_the_optimizer_and_what_it_holds_share_no_time():
    recorded = [
        ("optimizer", -1, -1, 10.0, 20.0),
        ("optimizer-clip-main-grad", -1, -1, 12.0, 14.0),
        ("params-all-gather", -1, -1, 18.0, 19.0),
        ("params-all-gather", -1, -1, 19.0, 20.0),
        ("separate-grads-all-reduce", -1, -1, 1.0, 9.0),
        ("grads-reduce-scatter", -1, -1, 1.0, 4.0),
        ("grads-reduce-scatter", -1, -1, 4.0, 6.0),
        ("forward-send", -1, -1, 0.0, 0.5),
        ("forward-send", -1, -1, 0.5, 0.9),
    ]
    spans = {kind: (start, end) for kind, _, _, start, end in apart(recorded)}
    assert spans["optimizer-clip-main-grad"] == (9.0, 14.0) and spans["optimizer"] == (14.0, 18.0)
    assert spans["params-all-gather"] == (18.0, 20.0) and spans["separate-grads-all-reduce"] == (6.0, 9.0)
    assert spans["grads-reduce-scatter"] == (1.0, 6.0)
    assert sum(kind == "forward-send" for kind, *_ in apart(recorded)) == 2


def test_parameters_that_are_gathered_behind_passes_hold_up_none_of_them():
    """Megatron's interleaved schedule starts to gather those of the third chunk and on while the first two compute."""
    passes = [("forward-compute", chunk, 0, 2.0 * chunk, 2.0 * chunk + 1.5) for chunk in range(4)]
    starts = [("params-all-gather", -1, -1, start, start + 0.125) for start in (-0.25, -0.125, 1.5, 3.5)]
    told = in_turn(apart([*passes, *starts, ("optimizer", -1, -1, 8.0, 9.0)]), -1.0, 9.0)
    assert [(kind, start, end) for kind, *_, start, end in told] == [
        ("step-begin", -1.0, 0.0),
        ("forward-compute", 0.0, 1.5),
        ("forward-compute", 1.5, 3.5),
        ("forward-compute", 3.5, 5.5),
        ("forward-compute", 5.5, 7.5),
        ("optimizer", 7.5, 9.0),
        ("step-end", 9.0, 9.0),
    ]


def test_the_head_is_what_the_last_stage_takes_beyond_its_layers():
    chain = chain_of(np.array([[11.0, 10.0, 10.0, 15.0], [20.0, 20.0, 20.0, 36.0]]), (10, 10, 10, 10))
    assert (chain.embedding.forward_s, chain.embedding.backward_s) == pytest.approx((1.0, 0.0))
    assert (chain.head.forward_s, chain.head.backward_s) == pytest.approx((5.0, 16.0))
    assert chain.mean_layer.total_s == pytest.approx(3.0)


def options(**given) -> TraceOptions | None:
    return TraceOptions.from_args(
        argparse.Namespace(**{f"straggler_trace{name}": value for name, value in given.items()})
    )


def test_an_embedding_that_was_noted_is_none_of_the_layers_of_the_first_of_two_stages():
    typical_s = np.array([[11.0, 15.0], [24.0, 36.0]])
    chain = chain_of(typical_s, (10, 10), np.array([1.0, 4.0]))
    assert [chain.embedding.forward_s, chain.embedding.backward_s] == [1.0, 4.0]
    assert [chain.mean_layer.forward_s, chain.mean_layer.backward_s] == pytest.approx([1.0, 2.0])
    assert [chain.head.forward_s, chain.head.backward_s] == pytest.approx([5.0, 16.0])
    assert chain_of(typical_s, (10, 10)).embedding.total_s == 0.0


def test_padding_is_no_real_token_but_takes_time():
    assert _sizes(([5, 3, 8], 8), 99) == (8, 8, 98)
    assert _sizes((torch.tensor([0, 5, 8, 8]), None), 99) == (8, 5, 34)  # stock's bounds, filled up with the last one
    assert _sizes(None, 99) == (99, None, None)


def test_data_parallel_ranks_are_compared_where_all_of_them_was_heard():
    def told(dp_rank: int, pp_rank: int, busy_s: float) -> dict:
        seconds = [[1.0], [2.0]]
        place = {"place": (dp_rank, pp_rank), "layers": [4], "seconds": seconds, "busy_s": busy_s}
        return {**place, "step_s": 9.0, "gc_s": 0.0, "embedding_s": None}

    heard = [told(0, 0, 3.0), told(0, 1, 4.0), told(1, 0, 3.0), told(1, 1, 5.0)]
    assert sorted(_stages(heard, Topology(2, 4)).dp_busy_s) == [7.0, 8.0]
    assert _stages(heard[:3], Topology(2, 4)).dp_busy_s.tolist() == [7.0]
    assert _stages(heard[1:3], Topology(2, 4)).dp_busy_s.tolist() == [1.0]


def test_a_folder_that_only_the_first_machine_has_is_told_at_once(tmp_path):
    with pytest.raises(OSError, match="name a folder that all machines share"):
        Parts(tmp_path / "elsewhere", 3, {}, {}, {})


def test_the_embedding_is_from_where_a_forward_pass_begins_to_where_a_backward_pass_ends(tmp_path):
    of, embedding, layer = recorder(tmp_path), torch.nn.Embedding(4, 2), torch.nn.Linear(2, 2)
    hooks.listen_to_embedding(of, [SimpleNamespace(embedding=embedding)])
    of._step, of.in_step = Step(1, of.mark()), True
    of.begin_pass()
    output = layer(embedding(torch.tensor([1, 2])))
    of.end_forward("forward-compute", 0, 0, [output])
    of.begin_pass([output])
    output.sum().backward()
    of.end_backward()
    step = of._step
    step.ended = of.mark()
    rows = {row.optype: row for row in of._told(step)}
    forward, backward = rows["forward-compute"], rows["backward-compute"]
    noted = step.embeddings
    assert forward.embedding == pytest.approx(of.marks.seconds(noted["forward-compute", 0, 0]) - forward.start_ts)
    end_s = backward.start_ts + backward.duration
    assert backward.embedding == pytest.approx(end_s - of.marks.seconds(noted["backward-compute", 0, 0]))
    assert 0 < forward.embedding < forward.duration and 0 < backward.embedding < backward.duration
    embedding(torch.tensor([3])).sum().backward()  # outside a pass, as in evaluation
    assert len(noted) == 2


def test_steps_are_counted_from_one_and_the_end_is_left_out():
    of = options(**{"": "trace", "_steps": "3:5"})
    assert [step for step in range(1, 8) if of.covers(step)] == [3, 4]
    assert options(**{"": "trace", "_steps": ":"}).covers(10**6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"_steps": "1:2"}, "--straggler-trace-steps does nothing without --straggler-trace"),
        ({"": "t", "_steps": "5:5"}, "5:5: must be A:B with 1 <= A < B"),
        ({"": "t", "_steps": "0:5"}, "0:5: must be A:B"),
        ({"": "t", "_steps": "five"}, "five: must be A:B"),
        ({"": "t", "_interval": 0}, "--straggler-trace-interval 0: must be 1 step or more"),
        ({"": ""}, "needs the name of a folder"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused(given, message):
    with pytest.raises(BalanceError, match=message):
        options(**given)


def test_a_job_does_not_record_over_the_trace_that_it_plans_on(tmp_path):
    args = argparse.Namespace(balanced_pipeline_costs=f"{tmp_path}/", cuda_graph_scope=None)
    with pytest.raises(BalanceError, match="would move the trace aside that --balanced-pipeline-costs plans on"):
        refuse_conflicts(args, options(**{"": str(tmp_path)}))
    refuse_conflicts(args, options(**{"": str(tmp_path / "next")}))


def test_an_earlier_trace_is_put_aside(tmp_path):
    of = options(**{"": str(tmp_path)})
    for count in (1, 2):
        parts(tmp_path).write([row(count)])
        prepare_folder(of)
        assert [path.name for path in (tmp_path / f"earlier-{count}").iterdir()] == ["rank-00007.0000.parquet"]
    (tmp_path / "file").touch()
    with pytest.raises(BalanceError, match=r"cannot be used .*name another folder"):
        prepare_folder(options(**{"": str(tmp_path / "file")}))


def test_clocks_of_two_machines_are_brought_together():
    store, here_s = dist.HashStore(), epoch_s()
    ranks = [("a", 0.0), ("b", 5.0), ("b", 5.25), ("a", 0.125)]  # clocks are ahead by this

    def synchronized(rank: int) -> CommonClock:
        machine, ahead_s = ranks[rank]
        clock = CommonClock(store, rank, len(ranks), here_s + ahead_s, machine)
        clock.synchronize()
        return clock

    with ThreadPoolExecutor(len(ranks)) as pool:
        clocks = list(pool.map(synchronized, range(len(ranks))))
    for clock, (_, ahead_s) in zip(clocks, ranks, strict=True):
        assert abs(clock.offset_s + ahead_s) <= clock.uncertainty_s + 1e-6 and clock.uncertainty_s < 1


def test_a_machine_that_is_late_the_first_time_is_waited_for(monkeypatch):
    monkeypatch.setattr(common_clock, "_COMES_S", 0.0)
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        clocks = list(pool.map(lambda rank: CommonClock(store, rank, 2, 7.0 * rank, "ab"[rank]), range(2)))
        assert [clock.uncertainty_s for clock in clocks] == [float("inf")] * 2
        rank_0 = pool.submit(clocks[0].synchronize)
        time.sleep(0.1)
        clocks[1].synchronize()
        rank_0.result()
    assert abs(clocks[1].offset_s + 7.0) <= clocks[1].uncertainty_s + 1e-6 and clocks[1].uncertainty_s < 1
    assert clocks[0].uncertainty_s == 0.0


def test_a_machine_that_comes_no_more_is_waited_for_once(monkeypatch):
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        clocks = list(pool.map(lambda rank: CommonClock(store, rank, 2, 7.0 * rank, "ab"[rank]), range(2)))
        list(pool.map(CommonClock.synchronize, clocks))
    before_s = clocks[1].offset_s
    monkeypatch.setattr(common_clock, "_COMES_S", 0.05)  # from now on: before, it was no more than late
    clocks[1]._patience_s = 0.05
    for clock in clocks:  # one after the other: neither finds the other
        clock.synchronize()
    monkeypatch.setattr(common_clock, "_awaited", None)  # nothing is waited for any more
    for clock in clocks:
        clock.synchronize()
    assert clocks[1].offset_s == before_s == pytest.approx(-7.0, abs=1.0)


def test_a_slow_last_stage_is_told_with_the_split_that_mends_it():
    store, topology = dist.HashStore(), Topology(4, 16)
    ranks = [Live(store, rank, 4, (0, rank), [9], topology, speaks=True) for rank in range(4)]
    for rank in (1, 2, 3, 0):
        busy = 9.0 + 6.0 * (rank == 3)
        passes = [("forward-compute", 0, m, 0.0, busy) for m in range(16)]
        passes += [("backward-compute", 0, m, 0.0, 2 * busy) for m in range(16)]
        passes += [("step-end", -1, -1, 850.0, 855.0)]
        ranks[rank].take(passes, 0.0)
        ranks[rank].hears = rank == 0
        ranks[rank].exchange()
    finding = ranks[0].finding
    assert finding.last_over_mean == pytest.approx(15 / 10.5) and finding.head_layers == pytest.approx(6.0)
    assert sum(finding.split) == 36 and max(finding.split[-1] + 6, *finding.split[:-1]) == 11 and finding.saving > 0.2
    assert finding.text.startswith("last stage 1.43x the mean; head = 6.0 layers; (")


def test_a_rank_that_is_late_once_is_heard_again_and_one_that_stays_away_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(live, "_PATIENCE_S", 0.0)
    store, topology = dist.HashStore(), Topology(2, 1)
    ranks = [Live(store, rank, 2, (0, rank), [2], topology, speaks=True) for rank in range(2)]
    ranks[1].hears = False
    found = []
    for tells in (True, False, True, False, False):
        ranks[1]._round += not tells
        for rank in ranks[1:] * tells + ranks[:1]:
            rank.take([("forward-compute", 0, 0, 0.0, 1.0), ("backward-compute", 0, 0, 1.0, 3.0)], 0.0)
            rank.exchange()
        found.append(ranks[0].finding is not None)
    assert found == [True, False, True, False, False] and ranks[0]._others == [0]


def recorder(folder) -> Recorder:
    return Recorder(options(**{"": str(folder)}), Topology(1, 2), 64, ProcessMarks())


def test_bounds_of_sequences_are_counted_whoever_gives_them(tmp_path):
    ours = SimpleNamespace(lengths=[3, 4, 5])
    stock = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 3, 7, 12, 12], dtype=torch.int32))
    for packed in (ours, stock):
        of = recorder(tmp_path)
        of._step, of.in_step = Step(1, of.mark()), True
        of.begin_pass()
        of.see_sequences(packed)
        output = torch.zeros(1)
        of.end_forward("forward-compute", 0, None, (output,))
        of.begin_pass(output)
        of.end_backward()
        of._step.ended = of.mark()
        _, forward, backward, _ = of._told(of._step)
        assert (backward.optype, backward.mc, backward.mb_id) == ("backward-compute", 0, 0)
        assert (forward.tokens, forward.longest, forward.squares) == (12, 5, 50) and backward.tokens is None
        of.give_up(OSError("the test is over"))


class Stuck(ProcessMarks):
    """Marks of a device that waits for ranks that wait for this one."""

    def done(self, mark: float) -> bool:
        return False

    def anchor(self) -> None:
        raise TimeoutError("waits for the device")


def combined_forward_backward_step(
    forward_step_func, data_iterator, f_model, num_microbatches, input_tensor, forward_data_store, b_model, b_input_tensor,
    b_output_tensor, b_output_tensor_grad, config, f_model_chunk_id=None, current_microbatch=None, post_forward=None,
):  # fmt: skip
    """Parameters of Megatron's, as far as they count here."""
    post_forward()
    return [torch.zeros(1)] if f_model else None, 1, None


def test_combined_passes_are_merged_with_what_they_wait_for(tmp_path):
    megatron = pytest.importorskip("megatron.core.pipeline_parallel.combined_1f1b").combined_forward_backward_step
    ours = inspect.signature(combined_forward_backward_step).parameters
    assert [name for name in inspect.signature(megatron).parameters if name in ours] == [
        name for name in ours if name not in ("current_microbatch", "post_forward")
    ] + ["post_forward", "current_microbatch"]
    of = recorder(tmp_path)
    send = _transfers(of, lambda self, **given: (None, None, None))
    step = _combined(of, combined_forward_backward_step)
    of._step, of.in_step = Step(1, of.mark()), True

    def run(forward: bool, output, which: int | None):
        models = ("model" if forward else None, "model" if output is not None else None)
        rest = (8, None, [], models[1], None, output, None, None)
        sends = lambda: send(None, tensor_send_next=torch.zeros(1))  # noqa: E731
        return step(None, None, models[0], *rest, f_model_chunk_id=1, current_microbatch=which, post_forward=sends)[0]

    first = run(True, None, 4)
    second = run(True, first, 5)
    send(None, tensor_send_prev=torch.zeros(1))
    run(False, second, None)
    of._step.ended = of.mark()
    of.topology = Topology(2, 8, virtual_size=2)
    told = [(row.optype, row.mc, row.mb_id) for row in of._told(of._step)]
    assert told == [
        ("step-begin", -1, -1),
        ("forward-compute", 1, 4),
        ("forward-backward-compute", 1, 5),
        ("backward-send", -1, -1),
        ("backward-compute", 1, 5),
        ("step-end", -1, -1),
    ]


def test_a_step_has_no_gaps_and_one_call_ends_at_once():
    recorded = [
        ("forward-compute", 0, 0, 2.0, 3.0),
        ("forward-send", -1, -1, 3.5, 5.0),
        ("backward-recv", -1, -1, 3.5, 5.0),
        ("backward-compute", 0, 0, 6.0, 8.0),
    ]
    assert [(kind, start, end) for kind, *_, start, end in in_turn(recorded, 1.0, 9.0)] == [
        ("step-begin", 1.0, 2.0),
        ("forward-compute", 2.0, 3.0),
        ("forward-send", 3.0, 5.0),
        ("backward-recv", 3.0, 5.0),
        ("backward-compute", 5.0, 8.0),
        ("step-end", 8.0, 9.0),
    ]


class Event:
    """A device's event, of a device that does one thing after the other and tells of it when it has caught up."""

    now_s, takes_s, caught_up = 0.0, 1.0, True

    def record(self) -> None:
        Event.now_s += Event.takes_s
        self.at_s = Event.now_s

    def synchronize(self) -> None:
        Event.caught_up = True

    def query(self) -> bool:
        return Event.caught_up

    def elapsed_time(self, other: Event) -> float:
        return float(np.float32(1000 * (other.at_s - self.at_s)))


class EventMarks(DeviceMarks):
    _event = staticmethod(Event)


@pytest.fixture
def on_a_device(tmp_path, monkeypatch) -> Recorder:
    for name, value in {"now_s": 0.0, "takes_s": 1.0, "caught_up": True}.items():
        monkeypatch.setattr(Event, name, value)
    of = Recorder(options(**{"": str(tmp_path), "_interval": 12}), Topology(2, 1), 64, EventMarks())
    of.start = lambda recorder, model, optimizer: setattr(recorder, "parts", parts(tmp_path))
    yield of
    of.give_up(OSError("the test is over"))


def step_on_a_device(of: Recorder, number: int) -> None:
    of.begin(number, "model", "optimizer")
    _transfers(of, lambda self, **given: (None, None, None))(None, tensor_send_next="tensor", recv_next=True)
    _timed(of, "optimizer")(lambda: None)()
    of.end()


def recorded(of: Recorder) -> list[Row]:
    """Without garbage that was collected in some step."""
    return [row for row in of._rows if row.optype != "gc"]


def test_events_are_used_again_but_not_while_they_are_to_be_told(on_a_device, monkeypatch):
    monkeypatch.setattr(recorder_room, "_TOLD_AT_ONCE", 1)
    for number in range(1, 12):
        Event.caught_up = number % 4 == 0  # two or three steps behind otherwise
        step_on_a_device(on_a_device, number)
    assert {row.step for row in recorded(on_a_device)} == set(range(1, 9))
    Event.caught_up = True
    on_a_device.drop()
    rows, began_s = recorded(on_a_device), on_a_device._rows[0].start_ts
    assert [row.step for row in rows] == [number for number in range(1, 12) for _ in range(5)]
    starts = [round(row.start_ts - began_s) for row in rows]
    ends = [round(row.start_ts + row.duration - began_s) for row in rows]
    of_step = [(starts[at : at + 5], ends[at : at + 5]) for at in range(0, len(rows), 5)]
    for (start, end), (after, _) in pairwise(of_step):
        assert start[1] == start[2] and end[1] == end[2] and start[3:] == end[2:4] and end[4] == after[0]
    assert starts == sorted(starts) and len(on_a_device.marks._spare) < 25


def test_steps_are_told_together_and_all_of_an_interval_before_it_is_written(on_a_device):
    for number in range(1, 12):
        step_on_a_device(on_a_device, number)
    assert not on_a_device._rows and len(on_a_device._untold) == 11
    Event.caught_up = False  # it is waited for
    step_on_a_device(on_a_device, 12)
    assert not on_a_device._untold and on_a_device._num_untold == 0
    (part,) = on_a_device.options.folder.iterdir()
    assert set(pq.read_table(part)["step"].to_pylist()) == set(range(1, 13))


def test_hours_between_steps_blur_none_of_their_times(on_a_device):
    """An event 14 hours from the base is told with an error of up to 2 ms."""
    Event.takes_s = 0.001
    for number in (1, 2):
        step_on_a_device(on_a_device, number)
        on_a_device.part()
        Event.now_s += 50_000.0
    on_a_device._tell()
    rows = recorded(on_a_device)
    assert len(rows) == 10 and 49_999 < rows[5].start_ts - rows[0].start_ts < 50_001
    durations = [row.duration for row in rows]
    assert durations == pytest.approx([0.001, 0.001, 0.001, 0.002, 0.001] * 2, abs=1e-6)


class Broken(ProcessMarks):
    """Marks of which one cannot be taken."""

    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self.left, mark = fails_at, self.mark

        def counted() -> float:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("no event")
            return mark()

        self.mark = counted


@pytest.mark.parametrize("fails_at", range(13))
def test_whatever_event_fails_the_functions_of_megatron_do_what_they_did(tmp_path, capsys, fails_at):
    """A step of Megatron's functions behind our hooks, of whose twelve marks one fails, or none."""
    of = Recorder(options(**{"": str(tmp_path)}), Topology(1, 2), 64, Broken(fails_at))
    handle = SimpleNamespace(wait=lambda: "waited")
    returned = {
        "forward": ([torch.zeros(1)], 3),
        "transfer": (None, "received", {"recv_prev": handle}),
        "backward": "gradient",
        "reduced": None,
    }
    forward = _forward(of, lambda *args, **kwargs: returned["forward"])
    transfer = _transfers(of, lambda self, **given: returned["transfer"])
    backward = _backward(of, lambda *args, **kwargs: returned["backward"])
    reduced = _timed(of, "grads-reduce-scatter")(lambda: returned["reduced"])

    def train_step(model, optimizer):
        done = [forward(vp_stage=None, current_microbatch=0)]
        done.append(transfer(None, tensor_send_next=torch.zeros(1), recv_prev=True))
        assert done[1][2]["recv_prev"].wait() == "waited"
        done += [backward(None, done[0][0]), reduced()]
        return done

    of.begin(1, "model", "optimizer")
    done = train_step("model", "optimizer")
    of.end()
    assert all(one is other for one, other in zip(done, returned.values(), strict=True))
    said = capsys.readouterr().err
    assert said.count("recording ends, training goes on (RuntimeError: no event)") == (fails_at < 12) and of.is_on == (
        not said
    )
    of.give_up(OSError("the test is over"))


def test_tens_of_thousands_of_operations_leave_memory_flat(tmp_path):
    of = Recorder(options(**{"": str(tmp_path), "_interval": 50}), Topology(1, 8), 64, ProcessMarks())
    of.parts = parts(tmp_path)
    used = []
    tracemalloc.start()
    for number in range(1, 3001):
        of.begin(number, "model", "optimizer")
        outputs = []
        for which in range(8):
            of.begin_pass()
            outputs.append([torch.zeros(1)])
            of.end_forward("forward-compute", 0, which, outputs[-1])
        for output in outputs:
            of.begin_pass(output[0])
            of.end_backward()
        of.add("optimizer", of.mark())
        of.end()
        if number in (1000, 3000):
            gc.collect()
            used.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert of.is_on and not of._untold and not of._rows and not of._forwarded
    assert used[1] - used[0] < 100_000  # 38 000 operations of at least 100 bytes are between
    of.finish()
    (path,) = tmp_path.iterdir()
    kinds = pq.read_table(path, columns=["optype"])["optype"].to_pylist()
    assert len(kinds) - kinds.count("gc") == 3000 * 19 and path.stat().st_size < 25 * len(kinds)


def test_a_failed_step_is_not_waited_for(tmp_path, capsys):
    of = Recorder(options(**{"": str(tmp_path)}), Topology(1, 2), 64, Stuck())
    before, failed = Step(1, of.mark()), Step(2, of.mark())
    of._untold.append(before)
    of._step, of.in_step = failed, True
    for step in (before, failed):
        step.operations.append(("forward-compute", 0, 0, of.mark(), of.mark()))
    of.drop()
    assert of.is_on and not of.in_step
    of.finish()
    assert not of._untold and not capsys.readouterr().err


def test_a_step_that_fails_still_fails_as_it_did(monkeypatch):
    monkeypatch.setattr(hooks, "_number", lambda: 1)
    called = []
    listening = SimpleNamespace(
        is_on=True,
        begin=lambda number, model, optimizer: called.append("begin"),
        end=lambda: called.append("end"),
        drop=lambda: called.append("drop"),
    )

    def train_step(model, optimizer):
        raise MemoryError("of the job")

    with pytest.raises(MemoryError, match="of the job"):
        _step(listening, train_step)("model", "optimizer")
    assert called == ["begin", "drop"]


@pytest.mark.parametrize("fails", ["prepare", "take", "exchange", "log"])
def test_a_log_line_that_fails_ends_the_log_lines_alone(tmp_path, capsys, fails):
    of = Recorder(options(**{"": str(tmp_path), "_interval": 1}), Topology(1, 2), 64, ProcessMarks())
    of.parts = parts(tmp_path)

    def full(*_):
        raise OSError("no space left for events")

    calls = dict.fromkeys(("prepare", "take", "exchange", "log"), lambda *_: None)
    of.speak(SimpleNamespace(**{**calls, fails: full}))
    for number in (1, 2):
        of._step, of.in_step = Step(number, of.mark()), True
        of._step.operations.append(("forward-compute", 0, 0, of.mark(), of.mark()))
        of.end()
        of.log(number)
    assert of.is_on and of.live is None
    assert set(pq.read_table(tmp_path)["step"].to_pylist()) == {1, 2}
    assert (
        capsys.readouterr().err.count("no more log lines, recording goes on (OSError: no space left for events)") == 1
    )


def test_a_failure_ends_the_recording_with_one_warning(tmp_path, capsys):
    of = recorder(tmp_path)
    of._step, of.in_step = Step(1, of.mark()), True
    of.see_sequences(SimpleNamespace(cu_seqlens_q=0))
    assert not of.is_on and not of.in_step
    of.see_sequences(SimpleNamespace(cu_seqlens_q=0))
    of.finish()
    assert capsys.readouterr().err.count("recording ends, training goes on (AttributeError") == 1
