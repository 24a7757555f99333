"""The global batches as JSON, so that anyone can check which bin has what."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np

from megatron_balance.pack_command.study import Study
from megatron_balance.packing.cut import GlobalBatch
from megatron_balance.packing.pieces import by_bin


def dump_text(found: Study) -> str:
    """``{"seq_length": C, "batches": [...]}``, a global batch on each line.

    A global batch is a list of ranks, a rank a list of micro-batches, a micro-batch a list of pieces, a piece ``[document,
    first token, end token]``: inputs first to end - 1, labels first + 1 to end. Several sequences in a micro-batch add a level
    between micro-batch and piece, which ``micro_batch_size`` says. Of several data sets, named in ``data_sets``, a piece is
    ``[data set, document, first token, end token]``.
    """
    micro_batch_size = found.request.grid.topology.micro_batch_size
    head: dict[str, Any] = {"seq_length": found.request.rule.seq_length}
    if micro_batch_size > 1:
        head["micro_batch_size"] = micro_batch_size
    if len(found.data_sets) > 1:
        head["data_sets"] = list(found.data_sets)
    lines = [
        json.dumps(_nested(found, batch, placement.bins), separators=(",", ":"))
        for batch, placement in zip(found.batches, found.placements, strict=True)
    ]
    return f'{json.dumps(head)[:-1]}, "batches": [\n' + ",\n".join(lines) + "\n]}\n"


def _nested(found: Study, batch: GlobalBatch, bins: np.ndarray) -> list[Any]:
    """Ranks, their micro-batches, (their sequences,) their pieces; within a bin in the order of the stream."""
    topology, pieces = found.request.grid.topology, batch.pieces
    columns = [pieces.document, pieces.first, pieces.end]
    if len(found.data_sets) > 1:
        columns.insert(0, pieces.data_set)
    order, edges = by_bin(bins, batch.num_bins)
    rows = np.stack(columns, axis=1)[order].tolist()
    sequences = [rows[first:stop] for first, stop in itertools.pairwise(edges)]
    size, ranks = topology.micro_batch_size, topology.data_size
    micro_batches = sequences if size == 1 else [sequences[i : i + size] for i in range(0, len(sequences), size)]
    return [micro_batches[rank::ranks] for rank in range(ranks)]
