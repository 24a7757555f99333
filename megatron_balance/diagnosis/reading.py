"""Reads traces: one parquet file of a whole job with a YAML file of its sizes, or a folder of one parquet file a rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_balance.diagnosis.cells import whole
from megatron_balance.diagnosis.clocks import aligned
from megatron_balance.diagnosis.described import FIELDS_OF_JOB, MOST_RANKS, described_job
from megatron_balance.diagnosis.graph import is_exchange
from megatron_balance.diagnosis.trace import (
    COMBINED,
    FORWARD,
    OPERATIONS,
    OURS,
    PASSES,
    Job,
    Sequences,
    Trace,
    of_kinds,
)
from megatron_balance.diagnosis.trace_files import EMBEDDING, LENGTHS, METADATA_KEY, RANK, read_tables, trace_files
from megatron_balance.errors import BalanceError
from megatron_balance.topology import Topology

if TYPE_CHECKING:
    import pyarrow

_COLUMN_OF = {"pipeline_size": "stage", "data_size": "dp_rank", "virtual_size": "mc", "num_microbatches": "mb_id"}
_MOST_TOKENS = 1 << 31  # of a micro-batch
_MOST_SHOWN = 5


def read_trace(path: str | Path, meta: str | Path | None = None) -> Trace:
    """The operations of a job's steps, those steps that are whole.

    Args:
        path: a parquet file, or a folder of parquet files, one a rank.
        meta: YAML file with ``trial_name``, ``pp_size``, ``dp_size``, ``vpp_size``, ``tp_size``, ``dsp_size``, ``world_size``;
            None takes what the parquet files say, a single YAML file in the folder, or else what the ranks' numbers show.

    Returns:
        The trace; what was odd or had to be left out is in ``problems``.

    Raises:
        BalanceError: there is nothing to read, the files are no trace, sizes contradict the rows, or no step is whole.
    """
    path = Path(path)
    problems: list[str] = []
    table = read_tables(trace_files(path), problems)
    stored = (table.schema.metadata or {}).get(METADATA_KEY)
    described = described_job(path, stored, None if meta is None else Path(meta))
    trace, kept = _rows(table, described, path, problems)
    if trace.job.in_turn and COMBINED in trace.kinds:
        problems.append("forward and backward passes run as one (MoE overlap): what passes wait for is part of them")
    if trace.steps.size == 1:
        problems.append("there is one step only: what varies from step to step cannot be told")
    trace = replace(trace, sequences=_sequences(table, kept, trace), problems=tuple(problems))
    return _with_known_sequences(aligned(whole(trace)))


def _rows(
    table: pyarrow.Table, described: dict[str, Any], path: Path, problems: list[str]
) -> tuple[Trace, np.ndarray | slice]:
    """The rows that make sense, and which of the table's they are."""
    if table.num_rows == 0:
        raise BalanceError(f"{path} has no rows: give the trace of a job that trained at least one step")
    kind, kinds = _kinds(table)
    start_s, duration_s = _seconds(table["start_ts"]), _seconds(table["duration"])
    columns = {name: _whole(table[name]) for name in ("dp_rank", "stage", "step", "mc", "mb_id")}
    keep = _sensible(kind, kinds, start_s, duration_s, columns, problems)
    if RANK in table.column_names:
        keep &= _speaks(_whole(table[RANK]), columns["dp_rank"], columns["stage"], keep)
    if described.get("in_turn"):
        keep &= _of_one_size(described, columns, keep & of_kinds(kind, kinds, PASSES), problems)
    if not keep.any():
        raise BalanceError(f"{path} has no row that makes sense: {problems[-1]}")
    kept: np.ndarray | slice = slice(None) if keep.all() else np.flatnonzero(keep)
    kind, start_s, duration_s = kind[kept], start_s[kept], duration_s[kept]
    columns = {name: values[kept] for name, values in columns.items()}
    is_pass = of_kinds(kind, kinds, PASSES)
    if not is_pass.any():
        raise BalanceError(f"{path} has no {FORWARD} or backward-compute operations: it is no trace of a training job")
    job = _job(described, columns, is_pass, path, problems)
    end_s = _ends_s(start_s, duration_s, of_kinds(kind, kinds, [name for name in kinds if is_exchange(name)]))
    trace = Trace(
        job,
        kind=kind.astype(np.int16),
        kinds=kinds,
        step=columns["step"],
        dp_rank=columns["dp_rank"].astype(np.int32),
        pp_rank=columns["stage"].astype(np.int32),
        chunk=np.where(is_pass, np.maximum(columns["mc"], 0), columns["mc"]).astype(np.int16),
        microbatch=columns["mb_id"].astype(np.int32),
        start_s=start_s.astype(np.float64),
        end_s=end_s,
        embedding_s=_seconds(table[EMBEDDING])[kept].astype(np.float64) if EMBEDDING in table.column_names else None,
    )
    return trace, kept


