"""Reading traces: what is written comes back, and what is odd is left out and said, or refused in one line."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from traces import made_trace, public_folder, table_of, turns, write_ranks, write_trace

from megatron_balance.diagnosis.reading import read_trace
from megatron_balance.diagnosis.replay import Replay
from megatron_balance.diagnosis.trace import Job, Trace
from megatron_balance.diagnosis.trace_files import LENGTHS
from megatron_balance.diagnosis.whatif import slowdown_of
from megatron_balance.errors import BalanceError
from megatron_balance.topology import Topology

pyarrow = pytest.importorskip("pyarrow", reason="traces are read with pyarrow, of the extra 'trace'")
from pyarrow import parquet  # noqa: E402

SIZES = Topology(2, 4, data_size=3)


@pytest.fixture(scope="module")
def trace() -> Trace:
    random = np.random.default_rng(0)
    seconds = random.uniform(0.5, 1.5, (4, 3, 2, 4))
    return made_trace(SIZES, seconds, 2.0 * seconds)


@pytest.fixture(scope="module")
def expected(trace: Trace) -> float:
    return slowdown_of(trace).slowdown


def changed(trace: Trace, file, **columns):
    """The trace's file with some columns replaced: by values, or by a function of the present ones."""
    table = table_of(trace)
    for name, values in columns.items():
        values = values(table[name].to_numpy().copy()) if callable(values) else values
        array = values if isinstance(values, pyarrow.Array) else pyarrow.array(values)
        table = table.set_column(table.column_names.index(name), name, array)
    parquet.write_table(table, file)
    return file


def replaced(row: int, value, dtype=None):
    def put(values):
        values = values if dtype is None else values.astype(dtype)
        values[row] = value
        return values

    return put


def test_a_file_and_a_folder_say_the_same(trace, expected, tmp_path):
    single = read_trace(write_trace(trace, tmp_path / "job.parquet"))
    (tmp_path / "ranks").mkdir()
    folder = read_trace(write_ranks(trace, tmp_path / "ranks"))
    for read in (single, folder):
        assert read.problems == ()
        assert read.job.topology == SIZES and read.job.world_size == 6 and read.job.name == "made"
        assert slowdown_of(read).slowdown == pytest.approx(expected, rel=1e-9)


def test_without_any_sizes_the_ranks_numbers_tell(trace, expected, tmp_path):
    read = read_trace(write_trace(trace, tmp_path / "job.parquet", described=False))
    assert read.job.topology == SIZES
    assert "sizes" in " ".join(read.problems)
    assert slowdown_of(read).slowdown == pytest.approx(expected, rel=1e-9)


def test_the_first_rank_speaks_for_those_that_share_a_worker(trace, expected, tmp_path):
    for rank in range(2):
        table = table_of(trace)
        own = 2 * (table["stage"].to_numpy() * 3 + table["dp_rank"].to_numpy()) + rank
        parquet.write_table(table.append_column("rank", pyarrow.array(own)), tmp_path / f"{rank}.parquet")
    read = read_trace(tmp_path)
    assert read.problems == ()
    assert slowdown_of(read).slowdown == pytest.approx(expected, rel=1e-9)


def test_parts_that_were_joined_already_are_not_read_twice(trace, tmp_path):
    write_ranks(trace, tmp_path)
    joined = sorted(tmp_path.iterdir())[0]
    (tmp_path / f"{joined.stem}.0000.parquet").write_bytes(joined.read_bytes())
    assert read_trace(tmp_path).problems == ()


