"""Two running jobs train in turns on the same processors, step by step.

A shared machine is now fast, now slow, for seconds or minutes. Steps that follow one another closely see the same machine,
whole launches do not. So the jobs that are compared are started together, and while one trains a step the other sleeps.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_POLL_S = 0.005
_TRAINING = "megatron.training.training"
_PURPOSE = "taking turns"


def order_of_turns(first: str, second: str, pairs: int) -> list[str]:
    """First, second, second, first, ...: a machine that gets slower or faster steadily favours neither."""
    return [job for pair in range(pairs) for job in ((first, second), (second, first))[pair % 2]]


@dataclass
class Turns:
    """One process's view of whose turn it is.

    Attributes:
        folder: where the processes of all jobs leave word, a file for each process and turn that has ended, or that it waits.
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
            self._word("waits", self.rank).touch()
            self._running = self._mine.pop(0)
            self._await_end_of(self._running - 1)
            return train_step(*args, **kwargs)

        return step

    def end(self) -> None:
        """Leave word that this process's turn, if it has one, is over."""
        if self._running is not None:
            self._word(self._running, self.rank).touch()
            self._running = None

    def are_awaited(self) -> bool:
        """Whether all processes of the job have come as far as their first turn."""
        return self._all_left("waits")

    def _await_end_of(self, turn: int) -> None:
        while turn >= 0 and not self._all_left(turn):
            time.sleep(_POLL_S)

    def _all_left(self, word: int | str) -> bool:
        return all(self._word(word, rank).exists() for rank in range(self.processes))

    def _word(self, word: int | str, rank: int) -> Path:
        """A turn's, by its number, or a job's."""
        return self.folder / (f"{word}-{rank}" if isinstance(word, int) else f"{self.job}-{word}-{rank}")


def take_turns(folder: Path, job: str, order: str) -> None:
    """Have this rank of ``job`` train a step when the turn is the job's; ``order`` names the jobs, with commas between.

    The hook is put in place when training begins, behind all those of the job, and so around them: waiting is no part of a
    step, neither of an observed nor of a recorded one.
    """
    from megatron_balance.megatron.recorder.recorder import leave_out
    from megatron_balance.megatron.registry import Hook, registry

    folder.mkdir(parents=True, exist_ok=True)
    taking = Turns(folder, order.split(","), job, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    atexit.register(taking.end)

    def around_step(train_step: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            leave_out()  # a recorded step begins where the one before it ended, which was before the wait
            return train_step(*args, **kwargs)

        return taking.around(step)

    def around_train(train: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            registry.apply(Hook(_TRAINING, "train_step", _PURPOSE, "waits for its turn", around_step))
            return train(*args, **kwargs)

        return run

    registry.apply(Hook(_TRAINING, "train", _PURPOSE, "begins to take turns", around_train))
