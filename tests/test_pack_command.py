"""`megatron-balance pack`: what it prints and writes, checked from its dump alone, and what it refuses."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from test_packing_documents import write_indexed

from megatron_balance.cli import main
from megatron_balance.costs.analytic import analytic_table
from megatron_balance.costs.devices import device_chosen
from megatron_balance.costs.table import save_costs
from megatron_balance.pack_command.report import histogram
from megatron_balance.packing import index
from megatron_balance.packing.documents import Documents
from megatron_balance.planning.job import read_job
from megatron_balance.schedule.simulate import Simulator
from megatron_balance.topology import Topology

MODEL = (
    "--num-layers 8 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 8 --vocab-size 32000 --swiglu"
    " --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --bf16"
    " --untie-embeddings-and-output-weights"
)
C, RATIO = 512, 300.0
JOB = f"--seq-length {C} --data-parallel-size 4 --pipeline-model-parallel-size 2 --global-batch-size 32 --cost-ratio {RATIO:.0f}"


def lengths(seed: int = 0, documents: int = 500) -> list[int]:
    """Log-normal, with one-token, empty and longer-than-bin documents among them."""
    drawn = np.random.default_rng(seed).lognormal(np.log(90), 1.1, documents).round().astype(int)
    drawn[:5] = 0, 1, 2, C + 1, 3 * C
    return drawn.tolist()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps(lengths()))
    return path


def run(capsys: pytest.CaptureFixture[str], text: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of the command."""
    try:
        status = main(["pack", *shlex.split(text)])
    except SystemExit as ended:
        status = ended.code
    return status, *capsys.readouterr()


def packed(capsys: pytest.CaptureFixture[str], text: str) -> dict:
    status, out, err = run(capsys, f"{text} --json")
    assert status == 0, err
    return json.loads(out)


def dumped(capsys: pytest.CaptureFixture[str], path: Path, text: str) -> dict:
    status, _, err = run(capsys, f"--dump {path} {text}")
    assert status == 0, err
    return json.loads(path.read_text())


# --- the dump: an independent check of what is planned


def label_counts(batches: list, data: list[int]) -> list[np.ndarray]:
    """How often each label of each document is learned from."""
    counts = [np.zeros(max(tokens - 1, 0), dtype=int) for tokens in data]
    for rank in (rank for batch in batches for rank in batch):
        for document, first, end in (piece for micro_batch in rank for piece in micro_batch):
            assert 0 <= first < end < data[document]
            counts[document][first:end] += 1
    return counts


def test_dumped_batches_learn_from_every_label_once_an_epoch_in_bins_of_the_right_size(capsys, data, tmp_path) -> None:
    batches = dumped(capsys, tmp_path / "dump.json", f"{data} {JOB} --batches 12")
    assert set(batches) == {"seq_length", "batches"} and batches["seq_length"] == C
    assert len(batches["batches"]) == 12
    for batch in batches["batches"]:
        assert len(batch) == 4 and {len(rank) for rank in batch} == {8}
        for micro_batch in (micro_batch for rank in batch for micro_batch in rank):
            assert 1 <= sum(end - first for _, first, end in micro_batch) <= C
    seen = np.concatenate(label_counts(batches["batches"], lengths()))
    epochs = sum(n - 1 for n in lengths() if n > 1)
    assert seen.sum() > 2 * epochs  # so that this is about more than one
    assert seen.max() - seen.min() <= 1
    first = np.concatenate(label_counts(batches["batches"][:2], lengths()))
    assert first.sum() < epochs and first.max() == 1


def test_same_documents_on_another_topology_and_seed_changes_them(capsys, data, tmp_path) -> None:
    other = JOB.replace("parallel-size 4", "parallel-size 2").replace("model-parallel-size 2", "model-parallel-size 4")
    found = [
        dumped(capsys, tmp_path / "dump.json", f"{data} {flags} --batches 2")["batches"]
        for flags in (JOB, other, f"{JOB} --seed 5")
    ]
    assert [len(batches[0]) for batches in found] == [4, 2, 4]
    pieces = [
        [Counter(tuple(piece) for rank in batch for micro_batch in rank for piece in micro_batch) for batch in batches]
        for batches in found
    ]
    assert pieces[0] == pieces[1] != pieces[2]


