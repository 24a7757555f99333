"""`megatron-balance diagnose`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from traces import made_trace, public_folder, write_ranks, write_trace

from megatron_balance.cli import main
from megatron_balance.diagnosis.result import CAUSES, HEALTHY
from megatron_balance.pipeline.layout import parse_layout
from megatron_balance.topology import Topology

pytest.importorskip("pyarrow")
TOPOLOGY = Topology(4, 8, data_size=2)
HEAD = 10  # layers' worth of the last stage's forward pass


def split_trace(layers: tuple[int, ...], steps: int = 4):
    """A job with these layers a stage and a head, and a little noise."""
    random = np.random.default_rng(1)
    work = np.array(layers, dtype=float)[:, None] * 0.007 * np.ones(TOPOLOGY.num_microbatches)
    work[-1] += 0.007 * HEAD
    noise = 1 + 0.002 * random.standard_normal((steps, TOPOLOGY.data_size, *work.shape))
    return made_trace(TOPOLOGY, work * noise, 2 * work * noise)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with ``before.parquet`` and ``ranks/``."""
    place = tmp_path_factory.mktemp("traces")
    write_trace(split_trace((9, 9, 9, 9)), place / "before.parquet")
    (place / "ranks").mkdir()
    write_ranks(split_trace((9, 9, 9, 9)), place / "ranks")
    return place


