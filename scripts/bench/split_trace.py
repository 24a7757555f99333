"""The recorded steps of a real job: trace ST of ByteDance's study of stragglers (36 layers as 9 a stage, PP4, DP2, M=4).

The trace names every operation of 32 recorded steps on 8 ranks: the forward and the backward pass of each micro-batch,
transfers between stages, what data parallelism exchanges, and the optimizer, with start and duration. Clocks start anew with
each step, so what a job does between two steps (logging, checkpoints) is in no figure.

What layers and head cost, and what a split gains on the whole step, is computed as ``megatron-balance diagnose`` does
(``megatron_balance/diagnosis/costs.py``). The first five recorded steps are left out: unlike the others they differ among each
other, in the optimizer by 0.26 s.

Data: https://github.com/ByteDance-Seed/StragglerAnalysis, folder ``data`` (Apache-2.0), read in place.
"""

from __future__ import annotations

from pathlib import Path

from public_data import data_folder

from megatron_balance.diagnosis.cells import take
from megatron_balance.diagnosis.costs import RecordedSplit
from megatron_balance.diagnosis.diagnose import recorded_split
from megatron_balance.diagnosis.reading import read_trace
from megatron_balance.errors import BalanceError

RECORDED = (9, 9, 9, 9)  # layers of each stage
UNSETTLED = 5  # recorded steps that are left out


def read_split(folder: Path | None = None, unsettled: int = UNSETTLED) -> RecordedSplit:
    """Read trace ST.

    Args:
        folder: of the public data; None takes ``data_folder()``.
        unsettled: steps to leave out at the beginning.

    Raises:
        BalanceError: the files are not there or are no such trace, or pyarrow is not installed.
    """
    folder = (folder or data_folder()) / "straggler-traces"
    file, meta = folder / "trace-ST.parquet", folder / "meta-ST.yaml"
    for needed in (file, meta):
        if not needed.is_file():
            raise BalanceError(f"no file {needed}; MEGATRON_BALANCE_DATA names the folder that has straggler-traces")
    trace = read_trace(file, meta)
    return recorded_split(take(trace, trace.step >= trace.steps[unsettled]), RECORDED)