def test_sequences(trace, tmp_path):
    table = table_of(trace)
    forward = np.array([name == "forward-compute" for name in table["optype"].to_pylist()])
    tokens = np.where(forward, 100 * trace.step + 10 * trace.dp_rank + trace.microbatch, 0)
    for factor, name in enumerate(LENGTHS, 1):
        table = table.append_column(name, pyarrow.array(factor * tokens, mask=~forward))
    parquet.write_table(table, tmp_path / "job.parquet")
    sequences = read_trace(tmp_path / "job.parquet").sequences
    step, microbatch, lane = np.meshgrid(np.arange(4), np.arange(4), np.arange(3), indexing="ij")
    for factor, name in enumerate(LENGTHS, 1):
        assert (getattr(sequences, name) == factor * (100 * step + 10 * lane + microbatch)).all()
    without_a_pass = table.filter(pyarrow.array(np.arange(trace.step.size) != np.flatnonzero(trace.step == 1)[0]))
    parquet.write_table(
        without_a_pass.filter(pyarrow.array(without_a_pass["dp_rank"].to_numpy() != 1)), tmp_path / "job.parquet"
    )
    read = read_trace(tmp_path / "job.parquet")
    assert read.steps.tolist() == [0, 2, 3] and np.unique(read.dp_rank).tolist() == [0, 2]
    assert (read.sequences.tokens[:, :, [0, 2]] == (100 * step + 10 * lane + microbatch)[[0, 2, 3]][:, :, [0, 2]]).all()
    parquet.write_table(
        table.set_column(8, "tokens", pyarrow.array(tokens, mask=~forward | (trace.step == 0))),
        tmp_path / "job.parquet",
    )
    read = read_trace(tmp_path / "job.parquet")
    assert read.sequences is None and "12 of 48 micro-batches do not tell" in read.problems[0]


def test_undivided_rows_are_one_sequence(trace, tmp_path):
    table = table_of(trace)
    forward = np.array([name == "forward-compute" for name in table["optype"].to_pylist()])
    table = table.append_column("tokens", pyarrow.array(np.full(forward.size, 32), mask=~forward))
    for name in LENGTHS[1:]:
        table = table.append_column(name, pyarrow.nulls(forward.size, pyarrow.int64()))
    parquet.write_table(table, tmp_path / "job.parquet")
    sequences = read_trace(tmp_path / "job.parquet").sequences
    assert [np.unique(getattr(sequences, name)).tolist() for name in LENGTHS] == [[32], [32], [1024]]


# --- partial


def test_missing_and_damaged_ranks_are_left_out(trace, tmp_path):
    write_ranks(trace, tmp_path)
    files = sorted(tmp_path.iterdir())  # pipeline rank by pipeline rank
    files[4].write_bytes(files[4].read_bytes()[:-100])
    read = read_trace(tmp_path)
    said = "\n".join(read.problems)
    assert files[4].name in said and "data-parallel rank 1 of 3" in said
    slowdown = slowdown_of(read)
    assert np.isnan(slowdown.by_worker).tolist() == [[False, True, False]] * 2
    assert np.isfinite(slowdown.slowdown) and np.isfinite(slowdown.slowest_workers)
    files[3].unlink(), files[5].unlink()
    with pytest.raises(BalanceError, match="pipeline rank 1 of 2"):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("duration", -1.0), ("duration", np.nan), ("duration", np.inf), ("start_ts", np.nan), ("start_ts", -np.inf)],
)
def test_steps_with_impossible_times_are_left_out(trace, tmp_path, name, value):
    row = int(np.flatnonzero(trace.step == 2)[0])
    read = read_trace(changed(trace, tmp_path / "job.parquet", **{name: replaced(row, value)}))
    assert read.steps.tolist() == [0, 1, 3]
    assert "1 rows" in read.problems[0] and "1 of 4 steps (2)" in read.problems[1]


def test_unknown_operations_are_left_out(trace, expected, tmp_path):
    table = table_of(trace)
    odd = table.slice(0, 3).set_column(
        table.column_names.index("optype"), "optype", pyarrow.array(["<script>"] * 3).dictionary_encode()
    )
    odd = odd.cast(table.schema.remove_metadata().set(3, pyarrow.field("optype", odd["optype"].type)))
    parquet.write_table(pyarrow.concat_tables([table, odd], promote_options="permissive"), tmp_path / "job.parquet")
    read = read_trace(tmp_path / "job.parquet")
    assert "3 rows of unknown operations ('<script>')" in read.problems[0]
    assert slowdown_of(read).slowdown == pytest.approx(expected, rel=1e-9)


