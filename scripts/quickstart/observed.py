"""The target of `torchrun` in a measured run: `observed.py FOLDER -- <arguments of megatron_balance.run>`.

Runs `megatron_balance.run` as it is, on a core of its own, and writes what it saw to FOLDER/rank-<r>.json.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def main(argv: list[str]) -> None:
    folder, separator, *arguments = argv
    if separator != "--":
        raise SystemExit("usage: observed.py FOLDER -- <arguments of megatron_balance.run>")
    die_with_parent()
    if arguments[:2] == ["--device", "cpu"]:
        pin(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    # Late: OpenMP looks at the cores when torch is loaded.
    from megatron_balance import run
    from megatron_balance.megatron.observer import observe

    run.main(arguments, ready=lambda: observe(folder))


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however that ends. Linux only; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def pin(local_rank: int, processes: int) -> None:
    """Keep this process on one core, another one for each process where there are enough."""
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        cpus = one_cpu_per_core(allowed)
        cpus = cpus if len(cpus) >= processes else allowed
        os.sched_setaffinity(0, {cpus[local_rank % len(cpus)]})


def one_cpu_per_core(allowed: list[int], topology: str = _TOPOLOGY) -> list[int]:
    """The first of the ``allowed`` logical CPUs of each physical core; all of them where the kernel does not tell."""
    first: dict[str, int] = {}
    for cpu in allowed:
        siblings = Path(topology.format(cpu))
        first.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    return list(first.values())


if __name__ == "__main__":
    main(sys.argv[1:])
