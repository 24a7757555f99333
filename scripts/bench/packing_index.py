#!/usr/bin/env python3
"""What the order of an epoch takes: seconds and memory to make it, seconds to start from the file that is kept of it.

Writes a Megatron index of many documents (the .bin stays a hole, as no token is read), and prints a row of Markdown for each
count. Every figure is of a process of its own, with its imports.

    python scripts/bench/packing_index.py [--documents N ...] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:  # run from a checkout that is not installed
    sys.path.insert(0, str(ROOT))

MEDIAN_TOKENS, SPREAD = 1024, 1.4  # log-normal, cut off at a bin of 32k


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, nargs="+", default=[1_000_000, 10_000_000, 100_000_000])
    parser.add_argument(
        "--folder", help="where to write, and remove, the files (default: the system's temporary folder)"
    )
    parser.add_argument("--one", nargs=2, metavar=("PREFIX", "CACHE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        return _open(*options.one)
    _open_small()
    print(
        "| documents | making the order, s | peak memory, MB | starting from the file, s | peak memory, MB | file, MB |"
    )
    print("|---|---|---|---|---|---|")
    for documents in options.documents:
        _measure(documents, options.folder)


def _measure(documents: int, folder: str | None) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        prefix, cache = Path(place, "data"), Path(place, "cache")
        _write_index(prefix, documents)
        made, started = (_child("--one", str(prefix), str(cache)) for _ in range(2))
        file_mb = sum(file.stat().st_size for file in cache.iterdir()) / 1e6
    print(
        f"| {documents:,} | {made['seconds']:.2f} | {made['peak_mb']:.0f} | {started['seconds']:.2f} |"
        f" {started['peak_mb']:.0f} | {file_mb:.0f} |",
        flush=True,
    )


def _write_index(prefix: Path, documents: int) -> None:
    rng = np.random.default_rng(0)
    lengths = np.empty(documents, dtype="<i4")
    for first in range(0, documents, 2**22):
        part = lengths[first : first + 2**22]
        part[:] = np.clip(rng.lognormal(np.log(MEDIAN_TOKENS), SPREAD, part.size), 16, 32768)
    ends = np.cumsum(lengths, dtype="<i8") * 4
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, documents, documents + 1))
        lengths.tofile(file)
        (ends - lengths * np.int64(4)).tofile(file)
        np.arange(documents + 1, dtype="<i8").tofile(file)
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(int(ends[-1]))


def _open_small() -> None:
    """Have the kernels compiled before anything is measured."""
    with tempfile.TemporaryDirectory() as place:
        _write_index(Path(place, "data"), 1000)
        _child("--one", str(Path(place, "data")), str(Path(place, "cache")))


def _child(*arguments: str) -> dict[str, float]:
    start_s = time.perf_counter()
    done = subprocess.run([sys.executable, __file__, *arguments], check=True, capture_output=True, text=True)
    return {**json.loads(done.stdout), "seconds": time.perf_counter() - start_s}


def _open(prefix: str, cache: str) -> None:
    """In a process of its own: read the index and open the order."""
    from megatron_balance.packing.documents import read_documents
    from megatron_balance.packing.index import epoch_order

    epoch_order(read_documents(prefix), seed=1234, place=0, epoch=0, cache_folder=Path(cache))
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"peak_mb": int(peak.split()[1]) / 1e3}))  # getrusage would count the parent's before exec, too


if __name__ == "__main__":
    main()
