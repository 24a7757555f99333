"""The quickstart's parts that need no training: corpus, command lines, reading observations, arithmetic, table, picture."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from quickstart import corpus, launch, observations, observed, report  # noqa: E402
from quickstart.observations import Operation, Step  # noqa: E402
from quickstart.report import BALANCED, UNIFORM, Round  # noqa: E402
from quickstart.turns import Turns, order_of_turns, take_turns  # noqa: E402

from megatron_balance.costs.chain import ChainCosts, ElementCost  # noqa: E402
from megatron_balance.megatron.recorder import recorder  # noqa: E402
from megatron_balance.megatron.registry import Hook, Registry  # noqa: E402
from megatron_balance.pipeline.plan import Plan, make_plan  # noqa: E402
from megatron_balance.topology import Topology  # noqa: E402

# --- corpus -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "lib"
    for name in ("a.py", "b.py", "package/c.py", "site-packages/other.py", "notes.txt", "__pycache__/d.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\nprint('hello')\n" * 3)
    (root / "empty.py").write_text("\n")
    (root / "latin.py").write_bytes(b"# caf\xe9\n")
    return root


def test_documents_are_source_files_in_an_order_of_their_names(library: Path) -> None:
    documents = corpus.read_documents(library, 10**6)
    assert {document.name for document in documents} == {"a.py", "b.py", "package/c.py"}
    assert documents[0].text == (library / documents[0].name).read_text()
    (library / "b.py").write_text("other = 1\n")
    assert [one.name for one in corpus.read_documents(library, 10**6)] == [one.name for one in documents]


def test_the_limit_cuts_the_same_order_short(library: Path) -> None:
    everything = corpus.read_documents(library, 10**6)
    assert corpus.read_documents(library, 1) == everything[:1]
    assert corpus.read_documents(library, 0) == []


def test_the_interpreters_own_library_is_there() -> None:
    documents = corpus.read_documents(corpus.standard_library(), 300_000)
    assert sum(len(document.text) for document in documents) > 200_000


def test_the_key_is_of_the_content() -> None:
    one = [corpus.Document("a", "bc")]
    assert corpus.corpus_key(one, 300) == corpus.corpus_key(list(one), 300)
    others = [([corpus.Document("ab", "c")], 300), ([corpus.Document("a", "bd")], 300), (one, 301), ([*one, *one], 300)]
    assert len({corpus.corpus_key(*other) for other in [(one, 300), *others]}) == 5


def test_a_corpus_is_built_once_and_reads_back(library: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    documents, vocabulary = corpus.read_documents(library, 10**6), 300
    (tmp_path / ".corpus-killed").mkdir()
    built, new = corpus.build_corpus(documents, vocabulary, tmp_path)
    assert new and not list(tmp_path.glob(".corpus-*"))
    assert corpus.build_corpus(documents, vocabulary, tmp_path) == (built, False)

    dataset = indexed_dataset.IndexedDataset(str(built.prefix))
    tokenizer = tokenizers.Tokenizer.from_file(str(built.folder / "tokenizer.json"))
    assert len(dataset) == len(dataset.document_indices) - 1 == built.documents == 3
    assert built.tokens == sum(dataset.sequence_lengths)
    assert built.learned == tokenizer.get_vocab_size() <= vocabulary - 1
    for document, ids in zip(documents, dataset[:], strict=True):
        assert ids[-1] == vocabulary - 1 and vocabulary - 1 not in ids[:-1]
        assert tokenizer.decode(ids[:-1].tolist()) == document.text


def test_long_documents_are_cut_into_several_that_lose_nothing(library: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    documents, vocabulary, longest = corpus.read_documents(library, 10**6), 300, 7
    whole, _ = corpus.build_corpus(documents, vocabulary, tmp_path)
    cut, _ = corpus.build_corpus(documents, vocabulary, tmp_path, longest=longest)
    dataset = indexed_dataset.IndexedDataset(str(cut.prefix))  # its lengths are mapped as long as it lives
    lengths = dataset.sequence_lengths
    assert max(lengths) == longest and cut.documents == len(lengths) > whole.documents
    assert sum(lengths) - len(lengths) == whole.tokens - whole.documents


def test_a_corpus_that_fails_on_the_way_does_not_appear(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_half(documents: object, vocabulary: object, folder: Path, *_: object) -> None:
        (folder / "tokens.bin").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(corpus, "_write_corpus", write_half)
    with pytest.raises(OSError, match="disk full"):
        corpus.build_corpus(corpus.read_documents(library, 10**6), 300, tmp_path)
    assert not list(tmp_path.glob("corpus-*"))


# --- launches ---------------------------------------------------------------------------------------------------------

SIZE = launch.Size(
    layers=16, hidden=64, heads=4, vocabulary=512, sequence=32, micro_batch=2, microbatches=4, warmup=1, pairs=2
)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The command lines of the starting run and of both splits, by name."""
    seen: dict[str, str] = {}
    monkeypatch.setattr(
        launch,
        "run",
        lambda commands, *_: seen.update({log.stem: " ".join(one) for log, one in commands.items()}),
    )
    job = launch.Job(SIZE, "cpu", tmp_path / "tokens", tmp_path)
    job.start("start", print)
    job.compare(order_of_turns(BALANCED, UNIFORM, SIZE.steps), print, print)
    return seen