def _kinds(table: pyarrow.Table) -> tuple[np.ndarray, tuple[str, ...]]:
    """The operations' kinds: of each row its number, and their names."""
    import pyarrow

    names = table["optype"].combine_chunks()
    if isinstance(names, pyarrow.ChunkedArray):
        names = names.chunk(0)
    return _whole(names.indices), tuple(str(name) for name in names.dictionary.to_pylist())


def _ends_s(start_s: np.ndarray, duration_s: np.ndarray, exchanged: np.ndarray) -> np.ndarray:
    """Ends of operations, float64; those ``exchanged`` in the file's precision.

    Published durations of exchanges were differences of times in that precision; those of passes are as written.
    """
    end_s = start_s.astype(np.float64) + duration_s
    end_s[exchanged] = (start_s + duration_s)[exchanged]
    return end_s


def _whole(column: pyarrow.ChunkedArray | pyarrow.Array) -> np.ndarray:
    """Whole numbers, int64; -1 for null."""
    filled = column.fill_null(-1) if column.null_count else column
    return np.ascontiguousarray(filled.to_numpy(), dtype=np.int64)


def _seconds(column: pyarrow.ChunkedArray) -> np.ndarray:
    """Seconds in the file's precision; NaN for null."""
    values = column.to_numpy()
    return values if values.dtype in (np.float32, np.float64) else values.astype(np.float64)


def _sensible(
    kind: np.ndarray,
    kinds: tuple[str, ...],
    start_s: np.ndarray,
    duration_s: np.ndarray,
    columns: dict[str, np.ndarray],
    problems: list[str],
) -> np.ndarray:
    """Whether each row tells all that is needed of an operation that is known."""
    keep = of_kinds(kind, kinds, (*OPERATIONS, *OURS))
    if not keep.all():
        unknown = [kinds[number] for number in np.unique(kind[~keep]) if number >= 0]
        shown = ", ".join(repr(name[:40]) for name in unknown[:_MOST_SHOWN])
        problems.append(f"{int((~keep).sum())} rows of unknown operations ({shown}) are left out")
    is_pass = of_kinds(kind, kinds, PASSES)
    for what, good in (
        (
            "without a start or duration, or with a negative one",
            np.isfinite(start_s) & (duration_s >= 0) & (duration_s < np.inf),
        ),
        ("without a rank or step", (columns["dp_rank"] >= 0) & (columns["stage"] >= 0) & (columns["step"] >= 0)),
        ("of passes without a micro-batch", ~is_pass | (columns["mb_id"] >= 0)),
    ):
        bad = keep & ~good
        if bad.any():
            problems.append(f"{int(bad.sum())} rows {what} are left out")
            keep &= good
    return keep


def _of_one_size(
    described: dict[str, Any], columns: dict[str, np.ndarray], is_pass: np.ndarray, problems: list[str]
) -> np.ndarray:
    """Whether each row is of the longest stretch of steps with as many micro-batches, the later of two as long; their number goes
    into ``described``.

    Their number grows while a job ramps up its batch size, and never shrinks: where it does, steps are not whole.
    """
    steps, step = np.unique(columns["step"][is_pass], return_inverse=True)
    counts = np.zeros(steps.size, dtype=np.int64)
    np.maximum.at(counts, step, columns["mb_id"][is_pass] + 1)
    if not steps.size or counts[0] == counts[-1] or (np.diff(counts) < 0).any():
        return np.ones(columns["step"].size, dtype=bool)
    sizes, first, lengths = np.unique(counts, return_index=True, return_counts=True)
    longest = lengths.size - 1 - int(lengths[::-1].argmax())
    stretch = steps[first[longest] : first[longest] + lengths[longest]]
    described["num_microbatches"] = int(sizes[longest])
    problems.append(
        f"the micro-batches of a step grow from {counts[0]} to {counts[-1]}: what is said is of steps {stretch[0]} to"
        f" {stretch[-1]}, which have {sizes[longest]}; the other {steps.size - stretch.size} steps are left out"
    )
    return (columns["step"] >= stretch[0]) & (columns["step"] <= stretch[-1])


