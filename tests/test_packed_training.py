"""Megatron trains on packed documents: the same on every topology, each label once. Real training, on the CPU."""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from launch import DRIVER as OBSERVED
from launch import TINY, Run, launch, trained
from megatron.core.models.gpt import GPTModel
from written_documents import EOD, write_documents

from megatron_balance.cli import main
from megatron_balance.megatron.found_checkpoint import ahead_of
from megatron_balance.megatron.packed.experts import padding_of
from megatron_balance.pipeline.stored import FILE_NAME

pytestmark = pytest.mark.training

TOLERANCE, GRADIENT_TOLERANCE = 2e-6, 1e-5
DRIVER, RUNS_TWICE = (Path(__file__).with_name(name) for name in ("packed_run.py", "rerun_run.py"))
MODEL = "--num-layers 4 --untie-embeddings-and-output-weights"
PACKING = "--varlen-packing --calculate-per-token-loss --split 90,10,0 --eval-iters 2 --eval-interval 20"
Piece = tuple[tuple[int, ...], tuple[int, ...]]


@pytest.fixture(scope="session")
def documents(tmp_path_factory) -> tuple[Path, list[np.ndarray]]:
    """Prefix of a data set, and its documents."""
    prefix = tmp_path_factory.mktemp("documents") / "text"
    return prefix, write_documents(prefix)


def arguments(prefix: Path, flags: str) -> list[str]:
    """Of a packed run: `TINY`'s, with data of its own."""
    given = flags.split()
    kept = [argument for argument in TINY if argument != "--mock-data"]
    for other, left_out in {
        "--train-samples": "--train-iters",
        "--step-batch-size-schedule": "--global-batch-size",
    }.items():
        if other in given:
            place = kept.index(left_out)
            del kept[place : place + 2]
    return [*kept, *MODEL.split(), "--data-path", str(prefix), *PACKING.split(), *given]


@pytest.fixture(scope="session")
def packed(documents, checkpoint, tmp_path_factory) -> Callable[..., Run]:
    """Train 20 packed steps from the PP=1 checkpoint, once for each set of flags: ``(flags, processes, driver)``."""

    @cache
    def train(flags: str = "", processes: int = 1, driver: Path = DRIVER) -> Run:
        load = f"--load {checkpoint(MODEL)} --finetune --no-load-optim --no-load-rng {flags}"
        return trained(launch(tmp_path_factory.mktemp("run"), arguments(documents[0], load), processes, driver=driver))

    return train


FIXED = "--varlen-packing-shapes fixed"
TOPOLOGIES = pytest.mark.parametrize(
    ("flags", "processes"),
    [
        ("--pipeline-model-parallel-size 2", 2),
        ("--pipeline-model-parallel-size 4 --eval-micro-batch-size 2", 4),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", 2),
        ("--pipeline-model-parallel-size 2", 4),
        ("--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2", 4),
        ("--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel", 4),
        ("--pipeline-model-parallel-size 2 --micro-batch-size 2", 2),
        ("--pipeline-model-parallel-size 2 --balanced-pipeline --balanced-pipeline-costs analytic", 2),
        (f"--pipeline-model-parallel-size 2 --micro-batch-size 2 {FIXED}", 2),
        ("--varlen-packing-micro-batches +8", 1),
        (
            "--pipeline-model-parallel-size 2 --varlen-packing-micro-batches +3 --recompute-granularity full"
            " --recompute-method uniform --recompute-num-layers 1",
            2,
        ),
    ],
    ids=[
        "PP2",
        "PP4",
        "PP2-VPP2",
        "DP2-PP2",
        "TP2-PP2",
        "SP2-PP2",
        "two-bins-a-micro-batch",
        "balanced",
        "two-bins-of-fixed-shape",
        "eight-more-micro-batches",
        "PP2-three-more-recomputed",
    ],
)


@TOPOLOGIES
def test_losses_equal_those_of_one_process(packed, flags, processes):
    losses, reference = packed(flags, processes).losses, packed(FIXED).losses
    assert len(losses) == len(reference) == 20
    assert max(abs(loss - right) / right for loss, right in zip(losses, reference, strict=True)) <= TOLERANCE


@TOPOLOGIES
def test_gradients_equal_those_of_one_process(packed, flags, processes):
    norms, reference = packed(flags, processes).gradient_norms, packed(FIXED).gradient_norms
    assert len(norms) == len(reference) == 20
    assert norms == pytest.approx(reference, rel=GRADIENT_TOLERANCE)