def test_both_splits_start_from_the_checkpoint_of_one_unsplit_run(commands: dict[str, str], tmp_path: Path) -> None:
    assert (
        f"--save {tmp_path}/start " in commands["start"] and "--pipeline-model-parallel-size" not in commands["start"]
    )
    for split in (UNIFORM, BALANCED):
        assert f"--load {tmp_path}/start --finetune --no-load-optim --no-load-rng" in commands[split]
        assert "--pipeline-model-parallel-size 2" in commands[split] and "--nproc-per-node 2" in commands[split]
        assert "--global-batch-size 8 --train-iters 4 " in commands[split]


def test_the_two_splits_differ_in_our_flags_alone(commands: dict[str, str], tmp_path: Path) -> None:
    ours = f" --balanced-pipeline --balanced-pipeline-plan {tmp_path}/plan.json"
    named = f"observations/uniform uniform {','.join(order_of_turns(BALANCED, UNIFORM, 4))} --"
    trace = f"--straggler-trace {tmp_path}/traces/uniform --straggler-trace-steps 2:4"
    assert named in commands[UNIFORM] and trace in commands[UNIFORM]
    assert commands[BALANCED].removesuffix(ours) == commands[UNIFORM].replace(
        named, named.replace("uniform uniform", "balanced balanced", 1)
    ).replace(trace, trace.replace("uniform", "balanced"))


def test_a_split_trains_alone_from_scratch_and_then_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(
        launch, "run", lambda commands, *_: started.append([" ".join(one) for one in commands.values()])
    )
    job = launch.Job(SIZE, "cpu", tmp_path / "tokens", tmp_path, from_scratch=True)
    job.compare([UNIFORM] * SIZE.steps, print)
    job.compare(order_of_turns(BALANCED, UNIFORM, SIZE.steps), print)
    assert [len(one) for one in started] == [1, 2]
    assert all("--load" not in command for commands in started for command in commands)
    assert "--balanced-pipeline" not in started[0][0] and "--balanced-pipeline" in started[1][1]


def test_a_failing_launch_shows_the_end_of_its_log_and_ends_the_other(tmp_path: Path) -> None:
    failing, other = tmp_path / "x.log", tmp_path / "y.log"
    commands = {
        other: [sys.executable, "-c", "import time; time.sleep(60)"],
        failing: [sys.executable, "-c", "print('no such layer'); raise SystemExit(3)"],
    }
    with pytest.raises(launch.LaunchFailed, match=r"(?s)no such layer.*status 3.*x\.log"):
        launch.run(commands, lambda text: None)
    assert "no such layer" in failing.read_text()


