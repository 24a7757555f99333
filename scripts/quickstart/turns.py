"""Two running jobs train in turns on the same processors, step by step.

A shared machine is now fast, now slow, for seconds or minutes. Steps that follow one another closely see the same machine,
whole launches do not. So the jobs that are compared are started together, and while one trains a step the other sleeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_POLL_S = 0.005


@dataclass
class Turns:
    """One process's view of whose turn it is.

    Attributes:
        folder: where the processes of all jobs leave word, a file for each process and turn that has ended.
        order: name of the job that trains, for each turn.
        job: the job of this process.
        rank: this process's rank in it.
        processes: processes of each job.
    """

    folder: Path
    order: Sequence[str]
    job: str
    rank: int
    processes: int
    _mine: list[int] = field(init=False)
    _running: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._mine = [turn for turn, job in enumerate(self.order) if job == self.job]

    def around(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """``train_step`` that waits for its turn first; what follows a step until the next belongs to its turn."""

        def step(*args: Any, **kwargs: Any) -> Any:
            self.end()
            self._running = self._mine.pop(0)
            self._await_end_of(self._running - 1)
            return train_step(*args, **kwargs)

        return step

    def end(self) -> None:
        """Leave word that this process's turn, if it has one, is over."""
        if self._running is not None:
            self._word(self._running, self.rank).touch()
            self._running = None

    def _await_end_of(self, turn: int) -> None:
        words = [self._word(turn, rank) for rank in range(self.processes)] if turn >= 0 else []
        while not all(word.exists() for word in words):
            time.sleep(_POLL_S)

    def _word(self, turn: int, rank: int) -> Path:
        return self.folder / f"{turn}-{rank}"
