"""Points in time within a step, taken without waiting for the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol


class Marks(Protocol):
    """Where a rank's computation stands, noted now and told later in seconds since the epoch."""

    def mark(self) -> Any:
        """A mark at what the device has been given so far."""

    def anchor(self) -> None:
        """Compare with the wall clock. For between steps: may wait for the device. Nothing can be told before the first one."""

    def wait(self, mark: Any) -> None:
        """Wait until ``mark`` is done."""

    def done(self, mark: Any) -> bool:
        """Whether ``mark`` and all before it can be told."""

    def tell_from(self, mark: Any) -> None:
        """What is told next is near ``mark``, which is done and which nobody but its release asks for again."""

    def seconds(self, mark: Any) -> float:
        """Seconds since the epoch of a mark that is done, on this process's clock."""

    def release(self, marks: Sequence[Any]) -> None:
        """Take back marks that nobody will ask for again; each may come several times."""


class ProcessMarks:
    """On the CPU the host does the work itself: its clock is the mark.

    The monotonic clock, which all processes of a machine share, is mapped to the epoch once: the wall clock may be set back.
    """

    def __init__(self) -> None:
        self.epoch_s = epoch_s()
        self.mark = time.monotonic

    def anchor(self) -> None:
        pass

    def wait(self, mark: float) -> None:
        pass

    def done(self, mark: float) -> bool:
        return True

    def tell_from(self, mark: float) -> None:
        pass

    def seconds(self, mark: float) -> float:
        return self.epoch_s + mark

    def release(self, marks: Sequence[float]) -> None:
        pass


class DeviceMarks:
    """CUDA events on the stream that computes.

    An event's time is told from another, the base, whose own is known in double precision. CUDA gives the distance as float32
    milliseconds, of an hour to a quarter of one, so the base follows the steps that are told. Until the first anchor there is
    no event: the process may not have its device yet, and events of all processes of a machine would be of the first.
    """

    def __init__(self) -> None:
        self.epoch_s = epoch_s()
        self._spare: list[Any] = []
        self._base: Any = None

    def mark(self) -> Any:
        event = self._spare.pop() if self._spare else self._event()
        event.record()
        return event

    def anchor(self) -> None:
        base = self.mark()
        base.synchronize()
        self._change_base(base, self.epoch_s + time.monotonic())

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def done(self, mark: Any) -> bool:
        return mark.query()

    def tell_from(self, mark: Any) -> None:
        if mark is not self._base:
            self._change_base(mark, self.seconds(mark))

    def _change_base(self, base: Any, base_s: float) -> None:
        if self._base is not None:
            self._spare.append(self._base)
        self._base, self._base_s = base, base_s

    def seconds(self, mark: Any) -> float:
        return self._base_s + self._base.elapsed_time(mark) / 1000

    def release(self, marks: Sequence[Any]) -> None:
        self._spare += {id(mark): mark for mark in marks if mark is not self._base}.values()

    @staticmethod
    def _event() -> Any:
        import torch

        return torch.cuda.Event(enable_timing=True)


def epoch_s() -> float:
    """What to add to the monotonic clock for seconds since the epoch; the same for all processes of a machine, to a microsecond."""
    pairs = []
    for _ in range(5):
        before = time.monotonic()
        wall = time.time()
        pairs.append((time.monotonic() - before, wall - before))
    return min(pairs)[1]