def run(capsys: pytest.CaptureFixture[str], text: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of the command."""
    try:
        status = main(["diagnose", *shlex.split(text)])
    except SystemExit as ended:
        status = ended.code
    return status, *capsys.readouterr()


def good(capsys: pytest.CaptureFixture[str], text: str) -> str:
    status, out, err = run(capsys, text)
    assert status == 0, err
    return out


def test_a_file_and_a_folder_of_ranks_give_the_same_report(capsys, folder):
    one, ranks = (json.loads(good(capsys, f"{folder / name} --json")) for name in ("before.parquet", "ranks"))
    assert {"S", "S_t", "S_w", "M_S", "M_W", "causes", "verdict", "checklist", "fix"} <= {*one}
    stages = [one.pop("stages"), ranks.pop("stages")]  # means of rows in another order
    assert one == ranks
    for name, seconds in stages[0].items():
        assert seconds == pytest.approx(stages[1][name])
    assert one["verdict"][0] == "stage split" and {*one["causes"]} <= {*CAUSES}
    assert one["fix"]["cause"] == "stage split" and one["fix"]["gain"] > 0.05 and one["S"] > 1.1


def test_all_files_are_written_and_written_again(capsys, folder, tmp_path):
    pytest.importorskip("matplotlib")
    flags = " ".join(
        f"--{flag} {tmp_path / name}"
        for flag, name in (("json", "r.json"), ("html", "r.html"), ("picture", "r.png"), ("timeline", "t.json"))
    )
    command = f"{folder / 'before.parquet'} --layers 9,9,9,9 --costs {tmp_path / 'costs.json'} --step 2 {flags}"
    first, second = good(capsys, command), good(capsys, command)
    assert first == second and "Stage split" in first and "\x1b" not in first
    assert json.loads((tmp_path / "r.json").read_text())["verdict"][0] == "stage split"
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    trace = json.loads((tmp_path / "t.json").read_text())
    assert trace["otherData"]["step"] == 2
    assert json.loads((tmp_path / "costs.json").read_text())["format"] == "megatron-balance costs"


def test_picture_without_matplotlib_says_what_to_install(capsys, folder, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = run(capsys, f"{folder / 'before.parquet'} --picture {tmp_path / 'r.png'}")
    assert (status, out) == (2, "") and "--picture needs matplotlib" in err and "pip install" in err


def test_layers_that_the_trace_tells_need_no_flag(capsys, tmp_path):
    trace = split_trace((9, 9, 9, 9))
    write_trace(replace(trace, job=replace(trace.job, layers=(9, 9, 9, 9))), tmp_path / "told.parquet")
    told = json.loads(good(capsys, f"{tmp_path / 'told.parquet'} --costs {tmp_path / 'costs.json'} --json"))
    assert told["fix"]["flags"][0].startswith("--pipeline-model-parallel-layout")
    assert json.loads((tmp_path / "costs.json").read_text())["provenance"]["layers of each stage"] == "9,9,9,9"


def test_before_and_after_the_split_that_was_proposed(capsys, folder, tmp_path):
    before, report, after = folder / "before.parquet", tmp_path / "before.json", tmp_path / "after.parquet"
    good(capsys, f"{before} --layers 9,9,9,9 --json {report}")
    flag, layout = shlex.split(json.loads(report.read_text())["fix"]["flags"][0])
    assert flag == "--pipeline-model-parallel-layout"
    layers = parse_layout(layout).layers
    write_trace(split_trace(layers), after)
    both = f"--after {after} --layers 9,9,9,9 --layers {','.join(map(str, layers))}"
    values = json.loads(good(capsys, f"--before {before} {both} --json"))
    assert values == json.loads(good(capsys, f"--before {report} {both} --json"))
    assert values["gain"] == pytest.approx(values["predicted"][0]["gain"], abs=0.02) and values["gain"] > 0.3
    assert "gone" in [change["change"] for change in values["changes"] if change["cause"] == "stage split"]
    text = good(capsys, f"--before {before} {both}")
    assert "What came" in text and "What was predicted" in text and "gone" in text


def test_a_healthy_job_is_called_healthy(capsys, tmp_path):
    level = made_trace(TOPOLOGY, np.full((4, 1, 1, 1), 0.01), np.full((4, 1, 1, 1), 0.02))
    write_trace(level, tmp_path / "level.parquet")
    values = json.loads(good(capsys, f"{tmp_path / 'level.parquet'} --json"))
    assert values["verdict"] == [HEALTHY] and values["S"] == pytest.approx(1)
    assert "Healthy" in good(capsys, str(tmp_path / "level.parquet"))


@pytest.mark.parametrize("name", ["ST", "SE"])
def test_published_traces(capsys, name, tmp_path):
    trace = public_folder() / f"trace-{name}.parquet"
    meta = public_folder() / f"meta-{name}.yaml"
    text = good(capsys, f"{trace} --meta {meta} --html {tmp_path / 'r.html'}")
    named = {"ST": "Stage split", "SE": "Sequence lengths and stage split"}[name]
    assert text.splitlines()[1].startswith(named)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("", "name one TRACE"),
        ("T --before T --after T", "name one TRACE"),
        ("--before T", "--before and --after go together"),
        ("--before T --after T --html X/r.html", "--html is of one trace"),
        ("T --meta a --meta b", "--meta is given 2 times"),
        ("T --json r.txt", "end the file's name in .json"),
        ("T --html X/none/r.html", "there is no folder"),
        ("T --html T.html", "was not written by this flag"),
        ("T --json X/same.json --timeline X/same.json", "name the same file"),
        ("T --costs X/c.json", "--costs needs --layers"),
        ("T --layers 9,x,9,9", "--layers 9,x,9,9: give the layers"),
        ("T --layers 9,9,9,9 --layers 9,9,9,9", "--layers is given 2 times"),
        ("T --layers 9,9", "--layers names 2 stages, the trace has 4"),
        ("T --step 2", "--step is for"),
        ("T --step 99 --timeline X/t.json", "--step 99 is not in the trace: it has 4 steps, 0 to 3"),
        ("X/none.parquet", "none.parquet"),
        ("X/empty", "no .parquet file"),
        ("X/cut.parquet", "cut.parquet"),
        ("--before X/bad.json --after T", "bad.json"),
        ("T --unknown", "unrecognized arguments: --unknown"),
    ],
)
def test_a_mistake_is_said_in_a_line_with_status_2(capsys, folder, tmp_path, flags, says):
    (tmp_path / "empty").mkdir()
    whole = (folder / "before.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "bad.json").write_text('{"S": "<script>"}')
    foreign = folder / "before.parquet.html"
    foreign.write_text("not ours")
    flags = " ".join(
        word.replace("T", str(folder / "before.parquet"), 1) if word[0] == "T" else word.replace("X", str(tmp_path), 1)
        for word in flags.split()
    )
    status, out, err = run(capsys, flags)
    assert status == 2 and not out
    assert re.search(says, err.splitlines()[-1]) and "Traceback" not in err
    assert foreign.read_text() == "not ours"


def test_help_names_every_output(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0
    for flag in ("--meta", "--layers", "--json", "--html", "--picture", "--timeline", "--costs", "--before", "--after"):
        assert flag in out


def test_it_needs_neither_torch_nor_megatron_and_plain_words_in_a_pipe(folder):
    code = (
        "import sys; from megatron_balance.cli import main; status = main(sys.argv[1:]);"
        " assert not {'torch', 'megatron', 'matplotlib'} & {*sys.modules}; sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "diagnose", str(folder / "before.parquet")],
        capture_output=True,
        env={**os.environ, "COLUMNS": "40", "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr.decode()
    text = done.stdout.decode("ascii")
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 40
