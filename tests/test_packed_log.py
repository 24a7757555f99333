"""What training logs of packing, and that no step plans a global batch for it."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
from launch import TINY, Run, launch, trained
from packed_data import blend, stream
from written_documents import write_documents

from megatron_balance.megatron.packed.planner import Planner
from megatron_balance.megatron.packed.totals import NEXT, TOTALS, BatchTotals, Told, totals_of
from megatron_balance.packing.pieces import PieceRule
from megatron_balance.packing.stream import Cursor
from megatron_balance.pipeline.stored import FILE_NAME, StoredLayout

MODELS = (
    "",
    "--group-query-attention --num-query-groups 2 --swiglu",
    "--multi-latent-attention",
    "--num-experts 4 --moe-ffn-hidden-size 128",
    "--varlen-packing --varlen-packing-shapes variable",
)


@pytest.fixture(scope="module")
def counts() -> list[list[float]]:
    pytest.importorskip("megatron.training")
    script = Path(__file__).with_name("packed_counts.py")
    command = [sys.executable, "-W", "ignore", str(script), json.dumps(MODELS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "model", range(len(MODELS)), ids=("multi-head", "grouped-queries", "latent", "experts", "variable")
)
def test_operations_are_those_that_megatron_counts_from_the_bounds(counts, model):
    count, by_bounds, whole = counts[model]
    assert count == pytest.approx(by_bounds, rel=1e-12)
    assert count < 0.96 * whole  # else it would not matter


SEQUENCE, BINS, GROWN = 32, 4, 8
LENGTHS = np.random.default_rng(2).integers(2, 50, 200)


def planner() -> Planner:
    """Of two global batches of four bins, then of eight, whose placement is that of the cut."""
    dealer = stream(blend(LENGTHS), PieceRule(SEQUENCE))

    def place(batch):
        return SimpleNamespace(bins=batch.bins, step_s=float(len(batch.pieces)), ideal_s=3.0)

    return Planner(dealer, (0, dealer.start), lambda item: BINS if item < 2 * BINS else GROWN, place)


@pytest.mark.parametrize("variable", [False, True], ids=["fixed", "variable"])
def test_items_say_what_their_global_batch_comes_to_through_the_loader(variable):
    """In processes of its own, two bins a micro-batch, as Megatron's."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    from megatron_balance.megatron.packed.items import PackedDataset
    from megatron_balance.megatron.packed.shapes import row_of

    source, depths = planner(), 2
    said = totals_of(source, depths, with_cursor=True)
    data = PackedDataset(source, [], PieceRule(SEQUENCE), 2 * BINS + GROWN, None, False, variable, variable, said)
    told, known = Told(), planner()
    for number, batch in enumerate(torch.utils.data.DataLoader(data, batch_size=2, num_workers=1)):
        told.note(row_of(batch, 1, 8) if variable else batch)
        told.note({})  # of evaluation
        window = known.window(2 * number)
        tokens = window.batch.pieces.tokens.tolist()
        shares = tuple(sum(max(each - depth, 0) for each in tokens) / sum(tokens) for depth in (1, 2))
        squares = float(sum(each**2 for each in tokens))
        assert told.batch == BatchTotals(
            window.stop, sum(tokens), squares, window.batch.fill, float(len(tokens)), 3.0, shares
        )
        cursor = window.batch.stop
        assert Cursor.of_table(cursor.identity, told.cursor_table(window.stop)) == cursor
    assert number == 7
    assert told.cursor_table(2 * BINS) is not None  # a step that does not count is saved as if it had not been
    assert told.cursor_table(0) is told.cursor_table(BINS) is told.cursor_table(3 * BINS) is None


def test_a_rank_that_saves_nothing_is_sent_no_cursor():
    item = totals_of(planner(), 0, with_cursor=False)(5)
    assert {*item} == {TOTALS} == {*totals_of(planner(), 0, with_cursor=True)(5)} - {NEXT}
    told = Told()
    told.note({TOTALS: item[TOTALS][None]})
    assert told.batch.stop == 2 * BINS and told.cursor_table(2 * BINS) is None


DRIVER = Path(__file__).with_name("packed_log_run.py")
STEPS = 8


