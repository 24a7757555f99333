"""Planning from the trace of a job: the folder does what the costs file does that the diagnosis writes."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from traces import made_trace, write_ranks, write_trace

from megatron_balance.cli import main
from megatron_balance.diagnosis.reading import read_trace
from megatron_balance.planning.costs import fingerprint
from megatron_balance.topology import Topology

pytest.importorskip("pyarrow")
TOPOLOGY = Topology(2, 4)
LAYERS = (4, 4)
JOB = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --vocab-size 512"
    " --micro-batch-size 1 --pipeline-model-parallel-size 2 --num-microbatches 4"
)


def recorded(folder: Path, layers: tuple[int, ...] | None = LAYERS, shapes: dict | None = None) -> Path:
    """A trace of a job whose head takes as long as two layers, one file a rank."""
    work = np.array(LAYERS, dtype=float)[:, None] * 0.01 * np.ones(TOPOLOGY.num_microbatches)
    work[-1] += 0.02
    trace = made_trace(TOPOLOGY, work * np.ones((3, 1, 1, 1)), 2 * work * np.ones((3, 1, 1, 1)))
    folder.mkdir()
    return write_ranks(replace(trace, job=replace(trace.job, layers=layers, shapes=shapes or {})), folder)


def planned(capsys: pytest.CaptureFixture[str], costs: Path) -> dict:
    status = main(["plan", "--json", *shlex.split(JOB), "--balanced-pipeline-costs", str(costs)])
    out, err = capsys.readouterr()
    assert status == 0, err
    return json.loads(out)


def test_a_trace_and_the_costs_file_of_its_diagnosis_give_the_same_plan(capsys, tmp_path) -> None:
    folder, file = recorded(tmp_path / "trace"), tmp_path / "costs.json"
    assert main(["diagnose", str(folder), "--costs", str(file)]) == 0
    capsys.readouterr()
    plan = planned(capsys, folder)
    assert plan == planned(capsys, file)
    assert [stage["layers"] for stage in plan["stages"]] == [5, 3]
    assert plan["stages"][0]["forward_s"] / plan["stages"][0]["layers"] == pytest.approx(0.01)


def test_a_trace_in_one_file_is_as_good_as_a_folder(capsys, tmp_path) -> None:
    folder = recorded(tmp_path / "trace")
    assert planned(capsys, write_trace(read_trace(folder), tmp_path / "whole.parquet")) == planned(capsys, folder)


def test_a_trace_that_does_not_tell_the_layers_is_refused_with_what_to_do(capsys, tmp_path) -> None:
    folder = recorded(tmp_path / "trace", layers=None)
    assert main(["plan", *shlex.split(JOB), "--balanced-pipeline-costs", str(folder)]) == 2
    error = capsys.readouterr().err
    assert f"megatron-balance diagnose {folder} --layers" in error and "--costs" in error


def test_a_trace_is_told_from_another_by_its_fingerprint(tmp_path) -> None:
    folder, other = recorded(tmp_path / "trace"), recorded(tmp_path / "other", layers=(5, 3))
    copied = shutil.copytree(folder, tmp_path / "copied")
    assert fingerprint(str(folder)) == fingerprint(str(copied)) != fingerprint(str(other))
    next(copied.iterdir()).unlink()
    assert fingerprint(str(folder)) != fingerprint(str(copied))


def test_an_empty_folder_is_no_trace(capsys, tmp_path) -> None:
    assert main(["plan", *shlex.split(JOB), "--balanced-pipeline-costs", str(tmp_path)]) == 2
    assert "no .parquet file" in capsys.readouterr().err


def test_a_trace_of_another_model_is_refused_with_what_differs(capsys, tmp_path) -> None:
    folder = recorded(tmp_path / "trace", shapes={"hidden_size": 128, "seq_length": 32})
    assert main(["plan", *shlex.split(JOB), "--balanced-pipeline-costs", str(folder)]) == 2
    assert "hidden_size is 64 here, 128 there" in capsys.readouterr().err
