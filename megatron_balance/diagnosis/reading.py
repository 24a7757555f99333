"""Reads traces: one parquet file of a whole job with a YAML file of its sizes, or a folder of one parquet file a rank.

Columns (those of ByteDance's published traces): ``dp_rank``, ``stage`` (pipeline rank), ``step``, ``optype``, ``start_ts`` and
``duration`` in seconds, ``mc`` (model chunk of the rank) and ``mb_id`` (micro-batch), -1 or null where the operation belongs to
none. Our recorder adds ``tokens``, ``longest`` and ``squares`` to forward passes, to those of the first stage, and to its backward
passes, ``embedding`` (seconds), and the job's sizes as JSON in the schema's
metadata; its operations run in turn (``Job.in_turn``). Nothing in a file is ever executed or unpickled.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_balance import reading
from megatron_balance.diagnosis.cells import whole
from megatron_balance.diagnosis.clocks import LEAST_S, aligned
from megatron_balance.diagnosis.graph import is_exchange
from megatron_balance.diagnosis.trace import COMBINED, FORWARD, OPERATIONS, OURS, PASSES, Job, Sequences, Trace
from megatron_balance.errors import BalanceError
from megatron_balance.topology import Topology

if TYPE_CHECKING:
    import pyarrow

METADATA_KEY, RANK_METADATA_KEY = b"megatron_balance", b"megatron_balance_rank"
COLUMNS = ("dp_rank", "stage", "step", "optype", "start_ts", "duration", "mc", "mb_id")
RANK = "rank"  # of the job; where tensor- or context-parallel ranks share a worker, the first speaks for them
LENGTHS = ("tokens", "longest", "squares")
EMBEDDING = "embedding"
_META = {  # key of the YAML file: field of Topology
    "pp_size": "pipeline_size",
    "vpp_size": "virtual_size",
    "tp_size": "tensor_size",
    "dsp_size": "context_size",
    "dp_size": "data_size",
}
_OF_JOB = ("name", "world_size", "layers", "in_turn", "sends_ahead", "shapes")  # described, but no field of Topology
_PART = re.compile(r"\.\d{4,}(?=\.parquet$)")
_MOST_RANKS = 1 << 22
_MOST_TOKENS = 1 << 31  # of a micro-batch
_MOST_LAYERS = 1_000_000
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
    table = _read_tables(_files(path), problems)
    described = _described(path, table, None if meta is None else Path(meta))
    trace, kept = _rows(table, described, path, problems)
    if trace.job.in_turn and COMBINED in trace.kinds:
        problems.append("forward and backward passes run as one (MoE overlap): what passes wait for is part of them")
    if trace.steps.size == 1:
        problems.append("there is one step only: what varies from step to step cannot be told")
    trace = replace(trace, sequences=_sequences(table, kept, trace), problems=tuple(problems))
    return _with_known_sequences(aligned(whole(trace)))


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix == ".parquet" and file.is_file())
        # A recorder that was killed while it joined a rank's parts leaves both.
        files = [file for file in files if not _PART.search(file.name) or path / _PART.sub("", file.name) not in files]
        if not files:
            raise BalanceError(
                f"no .parquet file is in the folder {path}: give a trace, or the folder the recorder wrote to"
            )
        return files
    if not path.is_file():
        raise BalanceError(f"there is no trace {path}")
    return [path]


def _read_tables(files: list[Path], problems: list[str]) -> pyarrow.Table:
    try:
        import pyarrow
        import pyarrow.compute
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise BalanceError(f"a trace needs pyarrow, which the extra 'trace' installs ({error})") from error
    tables, damaged, said, unsure = [], [], [], []
    for file in files:
        try:
            opened = ParquetFile(file)
            names = opened.schema_arrow.names
            lacking = [name for name in COLUMNS if name not in names]
            if lacking:
                raise BalanceError(f"{file} is no trace: it lacks the columns {', '.join(lacking)}")
            wanted = [*COLUMNS, *(name for name in (*LENGTHS, RANK, EMBEDDING) if name in names)]
            table = opened.read(columns=wanted)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            if isinstance(error, BalanceError):
                raise
            damaged.append(file)
            said.append(str(error).splitlines()[0] if str(error) else type(error).__name__)
            continue
        tables.append(_canonical(table, file))
        unsure.append(_clock_uncertainty_s(table.schema.metadata or {}))
    if not tables:
        raise BalanceError(f"{damaged[0]} cannot be read as parquet, it is cut off or damaged: {said[0]}")
    if damaged:
        shown = ", ".join(file.name for file in damaged[:_MOST_SHOWN])
        problems.append(f"{len(damaged)} of {len(files)} files cannot be read and are left out: {shown} ({said[0]})")
    if (worst_s := max(unsure)) > LEAST_S:
        many = sum(each_s > LEAST_S for each_s in unsure)
        how = "could not be compared" if worst_s == math.inf else f"are only known to {worst_s:.3g} s"
        problems.append(
            f"the clocks of {many} of {len(tables)} ranks {how}: how long ranks waited for one another may be wrong by as much"
        )
    return _joined(tables, files)


def _clock_uncertainty_s(metadata: Mapping[bytes, bytes]) -> float:
    """Of what a rank's file says; infinite where its clock was not compared, 0 where it says nothing."""
    try:
        here = json.loads(metadata.get(RANK_METADATA_KEY, b"{}"))
        value = here.get("clock_uncertainty_s", 0.0)
        return math.inf if value is None else float(value)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return 0.0  # nothing depends on it