GROWING = (
    "--step-batch-size-schedule 0:4,640:8,1408:12 --train-samples 80 --lr-decay-samples 80 --eval-interval 6"
    " --eval-global-batch-size 4"
)


@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        ("--varlen-packing-micro-batches +3 --balanced-pipeline --balanced-pipeline-costs analytic", 2),
        ("--num-virtual-stages-per-pipeline-rank 2 --varlen-packing-micro-batches +4", 4),
    ],
    ids=["balanced-three-more", "DP2-VPP2-four-more"],
)
def test_a_growing_batch_is_packed_alike_on_all_topologies(packed, flags, processes):
    """80 samples: five steps of 4, three of 8, three of 12."""
    grown = packed(f"--pipeline-model-parallel-size 2 {GROWING} {flags}", processes)
    reference = packed(f"{GROWING} {FIXED}")
    assert [len(of.losses) for of in (grown, reference)] == [11, 11]
    assert grown.losses == pytest.approx(reference.losses, rel=TOLERANCE)
    assert grown.gradient_norms == pytest.approx(reference.gradient_norms, rel=GRADIENT_TOLERANCE)
    if "--balanced-pipeline" in flags:
        assert "planning for the largest global batch, 12 micro-batches (the smallest has 4)" in grown.output


DESCENT = "--optimizer sgd --lr 0.03 --clip-grad 0"
WATCHED = (
    f"{DESCENT} --pipeline-model-parallel-size 2 --varlen-packing-micro-batches +3 --tensorboard-dir board"
    " --straggler-trace trace --straggler-trace-interval 5"
)


@pytest.fixture(scope="session")
def watched(packed) -> Run:
    """DP2-PP2 with three more micro-batches, by plain descent; recorded, and with Megatron's writer."""
    return packed(WATCHED, 4, OBSERVED)


def test_each_step_goes_as_far_as_that_of_one_process(packed, watched):
    """Adam divides a factor of the gradient out, and clipping may: here it would be one of the learning rate."""
    reference = packed(f"{DESCENT} {FIXED}").losses
    assert len(watched.losses) == 20 and watched.losses == pytest.approx(reference, rel=TOLERANCE)
    assert min(reference) < 0.97 * reference[0]  # it goes somewhere


def test_rank_0_says_at_the_start_what_packing_does(documents, watched):
    trained_on = documents[1][:360]
    said = dict.fromkeys(re.findall("^megatron-balance: (.*)", watched.output, re.MULTILINE))
    (bins,) = (line for line in said if line.startswith("packing"))
    labels = sum(text.size - 1 for text in trained_on)
    assert bins.startswith(f"packing 360 documents of {labels:,} labels into bins of 32 tokens, ")
    longer, without = (sum(map(case, trained_on)) for case in (lambda text: text.size > 33, lambda text: text.size < 2))
    assert f"variable shape; {longer} documents are longer than a bin (split), {without} have no label" in bins
    (steps,) = (line for line in said if line.startswith("simulated step of the first 3 global batches: "))
    ours, stock = map(float, re.findall(r"([\d.]+) of ideal", steps))
    assert 1 <= ours < stock
    (more,) = (line for line in said if line.startswith("with 4 + 3 micro-batches the simulated step is "))
    assert 0.5 < float(re.search(r"is ([\d.]+) times faster than with 4$", more)[1]) < 3
    for line in (bins, steps, more):
        assert watched.output.count(line) == 1


def test_what_is_logged_of_packing_goes_to_the_writer(packed, watched):
    lines = re.findall(
        r"packing of iteration +(\d+) \| fill: ([\d.]+)% \| real tokens: +(\d+) \| predicted step over ideal: ([\d.]+) \|",
        watched.output,
    )
    printed = [[float(column) for column in columns] for columns in zip(*lines, strict=True)]
    steps, fills, real, over = printed
    assert steps == [*range(1, 21)]
    scalars = scalars_of(watched)
    for name, column, apart in (
        ("fill", fills, 5e-3),
        ("real tokens", real, 0),
        ("predicted step over ideal", over, 5e-5),
    ):
        written = scalars[f"packing/{name}"]
        assert [*written] == steps
        values = np.array([*written.values()]) * (100 if name == "fill" else 1)
        assert np.abs(values - column).max() <= apart + 1e-6 * max(column)
    learned = [
        sum(len(labels) for _, labels in pieces.elements()) for _, pieces in sorted(fed(packed(FIXED).folder).items())
    ]
    assert real == learned  # as another run was fed
    assert [fill / 100 for fill in fills] == pytest.approx([tokens / (8 * 32) for tokens in real], abs=1e-4)
    assert min(over) >= 1 and len({*over}) > 1