def test_steps_of_two_runs(trace, tmp_path):
    table = table_of(trace)
    parquet.write_table(table.filter(pyarrow.array(trace.step >= 1)), tmp_path / "a.parquet")
    parquet.write_table(table.filter(pyarrow.array(trace.step <= 1)), tmp_path / "b.parquet")
    read = read_trace(tmp_path)
    assert read.steps.tolist() == [0, 2, 3]
    assert "1 of 4 steps (1) have operations twice" in read.problems[0]
    parquet.write_table(table, tmp_path / "b.parquet")
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(BalanceError, match="two runs"):
        read_trace(tmp_path)
    other = table.replace_schema_metadata({b"megatron_balance": b'{"name": "other"}'})
    parquet.write_table(other, tmp_path / "b.parquet")
    with pytest.raises(BalanceError, match="2 different jobs or runs"):
        read_trace(tmp_path)


def test_skewed_clocks_are_set_right(trace, expected, tmp_path):
    skewed = (trace.dp_rank == 1) & (trace.pp_rank == 1)
    read = read_trace(changed(trace, tmp_path / "job.parquet", start_ts=trace.start_s + 0.4 * skewed))
    assert "1 of 6 ranks are off by up to 0.4 s" in read.problems[0]
    assert slowdown_of(read).slowdown == pytest.approx(expected, rel=1e-9)
    with pytest.raises(BalanceError, match="data-parallel rank 1 on pipeline rank 1 are 3600 s away"):
        read_trace(changed(trace, tmp_path / "job.parquet", start_ts=trace.start_s + 3600.0 * skewed))


def test_a_ramp_up_is_read_where_it_is_longest(tmp_path):
    parts = [turns(np.ones((steps, 2, 2, count))) for steps, count in ((2, 2), (4, 4), (3, 5))]
    tables = []
    for part, before in zip(parts, (0, 2, 6), strict=True):
        later = replace(part, step=part.step + before, job=parts[0].job)
        tables.append(table_of(later))
    parquet.write_table(pyarrow.concat_tables(tables), tmp_path / "job.parquet")
    read = read_trace(tmp_path / "job.parquet")
    assert read.steps.tolist() == [2, 3, 4, 5] and read.job.topology.num_microbatches == 4
    assert "grow from 2 to 5: what is said is of steps 2 to 5, which have 4; the other 5 steps" in read.problems[0]
    assert slowdown_of(read).actual_s == pytest.approx(Replay(parts[1]).recorded_step_s)


def test_clocks_that_the_recorder_compared_are_left_alone(tmp_path):
    """What a rank does alone after the reduction takes longer on the second, which is no clock's error."""
    trace = turns(np.ones((3, 2, 2, 4)))
    clips = (trace.kind == trace.kinds.index("optimizer-clip-main-grad")) & (trace.pp_rank == 1)
    finishes = (trace.kind == trace.kinds.index("step-end")) & (trace.pp_rank == 1)
    longer = replace(trace, start_s=trace.start_s + 2.0 * finishes, end_s=trace.end_s + 2.0 * (clips | finishes))
    read = read_trace(write_trace(longer, tmp_path / "job.parquet"))
    assert read.problems == () and read.end_s == pytest.approx(longer.end_s)
    other = longer.pp_rank == 1
    away = replace(longer, start_s=longer.start_s + 4000.0 * other, end_s=longer.end_s + 4000.0 * other)
    with pytest.raises(BalanceError, match="the files are of two runs"):
        read_trace(write_trace(away, tmp_path / "job.parquet"))


