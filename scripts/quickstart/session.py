"""What a run of one of these scripts shares with the others: its folder, its progress on the terminal, and how it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from megatron_balance.errors import BalanceError
from megatron_balance.megatron.measuring.launch import MeasurementFailed
from quickstart.launch import ENVIRONMENT, LaunchFailed, stop

REPOSITORY = Path(__file__).resolve().parents[2]
Progress = Callable[[str], None]

console = Console()


def run(out: Path, work: Callable[[Path], int]) -> int:
    """``work`` on the folder ``out``, which it has for itself; returns the exit status of the script.

    Whatever ends it early, a signal too, leaves no process behind.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.update(ENVIRONMENT)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    out = out.resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        say(f"{out} cannot be used for results ({error.strerror}): give another folder with --out")
        return 2
    try:
        with _alone_in(out):
            say("Steps are timed, on all cores: whatever else runs meanwhile makes the figures uncertain.")
            return work(out)
    except (BalanceError, LaunchFailed, MeasurementFailed) as failure:
        say(str(failure))
        return 1
    except KeyboardInterrupt:
        say("stopped; nothing is left running")
        return 130


def say(text: str) -> None:
    """A line as it is, whatever brackets are in it."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def stage(name: str) -> Iterator[Progress]:
    """Show that ``name`` is under way, and how far; a line with its time when it is done."""
    began = time.monotonic()
    with console.status(name, refresh_per_second=2) as status:  # drawing takes time from the training
        yield lambda text: status.update(f"{name}: {text}")
    console.print(f"[green]done[/green] {name} [dim]({time.monotonic() - began:.0f} s)[/dim]", highlight=False)


@contextlib.contextmanager
def beside(module: str) -> Iterator[None]:
    """Run ``module`` in a process of its own meanwhile, and wait for its end, whatever that is."""
    silent = subprocess.DEVNULL
    process = subprocess.Popen(
        [sys.executable, "-m", module], stdin=silent, stdout=silent, stderr=silent, start_new_session=True
    )
    try:
        yield
        process.wait()
    finally:
        stop(process)


def device() -> str:
    """``cuda`` where there is a GPU for each of two ranks, else ``cpu``."""
    import torch

    return "cuda" if torch.cuda.device_count() >= 2 else "cpu"


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Hold ``out`` for this process; the kernel lets go of it however the process ends."""
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another run is using {out}: wait for it, or give another folder with --out") from None
        yield
