#!/usr/bin/env python3
"""How fast the simulator is on one core: operations (a forward or backward pass of a micro-batch through a stage) a second.

Exits with 1 below 100 million. The order of a schedule is made once; then each split is one pass over its operations.

    python scripts/bench/simulate.py [--seconds S]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:  # run from a checkout that is not installed
    sys.path.insert(0, str(ROOT))

from megatron_balance.kernels import run_program  # noqa: E402
from megatron_balance.schedule.simulate import Simulator  # noqa: E402
from megatron_balance.topology import Topology  # noqa: E402

TOPOLOGIES = (
    Topology(8, 64),
    Topology(16, 64),
    Topology(8, 64, 4),
    Topology(16, 256, 8),
    Topology(16, 256, 8, overlap_moe=True),
)
ENOUGH_PER_S = 100e6


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.5, help="of measuring each schedule (default: 0.5)")
    seconds = parser.parse_args(arguments).seconds
    print(
        "| PP | virtual stages | micro-batches | MoE overlap | operations | making the order | a step | operations a second |"
    )
    print("|---|---|---|---|---|---|---|---|")
    return 0 if min(_measure(topology, seconds) for topology in TOPOLOGIES) >= ENOUGH_PER_S else 1


def _measure(topology: Topology, seconds: float) -> float:
    """Print a row and return operations a second, by the median step."""
    Simulator(topology)  # compiles
    order_s = _duration_s(lambda: Simulator(topology))
    simulator = Simulator(topology)
    durations = np.random.default_rng(0).uniform(1.0, 2.0, 2 * topology.num_stages)
    operations = simulator.program.cost.size
    free, end = np.empty(topology.pipeline_size), np.empty(operations + 1)
    step = lambda: run_program(simulator.program, durations, 0.0, free, end)  # noqa: E731
    step()
    samples, stop = [], time.perf_counter() + seconds
    while time.perf_counter() < stop:
        samples.append(_duration_s(step))
    step_s = float(np.median(samples))
    print(
        f"| {topology.pipeline_size} | {topology.virtual_size} | {topology.num_microbatches} |"
        f" {'yes' if topology.overlap_moe else ''} | {operations:,} | {1e3 * order_s:.1f} ms | {1e6 * step_s:.0f} us |"
        f" {operations / step_s / 1e6:.0f} million |"
    )
    return operations / step_s


def _duration_s(action) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