@pytest.mark.parametrize(
    ("uncertainty", "said"), [("0.002", None), ("0.5", "are only known to 0.5 s"), ("null", "could not be")]
)
def test_clocks_that_were_not_compared_well_are_told(trace, tmp_path, uncertainty, said):
    file = sorted(write_ranks(trace, tmp_path).iterdir())[1]
    table = parquet.read_table(file)
    here = {b"megatron_balance_rank": b'{"clock_uncertainty_s": %s}' % uncertainty.encode()}
    parquet.write_table(table.replace_schema_metadata({**table.schema.metadata, **here}), file)
    problems = [line for line in read_trace(tmp_path).problems if "the clocks of 1 of 6 ranks" in line]
    assert [said in line for line in problems] == [True] * (said is not None)


def test_passes_that_run_as_one_are_read_with_what_they_wait_for(tmp_path):
    """Two interleaved ranks; transfers within merged passes are not told, those before and after them are."""
    kinds = (
        "step-begin",
        "forward-compute",
        "forward-send",
        "forward-backward-compute",
        "backward-compute",
        "step-end",
    )
    rows = [(0, -1, -1), (1, 0, 0), (2, -1, -1), (3, 0, 1), (3, 1, 0), (3, 1, 1), (4, 1, 1), (5, -1, -1)]
    kind, chunk, microbatch = (np.tile(column, 4) for column in np.array(rows).T)
    ranks, steps = np.tile(np.repeat([0, 1], len(rows)), 2), np.repeat([0, 1], 2 * len(rows))
    start_s = np.tile(np.arange(len(rows), dtype=float), 4) + 100.0 * steps
    job = Job("made", Topology(2, 2, 2, overlap_moe=True), 2, in_turn=True)
    lane = np.zeros_like(ranks)
    made = Trace(job, kind, kinds, steps, lane, ranks, chunk, microbatch, start_s, start_s + 1.0)
    read = read_trace(write_trace(made, tmp_path / "job.parquet"))
    assert read.problems == (
        "forward and backward passes run as one (MoE overlap): what passes wait for is part of them",
    )
    assert Replay(read).steps_with_s(Replay(read).actual_s).tolist() == [8.0, 8.0]


def test_a_rank_whose_recorder_gave_up_early(tmp_path):
    trace = turns(np.ones((9, 2, 2, 4)))
    rows = (trace.pp_rank == 0) | (trace.step < 2)
    parquet.write_table(table_of(trace, rows), tmp_path / "job.parquet")
    read = read_trace(tmp_path / "job.parquet")
    assert read.steps.tolist() == [0, 1]
    assert "7 of 9 steps (2, 3, 4 and 4 more) have nothing of pipeline rank 1, and are left out" in read.problems


def test_one_step(trace, tmp_path):
    table = table_of(trace).filter(pyarrow.array(trace.step == 3))
    parquet.write_table(table, tmp_path / "job.parquet")
    read = read_trace(tmp_path / "job.parquet")
    assert "one step only" in read.problems[0]
    assert slowdown_of(read).steps.tolist() == [3]


def test_whole_numbers_may_be_floats_with_nan(trace, expected, tmp_path):
    none = np.where(trace.microbatch < 0, np.nan, trace.microbatch)
    file = changed(trace, tmp_path / "job.parquet", mb_id=none, mc=np.where(np.isnan(none), np.nan, 0.0))
    assert slowdown_of(read_trace(file)).slowdown == pytest.approx(expected, rel=1e-9)


# --- refused


def test_nothing_to_read(tmp_path):
    with pytest.raises(BalanceError, match=r"no \.parquet file"):
        read_trace(tmp_path)
    with pytest.raises(BalanceError, match="no trace"):
        read_trace(tmp_path / "none.parquet")


