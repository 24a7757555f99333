"""The parquet files of a trace as one table.

Columns (those of ByteDance's published traces): ``dp_rank``, ``stage`` (pipeline rank), ``step``, ``optype``, ``start_ts`` and
``duration`` in seconds, ``mc`` (model chunk of the rank) and ``mb_id`` (micro-batch), -1 or null where the operation belongs to
none. Our recorder adds ``tokens``, ``longest`` and ``squares`` to forward passes, to those of the first stage, and to its backward
passes, ``embedding`` (seconds), and the job's sizes as JSON in the schema's metadata; its operations run in turn
(``Job.in_turn``). Nothing in a file is ever executed or unpickled.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_balance.diagnosis.clocks import LEAST_S
from megatron_balance.errors import BalanceError

if TYPE_CHECKING:
    import pyarrow

METADATA_KEY, RANK_METADATA_KEY = b"megatron_balance", b"megatron_balance_rank"
COLUMNS = ("dp_rank", "stage", "step", "optype", "start_ts", "duration", "mc", "mb_id")
RANK = "rank"  # of the job; where tensor- or context-parallel ranks share a worker, the first speaks for them
LENGTHS = ("tokens", "longest", "squares")
EMBEDDING = "embedding"
_PART = re.compile(r"\.\d{4,}(?=\.parquet$)")
_MOST_SHOWN = 5


def trace_files(path: Path) -> list[Path]:
    """The parquet files of a trace: one, or those of a folder.

    Raises:
        BalanceError: there are none.
    """
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


def read_tables(files: list[Path], problems: list[str]) -> pyarrow.Table:
    """The rows of all files that can be read, with the columns of a trace, each of one type.

    Args:
        files: of one job.
        problems: grows by what is left out, or may be wrong.

    Raises:
        BalanceError: pyarrow is not installed, no file can be read, one is no trace, or they are of several jobs.
    """
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
