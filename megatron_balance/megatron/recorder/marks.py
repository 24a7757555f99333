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
        """Compare with the wall clock. For between steps: may wait for the device, after which all marks are done."""

    def done(self, mark: Any) -> bool:
        """Whether ``mark`` and all before it can be told."""

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

    def done(self, mark: float) -> bool:
        return True

    def seconds(self, mark: float) -> float:
        return self.epoch_s + mark

    def release(self, marks: Sequence[float]) -> None:
        pass


class DeviceMarks:
    """CUDA events on the stream that computes.

    An event's time is told from the last anchor, an event for which the host waited, on either side of it. CUDA gives it as
    float32 milliseconds: an anchor must not be hours away.
    """

    def __init__(self) -> None:
        self.epoch_s = epoch_s()
        self._spare: list[Any] = []
        self.anchor()

    def mark(self) -> Any:
        event = self._spare.pop() if self._spare else self._event()
        event.record()
        return event

    def anchor(self) -> None:
        import torch

        torch.cuda.synchronize()
        self._base = self._event()
        self._base.record()
        self._base.synchronize()
        self._base_s = self.epoch_s + time.monotonic()

    def done(self, mark: Any) -> bool:
        return mark.query()

    def seconds(self, mark: Any) -> float:
        return self._base_s + self._base.elapsed_time(mark) / 1000

    def release(self, marks: Sequence[Any]) -> None:
        self._spare += {id(mark): mark for mark in marks}.values()

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