def test_files_that_are_no_traces(trace, tmp_path):
    file = tmp_path / "job.parquet"
    file.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(BalanceError, match="cut off or damaged"):
        read_trace(file)
    whole = write_trace(trace, file).read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BalanceError, match="cut off or damaged"):
        read_trace(file)
    parquet.write_table(table_of(trace).drop_columns(["stage", "mb_id"]), file)
    with pytest.raises(BalanceError, match="lacks the columns stage, mb_id"):
        read_trace(file)
    parquet.write_table(table_of(trace).slice(0, 0), file)
    with pytest.raises(BalanceError, match="no rows"):
        read_trace(file)
    with pytest.raises(BalanceError, match="column step is of type string"):
        read_trace(changed(trace, file, step=pyarrow.array(["one"] * trace.step.size)))
    with pytest.raises(BalanceError, match="no forward-compute"):
        read_trace(changed(trace, file, optype=pyarrow.array(["optimizer"] * trace.step.size)))


@pytest.mark.parametrize("name", ["dp_rank", "stage", "mc", "mb_id"])
@pytest.mark.parametrize("described", [True, False])
def test_absurd_numbers(trace, tmp_path, name, described):
    row = int(np.flatnonzero(trace.microbatch >= 0)[0])
    file = changed(trace, tmp_path / "job.parquet", **{name: replaced(row, 2**40, np.int64)})
    if not described:
        parquet.write_table(parquet.read_table(file).replace_schema_metadata(None), file)
    with pytest.raises(BalanceError, match=f"{name} of {2**40}"):
        read_trace(file)


def test_absurd_steps_are_only_numbers(trace, expected, tmp_path):
    file = changed(trace, tmp_path / "job.parquet", step=trace.step + 2**62)
    assert slowdown_of(read_trace(file)).slowdown == pytest.approx(expected, rel=1e-9)
    file = changed(trace, tmp_path / "job.parquet", step=pyarrow.array([2**64 - 1] * trace.step.size, pyarrow.uint64()))
    with pytest.raises(BalanceError, match="step cannot be read"):
        read_trace(file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a list", "is not a job's sizes"),
        ("pp_size: [", "cannot be read as YAML"),
        ("!!python/object/apply:os.system ['true']", "cannot be read as YAML"),
        ("pp_size: -2", "pp_size must be a whole number"),
        ("pp_size: two", "pp_size must be a whole number"),
        ("pp_size: true", "pp_size must be a whole number"),
        (f"dp_size: {10**30}", "dp_size must be a whole number"),
        ("{pp_size: 1, dp_size: 3}", "stage of 1, but pipeline size is 1"),
        ("{pp_size: 4, dp_size: 3}", "pipeline rank 2, 3 of 4"),
    ],
)
def test_absurd_sizes(trace, tmp_path, text, said):
    file, meta = write_trace(trace, tmp_path / "job.parquet", described=False), tmp_path / "meta.yaml"
    meta.write_text(text)
    with pytest.raises(BalanceError, match=said):
        read_trace(file, meta)


def test_more_ranks_than_there_are_files(trace, tmp_path):
    file, meta = write_trace(trace, tmp_path / "job.parquet", described=False), tmp_path / "meta.yaml"
    meta.write_text("{trial_name: '<b>&', pp_size: 2, dp_size: 4, world_size: 64}")
    read = read_trace(file, meta)
    assert (read.job.name, read.job.world_size) == ("<b>&", 64)
    assert "data-parallel rank 3 of 4" in read.problems[0]
    assert np.isnan(slowdown_of(read).by_dp_rank).tolist() == [False, False, False, True]


@pytest.mark.parametrize("stored", [b"{", b"[]", b'{"topology": 3}', b'{"topology": {"pipeline_size": 1e9}}', b"\xff"])
def test_damaged_sizes_of_the_recorder(trace, tmp_path, stored):
    table = table_of(trace).replace_schema_metadata({b"megatron_balance": stored})
    parquet.write_table(table, tmp_path / "job.parquet")
    with pytest.raises(BalanceError, match=r"damaged|whole number"):
        read_trace(tmp_path / "job.parquet")


def test_public_traces_are_whole():
    folder = public_folder()
    for name, steps in (("ST", 32), ("SE", 43)):
        trace = read_trace(folder / f"trace-{name}.parquet", folder / f"meta-{name}.yaml")
        assert trace.problems == () and trace.steps.size == steps