def test_report_says_what_the_dumped_batches_cost(capsys, data, tmp_path) -> None:
    """Costs by hand from the dump, each rank by the simulator of whole schedules."""
    path = tmp_path / "dump.json"
    for shapes in ("fixed", "variable"):
        flags = f"{data} {JOB} --batches 3 --varlen-packing-shapes {shapes}"
        values = packed(capsys, f"--dump {path} {flags}")
        topology = Topology(2, 8)
        simulator, step_s, ideal_s, labels, busiest = Simulator(topology), 0.0, 0.0, 0, []
        for batch in json.loads(path.read_text())["batches"]:
            tokens = [[[end - first for _, first, end in bin_] for bin_ in rank] for rank in batch]
            linear = [[C if shapes == "fixed" else sum(bin_) for bin_ in rank] for rank in tokens]
            cost = np.array([[sum(n * n for n in bin_) for bin_ in rank] for rank in tokens]) + RATIO * np.array(linear)
            each = np.broadcast_to(cost[:, None, :] / 2, (4, 2, 8))
            step_s += max(simulator.step_s(rank / 3, rank * 2 / 3) for rank in each)
            ideal_s += cost.sum() / (4 * 2)
            labels += sum(n for rank in tokens for bin_ in rank for n in bin_)
            busiest.append(cost.sum(axis=1).max() / cost.sum(axis=1).mean())
        ours = values["outcomes"]["packed"]
        assert ours["step_over_ideal"] == pytest.approx(step_s / ideal_s)
        assert ours["s_per_token"] == pytest.approx(step_s / labels)
        assert ours["data_parallel_max_over_mean"] == pytest.approx(np.mean(busiest))
        assert values["lower_bound_over_ideal"] <= ours["step_over_ideal"]
        assert values["step_above_bound"] == pytest.approx(
            1 - values["lower_bound_over_ideal"] / ours["step_over_ideal"]
        )


