"""The recorder's parts that need no training: what a step's marks become, files, flags, and what the stages say."""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from megatron_balance.errors import BalanceError
from megatron_balance.megatron.recorder.live import Stages, chain_of
from megatron_balance.megatron.recorder.options import TraceOptions, prepare_folder
from megatron_balance.megatron.recorder.parts import METADATA, Parts, Row
from megatron_balance.megatron.recorder.recorder import apart


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
    assert table["step"].to_pylist() == list(range(1, 13)) and table.schema.metadata[METADATA] == b'{"format": 1}'
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
    assert spans["optimizer-clip-main-grad"] == (10.0, 14.0) and spans["optimizer"] == (14.0, 18.0)
    assert spans["params-all-gather"] == (18.0, 20.0) and spans["separate-grads-all-reduce"] == (6.0, 9.0)
    assert spans["grads-reduce-scatter"] == (1.0, 6.0)
    assert sum(kind == "forward-send" for kind, *_ in apart(recorded)) == 2


def test_the_head_is_what_the_last_stage_takes_beyond_its_layers():
    stages = Stages(
        np.array([11.0, 10.0, 10.0, 15.0]), np.array([20.0, 20.0, 20.0, 36.0]), (10, 10, 10, 10), np.ones(1), 0.0
    )
    chain = chain_of(stages)
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
