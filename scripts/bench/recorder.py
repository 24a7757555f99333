#!/usr/bin/env python3
"""What `--straggler-trace` costs: real training on the CPU, recorded every other step in one process.

Steps are compared in pairs, a recorded one with the one beside it that was not, in turns of order: on, off, off, on. The steps that
write a part are told apart: their cost is a share of the interval. Two cores are needed, and a quiet machine: about two minutes.
Exits with 1 if a target is missed.

    python scripts/bench/recorder.py [--steps N] [--only PP2|DP2] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("recorder_observed.py")
CASES = {"PP2": "--pipeline-model-parallel-size 2", "DP2": ""}
TARGET, INTERVAL, WARMUP = 0.01, 100, 8
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1"
    " --global-batch-size 8 --lr 1e-3 --lr-decay-style constant --mock-data --split 98,1,1 --tokenizer-type NullTokenizer"
    " --vocab-size 1023 --num-workers 0 --log-interval 100 --eval-iters 0 --eval-interval 100000 --transformer-impl local"
    " --hidden-dropout 0 --attention-dropout 0 --untie-embeddings-and-output-weights"
).split()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="of each case; half of them are recorded")
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--out", type=Path, default=ROOT / "recorder-bench-out")
    options = parser.parse_args()
    missed = 0
    for name in [options.only] if options.only else CASES:
        missed += _case(name, options.steps, options.out.resolve() / name)
    return 1 if missed else 0


def _case(name: str, steps: int, folder: Path) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    trace = f"--straggler-trace {folder / 'trace'} --straggler-trace-interval {INTERVAL} --train-iters {steps}"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(DRIVER),
        str(folder),
    ]
    command += ["--device", "cpu", *MODEL, *CASES[name].split(), *trace.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (folder / "output.log").open("w") as log:
        subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True, cwd=folder)
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("steps-*.json"))]
    # A step is over when all ranks have finished it, so their means tell the same; the mean lessens the noise of one.
    step, on, _ = (np.array(column) for column in zip(*ranks[0], strict=True))
    seconds = np.mean([[row[2] for row in rank] for rank in ranks], axis=0)
    writes = step % INTERVAL == 0
    pairs = _pairs(step, on.astype(bool), seconds, writes)
    median, low, high = _median(pairs)
    size = sum(path.stat().st_size for path in (folder / "trace").iterdir()) / len(ranks)
    write_s = float(np.median(seconds[writes]) - np.median(seconds[~writes])) if writes.any() else 0.0
    off_s = float(np.median(seconds[~on.astype(bool)]))
    print(
        f"{name}: {pairs.size} pairs of steps of {1000 * off_s:.1f} ms: recorded over not recorded {100 * median:+.2f} %"
        f" (95 % {100 * low:+.2f} to {100 * high:+.2f}); a write {1000 * write_s:.1f} ms,"
        f" {100 * write_s / INTERVAL / off_s:.3f} % of {INTERVAL} steps; {size / on.sum():.0f} bytes a recorded step and rank",
        flush=True,
    )
    return median > TARGET


def _pairs(step: np.ndarray, on: np.ndarray, seconds: np.ndarray, writes: np.ndarray) -> np.ndarray:
    """Seconds of a recorded step over those of the one beside it, minus 1."""
    kept = {
        int(number): (bool(is_on), float(took))
        for number, is_on, took, left in zip(step, on, seconds, writes, strict=True)
        if not left and number > WARMUP
    }
    found = []
    for number in sorted(kept):
        if number % 2 == 1 and number + 1 in kept:
            first, second = kept[number], kept[number + 1]
            if first[0] != second[0]:
                recorded, other = (first, second) if first[0] else (second, first)
                found.append(recorded[1] / other[1] - 1)
    return np.array(found)


def _median(values: np.ndarray) -> tuple[float, float, float]:
    """Median and its 95 % interval, by resampling."""
    random = np.random.default_rng(0)
    medians = np.median(random.choice(values, (2000, values.size)), axis=1)
    return float(np.median(values)), *map(float, np.percentile(medians, [2.5, 97.5]))


if __name__ == "__main__":
    sys.exit(main())