def test_what_the_recorder_finds_goes_to_the_writer(watched):
    found = re.findall(
        r"^megatron-balance: iteration (\d+): last stage ([\d.]+)x the mean", watched.output, re.MULTILINE
    )
    scalars = scalars_of(watched)
    last = scalars["straggler/last stage over mean"]
    assert [*last] == [int(step) for step, _ in found] and len(found) >= 3
    assert [*last.values()] == pytest.approx([float(value) for _, value in found], abs=0.006)
    names = {name.removeprefix("straggler/") for name in scalars if name.startswith("straggler/")}
    assert names >= {
        "saving by another split",
        "slowest data-parallel rank over mean",
        "garbage collection seconds a step",
    }
    assert all({*scalars[f"straggler/{name}"]} <= {*last} for name in names)
    assert min(scalars["straggler/slowest data-parallel rank over mean"].values()) >= 1


def scalars_of(run: Run) -> dict[str, dict[int, float]]:
    """What Megatron's writer of TensorBoard was given, by name and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.folder / "board")).Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


@TOPOLOGIES
def test_evaluation_does_not_depend_on_the_topology(packed, flags, processes):
    values, reference = evaluated(packed(flags, processes)), evaluated(packed(FIXED))
    assert len(values) == len(reference) > 0
    assert values == pytest.approx(reference, rel=3e-6)  # seven digits are printed


MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall"
    " --disable-bias-linear"
)
PREDICTING = "--mtp-num-layers 2 --position-embedding-type rope"


@pytest.fixture(scope="session")
def shared(checkpoint, tmp_path_factory) -> Callable[..., Run]:
    """Ten packed steps from a PP=1 checkpoint, on documents that two context-parallel ranks share without padding: so that a
    global batch holds the same ones on any number of ranks; once for each model and set of flags.
    """
    prefix = tmp_path_factory.mktemp("documents of fours") / "text"
    write_documents(prefix, multiple=4)

    @cache
    def train(model: str = "", flags: str = "", processes: int = 1) -> Run:
        load = f"--load {checkpoint(f'{MODEL} {model}')} --finetune --no-load-optim --no-load-rng --train-iters 10"
        return trained(launch(tmp_path_factory.mktemp("run"), arguments(prefix, f"{load} {model} {flags}"), processes))

    return train


@pytest.mark.parametrize(
    ("model", "flags", "processes"),
    [
        ("", "--context-parallel-size 2", 2),
        ("", "--context-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 2", 4),
        ("", "--tensor-model-parallel-size 2 --sequence-parallel", 2),
        ("", "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 2),
        ("", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 1),
        (MOE, "--expert-model-parallel-size 2", 2),
        (PREDICTING, "--context-parallel-size 2", 2),
        (PREDICTING, "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Ett|tt|mm|L", 4),
    ],
    ids=[
        "CP2", "CP2-PP2-two-bins", "TP2-SP", "distributed-optimizer", "recompute", "EP2", "MTP-CP2", "MTP-alone-PP4",
    ],
)  # fmt: skip
def test_losses_and_gradients_equal_those_of_one_process_on_all_kinds_of_ranks(shared, model, flags, processes):
    run, reference = shared(model, flags, processes), shared(model)
    assert len(run.losses) == len(reference.losses) == 10
    assert run.losses == pytest.approx(reference.losses, rel=TOLERANCE)
    assert run.gradient_norms == pytest.approx(reference.gradient_norms, rel=GRADIENT_TOLERANCE)
    assert len(evaluated(reference)) > 0
    assert evaluated(run) == pytest.approx(evaluated(reference), rel=3e-6)  # seven digits are printed


LOADED = MOE.replace("balancing-type none", "balancing-type aux_loss --moe-aux-loss-coeff 0.5 --moe-z-loss-coeff 0.5")


def test_a_micro_batch_of_padding_alone_has_no_load():
    """As a step with more micro-batches may have: Megatron would divide by its tokens."""
    router = {
        "num_experts": 4,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_z_loss_coeff": None,
        "mtp_num_layers": None,
    }
    args = SimpleNamespace(**router, sequence_parallel=False)
    stage = GPTModel.__new__(GPTModel)
    stage.__dict__["pre_process"] = False
    valid = torch.tensor([[1.0, 1.0, 0.0]])
    assert padding_of(args, stage, torch.zeros(1, 3), 0) == {}
    assert padding_of(SimpleNamespace(**{**vars(args), "num_experts": None}), stage, valid, 2) == {}
    if "padding_mask" in inspect.signature(GPTModel.forward).parameters:
        with mock.patch.object(torch.Tensor, "cuda", lambda self, **_: self):  # as the CPU runtime has it
            assert padding_of(args, stage, valid, 2)["padding_mask"].tolist() == [[False, False, True]]


@pytest.mark.skipif(
    "padding_mask" not in inspect.signature(GPTModel.forward).parameters,
    reason="this Megatron's routers know no padding",
)
@pytest.mark.parametrize(
    ("flags", "processes"),
    [("", 1), ("--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2", 4)],
    ids=["one", "TP2-SP-PP2"],
)
def test_a_router_is_trained_alike_with_padding_and_on_any_number_of_ranks(shared, flags, processes):
    """One bin a step, so that the same documents share it with padding or without: the load is one of a micro-batch."""
    alone = "--global-batch-size 1"
    padded, unpadded = shared(LOADED, f"{alone} {flags} {FIXED}", processes), shared(LOADED, alone)
    assert padded.losses == pytest.approx(unpadded.losses, rel=TOLERANCE)
    loads = [re.findall(r"load_balancing_loss: (\S+)", run.output) for run in (padded, unpadded)]
    assert padded.gradient_norms == pytest.approx(unpadded.gradient_norms, rel=GRADIENT_TOLERANCE)
    assert len(loads[0]) == 10 and [*map(float, loads[0])] == pytest.approx([*map(float, loads[1])], rel=1e-5)


def evaluated(run: Run) -> list[float]:
    return [float(value) for value in re.findall(r"lm loss value: (\S+)", run.output)]


def test_every_label_is_learned_once_an_epoch_also_across_a_kill_and_another_topology(documents, tmp_path):
    prefix, written = documents
    save, mask = f"--save {tmp_path / 'checkpoint'} --save-interval 3", "--eod-mask-loss"
    first = launch(
        tmp_path / "killed",
        arguments(prefix, f"--pipeline-model-parallel-size 2 {save} {mask} --train-iters 40"),
        2,
        driver=DRIVER,
        environment={"HELD_AT": str(8 * 8)},
        kill_when="iteration        8/",
    )
    assert first.status < 0
    beside = tmp_path / "checkpoint" / "iter_0000006" / FILE_NAME
    beside.replace(ahead_of(beside))  # where a kill would have left it just after the checkpoint was complete
    resumed = f"--load {tmp_path / 'checkpoint'} {save} {mask} --num-workers 2 --train-iters 40 --micro-batch-size 2"
    resumed += " --varlen-packing-micro-batches +1"
    trained(launch(tmp_path / "resumed", arguments(prefix, resumed), 2, driver=DRIVER))
    before, after = fed(tmp_path / "killed"), fed(tmp_path / "resumed")
    turn = min(after)
    before.pop(max(before))  # it was killed in the middle of
    assert turn > 0 and turn in before  # what the killed run did after its last checkpoint is done again
    for step in {*before} & {*after}:
        assert before[step] == after[step]  # other ranks and micro-batches, the same documents
    steps = {**after, **{step: pieces for step, pieces in before.items() if step < turn}}
    assert sorted(steps) == list(range(0, 40 * 8, 8))
    check_epochs(steps, written[: round(0.9 * len(written))])


def test_the_command_packs_what_training_is_fed(packed, documents, tmp_path):
    """The same documents, cut into the same global batches, by the same flags."""
    (prefix, written), fed_steps = documents, fed(packed().folder)
    dump, report = tmp_path / "dump.json", tmp_path / "report.json"
    flags = "--seq-length 32 --global-batch-size 8 --split 90,10,0 --batches 20"
    assert main(["pack", str(prefix), *flags.split(), "--dump", str(dump), "--json", str(report)]) == 0
    planned = json.loads(dump.read_text())["batches"]
    assert len(planned) == len(fed_steps)
    for step, (rank,) in zip(sorted(fed_steps), planned, strict=True):
        assert len(rank) == 8  # bins
        assert fed_steps[step] == Counter(
            (tuple(written[document][first:end]), tuple(written[document][first + 1 : end + 1]))
            for bin_ in rank
            for document, first, end in bin_
        )
    said = re.search(r"packing (\S+) documents of (\S+) labels", packed().output)
    counted = json.loads(report.read_text())
    assert [int(number.replace(",", "")) for number in said.groups()] == [counted["documents"], counted["labels"]]
    assert counted["documents"] == 360


@pytest.mark.parametrize("virtual", ["", "--num-virtual-stages-per-pipeline-rank 2"], ids=["PP2", "PP2-VPP2"])
def test_no_shape_is_sent_also_when_evaluation_comes_between_and_an_epoch_ends(packed, documents, virtual):
    flags = f"--pipeline-model-parallel-size 2 {virtual} --eval-interval 5 --train-iters 30"
    again, fixed = packed(flags, 2), packed(f"{flags} {FIXED}", 2)
    assert len(again.losses) == 30
    assert again.losses == pytest.approx(fixed.losses, rel=TOLERANCE)
    assert again.gradient_norms == pytest.approx(fixed.gradient_norms, rel=GRADIENT_TOLERANCE)
    assert evaluated(again) == pytest.approx(evaluated(fixed), rel=3e-6) and len(evaluated(again)) > 3
    learned = sum(len(labels) for pieces in fed(again.folder).values() for _, labels in pieces.elements())
    assert learned > sum(text.size - 1 for text in documents[1][:360])  # of an epoch
    sent, as_fixed = messages(again), messages(fixed)
    assert len(sent) == 2
    for rank, counts in sent.items():
        assert counts["shapes"] == 0
        assert counts["tensors"] == as_fixed[rank]["tensors"] > 30 * 8
        assert len(counts["lengths"]) > 3 and max(counts["lengths"]) <= 32
        assert as_fixed[rank]["lengths"] == [32]


def test_samples_that_end_inside_a_step_are_the_same_in_both_shapes(packed):
    flags = "--train-samples 100 --micro-batch-size 2 --pipeline-model-parallel-size 2"
    variable, fixed = packed(f"{flags} --varlen-packing-micro-batches +2", 2), packed(f"{flags} {FIXED}", 2)
    assert len(variable.losses) == 100 // 8
    assert variable.losses == pytest.approx(fixed.losses, rel=TOLERANCE)
    assert variable.gradient_norms == pytest.approx(fixed.gradient_norms, rel=GRADIENT_TOLERANCE)


@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        ("", 1),
        ("--pipeline-model-parallel-size 2 --micro-batch-size 2 --varlen-packing-micro-batches +2", 2),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --eval-interval 5", 2),
    ],
    ids=["one-process", "PP2", "PP2-VPP2-evaluated-between"],
)
def test_a_step_that_is_run_again_is_fed_the_same_rows_and_learns_once(packed, flags, processes):
    twice, once = packed(flags, processes, RUNS_TWICE), packed(flags, processes)
    assert twice.losses == once.losses and twice.gradient_norms == once.gradient_norms
    assert evaluated(twice) == evaluated(once)
    rows, rows_once = fed_rows(twice), fed_rows(once)
    assert rows.keys() == rows_once.keys()
    assert rows == {step: 2 * of_a_run for step, of_a_run in rows_once.items()}
    for rank, counts in messages(twice).items():
        assert counts["shapes"] == 0 and counts["lengths"] == messages(once)[rank]["lengths"]


def test_whole_validation_sets_have_one_value_on_all_topologies(documents, checkpoint, tmp_path):
    prefix, sets = documents[0], {"second": 37, "third": 50}
    for seed, (name, count) in enumerate(sets.items(), 1):
        write_documents(tmp_path / name, documents=count, seed=seed)
    data = f"--train-data-path {prefix} --valid-data-path {' '.join(str(tmp_path / name) for name in sets)}"
    load = f"--load {checkpoint(MODEL)} --finetune --no-load-optim --no-load-rng --train-iters 2"
    whole = f"{data} {load} --full-validation --multiple-validation-sets --eval-interval 2"
    given = arguments(prefix, whole)
    for flag in ("--data-path", "--split"):
        place = given.index(flag)
        del given[place : place + 2]
    values = [
        evaluated(trained(launch(tmp_path / name, [*given, *flags.split()], processes)))
        for name, flags, processes in (
            ("one process", FIXED, 1),
            ("PP2", "--pipeline-model-parallel-size 2", 2),
            ("DP2", "", 2),
        )
    ]
    assert len({*values[0]}) == 2  # of each set
    assert values == [pytest.approx(values[0], rel=3e-6)] * 3


def fed_rows(run: Run) -> dict[int, list]:
    """The micro-batches that each step was fed, in their order, by the samples consumed before it; of one data-parallel rank."""
    steps: dict[int, list] = {}
    (path,) = [path for path in run.folder.glob("seen/fed-*.jsonl") if path.stat().st_size]
    for line in path.read_text().splitlines():
        step, pieces = json.loads(line)
        steps.setdefault(step, []).append(pieces)
    return steps


def messages(run: Run) -> dict[int, dict]:
    """What was sent by each rank."""
    return {int(path.stem.split("-")[1]): json.loads(path.read_text()) for path in run.folder.glob("seen/sent-*.json")}


def test_every_label_is_learned_once_an_epoch_also_when_context_parallelism_begins_in_the_middle(documents, tmp_path):
    """It pads documents, so that a global batch holds other ones."""
    prefix, written = documents
    keep = f"--save {tmp_path / 'checkpoint'} --save-interval 20 --eod-mask-loss"
    trained(launch(tmp_path / "before", arguments(prefix, f"{keep} --train-iters 20"), driver=DRIVER))
    resumed = f"--load {tmp_path / 'checkpoint'} {keep} --train-iters 45 --override-opt_param-scheduler"
    trained(launch(tmp_path / "after", arguments(prefix, f"{resumed} --context-parallel-size 2"), 2, driver=DRIVER))
    steps = fed(tmp_path / "before") | fed(tmp_path / "after")
    assert sorted(steps) == list(range(0, 45 * 8, 8))
    check_epochs(steps, written[: round(0.9 * len(written))])


def test_a_packed_checkpoint_that_goes_on_without_packing_is_warned_of(documents, tmp_path):
    folder = tmp_path / "checkpoint"
    trained(launch(tmp_path / "packed", arguments(documents[0], f"--save {folder} --save-interval 2 --train-iters 2")))
    load = f"{MODEL} --load {folder} --train-iters 3 --override-opt_param-scheduler"
    stock = trained(launch(tmp_path / "stock", [*TINY, *load.split()]))
    assert stock.output.count("warning: the checkpoint was trained with --varlen-packing") == 1


def test_too_few_documents_to_evaluate_on_are_refused_before_training(documents, tmp_path):
    run = launch(tmp_path, arguments(documents[0], "--split 98,1,1"))
    assert run.status != 0 and not run.ranks
    assert "megatron-balance: error: valid data: all data hold 4 documents" in run.output


def fed(folder: Path) -> dict[int, Counter[Piece]]:
    """What each step was fed, by the samples consumed before it."""
    steps: dict[int, Counter[Piece]] = {}
    for path in (folder / "seen").glob("fed-*.jsonl"):
        for line in path.read_text().splitlines():
            step, pieces = json.loads(line)
            steps.setdefault(step, Counter()).update((tuple(inputs), tuple(labels)) for inputs, labels in pieces)
    return steps


def check_epochs(steps: dict[int, Counter[Piece]], written: Iterable[np.ndarray], capacity: int = 32) -> None:
    """Whole epochs hold the counted labels of each piece as often as there are epochs, and the rest no more than once."""
    epoch = Counter()
    for document in written:
        text = document.tolist()
        for start in range(0, len(text) - 1, capacity):
            end = min(start + capacity, len(text) - 1)
            counted = [place for place in range(start, end) if text[place] != EOD]  # --eod-mask-loss
            if counted:
                epoch[tuple(text[place] for place in counted), tuple(text[place + 1] for place in counted)] += 1
    dealt = sum((steps[step] for step in sorted(steps)), Counter())
    assert {*dealt} <= {*epoch}
    times = [dealt[piece] / count for piece, count in epoch.items()]
    assert min(times) >= 1 and max(times) - min(times) <= 1
