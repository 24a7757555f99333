"""Real documents for packed training: Megatron's own writer, the characters of a text as tokens."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np

EOD = 126  # the tokenizer's end of document with --vocab-size 127


def write_documents(
    prefix: Path, documents: int = 400, seed: int = 0, median: float = 12.0, longest: int = 90, multiple: int = 1
) -> list[np.ndarray]:
    """Write PREFIX.bin and PREFIX.idx with documents of log-normal lengths; returns their tokens: the last one 0, one ``EOD``.

    Each has a multiple of ``multiple`` labels.
    """
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    rng = np.random.default_rng(seed)
    text = np.frombuffer(inspect.getsource(np).encode(), np.uint8).astype(np.int64)
    text = text[(text > 0) & (text < EOD)]
    lengths = np.clip(rng.lognormal(np.log(median), 0.9, documents).round().astype(int), 1, longest)
    lengths = -(-(lengths - 1) // multiple) * multiple + 1
    written = []
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for length in lengths:
        start = int(rng.integers(text.size - length))
        tokens = np.append(text[start : start + length - 1], 0)
        tokens[length // 3] = EOD
        builder.add_document(torch.from_numpy(tokens), [length])
        written.append(tokens)
    builder.finalize(f"{prefix}.idx")
    return written
