#!/usr/bin/env python3
"""What `--straggler-trace` costs, and whether what it records gives the step again: real training on the CPU.

overhead  recorded against not recorded, step by step in one process, in pairs of neighbours in turns of order: on, off, off, on.
          A step that is not recorded still passes through the hooks, which then ask one flag each. The steps that write a part
          are told apart: their cost is a share of the interval. Target: median below 1 % of a step.
replay    the step that the recorded durations give, against what Megatron logs as elapsed time per iteration, data loading,
          optimizer and logging with it. Target: median within 3 %.

Needs two cores and a quiet machine; four ranks on two cores say so in their name. Half a minute to nine minutes a case. Exits
with 1 if a target is missed.

    python scripts/bench/recorder.py [CASE ...] [--steps N] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from megatron_balance.diagnosis.reading import read_trace  # noqa: E402
from megatron_balance.diagnosis.replay import Replay  # noqa: E402
from megatron_balance.diagnosis.trace import BACKWARD, FORWARD  # noqa: E402

DRIVER = Path(__file__).with_name("recorder_observed.py")
SMALL, MIDDLE, LARGE = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128",
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 512",
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 512",
)
PP2, VPP2 = "--pipeline-model-parallel-size 2", "--num-virtual-stages-per-pipeline-rank 2"


@dataclass(frozen=True)
class Case:
    """What is asked of a job.

    Attributes:
        kind: "overhead" or "replay".
        model: its flags.
        parallel: flags of the pipeline.
        ranks: processes.
        data_size: data-parallel ranks among them.
        steps: of training; of overhead half are recorded.
    """

    kind: str
    model: str
    parallel: str
    ranks: int
    data_size: int
    steps: int


CASES = {
    "overhead-PP2": Case("overhead", SMALL, PP2, 2, 1, 600),
    "overhead-DP2": Case("overhead", SMALL, "", 2, 2, 600),
    "overhead-PP2-middle": Case("overhead", MIDDLE, PP2, 2, 1, 480),
    "overhead-DP2-middle": Case("overhead", MIDDLE, "", 2, 2, 480),
    "replay-PP2": Case("replay", SMALL, PP2, 2, 1, 200),
    "replay-PP2-VPP2": Case("replay", SMALL, f"{PP2} {VPP2}", 2, 1, 200),
    "replay-DP2": Case("replay", SMALL, "", 2, 2, 200),
    "replay-DP2-PP2-on-2-cores": Case("replay", SMALL, PP2, 4, 2, 200),
    "replay-PP2-large": Case("replay", LARGE, PP2, 2, 1, 50),
    "replay-PP2-VPP2-large": Case("replay", LARGE, f"{PP2} {VPP2}", 2, 1, 50),
    "replay-DP2-PP2-on-2-cores-large": Case("replay", LARGE, PP2, 4, 2, 30),
}
MICROBATCHES = {"overhead": 4, "replay": 8}  # of a step: few make what is done once a step weigh more
OVERHEAD, REPLAY, INTERVAL, WARMUP = 0.01, 0.03, 40, 8
COMMON = (
    "--max-position-embeddings 512 --micro-batch-size 1 --lr 1e-3 --lr-decay-style constant --mock-data --split 98,1,1"
    " --tokenizer-type NullTokenizer --vocab-size 1023 --num-workers 0 --eval-iters 0 --eval-interval 100000"
    " --transformer-impl local --hidden-dropout 0 --attention-dropout 0 --untie-embeddings-and-output-weights"
)
_ELAPSED = re.compile(r"iteration +(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument(
        "--steps", type=int, help="of each case (default: the case's own; of overhead half are recorded)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "recorder-bench-out")
    options = parser.parse_args()
    if unknown := [name for name in options.cases if name not in CASES]:
        parser.error(f"no case {', '.join(unknown)}: there are {', '.join(CASES)}")
    missed = 0
    for name in options.cases or CASES:
        ask = {"overhead": _overhead, "replay": _replay}[CASES[name].kind]
        missed += not ask(name, options.steps or CASES[name].steps, options.out.resolve() / name)
    return 1 if missed else 0


def _train(name: str, steps: int, folder: Path, driver: list[str], log_interval: int) -> str:
    """What the job prints."""
    case = CASES[name]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    trace = f"--straggler-trace {folder / 'trace'} --straggler-trace-interval {INTERVAL}"
    batch = MICROBATCHES[case.kind] * case.data_size
    size = f"--train-iters {steps} --global-batch-size {batch} --log-interval {log_interval}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}", *driver]
    command += ["--device", "cpu", *f"{case.model} {COMMON} {case.parallel} {size} {trace}".split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (folder / "output.log").open("w") as log:
        status = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder).returncode
    if status:
        raise SystemExit(f"{name}: training ended with status {status}, see {folder / 'output.log'}")
    return (folder / "output.log").read_text(errors="replace")


def _replay(name: str, steps: int, folder: Path) -> bool:
    printed = _train(name, steps, folder, ["-m", "megatron_balance.run"], log_interval=1)
    logged_s = {int(step): float(shown) / 1000 for step, shown in _ELAPSED.findall(printed)}
    trace = read_trace(folder / "trace")
    replay = Replay(trace)
    settled = np.array([int(step) > WARMUP and int(step) in logged_s for step in replay.steps])
    measured_s = np.array([logged_s[int(step)] for step in replay.steps[settled]])
    replayed_s = replay.steps_with_s(replay.actual_s)[settled]
    recorded_s = replay.recorded_step_s[settled]
    median, low, high = _median(replayed_s / measured_s - 1)
    passes = replay.nodes.are(FORWARD, BACKWARD)
    pass_ms = 1000 * np.percentile(replay.actual_s[:, passes], [5, 95])
    print(
        f"{name}: {measured_s.size} steps of {1000 * np.median(measured_s):.1f} ms, passes of {pass_ms[0]:.1f} to"
        f" {pass_ms[1]:.1f} ms: replayed over measured {100 * median:+.2f} % (95 % {100 * low:+.2f} to {100 * high:+.2f}), all"
        f" together {100 * (replayed_s.sum() / measured_s.sum() - 1):+.2f} %; recorded over measured"
        f" {100 * float(np.median(recorded_s / measured_s - 1)):+.2f} %{''.join(f'; {line}' for line in trace.problems)}",
        flush=True,
    )
    return abs(median) <= REPLAY


def _overhead(name: str, steps: int, folder: Path) -> bool:
    _train(name, steps, folder, [str(DRIVER), str(folder)], log_interval=100)
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("steps-*.json"))]
    # A step is over when all ranks have finished it, so their means tell the same; the mean lessens the noise of one.
    step, on, _ = (np.array(column) for column in zip(*ranks[0], strict=True))
    seconds = np.mean([[row[2] for row in rank] for rank in ranks], axis=0)
    on, writes = on.astype(bool), step % INTERVAL == 0
    recorded_s, other_s = _pairs(step, on, seconds, writes).T
    median, low, high = _median(recorded_s / other_s - 1)
    microseconds = [1e6 * each for each in _median(recorded_s - other_s)]
    size = sum(path.stat().st_size for path in (folder / "trace").iterdir()) / len(ranks)
    write_s = float(np.median(seconds[writes]) - np.median(seconds[~writes])) if writes.any() else 0.0
    off_s = float(np.median(seconds[~on]))
    print(
        f"{name}: {recorded_s.size} pairs of steps of {1000 * off_s:.1f} ms: recorded over not recorded {100 * median:+.2f} %"
        f" (95 % {100 * low:+.2f} to {100 * high:+.2f}), {microseconds[0]:+.0f} us a step ({microseconds[1]:+.0f} to"
        f" {microseconds[2]:+.0f}); a write {1000 * write_s:.1f} ms, {100 * write_s / INTERVAL / off_s:.3f} % of {INTERVAL} steps;"
        f" {size / on.sum():.0f} bytes a recorded step and rank",
        flush=True,
    )
    return median <= OVERHEAD


def _pairs(step: np.ndarray, on: np.ndarray, seconds: np.ndarray, writes: np.ndarray) -> np.ndarray:
    """Seconds of a recorded step and of the one beside it that was not, [pairs, 2]."""
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
                found.append((recorded[1], other[1]))
    return np.array(found)


def _median(values: np.ndarray) -> tuple[float, float, float]:
    """Median and its 95 % interval, by resampling."""
    random = np.random.default_rng(0)
    medians = np.median(random.choice(values, (2000, values.size)), axis=1)
    return float(np.median(values)), *map(float, np.percentile(medians, [2.5, 97.5]))


if __name__ == "__main__":
    sys.exit(main())
