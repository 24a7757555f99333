"""The target of `torchrun` in a measured run: `observed.py FOLDER [JOB TURN,TURN...] -- <arguments of megatron_balance.run>`.

Runs `megatron_balance.run` as it is, on a core of its own, and writes what it saw to FOLDER/rank-<r>.json. With the order of
turns it trains a step only when the turn is its JOB's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megatron_balance.processes import die_with_parent
from quickstart.turns import take_turns

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def main(argv: list[str]) -> None:
    if "--" not in argv:
        raise SystemExit("usage: observed.py FOLDER [JOB TURN,TURN...] -- <arguments of megatron_balance.run>")
    split = argv.index("--")
    (folder, *turns), arguments = argv[:split], argv[split + 1 :]
    die_with_parent()
    if arguments[:2] == ["--device", "cpu"]:
        pin(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    # Late: OpenMP looks at the cores when torch is loaded.
    from megatron_balance import run

    run.main(arguments, ready=lambda: _observe(Path(folder), turns))


def _observe(folder: Path, turns: list[str]) -> None:
    from megatron_balance.megatron.observer import observe

    observe(folder)
    if turns:
        take_turns(folder.parent, *turns)


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