def test_blends_and_larger_micro_batches_add_a_number_and_a_level(capsys, tmp_path) -> None:
    for name, seed in (("a.json", 1), ("b.json", 2)):
        (tmp_path / name).write_text(json.dumps(lengths(seed)))
    blend = f"--data-path 0.25 {tmp_path / 'a.json'} 0.75 {tmp_path / 'b.json'}"
    found = dumped(capsys, tmp_path / "dump.json", f"{blend} {JOB} --micro-batch-size 2 --batches 8")
    assert found["data_sets"] == [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert found["micro_batch_size"] == 2
    tokens = Counter()
    for batch in found["batches"]:
        assert len(batch) == 4 and {len(rank) for rank in batch} == {4}
        sequences = [sequence for rank in batch for micro_batch in rank for sequence in micro_batch]
        assert len(sequences) == 32
        for sequence in sequences:
            assert 1 <= sum(end - first for _, _, first, end in sequence) <= C
            for data_set, document, first, end in sequence:
                assert end < lengths(1 + data_set)[document]
                tokens[data_set] += end - first
    assert tokens[0] / tokens.total() == pytest.approx(0.25, abs=C / tokens.total())


# --- the report


def test_json_counts_documents_as_they_are(capsys, data) -> None:
    values, counted = packed(capsys, f"{data} {JOB} --batches 2"), lengths()
    assert values["documents"] == len(counted) and values["tokens"] == sum(counted)
    assert values["without_labels"] == sum(n < 2 for n in counted)
    assert values["long_documents"] == sum(n - 1 > C for n in counted) and values["labels_left_out"] == 0
    assert sum(bar["documents"] for bar in values["histogram"]) == len(counted)
    for bar in values["histogram"]:
        within = [n for n in counted if bar["first"] <= n <= bar["last"]]
        assert (len(within), sum(within)) == (bar["documents"], bar["tokens"])
    assert set(values["outcomes"]) == {"chopped_undivided", "chopped", "in_order", "first_fit", "packed"}
    assert set(values["gain"]) == {*values["outcomes"]} - {"packed"}
    undivided, ours = values["outcomes"]["chopped_undivided"], values["outcomes"]["packed"]
    assert undivided["step_over_ideal"] == pytest.approx((8 + 2 - 1) / 8)  # equal micro-batches, 1F1B
    assert undivided["s_per_token"] == pytest.approx((RATIO * C + C * C) / 2 * (8 + 1) / (32 * C))
    assert values["gain"]["chopped_undivided"] == pytest.approx(undivided["s_per_token"] / ours["s_per_token"] - 1)
    assert 0.95 < values["batch"]["fill"] <= 1.0 and values["outcomes"]["chopped"]["fill"] == 1.0
    (one,) = values["data_sets"]
    assert one["batches_per_epoch"] == pytest.approx(values["labels"] / values["batch"]["tokens"])
    assert values["costs_in_seconds"] is False and values["assumed"] == []


@pytest.mark.parametrize("policy", ["truncate", "drop"])
def test_labels_of_long_documents_that_are_left_out_are_told(capsys, data, policy: str) -> None:
    values = packed(capsys, f"{data} {JOB} --batches 2 --varlen-packing-long-documents {policy}")
    kept = C if policy == "truncate" else 0
    assert values["labels_left_out"] == sum(n - 1 - kept for n in lengths() if n - 1 > C) > 0
    status, out, _ = run(capsys, f"{data} {JOB} --batches 2 --varlen-packing-long-documents {policy}")
    assert status == 0 and ("truncated to a bin" if policy == "truncate" else "left out") in out


def test_text_names_sizes_outcomes_and_verdict(capsys, data, tmp_path) -> None:
    path = tmp_path / "report.json"
    status, out, err = run(capsys, f"{data} --json {path} {JOB} --batches 2")
    assert status == 0, err
    assert out.startswith("Packing: 500 documents of ") and "32 bins of 512 tokens a step" in out
    assert "data-parallel size 4, 2 pipeline ranks, 8 micro-batches of 1 a step" in out
    for line in ("chopped, undivided attention", "this plan", "no placement is below", "verdict", "limited by"):
        assert sum(one.startswith(f"  {line}") for one in out.splitlines()) == 1, line
    assert max(map(len, out.splitlines())) <= 110
    assert json.loads(path.read_text())["worth_it"] == ("packing is worth it" in out)


def test_equal_documents_that_fill_a_bin_are_not_worth_packing(capsys, tmp_path) -> None:
    (tmp_path / "equal.json").write_text(json.dumps([C + 1] * 300))
    values = packed(capsys, f"{tmp_path / 'equal.json'} {JOB} --batches 2")
    assert not values["worth_it"]
    assert values["gain"]["chopped_undivided"] == pytest.approx(0, abs=1e-9)
    status, out, _ = run(capsys, f"{tmp_path / 'equal.json'} {JOB} --batches 2")
    assert status == 0 and "not worth it" in out


def test_everything_that_was_not_given_is_said(capsys, data) -> None:
    data.write_text(json.dumps(lengths(documents=2000)))
    values = packed(capsys, f"{data} --seq-length {C} --pipeline-model-parallel-size 3 --batches 1")
    assert values["assumed"] == [
        "--data-parallel-size 1",
        "--global-batch-size 258",  # whole groups of three
        "--cost-ratio 49152 (an 8B model)",
    ]
    assert values["bins"]["global_batch_size"] == 258 == values["bins"]["num_microbatches"]


def test_a_whole_command_line_of_training_is_read(capsys, data) -> None:
    launcher = "torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py"
    sizes = f"--seq-length {C} --global-batch-size 32 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    status, out, err = run(
        capsys, f"--json --batches 1 {launcher} {MODEL} {sizes} --lr 1e-4 --varlen-packing --data-path {data}"
    )
    assert status == 0, err
    values = json.loads(out)
    assert values["bins"]["data_parallel_size"] == 4 and values["costs_in_seconds"] is True
    assert values["costs"] == "analytic (generic GPU)" and values["assumed"] == []
    assert "without effect on packing: --lr" in err