def _speaks(rank: np.ndarray, dp_rank: np.ndarray, stage: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """Whether each row is of the lowest rank of its worker."""
    if not keep.any():
        return keep
    width = int(stage[keep].max()) + 1
    if (int(dp_rank[keep].max()) + 1) * width > MOST_RANKS:
        return np.ones_like(keep)
    worker = np.where(keep, dp_rank * width + stage, 0)
    lowest = np.full((int(dp_rank[keep].max()) + 1) * width, np.iinfo(np.int64).max)
    np.minimum.at(lowest, worker[keep], rank[keep])
    return rank == lowest[worker]


def _job(
    described: dict[str, Any], columns: dict[str, np.ndarray], is_pass: np.ndarray, path: Path, problems: list[str]
) -> Job:
    """The job's sizes, from what files say and what the rows show."""
    shown = {
        "pipeline_size": int(columns["stage"].max()) + 1,
        "data_size": int(columns["dp_rank"].max()) + 1,
        "virtual_size": max(int(columns["mc"].max()) + 1, 1),
        "num_microbatches": int(columns["mb_id"][is_pass].max()) + 1,
    }
    for name, column in _COLUMN_OF.items():
        said, most = described.get(name), shown[name]
        if said is None and most > is_pass.size:
            raise BalanceError(f"{path} has {is_pass.size} rows and a {column} of {most - 1}: its numbers are damaged")
        if said is not None and most > said:
            raise BalanceError(
                f"{path} has a {column} of {most - 1}, but {name.replace('_', ' ')} is {said}: the sizes are of another job"
            )
        if said is not None and most < said and name in ("virtual_size", "num_microbatches"):
            problems.append(f"{name.replace('_', ' ')} is {said}, but only {most} appear in the trace, which is taken")
            described[name] = most
    sizes = {**shown, **{key: value for key, value in described.items() if key not in FIELDS_OF_JOB}}
    if sizes["pipeline_size"] * sizes["data_size"] > MOST_RANKS:
        raise BalanceError(
            f"{sizes['pipeline_size']} pipeline ranks by {sizes['data_size']} data-parallel ranks are more than {MOST_RANKS}: "
            "the sizes are damaged"
        )
    if not described:
        problems.append("the job's sizes are not in the trace and are taken from the ranks' numbers")
    topology = Topology(**sizes)
    ranks = topology.pipeline_size * topology.data_size * topology.tensor_size * topology.context_size
    world = described.get("world_size", ranks)
    if world < topology.pipeline_size * topology.data_size:
        problems.append(f"world_size is {world}, but the sizes make {ranks} ranks, which is taken")
        world = ranks
    known = {name: described[name] for name in ("in_turn", "sends_ahead", "shapes") if name in described}
    layers = _layers(described.get("layers"), topology, problems)
    return Job(described.get("name", path.stem), topology, world, layers, **known)


def _layers(layers: tuple[int, ...] | None, topology: Topology, problems: list[str]) -> tuple[int, ...] | None:
    """Those of each stage, unless they are of another job."""
    if layers is None or len(layers) == topology.num_stages:
        return layers
    problems.append(
        f"layers are given for {len(layers)} stages, but the job has {topology.num_stages}: they are not used"
    )
    return None


def _sequences(table: pyarrow.Table, kept: np.ndarray | slice, trace: Trace) -> Sequences | None:
    """What the micro-batches hold, where forward passes of any pipeline rank say it; -1 where they do not.

    Where only their tokens are told, nothing divides their rows: each holds ``micro_batch_size`` sequences of one length.
    """
    if any(name not in table.column_names for name in LENGTHS):
        return None
    topology, steps = trace.job.topology, trace.steps
    columns = [_whole(table[name])[kept] for name in LENGTHS]
    rows = np.flatnonzero((columns[0] >= 0) & (columns[0] <= _MOST_TOKENS) & (trace.microbatch >= 0))
    if not rows.size:
        return None
    shape = (steps.size, topology.num_microbatches, topology.data_size)
    place = (np.searchsorted(steps, trace.step[rows]), trace.microbatch[rows], trace.dp_rank[rows])
    tokens, longest, squares = (np.full(shape, -1, dtype=np.int64) for _ in LENGTHS)
    for values, column in zip((tokens, longest, squares), columns, strict=True):
        values[place] = column[rows]
    undivided = (tokens >= 0) & ((longest < 0) | (squares < 0))
    longest[undivided] = -(-tokens[undivided] // topology.micro_batch_size)
    squares[undivided] = tokens[undivided] ** 2 // topology.micro_batch_size
    return Sequences(tokens, longest, squares)


def _with_known_sequences(trace: Trace) -> Trace:
    """The trace without its sequences, if some of those that are left are not told."""
    if trace.sequences is None:
        return trace
    tokens = trace.sequences.tokens[:, :, np.unique(trace.dp_rank)]
    unknown = int((tokens < 0).sum())
    if not unknown:
        return trace
    line = f"{unknown} of {tokens.size} micro-batches do not tell the lengths of their sequences: no lengths are used"
    return replace(trace, sequences=None, problems=(*trace.problems, line))
