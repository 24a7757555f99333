"""What `launch` starts once for many launches: imports Megatron, and becomes each rank of each of them by a fork.

Importing Megatron is most of what a small run takes, and a fork has it already. A launch is a line of JSON on the standard input
(see `launch.py`). The answers are two lines: the process group of the launch, whose leader stands for torchrun, and its exit status
when it has ended.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from megatron_balance.processes import die_with_parent

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
from forks import VARIABLES, first_failure, settle, start_ranks


def main(parent: int) -> None:
    die_with_parent(parent)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever imports print is no answer
    _import_megatron()
    for line in sys.stdin:
        starter, leader = os.getpid(), os.fork()
        if leader == 0:
            die_with_parent(starter)
            os.setsid()
            os._exit(_lead(json.loads(line)))
        print(leader, file=answers, flush=True)
        _, status = os.waitpid(leader, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _import_megatron() -> None:
    from megatron_balance import cpu

    cpu.install()

    for module in (
        "megatron.core.models.gpt",
        "megatron.training.training",
        "torch._dynamo",
        "megatron_balance.packing.placement",
        "megatron_balance.planning.planner",
    ):
        importlib.import_module(module)
    # A rank that saves has a process of its own pass results on between threads. Spawned, it would import all of that again.
    writers = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    writers.get_write_results_queue = functools.partial(writers.get_write_results_queue, "fork")

    settle()


def _lead(launch: dict[str, Any]) -> int:
    """Start the ranks and wait for them."""
    failed = first_failure(start_ranks(launch["processes"], lambda rank: Path(launch["log"]), lambda: _train(launch)))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)  # whatever they have started and left
    if failed is None:
        return 0
    return max(failed[1] or 1, 1) if launch["alone"] else 1


def _train(launch: dict[str, Any]) -> None:
    os.chdir(launch["folder"])
    os.environ.update(launch["variables"])
    if launch["alone"]:  # as nobody has started it
        for name in VARIABLES:
            del os.environ[name]
    sys.argv = [launch["driver"], *launch["arguments"]]
    sys.path.insert(0, os.path.dirname(launch["driver"]))
    runpy.run_path(launch["driver"], run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]))
