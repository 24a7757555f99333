#!/usr/bin/env python3
"""How long diagnosis takes to replay a trace: beside the published tool, and on a made trace of 1,024 ranks.

The published tool is ByteDance's StragglerAnalysis, three processes a trace (S with S_t and S_w; M_S; M_W); ours says the same in
one: `megatron-balance diagnose`, which also names the causes and prints the checklist and the fix. Both run in turns, whole
processes with the start of Python in them. The published tool needs an interpreter of its own
(pandas before 3, pyarrow, PyYAML, tqdm) and a checkout whose ``data`` folder has the traces.

    python scripts/bench/diagnosis.py [--published CHECKOUT --published-python PYTHON] [--runs N] [--large]

Exits with 1 if ours takes more than a fifth, or the large trace more than 60 s or 8 GB.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
for folder in (ROOT, ROOT / "tests"):  # run from a checkout that is not installed
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

NAMES = ("ST", "SE")
LARGEST_SHARE, MOST_S, MOST_BYTES = 0.2, 60.0, 8e9
OURS = ("-m", "megatron_balance.cli", "diagnose")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--published", type=Path, help="checkout of the published tool")
    parser.add_argument("--published-python", default=sys.executable, help="interpreter that has what it needs")
    parser.add_argument("--runs", type=int, default=5, help="of each side (default: 5)")
    parser.add_argument("--large", action="store_true", help="time the made trace of 1,024 ranks and 64 steps")
    options = parser.parse_args(arguments)
    good = True
    if options.published:
        print("| trace | published: S | M_S | M_W | all three | `megatron-balance diagnose` | share |")
        print("|---|---|---|---|---|---|---|")
        for name in NAMES:
            good &= _beside(name, options.published.resolve(), options.published_python, options.runs)
    if options.large:
        good &= _large()
    return 0 if good else 1


def _beside(name: str, checkout: Path, python: str, runs: int) -> bool:
    data = checkout / "data"
    ours = [sys.executable, *OURS, str(data / f"trace-{name}.parquet"), "--meta", str(data / f"meta-{name}.yaml")]
    samples = []
    with tempfile.TemporaryDirectory() as folder:
        result = ["--analysis-result", str(data / f"result-{name}.json")]
        published = [
            ["wia.py", "--metadata", str(data / f"meta-{name}.yaml"), "--trace", str(data / f"trace-{name}.parquet")],
            ["compute_ms.py", "--trial", name, *result],
            ["compute_mw.py", "--trial", name, *result],
        ]
        commands = [
            [python, str(checkout / "analyzer" / script), *flags, "--root", folder, "--dump-dir", folder]
            for script, *flags in published
        ]
        path = os.pathsep.join([str(checkout), str(checkout / "analyzer")])
        for run in range(runs + 1):
            seconds = [*(_seconds(command, path) for command in commands), _seconds(ours, str(ROOT))]
            if run:  # the first of each fills the file cache
                samples.append(seconds)
    *parts, own = np.median(samples, axis=0)
    share = own / sum(parts)
    shown = " | ".join(f"{part:.2f} s" for part in (*parts, sum(parts), own))
    print(f"| {name} | {shown} | {share:.3f} |")
    return share <= LARGEST_SHARE


def _seconds(command: list[str], path: str) -> float:
    started = time.perf_counter()
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:2])} failed:\n{done.stderr[-2000:]}")
    return seconds


def _large() -> bool:
    """Write, read and replay a trace of PP 16, DP 64 and 32 micro-batches."""
    with tempfile.TemporaryDirectory() as folder:
        writer = [sys.executable, "-c", "import diagnosis, sys; diagnosis.write_large(sys.argv[1])", folder]
        _seconds(writer, os.pathsep.join([str(ROOT), str(Path(__file__).parent)]))
        files = sorted(Path(folder).iterdir())
        size = sum(file.stat().st_size for file in files)
        seconds = _seconds([sys.executable, *OURS, folder], str(ROOT))
    peak = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(
        f"1,024 ranks, 64 steps, {len(files)} files of {size / 1e6:.0f} MB: {seconds:.1f} s, peak {peak / 1e9:.2f} GB"
    )
    return seconds <= MOST_S and peak <= MOST_BYTES


def write_large(folder: str) -> None:
    """Durations vary by worker, micro-batch and step."""
    from traces import made_trace, write_ranks

    from megatron_balance.topology import Topology

    topology = Topology(16, 32, data_size=64)
    random = np.random.default_rng(0)
    forward_s = 0.1 * random.lognormal(0.0, 0.1, (64, 64, 16, 32))
    write_ranks(made_trace(topology, forward_s, 2.0 * forward_s), Path(folder))


if __name__ == "__main__":
    sys.exit(main())