@pytest.fixture(
    scope="module",
    params=[(3, "--varlen-packing-micro-batches +2"), (1, "--num-virtual-stages-per-pipeline-rank 2")],
    ids=["every-third", "every-step"],
)
def logged(request, tmp_path_factory) -> tuple[int, Run, list[str]]:
    """Eight steps that are logged every so many: the interval, the run, and arguments that resume it."""
    pytest.importorskip("megatron.training")
    folder, (interval, more) = tmp_path_factory.mktemp("logged"), request.param
    checkpoint = folder / "checkpoint"
    (checkpoint / "iter_0000004" / FILE_NAME).mkdir(parents=True)  # in the way of the file
    write_documents(folder / "text")
    words = (
        f"--num-layers 4 --varlen-packing --calculate-per-token-loss --data-path {folder / 'text'} --split 90,10,0"
        " --pipeline-model-parallel-size 2 --micro-batch-size 2"
        f" --train-iters {STEPS}"
        f" {more} --num-workers 1 --log-throughput --log-interval {interval}"
        f" --eval-interval 2 --eval-iters 1 --save {checkpoint} --save-interval 4"
    ).split()
    given = [*(word for word in TINY if word != "--mock-data"), *words]
    run = trained(launch(folder, given, 2, driver=DRIVER))
    return interval, run, [*given, "--load", str(checkpoint)]


def observations(run: Run) -> list[dict]:
    """What `packed_log_run.py` wrote, rank by rank."""
    return [json.loads((run.folder / "seen" / f"logged-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.training
def test_no_process_that_trains_cuts_a_global_batch_of_training(logged):
    for seen in observations(logged[1]):
        assert len(seen["counted"]) == STEPS
        assert seen["cuts"] == 1  # of evaluation, before training


@pytest.mark.training
def test_what_is_logged_is_of_the_global_batch_trained_on(logged):
    interval, run, _ = logged
    lines = re.findall(
        r"packing of iteration +(\d+) \| fill: (\S+)% \| real tokens: +(\d+) \| predicted step over ideal: (\S+) \|",
        run.output,
    )
    batches = dict(enumerate(observations(run)[1]["batches"], 1))
    assert [int(line[0]) for line in lines] == [*range(interval, STEPS + 1, interval)]
    assert len({tokens for tokens, *_ in batches.values()}) > 3
    for iteration, *shown in lines:
        tokens, fill, over_ideal, _ = batches[int(iteration)]
        assert shown == [f"{fill:.2%}"[:-1], str(tokens), f"{over_ideal:.4f}"]


@pytest.mark.training
def test_throughput_is_of_all_steps_whose_time_it_is_divided_by(logged):
    from megatron.training.training import training_log

    interval, run, _ = logged
    first = "is_first_iteration" in inspect.signature(training_log).parameters  # is logged, and its time left in
    expected, begin = [], 0
    for step in range(1, STEPS + 1):
        if step % interval == 0 or (first and step == 1):
            expected.append([step, (begin, step)])
            begin = begin if first and step == 1 else step
    for seen in observations(run):
        counted = seen["counted"]
        assert len({*counted}) > 3
        assert seen["lines"] == [
            [step, pytest.approx(fmean(counted[slice(*steps)]), rel=1e-12)] for step, steps in expected
        ]


@pytest.mark.training
def test_checkpoints_hold_the_place_that_items_told(logged):
    _, run, _ = logged
    text = (run.folder / "checkpoint" / "iter_0000008" / FILE_NAME).read_text()
    assert StoredLayout.from_json(text, "it").packing == observations(run)[0]["batches"][-1][-1]


@pytest.mark.training
def test_a_place_that_is_not_kept_is_warned_of_and_then_missed(logged):
    _, run, resume = logged
    lost = (
        f"layout and place in the data could not be kept beside the checkpoint ({FILE_NAME}), which cannot be resumed"
    )
    assert run.output.count(lost) == 1
    (run.folder / "checkpoint" / "iter_0000008" / FILE_NAME).rename(run.folder / FILE_NAME)
    again = launch(run.folder / "again", [*resume, "--override-opt_param-scheduler"], 2)
    assert again.status != 0 and not again.ranks
    assert f"is kept in {FILE_NAME} beside it, which is not there" in again.output
