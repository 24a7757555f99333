"""The recorder's parts that need no training: what a step's marks become, files, flags, and what the stages say."""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_balance.diagnosis.costs import chain_of
from megatron_balance.diagnosis.reading import METADATA_KEY
from megatron_balance.errors import BalanceError
from megatron_balance.megatron.recorder.common_clock import CommonClock
from megatron_balance.megatron.recorder.hooks import _step
from megatron_balance.megatron.recorder.live import Live
from megatron_balance.megatron.recorder.marks import ProcessMarks, epoch_s
from megatron_balance.megatron.recorder.options import TraceOptions, prepare_folder
from megatron_balance.megatron.recorder.parts import Parts, Row
from megatron_balance.megatron.recorder.recorder import Recorder, Step, apart
from megatron_balance.topology import Topology

pq = pytest.importorskip("pyarrow.parquet", reason="traces are written with pyarrow, of the extra 'trace'")


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


def test_the_head_is_what_the_last_stage_takes_beyond_its_layers():
    chain = chain_of(np.array([[11.0, 10.0, 10.0, 15.0], [20.0, 20.0, 20.0, 36.0]]), (10, 10, 10, 10))
    assert (chain.embedding.forward_s, chain.embedding.backward_s) == pytest.approx((1.0, 0.0))
    assert (chain.head.forward_s, chain.head.backward_s) == pytest.approx((5.0, 16.0))
    assert chain.mean_layer.total_s == pytest.approx(3.0)


def options(**given) -> TraceOptions | None:
    return TraceOptions.from_args(
        argparse.Namespace(**{f"straggler_trace{name}": value for name, value in given.items()})
    )


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


def test_a_step_that_fails_still_fails_as_it_did():
    called = []
    listening = SimpleNamespace(
        is_on=True,
        begin=lambda model, optimizer: called.append("begin"),
        end=lambda: called.append("end"),
        drop=lambda: called.append("drop"),
    )

    def train_step(model, optimizer):
        raise MemoryError("of the job")

    with pytest.raises(MemoryError, match="of the job"):
        _step(listening, train_step)("model", "optimizer")
    assert called == ["begin", "drop"]


def test_a_failure_ends_the_recording_with_one_warning(tmp_path, capsys):
    of = recorder(tmp_path)
    of._step, of.in_step = Step(1, of.mark()), True
    of.see_sequences(SimpleNamespace(cu_seqlens_q=0))
    assert not of.is_on and not of.in_step
    of.see_sequences(SimpleNamespace(cu_seqlens_q=0))
    of.finish()
    assert capsys.readouterr().err.count("recording ends, training goes on (AttributeError") == 1