def test_megatron_data_sets_are_read_as_their_lengths_are(capsys, data, tmp_path) -> None:
    prefix = write_indexed(tmp_path / "indexed_text_document", lengths())
    indexed, listed = (packed(capsys, f"{name} {JOB} --split 1,0,0 --batches 1") for name in (prefix, data))
    names = [values["data_sets"][0].pop("name") for values in (indexed, listed)]
    assert names == [str(prefix), str(data)] and indexed == listed


def test_orders_and_profiles_are_kept_and_change_nothing(capsys, data, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(index, "_SMALL", 0)
    flags = f"{data} {JOB} --batches 1"
    without = packed(capsys, flags)
    first, second = (packed(capsys, f"{flags} --data-cache-path {tmp_path / 'cache'}") for _ in range(2))
    assert first == second == without
    kept = sorted(path.name.split("-")[0] for path in (tmp_path / "cache").iterdir())
    assert "epoch" in kept and "profile" in kept


def test_experts_context_and_virtual_stages_reach_the_grid(capsys, data) -> None:
    flags = (
        f"--seq-length {C} --data-parallel-size 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
        " --context-parallel-size 2 --expert-model-parallel-size 4 --global-batch-size 32 --batches 1"
    )
    values = packed(capsys, f"{data} {flags}")
    assert values["bins"]["alignment"] == 4  # two parts of each document for each of two ranks
    assert values["bins"]["lockstep_size"] == 2 and values["bins"]["virtual_pipeline_size"] == 2
    assert values["outcomes"]["chopped_undivided"]["step_over_ideal"] == pytest.approx(1 + 1 / (2 * 8))


def test_costs_come_from_a_file(capsys, data, tmp_path) -> None:
    sizes = f"{MODEL} --seq-length {C} --pipeline-model-parallel-size 2"
    job, device = read_job(shlex.split(sizes), num_microbatches=1), device_chosen("H200")
    save_costs(tmp_path / "costs.json", analytic_table(job.model, job.topology, device))
    flags = f"{data} {sizes} --data-parallel-size 2 --global-batch-size 16 --batches 1"
    values = packed(capsys, f"{flags} --balanced-pipeline-costs {tmp_path / 'costs.json'}")
    assert values["costs"] == "analytic (H200)"
    counted = packed(capsys, f"{flags} --balanced-pipeline-device H200")
    own_s, counted_s = (one["outcomes"]["chopped_undivided"]["s_per_token"] for one in (values, counted))
    assert own_s == pytest.approx(counted_s)  # bins of one whole sequence: what the costs are of


def test_histogram_has_a_bar_for_each_power_of_two() -> None:
    bars = histogram([Documents.of("a", np.array([0, 15, 16, 31, 32])), Documents.of("b", np.array([200]))])
    assert [(bar.first, bar.last, bar.documents, bar.tokens) for bar in bars] == [
        (0, 15, 2, 15), (16, 31, 2, 47), (32, 63, 1, 32), (64, 127, 0, 0), (128, 255, 1, 200),
    ]  # fmt: skip


# --- the picture


def test_plot_is_a_picture_of_the_right_kind(capsys, data, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "packing.png"
    status, out, err = run(capsys, f"{data} --plot {path} {JOB} --batches 2")
    assert status == 0 and out, err
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000


def test_plot_without_matplotlib_says_what_to_install(capsys, data, monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = run(capsys, f"{data} --plot {tmp_path / 'packing.png'} {JOB}")
    assert (status, out) == (2, "") and "pip install 'megatron_balance[timeline]'" in err


# --- refusals


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (JOB, "no data: name the Megatron data sets first"),
        (f"DATA {JOB.replace(f'--seq-length {C}', '')}", "--seq-length is missing"),
        (f"DATA {JOB} --seed -1", "--seed -1"),
        (f"DATA {JOB} --batches 0", "--batches 0"),
        (f"DATA {JOB.replace('300', 'nan')}", "--cost-ratio nan"),
        (f"DATA {JOB.replace('300', '-1')}", "--cost-ratio -1"),
        (
            f"DATA {JOB.replace('size 32', 'size 30')}",
            "30 is not a multiple of micro-batch size * data-parallel size (1 * 4)",
        ),
        (f"DATA {JOB} --num-virtual-stages-per-pipeline-rank 2 --num-microbatches 3", "leave a last group of 1"),
        (f"DATA {JOB} --seq-lenght 512", "unrecognized arguments: --seq-lenght"),
        (f"DATA {JOB} --varlen-packing-shape fixed {MODEL}", "unrecognized arguments: --varlen-packing-shape"),
        (f"DATA {JOB} --context-parallel-size 3", "--seq-length 512 is not a multiple of 6"),
        (f"DATA {JOB} --expert-model-parallel-size 3", "replica of the experts"),
        (f"DATA {JOB} --lengths DATA", "PREFIX and --lengths each name the data"),
        (f"DATA {JOB} --split 0,1,0", "--split 0,1,0 leaves nothing for training"),
        (f"DATA {JOB} --split ''", "--split : give the proportions"),
        (f"DATA {JOB} --split 1,1,1,1", "--split 1,1,1,1: give the proportions"),
        (f"DATA {JOB} --split 1.2.3,1,1", "--split 1.2.3,1,1: give the proportions"),
        (f"DATA {JOB} --split 1,9999,0", "holds 500 documents, of which this part of --split gets none"),
        (f"DATA {JOB} --use-megatron-fsdp", "--use-megatron-fsdp with --pipeline-model-parallel-size 2"),
        (f"DATA {JOB} --world-size 8", "--data-parallel-size and --world-size"),
        (f"DATA {JOB} --balanced-pipeline-device H100", "leave --cost-ratio out"),
        (f"DATA {JOB} --dump batches.txt", "end the file's name in .json"),
        (f"DATA {JOB} --plot picture.pdf", "end the name in .png"),
        (f"DATA {JOB} --dump /nowhere/at/all/dump.json", "there is no folder /nowhere/at/all"),
        (f"--json DATA2 {JOB}", "end the file's name in .json"),
        (f"DATA2 {JOB}", "data.idx is missing"),
        (f"--lengths DATA2 {JOB}", "must end in .json, .csv or .npy"),
        (f"DATA {JOB.replace('size 32', 'size 4096')}", "4096"),  # more bins than there are documents
    ],
)
def test_what_cannot_be_is_refused_in_one_line(capsys, data, tmp_path, flags: str, told: str) -> None:
    command = flags.replace("DATA2", str(tmp_path / "data")).replace("DATA", str(data))
    status, out, err = run(capsys, command)
    assert (status, out) == (2, "") and told in err.splitlines()[-1], err
    assert not [*tmp_path.glob("*dump*")]


def test_flags_of_packed_training_are_taken(capsys, data) -> None:
    flags = "--varlen-packing-attention te --varlen-packing-micro-batches +2 --spec some module"
    report = packed(capsys, f"{data} {JOB} --batches 1 {MODEL} {flags}")
    assert report == {**packed(capsys, f"{data} {JOB} --batches 1 {MODEL}"), "assumed": report["assumed"]}


def test_documents_are_those_of_training(capsys, data, tmp_path) -> None:
    """Test data sets are of 500 documents, 484 (and a half) of which are Megatron's 96.9 %."""
    prefix = write_indexed(tmp_path / "indexed_text_document", lengths())
    told = "--split 969, 30, 1 (Megatron's own)"
    for words, count, assumed in (
        (f"{prefix}", 484, [told]),
        (f"--data-path {prefix}", 484, [told]),
        (f"--train-data-path {prefix}", 500, []),
        (f"--train-data-path {prefix} --split 80,20,0", 500, []),
        (f"--data-path 1 {prefix} 3 {data}", 968, [told]),
        (f"{prefix} --split 80,20,0", 400, []),
        (f"--lengths {data} --split 80,20,0", 400, []),
        (f"--lengths {data}", 500, []),
    ):
        report = packed(capsys, f"{words} {JOB} --batches 1")
        assert (report["documents"], report["assumed"]) == (count, assumed), words
    _, out, _ = run(capsys, f"{prefix} {JOB} --split 80,20,0 --batches 1")
    assert "the first 80.0 % of each data set's documents" in " ".join(out.split())


def test_chopped_bins_are_full_and_no_fuller(capsys, data) -> None:
    report = packed(capsys, f"{data} {JOB} --batches 2 --context-parallel-size 2")
    assert report["outcomes"]["chopped"]["fill"] == pytest.approx(1.0)


def test_lengths_behind_a_flag_that_writes_are_never_overwritten(capsys, data) -> None:
    for flag in ("--json", "--dump"):
        status, out, err = run(capsys, f"{flag} {data} {data} {JOB} --batches 1")
        assert (status, out) == (2, "") and "name another file" in err
        assert json.loads(data.read_text()) == lengths()


def test_needs_neither_torch_nor_megatron_nor_compiled_code_to_refuse(data) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'megatron', 'transformer_engine', 'matplotlib'): sys.modules[name] = None\n"
        "from megatron_balance.cli import main\n"
        f"status = main(['pack', {str(data)!r}, '--seq-length', '0'])\n"
        "assert status == 2, status\n"
        "assert 'numba' not in sys.modules and 'scipy' not in sys.modules\n"
        f"sys.exit(main(['pack', {str(data)!r}, '--json', '--batches', '1', *{shlex.split(JOB)!r}]))\n"
    )
    root = Path(__file__).parents[1]
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["documents"] == 500


