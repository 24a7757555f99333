"""What `launch` starts once for many launches: imports Megatron, and becomes each rank of each of them by a fork.

Importing Megatron is most of what a small run takes, and a fork has it already. A launch is a line of JSON on the standard input:
``driver``, ``arguments``, ``processes``, ``folder``, ``log``, ``variables``. The answers are two lines: the process group of the
launch, whose leader stands for torchrun, and its exit status when it has ended.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from typing import Any, NoReturn

from megatron_balance.processes import die_with_parent

_GRACE_S = 3.0  # for the other ranks, once one has failed


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

    gc.collect()
    gc.freeze()  # forks share these pages for as long as nobody counts their objects


def _lead(launch: dict[str, Any]) -> int:
    """Start the ranks and wait for them, as torchrun does: where one fails, the others are ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = set()
    for rank in range(launch["processes"]):
        leader, pid = os.getpid(), os.fork()
        if pid == 0:
            die_with_parent(leader)
            _become(launch, rank, port)
        running.add(pid)
    failed, deadline_s = False, float("inf")
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        running.discard(pid)
        if pid and status and not failed:
            failed, deadline_s = True, time.monotonic() + _GRACE_S
        if not pid:
            if time.monotonic() > deadline_s:
                for late in running:
                    os.kill(late, signal.SIGKILL)
            time.sleep(0.02)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)  # whatever they have started and left
    return int(failed)


def _become(launch: dict[str, Any], rank: int, port: int) -> NoReturn:
    log = os.open(launch["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.chdir(launch["folder"])
    size = str(launch["processes"])
    os.environ.update(launch["variables"], MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    sys.argv = [launch["driver"], *launch["arguments"]]
    sys.path.insert(0, os.path.dirname(launch["driver"]))
    status = 1
    try:
        runpy.run_path(launch["driver"], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()  # the interpreter's own end would run the frames of the parent to theirs
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(int(sys.argv[1]))
