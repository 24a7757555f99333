"""Ranks of a job as forks of a process that has imported Megatron already, which is most of what a small run takes."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from megatron_balance.processes import die_with_parent

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_GRACE_S = 3.0  # for the other ranks, once one has failed


def settle() -> None:
    """To be called once all is imported: forks share its memory for as long as nobody counts the objects in it."""
    gc.collect()
    gc.freeze()


def start_ranks(size: int, log: Callable[[int], Path], work: Callable[[], None]) -> dict[int, int]:
    """Fork the ranks of a job on this machine, with the variables that torchrun gives.

    Args:
        size: ranks.
        log: file that takes a rank's output; it may be one for all.
        work: what each rank does; its end, by an exception or by `sys.exit`, is the rank's.

    Returns:
        The ranks, by process id.
    """
    parent, ranks = os.getpid(), {}
    with held_port() as held:  # the ranks go on to hold it
        port = held.getsockname()[1]
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                die_with_parent(parent)
                _become(rank, size, port, log(rank), work)
            ranks[pid] = rank
    return ranks


def held_port() -> socket.socket:
    """A free port that nobody else is given for as long as this socket is open, and at which a rendezvous store can listen.

    Linux lets a socket listen where another is only bound, if both allow the address to be used again, as torch's do; and whoever
    asks for any free port gets none that is bound.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


def first_failure(ranks: dict[int, int], limit_s: float = float("inf")) -> tuple[int, int | None] | None:
    """Wait for the ranks, as torchrun does: where one fails, the others are ended.

    Args:
        ranks: of `start_ranks`.
        limit_s: seconds after which they are ended, too.

    Returns:
        The rank that failed first, and its exit status, negative for a signal; of a late one None. Nothing where all ended well.
    """
    running, failed, deadline_s = dict(ranks), None, time.monotonic() + limit_s
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            rank, code = running.pop(pid), os.waitstatus_to_exitcode(status)
            if code and failed is None:
                failed, deadline_s = (rank, code), time.monotonic() + _GRACE_S
        elif not pid and time.monotonic() > deadline_s:
            failed, deadline_s = failed or (min(running.values()), None), float("inf")
            for late in running:
                os.kill(late, signal.SIGKILL)
        elif not pid:
            time.sleep(0.02)
    return failed


def _become(rank: int, size: int, port: int, log: Path, work: Callable[[], None]) -> NoReturn:
    """Turn this fork into a rank, and end."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(file, stream)
    values = (str(rank), str(rank), str(size), str(size), "127.0.0.1", str(port))
    os.environ.update(zip(VARIABLES, values, strict=True))
    status = 1
    try:
        work()
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
