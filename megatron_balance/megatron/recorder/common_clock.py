"""The clocks of the job's machines against that of rank 0's, through the rendezvous store and outside steps."""

from __future__ import annotations

import math
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_balance.megatron.agreement import said_by_all

_ROUNDS, _LATER_ROUNDS = 12, 3  # of questions to rank 0: before the first recorded step, and at intervals
_COMES_S = 0.5  # that rank 0 waits for a machine, where all come from the same step
_PATIENCE_S = 5.0  # that others wait for rank 0, which answers one machine after the other


class CommonClock:
    """Seconds to add to this machine's clock for that of rank 0's machine.

    All processes of a machine share a clock (`marks.epoch_s` agrees to a microsecond), so one rank of each machine asks rank 0
    for the time, and takes of several answers the one that came fastest: it is off by half that round trip at most. Before
    there is an answer it may be off by whatever.
    """

    def __init__(self, store: Any, rank: int, world_size: int, epoch_s: float, machine: str | None = None) -> None:
        """Find out which ranks share a machine. Every rank must take part.

        Args:
            store: rendezvous store.
            rank, world_size: of the job.
            epoch_s: this process's, from its monotonic clock to the epoch.
            machine: name of what shares a monotonic clock; None finds out.
        """
        self.store, self.rank, self.epoch_s = store, rank, epoch_s
        self.offset_s, self.uncertainty_s = 0.0, math.inf
        machine = machine or _machine()
        store.set(f"clock/machine/{rank}", f"{machine} {epoch_s!r}")
        self._asking = _first_of_each_machine(store, world_size) if rank == 0 else []
        (told,) = said_by_all(store, [f"clock/first/{machine}"])
        asks, asks_epoch_s, machines = told.decode().split()
        # The rank that asks for this machine, and its clock.
        self._asks, self._asks_epoch_s = int(asks), float(asks_epoch_s)
        self._round, self._questions = 0, _ROUNDS
        self._is_answered = True
        self._patience_s = _PATIENCE_S + 0.05 * int(machines)

    def synchronize(self) -> None:
        """Compare clocks again. Between steps, on all ranks.

        A rank that does not come costs those that wait for it some seconds, once: they keep the offset that they have.
        """
        self._round += 1
        if self.rank == 0:
            self._asking = [other for other in self._asking if self._answer(other)]
        elif self._asks == self.rank:
            if self._is_answered:
                self._ask()
        elif self._asks != 0 and self._is_answered:
            key = f"clock/offset/{self._asks}/{self._round}"
            self._is_answered = _awaited(self.store, key, self._patience_s)
            if self._is_answered:
                offset_s, self.uncertainty_s = map(float, self.store.get(key).decode().split())
                # The asking process's clock, and from it to this one's: both read the same monotonic clock.
                self.offset_s = offset_s + self._asks_epoch_s - self.epoch_s
        if self._asks == 0:
            self.offset_s, self.uncertainty_s = self._asks_epoch_s - self.epoch_s, 0.0
        self._questions = _LATER_ROUNDS

    def _answer(self, other: int) -> bool:
        """Tell a rank the time, if it comes; the first time nothing has brought the ranks together."""
        patience_s = _COMES_S if self._round > 1 else self._patience_s
        for count in range(self._questions):
            if not _awaited(self.store, f"clock/ask/{other}/{self._round}/{count}", patience_s):
                return False
            now_s = self.epoch_s + time.monotonic()
            self.store.set(f"clock/told/{other}/{self._round}/{count}", repr(now_s))
        return True

    def _ask(self) -> None:
        answers = []
        for count in range(self._questions):
            asked_s = time.monotonic()
            self.store.set(f"clock/ask/{self.rank}/{self._round}/{count}", "")
            key = f"clock/told/{self.rank}/{self._round}/{count}"
            if not _awaited(self.store, key, self._patience_s):
                self._is_answered = False
                break
            told_s, heard_s = float(self.store.get(key)), time.monotonic()
            answers.append((heard_s - asked_s, told_s - self.epoch_s - (asked_s + heard_s) / 2))
            self.store.delete_key(key)
            self.store.delete_key(f"clock/ask/{self.rank}/{self._round}/{count}")
        if len(answers) > 1:
            trip_s, self.offset_s = min(answers[1:])  # the first waits for rank 0 to come
            self.uncertainty_s = trip_s / 2
        self.store.set(f"clock/offset/{self.rank}/{self._round}", f"{self.offset_s!r} {self.uncertainty_s!r}")


def _first_of_each_machine(store: Any, world_size: int) -> list[int]:
    """Tell each machine its first rank, the clock of that, and the number of machines; return these ranks but rank 0.

    For rank 0: if every rank read what all have said, the store would be asked for the square of their number.
    """
    first: dict[str, tuple[int, str]] = {}
    for rank, text in enumerate(said_by_all(store, [f"clock/machine/{rank}" for rank in range(world_size)])):
        machine, epoch_s = text.decode().split()
        first.setdefault(machine, (rank, epoch_s))
    for machine, (rank, epoch_s) in first.items():
        store.set(f"clock/first/{machine}", f"{rank} {epoch_s} {len(first)}")
    return sorted(rank for rank, _ in first.values() if rank)


def _machine() -> str:
    """Name of what shares a monotonic clock: a booted machine, whatever container a process is in."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname().replace(" ", "-")


def _awaited(store: Any, key: str, patience_s: float) -> bool:
    """Whether ``key`` comes in time."""
    try:
        store.wait([key], timedelta(seconds=patience_s))
    except RuntimeError:  # also of a store whose process is gone
        return False
    return True