def test_the_second_command_waits_until_it_may_follow(tmp_path: Path) -> None:
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(second)!r}).exists(): time.sleep(0.05)"
    commands = {first: [sys.executable, "-c", wait], second: [sys.executable, "-c", "print('second')"]}
    asked: list[bool] = []

    def follows() -> bool:
        asked.append(first.exists() and not second.exists())
        return len(asked) == 2

    launch.run(commands, lambda text: None, follows=follows)
    assert asked == [True, True] and "second" in second.read_text()


def test_what_interrupts_a_launch_ends_its_process(tmp_path: Path) -> None:
    log = tmp_path / "x.log"

    def interrupt(text: str) -> None:
        if log.read_text().splitlines()[-1].isdigit():
            raise KeyboardInterrupt

    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with pytest.raises(KeyboardInterrupt):
        launch.run({log: [sys.executable, "-c", code]}, interrupt)
    assert not _runs(int(log.read_text().splitlines()[-1]))


def test_progress_is_read_from_megatrons_lines(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("building\n")
    assert launch.steps_reached(log) == (0, "starting")
    log.write_text(
        "x" * 9000 + "\n [2026] iteration        2/       8 | consumed\n iteration        3/       8 | consumed"
    )
    assert launch.steps_reached(log) == (3, "step 3 of 8")


def test_the_end_of_a_log_is_before_torchruns_account() -> None:
    lines = [f"line {i}" for i in range(50)] + ["E1129 1 torch/distributed/elastic/x.py:1] failed", "Root Cause"]
    assert launch.end_of_log("\n".join(lines)).splitlines() == lines[20:50]
    assert launch.end_of_log("only this\n") == "only this"


# --- pinning ----------------------------------------------------------------------------------------------------------


def test_one_cpu_of_each_core(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        (tmp_path / str(cpu)).write_text(siblings)
    topology = str(tmp_path / "{}")
    assert observed.one_cpu_per_core([0, 1, 2, 3], topology) == [0, 1]
    assert observed.one_cpu_per_core([2, 3], topology) == [2, 3]
    assert observed.one_cpu_per_core([0, 2], str(tmp_path / "unknown-{}")) == [0, 2]


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux")
def test_a_worker_dies_with_its_parent() -> None:
    child = "from megatron_balance.processes import die_with_parent as d; d(); import time; print(flush=True); time.sleep(60)"
    parent = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, env=environment) as process:
        pid = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 50
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended, perhaps just now
        return False


# --- turns ------------------------------------------------------------------------------------------------------------


def test_steps_are_trained_in_turn(tmp_path: Path) -> None:
    """Two jobs of two ranks, each rank a thread: a step starts after all ranks have ended the turn before it."""
    order, log, awaited, guard = order_of_turns(BALANCED, UNIFORM, 6), [], [], threading.Lock()

    def train(job: str, rank: int) -> None:
        turns = Turns(tmp_path, order, job, rank, processes=2)
        with guard:
            awaited.append(turns.are_awaited())

        def train_step() -> None:
            with guard:
                log.append((job, "start"))
            time.sleep(0.01 * rank)
            with guard:
                log.append((job, "end"))

        step = turns.around(train_step)
        for _ in range(order.count(job)):
            step()
        turns.end()

    threads = [threading.Thread(target=train, args=(job, rank)) for job in (UNIFORM, BALANCED) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [log[i][0] for i in range(0, len(log), 4)] == order
    assert not awaited[0] and Turns(tmp_path, order, UNIFORM, 0, processes=2).are_awaited()
    assert all(len({job for job, _ in log[i : i + 4]}) == 1 for i in range(0, len(log), 4))


def test_a_turn_is_awaited_outside_what_the_job_puts_around_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with the recorder, whose hook comes after ours: waiting must not be part of what it sees."""
    training = types.ModuleType("megatron.training.training")
    order: list[str] = []
    training.train_step = lambda: order.append("step")
    training.train = lambda: training.train_step()
    monkeypatch.setitem(sys.modules, "megatron.training.training", training)
    monkeypatch.setattr("megatron_balance.megatron.registry.registry", registry := Registry())
    monkeypatch.setattr(Turns, "around", lambda self, step: lambda: (order.append("wait"), step()))
    monkeypatch.setattr(recorder, "recording", [types.SimpleNamespace(part=lambda: order.append("left out"))])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    take_turns(tmp_path, "job", "job")
    registry.apply(
        Hook("megatron.training.training", "train_step", "t", "records", lambda f: lambda: (order.append("begin"), f()))
    )
    training.train()
    assert order == ["wait", "left out", "begin", "step"]


# --- observations -----------------------------------------------------------------------------------------------------


def _seen(pipeline_rank: int, loss: float | None, offset_s: float = 0.0) -> dict:
    operations = [["forward", 0, 0, offset_s + 1.0, offset_s + 1.5], ["backward", 0, 0, offset_s + 2.0, offset_s + 3.0]]
    step = {"start_s": offset_s + 0.5, "end_s": offset_s + 4.0, "loss": loss, "operations": operations}
    return {"rank": pipeline_rank, "pipeline_rank": pipeline_rank, "chunks": [{"layers": [1, 2]}], "steps": [step]}


def _write(folder: Path, *ranks: dict) -> None:
    for rank in ranks:
        (folder / f"rank-{rank['rank']}.json").write_text(json.dumps(rank))


def test_ranks_are_joined_to_steps(tmp_path: Path) -> None:
    _write(tmp_path, _seen(1, 9.5, offset_s=0.25), _seen(0, None))
    layers, (step,) = observations.read_run(tmp_path)
    assert layers == (2, 2)
    assert (step.start_s, step.end_s, step.duration_s, step.loss) == (0.5, 4.25, 3.75, 9.5)
    assert step.busy_s == (1.5, 1.5)
    assert step.operations[1][0] == Operation("forward", 0, 1.25, 1.75)


def test_ranks_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    short = _seen(0, None)
    short["steps"] = []
    _write(tmp_path, short, _seen(1, 9.5))
    with pytest.raises(ValueError, match=r"\[0, 1\] steps"):
        observations.read_run(tmp_path)
    _write(tmp_path, _seen(0, None), _seen(1, None))
    with pytest.raises(ValueError, match="loss"):
        observations.read_run(tmp_path)


# --- report -----------------------------------------------------------------------------------------------------------


def _step(duration_s: float, loss: float = 10.0) -> Step:
    rank = (
        Operation("forward", 0, 0.0, 0.2 * duration_s),
        Operation("backward", 0, 0.4 * duration_s, 0.8 * duration_s),
    )
    return Step(0.0, duration_s, loss, (rank, rank[1:]))


def _round(split: str, duration_s: float, loss: float = 10.0) -> Round:
    return Round(split, (8, 8) if split == UNIFORM else (13, 3), _step(duration_s, loss))


def _plan(uniform_step_s: float, step_s: float) -> Plan:
    costs = ChainCosts(ElementCost(0, 0), (ElementCost(1, 2),) * 16, ElementCost(10, 20), "measured (CPU)")
    return replace(make_plan(costs, Topology(2, 8), {}), uniform_step_s=uniform_step_s, step_s=step_s)


def _rounds(*durations_s: float) -> list[Round]:
    order = order_of_turns(BALANCED, UNIFORM, len(durations_s) // 2)
    return [_round(split, one) for split, one in zip(order, durations_s, strict=True)]


def test_rounds_alternate_within_and_between_pairs() -> None:
    u, b = UNIFORM, BALANCED
    assert order_of_turns(BALANCED, UNIFORM, 3) == [b, u, u, b, b, u]


def test_the_summary_is_of_medians_without_the_first_and_last_turns() -> None:
    rounds = _rounds(88, 99, 4, 2, 3, 5, 3, 2, 66, 77)  # turns b u, u b, b u, u b, b u; first and last do not count
    summary = report.summarize(rounds, 1, _plan(5.7, 3.0), "cpu")
    assert (summary.uniform_split, summary.balanced_split) == ((8, 8), (13, 3))
    assert (summary.uniform_step_s, summary.balanced_step_s) == (4, 2)
    assert summary.pair_speedups == (4 / 2, 5 / 3, 3 / 2)
    assert summary.measured_speedup == 5 / 3  # not 4 / 2, of the medians of the splits
    assert summary.predicted_speedup == pytest.approx(1.9)
    assert summary.prediction_over_measured == pytest.approx(1.9 * 3 / 5)
    assert summary.turn_spread == pytest.approx(4.5 / 3.5)
    assert summary.uniform_busy_s == pytest.approx((0.6 * 4, 0.4 * 4))
    assert [one["split"] for one in summary.rounds] == [UNIFORM, BALANCED, BALANCED, UNIFORM, UNIFORM, BALANCED]
    assert json.loads(json.dumps(summary.to_json()))["rounds"][0]["step_s"] == 4


@pytest.mark.parametrize(("loss", "agree"), [(10.0, True), (10.0 * (1 + 1e-6), True), (10.0 * (1 - 3e-6), False)])
def test_the_loss_difference_is_relative_and_of_the_worst_pair(loss: float, agree: bool) -> None:
    rounds = [_round(UNIFORM, 1), _round(BALANCED, 1, loss), *_rounds(1, 1, 1, 1)]
    summary = report.summarize(rounds, 1, _plan(1.0, 1.0), "cpu")
    assert summary.max_loss_difference == pytest.approx(abs(loss - 10) / 10)
    assert summary.losses_agree is agree


def test_the_typical_step_is_one_near_the_median() -> None:
    assert report.typical_step([_round(UNIFORM, one) for one in (3.1, 1, 3, 9, 2)]).duration_s == 3


def _summary() -> report.Summary:
    return report.summarize(_rounds(3, 4, 9, 9), 0, _plan(3.9, 3.0), "cpu")


def test_the_table_names_splits_and_speedups() -> None:
    from rich.console import Console

    text = StringIO()
    Console(file=text, width=100).print(report.table(_summary()))
    for word in ("8 | 8", "13 | 3", "2.400 s ( 60%)", "3.900 s", "1.300", "1.333", "0.975", "0.0e+00"):
        assert word in text.getvalue()


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from quickstart.picture import draw

    draw(_summary(), _step(4), _step(3), tmp_path / "timelines.png")
    assert (tmp_path / "timelines.png").read_bytes().startswith(b"\x89PNG")


# --- the shell --------------------------------------------------------------------------------------------------------


def _bash(script: str, **environment: str) -> subprocess.CompletedProcess:
    command = ["bash", "-c", f"set -euo pipefail; source {SCRIPTS}/lib/python.sh; {script}"]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def _fake_python(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def test_a_python_that_does_not_run_is_passed_over(tmp_path: Path) -> None:
    minimum = f"{sys.version_info.major}.{sys.version_info.minor}"
    _fake_python(tmp_path / "shims", f"python{minimum}", "echo 'pyenv: command not found' >&2; exit 127")
    _fake_python(tmp_path / "good", f"python{minimum}", f'exec "{sys.executable}" "$@"')
    search = f"{tmp_path}/shims:{tmp_path}/good:/usr/bin:/bin"
    found = _bash(f"find_python {minimum}", PATH=search, PYENV_ROOT="/nowhere", MEGATRON_BALANCE_PYTHON="")
    assert found.stdout.strip() == f"{tmp_path}/good/python{minimum}"


def test_no_python_is_an_error_with_a_remedy() -> None:
    found = _bash("find_python 3.19", MEGATRON_BALANCE_PYTHON="")
    assert found.returncode != 0 and "MEGATRON_BALANCE_PYTHON=" in found.stderr and not found.stdout
    named = _bash("find_python 3.19", MEGATRON_BALANCE_PYTHON=sys.executable)
    assert named.returncode != 0 and sys.executable in named.stderr


@pytest.mark.parametrize("name", ["quickstart", "reproduce_stage_imbalance", "reproduce_length_imbalance"])
def test_help_needs_nothing_installed(name: str) -> None:
    for flag in ("--help", "-h"):
        shown = subprocess.run(["bash", SCRIPTS / f"{name}.sh", "--quick", flag], capture_output=True, text=True)
        assert shown.returncode == 0 and "--quick" in shown.stdout and "summary.json" in shown.stdout