def _canonical(table: pyarrow.Table, file: Path) -> pyarrow.Table:
    """The columns with one type each: files of ranks may differ in what they chose."""
    import pyarrow

    columns: dict[str, pyarrow.ChunkedArray] = {}
    for name in table.column_names:
        column = table[name]
        try:
            if name == "optype":
                columns[name] = _names(column)
            elif name in ("start_ts", "duration", EMBEDDING):
                columns[name] = _numbers(column, name, file, pyarrow.float64(), pyarrow.types.is_floating)
            else:
                columns[name] = _numbers(column, name, file, pyarrow.int64(), pyarrow.types.is_signed_integer)
        except pyarrow.ArrowException as error:
            raise BalanceError(f"{file} is no trace: {name} cannot be read ({str(error).splitlines()[0]})") from error
    return pyarrow.table(columns, metadata=table.schema.metadata)


def _names(column: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    import pyarrow

    if not pyarrow.types.is_dictionary(column.type):
        column = column.cast(pyarrow.string()).dictionary_encode()
    return column.cast(pyarrow.dictionary(pyarrow.int32(), pyarrow.string()))


def _numbers(
    column: pyarrow.ChunkedArray,
    name: str,
    file: Path,
    wanted: pyarrow.DataType,
    is_wanted: Callable[[pyarrow.DataType], bool],
) -> pyarrow.ChunkedArray:
    """A column of numbers, as ``wanted`` unless it is of that sort already. Whole numbers may be floats with NaN for null."""
    import pyarrow

    sort = column.type
    if not (pyarrow.types.is_floating(sort) or pyarrow.types.is_integer(sort) or pyarrow.types.is_null(sort)):
        raise BalanceError(f"{file} is no trace: the column {name} is of type {sort}, not of numbers")
    if is_wanted(sort):
        return column
    if pyarrow.types.is_floating(sort):
        column = pyarrow.chunked_array([pyarrow.array(column.to_numpy(), from_pandas=True)])
    return column.cast(wanted)


def _joined(tables: list[pyarrow.Table], files: list[Path]) -> pyarrow.Table:
    import pyarrow

    if len(tables) == 1:
        return tables[0].unify_dictionaries()
    metas = {(table.schema.metadata or {}).get(METADATA_KEY) for table in tables}
    if len(metas) > 1:
        raise BalanceError(
            f"the {len(tables)} files of {files[0].parent} describe {len(metas)} different jobs or runs: put each run's files "
            "into a folder of its own"
        )
    metadata = tables[0].schema.metadata
    plain = [table.replace_schema_metadata(None) for table in tables]
    joined = pyarrow.concat_tables(plain, promote_options="permissive")
    return joined.replace_schema_metadata(metadata).unify_dictionaries()


# --- what the job is


def _described(path: Path, table: pyarrow.Table, meta: Path | None) -> dict[str, Any]:
    """Name, world_size and fields of a Topology, as far as files tell."""
    described: dict[str, Any] = {}
    stored = (table.schema.metadata or {}).get(METADATA_KEY)
    if stored is not None:
        described = _from_recorder(stored, path)
    if meta is None and stored is None and path.is_dir():
        beside = sorted(file for file in path.iterdir() if file.suffix in (".yaml", ".yml"))
        meta = beside[0] if len(beside) == 1 else None
    if meta is not None:
        described.update(_from_yaml(meta))
    return described


def _from_yaml(meta: Path) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise BalanceError(f"{meta} needs PyYAML: pip install pyyaml ({error})") from error
    try:
        values = yaml.safe_load(meta.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise BalanceError(f"{meta} cannot be read as YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict):
        raise BalanceError(f"{meta} is not a job's sizes: it needs keys such as pp_size and dp_size")
    described = {field: _size(values[key], key, meta) for key, field in _META.items() if values.get(key) is not None}
    if values.get("layers") is not None:
        described["layers"] = _layers(values["layers"], meta)
    if values.get("trial_name") is not None:
        described["name"] = str(values["trial_name"])
    if values.get("world_size") is not None:
        described["world_size"] = _size(values["world_size"], "world_size", meta)
    return described


def _from_recorder(stored: bytes, path: Path) -> dict[str, Any]:
    try:
        values = json.loads(stored.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BalanceError(f"the job's sizes in {path} are damaged: {error}") from error
    if not isinstance(values, dict):
        raise BalanceError(f"the job's sizes in {path} are damaged: they are no JSON object")
    topology = values.get("topology", values)
    if not isinstance(topology, Mapping):
        raise BalanceError(f"the job's sizes in {path} are damaged: topology is no JSON object")
    described: dict[str, Any] = {}
    for field in fields(Topology):
        if topology.get(field.name) is None:
            continue
        value = topology[field.name]
        described[field.name] = value is True if field.name == "overlap_moe" else _size(value, field.name, path)
    if values.get("stages") is not None:
        described["layers"] = _built_layers(values["stages"], path)
    described["name"] = str(values.get("name") or path.name)
    if values.get("world_size") is not None:
        described["world_size"] = _size(values["world_size"], "world_size", path)
    described |= {name: values.get(name) is True for name in ("in_turn", "sends_ahead")}
    try:
        described["shapes"] = reading.scalars(values.get("shapes", {}), "shapes")
    except reading.DamageError as error:
        raise BalanceError(f"the job's sizes in {path} are damaged: {error}") from error
    return described


def _layers(value: Any, source: Path) -> tuple[int, ...]:
    good = isinstance(value, list) and value and all(type(each) is int and 0 <= each <= _MOST_LAYERS for each in value)
    if not good:
        raise BalanceError(
            f"{source}: layers must be a list of whole numbers, those of each stage, not {repr(value)[:40]}"
        )
    return tuple(value)


def _built_layers(value: Any, source: Path) -> tuple[int, ...]:
    """Layers of each stage, from what the recorder says that each pipeline rank's chunks hold."""
    try:
        by_rank = [[len(chunk["layers"]) for chunk in chunks] for chunks in value]
        chunks = [list(row) for row in zip(*by_rank, strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise BalanceError(f"the job's stages in {source} are damaged: {error}") from error
    return _layers([layers for row in chunks for layers in row], source)


def _size(value: Any, key: str, source: Path) -> int:
    if type(value) is not int or not 1 <= value <= _MOST_RANKS:
        shown = repr(value)
        raise BalanceError(f"{source}: {key} must be a whole number from 1 to {_MOST_RANKS}, not {shown[:40]}")
    return value


# --- the rows


def _rows(
    table: pyarrow.Table, described: dict[str, Any], path: Path, problems: list[str]
) -> tuple[Trace, np.ndarray | slice]:
    """The rows that make sense, and which of the table's they are."""
    if table.num_rows == 0:
        raise BalanceError(f"{path} has no rows: give the trace of a job that trained at least one step")
    import pyarrow

    names = table["optype"].combine_chunks()
    if isinstance(names, pyarrow.ChunkedArray):
        names = names.chunk(0)
    kinds = tuple(str(name) for name in names.dictionary.to_pylist())
    kind = _whole(names.indices)
    start_s, duration_s = _seconds(table["start_ts"]), _seconds(table["duration"])
    columns = {name: _whole(table[name]) for name in ("dp_rank", "stage", "step", "mc", "mb_id")}
    keep = _sensible(kind, kinds, start_s, duration_s, columns, problems)
    if RANK in table.column_names:
        keep &= _speaks(_whole(table[RANK]), columns["dp_rank"], columns["stage"], keep)
    if described.get("in_turn"):
        keep &= _of_one_size(described, columns, keep & _are_passes(kind, kinds), problems)
    if not keep.any():
        raise BalanceError(f"{path} has no row that makes sense: {problems[-1]}")
    kept: np.ndarray | slice = slice(None) if keep.all() else np.flatnonzero(keep)
    kind, start_s, duration_s = kind[kept], start_s[kept], duration_s[kept]
    columns = {name: values[kept] for name, values in columns.items()}
    is_pass = _are_passes(kind, kinds)
    if not is_pass.any():
        raise BalanceError(f"{path} has no {FORWARD} or backward-compute operations: it is no trace of a training job")
    job = _job(described, columns, is_pass, path, problems)
    end_s = start_s.astype(np.float64) + duration_s
    # Published durations of exchanges were differences of times in the file's precision; those of passes are as written.
    exchanged = np.array([is_exchange(name) for name in kinds], dtype=bool)[kind]
    end_s[exchanged] = (start_s + duration_s)[exchanged]
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
        end_s=end_s.astype(np.float64),
        embedding_s=_seconds(table[EMBEDDING])[kept].astype(np.float64) if EMBEDDING in table.column_names else None,
    )
    return trace, kept


def _whole(column) -> np.ndarray:
    """Whole numbers, int64; -1 for null."""
    filled = column.fill_null(-1) if column.null_count else column
    return np.ascontiguousarray(filled.to_numpy(), dtype=np.int64)


def _seconds(column) -> np.ndarray:
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
    known = np.array([name in (*OPERATIONS, *OURS) for name in kinds], dtype=bool)
    keep = known[kind] if kinds else np.zeros(kind.size, dtype=bool)
    keep &= kind >= 0
    if not keep.all():
        unknown = [kinds[number] for number in np.unique(kind[~keep]) if number >= 0]
        shown = ", ".join(repr(name[:40]) for name in unknown[:_MOST_SHOWN])
        problems.append(f"{int((~keep).sum())} rows of unknown operations ({shown}) are left out")
    is_pass = _are_passes(kind, kinds)
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


def _are_passes(kind: np.ndarray, kinds: tuple[str, ...]) -> np.ndarray:
    return np.isin(kind, [number for number, name in enumerate(kinds) if name in PASSES])


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
    if (int(dp_rank[keep].max()) + 1) * width > _MOST_RANKS:
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
    rows = is_pass.size
    for name, column in (
        ("pipeline_size", "stage"), ("data_size", "dp_rank"), ("virtual_size", "mc"), ("num_microbatches", "mb_id")
    ):  # fmt: skip
        said, most = described.get(name), shown[name]
        if said is None and most > rows:
            raise BalanceError(f"{path} has {rows} rows and a {column} of {most - 1}: its numbers are damaged")
        if said is not None and most > said:
            raise BalanceError(
                f"{path} has a {column} of {most - 1}, but {name.replace('_', ' ')} is {said}: the sizes are of another job"
            )
        if said is not None and most < said and name in ("virtual_size", "num_microbatches"):
            problems.append(f"{name.replace('_', ' ')} is {said}, but only {most} appear in the trace, which is taken")
            described[name] = most
    sizes = {**shown, **{key: value for key, value in described.items() if key not in _OF_JOB}}
    if sizes["pipeline_size"] * sizes["data_size"] > max(_MOST_RANKS, 1):
        raise BalanceError(
            f"{sizes['pipeline_size']} pipeline ranks by {sizes['data_size']} data-parallel ranks are more than {_MOST_RANKS}: "
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
    layers = described.get("layers")
    if layers is not None and len(layers) != topology.num_stages:
        problems.append(
            f"layers are given for {len(layers)} stages, but the job has {topology.num_stages}: they are not used"
        )
        layers = None
    known = {name: described[name] for name in ("in_turn", "sends_ahead", "shapes") if name in described}
    return Job(described.get("name", path.stem), topology, world, layers, **known)


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
