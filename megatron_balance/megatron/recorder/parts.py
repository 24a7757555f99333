"""A rank's file: written in parts, so that what is written can be read whatever happens next, and joined at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_balance.diagnosis.trace_files import METADATA_KEY, RANK_METADATA_KEY
from megatron_balance.files import writing_atomically

_MOST_BYTES = 256_000_000


class Row(NamedTuple):
    """One operation, in the columns of the published traces; what is not published stands last.

    Attributes:
        step: of training, from 1.
        optype: name of the operation (`diagnosis/trace.py`).
        start_ts, duration: seconds since the epoch on the clock of rank 0's machine; seconds.
        seq_id: how many of its kind this rank began before it in the step.
        mc, gmc: model chunk on the rank, and among all; -1 where the operation belongs to none.
        mb_id: micro-batch; -1 where the operation belongs to none.
        tokens, longest, squares: of a forward pass: real tokens (of stock's rows all); of the longest sequence, and the sum of the
            squares of the sequences' tokens, padding too, which takes time: None where sequences are not told apart.
        embedding: seconds of a pass of the first stage that its embedding takes, fetching the batch with it; None where not told.
    """

    step: int
    optype: str
    start_ts: float
    duration: float
    seq_id: int
    mc: int
    gmc: int
    mb_id: int
    tokens: int | None = None
    longest: int | None = None
    squares: int | None = None
    embedding: float | None = None


class Parts:
    """The file of one rank."""

    def __init__(
        self, folder: Path, rank: int, same: Mapping[str, int], job: Mapping[str, Any], here: Mapping[str, Any]
    ) -> None:
        """Write nothing yet.

        Args:
            folder: for the files.
            rank: of this process.
            same: columns whose value is the same in all rows (``dp_rank``, ``stage``, ...).
            job: what all files say of the job, as JSON under the key ``megatron_balance`` of their schemas.
            here: what this rank's says beside, under ``megatron_balance_rank``.
        """
        import pyarrow.parquet  # noqa: F401  the first import takes a while: not after a step

        if not folder.is_dir():  # rank 0 has made it
            raise OSError(f"{folder} is not on this machine: name a folder that all machines share")
        self.folder, self.rank, self.same = folder, rank, dict(same)
        self.metadata = {METADATA_KEY: json.dumps(job).encode(), RANK_METADATA_KEY: json.dumps(here).encode()}
        self.bytes = 0
        self._count = 0

    @property
    def path(self) -> Path:
        """Where all is joined."""
        return self.folder / f"rank-{self.rank:05d}.parquet"

    @property
    def is_full(self) -> bool:
        return self.bytes >= _MOST_BYTES

    def write(self, rows: Sequence[Row]) -> None:
        """Write another part.

        Raises:
            OSError: it cannot be written; the parts before it stay.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not rows:
            return
        columns = dict(zip(Row._fields, zip(*rows, strict=True), strict=True))
        columns |= {name: [value] * len(rows) for name, value in self.same.items()}
        schema = _schema(self.same, self.metadata)
        arrays = [pa.array(columns[field.name], field.type) for field in schema]
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_arrays(arrays, schema=schema), sink, compression="zstd")
        content = sink.getvalue()
        with writing_atomically(self.folder / f"rank-{self.rank:05d}.{self._count:04d}.parquet") as file:
            file.write(content)
        self._count += 1
        self.bytes += len(content)

    def join(self) -> None:
        """Put one file in the place of the parts.

        Raises:
            OSError: it cannot be written; the parts stay.
        """
        import pyarrow.parquet as pq

        parts = sorted(self.folder.glob(f"rank-{self.rank:05d}.*.parquet"), key=_number)
        if not parts:
            return
        schema = _schema(self.same, self.metadata)
        with writing_atomically(self.path) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for part in parts:
                writer.write_table(pq.read_table(part, schema=schema))
        for part in parts:
            part.unlink()


def _number(part: Path) -> int:
    return int(part.name.split(".")[1])


def _schema(same: Mapping[str, int], metadata: Mapping[bytes, bytes]) -> Any:
    import pyarrow as pa

    types = {
        "dp_rank": pa.int32(),
        "stage": pa.int32(),
        "rank": pa.int32(),
        "step": pa.int64(),
        "optype": pa.dictionary(pa.int8(), pa.string()),
        "start_ts": pa.float64(),
        "duration": pa.float32(),
        "seq_id": pa.int32(),
        "mc": pa.int16(),
        "gmc": pa.int32(),
        "mb_id": pa.int32(),
        "tokens": pa.int64(),
        "longest": pa.int64(),
        "squares": pa.int64(),
        "embedding": pa.float32(),
    }
    types |= {name: pa.int32() for name in same if name not in types}
    return pa.schema(list(types.items()), metadata=dict(metadata))
