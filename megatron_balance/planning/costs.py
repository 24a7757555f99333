"""The costs that a plan is told to stand on: a costs file, or the trace of a recorded job."""

from __future__ import annotations

import hashlib
from pathlib import Path

from megatron_balance.costs.table import CostTable, load_fitting, shapes_of
from megatron_balance.errors import BalanceError
from megatron_balance.files import read_text, readable
from megatron_balance.model import ModelSpec
from megatron_balance.topology import Topology

_END_BYTES = 1 << 16


def given_costs(source: str, model: ModelSpec, topology: Topology) -> CostTable:
    """The costs in ``source``, for this model.

    Args:
        source: a costs file, a trace's ``.parquet`` file, or the folder of one.
        model: that they are for; those of a trace hold for whatever they do not name.
        topology: of the job that is planned.

    Raises:
        BalanceError: nothing can be read there, it is of other shapes, or the trace does not tell what a layer costs.
    """
    if not _is_trace(source):
        return load_fitting(source, model, topology)
    table = _recorded_costs(source)
    table.check_fits(shapes_of(model, topology), f"the trace {source}")
    return table


def fingerprint(source: str) -> str:
    """What tells the costs in ``source`` from others: every rank asks for it, so that of a trace, which may be large, only the
    names and sizes of its files are read, and the end of the first one, where parquet keeps the bounds of all columns.

    Raises:
        BalanceError: it cannot be read.
    """
    if not _is_trace(source):
        return _digest(read_text(source, f"the costs file {source}").encode())
    path = Path(source)
    with readable(f"the trace {source}"):
        files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        sizes = " ".join(f"{file.name} {file.stat().st_size}" for file in files)
        return _digest(sizes.encode() + (_end_of(files[0]) if files else b""))


def _recorded_costs(path: str) -> CostTable:
    """What layers and head cost in a recorded job.

    Raises:
        BalanceError: there is no trace, or it does not tell.
    """
    from megatron_balance.diagnosis.diagnose import recorded_split  # reads parquet, which no other plan needs
    from megatron_balance.diagnosis.reading import read_trace

    trace = read_trace(path)
    if trace.job.layers is None:
        raise BalanceError(
            f"the trace {path} does not tell how many layers each stage holds: name them with `megatron-balance diagnose {path}"
            " --layers 9,9,9,9 --costs costs.json`, then plan on costs.json"
        )
    return recorded_split(trace, trace.job.layers).table()


def _is_trace(source: str) -> bool:
    return Path(source).is_dir() or source.endswith(".parquet")


def _end_of(file: Path) -> bytes:
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - _END_BYTES))
        return opened.read()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