def test_full_disk_behind_standard_output_is_said_in_one_line(data) -> None:
    command = [sys.executable, "-m", "megatron_balance.cli", "pack", str(data), *shlex.split(f"{JOB} --batches 1")]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith(
        "megatron-balance: error: standard output cannot be written (No space"
    )


def test_whole_epochs_are_not_cut_where_that_takes_for_ever(capsys, data, tmp_path) -> None:
    """A data set of hardly any weight is never read once, and a few documents may be of any length."""
    huge = tmp_path / "huge.json"
    huge.write_text(json.dumps([2**31 - 1] * 3))
    for words in (f"1 {data} 1e-9 {data}", str(huge)):
        assert packed(capsys, f"{words} {JOB} --batches 1")["batch"]["batches_cut"] == 1
    assert packed(capsys, f"0.9 {data} 0.1 {data} {JOB} --batches 1")["data_sets"][1]["batches_per_epoch"] > 10


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--dump {0}/a.json --json {0}/../{1}/a.json", "--dump and --json both name"),
        ("--json {0}/pipe.json", "pipe.json is there and no regular file"),
        ("--json {0}/" + "a" * 300 + ".json", "cannot be written (File name too long)"),
        ("--expert-model-parallel-size -2", "--expert-model-parallel-size -2: must be 1 or more"),
        ("--expert-tensor-parallel-size 0", "--expert-tensor-parallel-size 0: must be 1 or more"),
        ("--tensor-model-parallel-size 4 --expert-model-parallel-size 3 --expert-tensor-parallel-size 1", "replica of"),
    ],
)
def test_odd_outputs_and_experts_are_refused(capsys, data, tmp_path, flags, said) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    status, out, err = run(capsys, f"{data} {JOB} --batches 1 {flags.format(tmp_path, tmp_path.name)}")
    assert (status, out) == (2, "") and said in err


@pytest.mark.parametrize(("ending", "status"), [(">&-", 2), ("| cat", 0)])
def test_standard_output_that_is_closed_or_knows_ascii_only(data, ending, status) -> None:
    command = f"set -o pipefail; {sys.executable} -m megatron_balance.cli pack {data} {JOB} --batches 1 {ending}"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == status and "Traceback" not in done.stderr
    assert ("??" in done.stdout) == (not status) and ("it is closed" in done.stderr) == (status == 2)
