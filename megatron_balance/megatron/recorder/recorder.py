"""What one rank records: noted within a step, told between steps, written and logged at intervals."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_balance.diagnosis.trace import (
    CLIP,
    COMBINED,
    EMBEDDING,
    FORWARD,
    GATHER,
    LAYERNORM,
    OPTIMIZER,
    PASSES,
    PAUSE,
    SCATTER,
    SEPARATE,
    TRANSFERS,
)
from megatron_balance.megatron.recorder.common_clock import CommonClock
from megatron_balance.megatron.recorder.live import Live
from megatron_balance.megatron.recorder.marks import Marks
from megatron_balance.megatron.recorder.options import FLAG, TraceOptions
from megatron_balance.megatron.recorder.parts import Parts, Row
from megatron_balance.topology import Topology

_PATIENCE_S = 5.0
_SHORTEST_PAUSE_S = 1e-4  # collections of the youngest objects, many a step, hold up nothing


@dataclass
class Step:
    """What was noted of one step; times are marks until it is told.

    Attributes:
        number: of the step.
        operations: (kind, chunk, micro-batch, start, end) in the order in which they ended.
        pauses: (start, end) of the garbage collector's, seconds of the monotonic clock.
        sequences: of (chunk, micro-batch), the bounds as a tensor, or the lengths as a list.
    """

    number: int
    operations: list[tuple[str, int, int, Any, Any]] = field(default_factory=list)
    pauses: list[tuple[float, float]] = field(default_factory=list)
    sequences: dict[tuple[int, int], Any] = field(default_factory=dict)


def _never_stops_training(method: Callable[..., Any]) -> Callable[..., Any]:
    """Whatever fails in the recorder ends the recording, with one warning, and not the job."""

    @functools.wraps(method)
    def call(self: Recorder, *args: Any, **kwargs: Any) -> Any:
        if not self.is_on:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.give_up(error)
            return None

    return call


class Recorder:
    """The recorder of one rank. `hooks.py` calls it from within Megatron."""

    def __init__(self, options: TraceOptions, topology: Topology, row_tokens: int, marks: Marks) -> None:
        """Listen to nothing yet.

        Args:
            options: our flags.
            topology: sizes of the job.
            row_tokens: tokens of a micro-batch where its sequences are not told.
            marks: how points in time are taken.
        """
        self.options, self.topology, self.row_tokens, self.marks = options, topology, row_tokens, marks
        self.mark = marks.mark
        self.is_on, self.in_step, self.in_pass = True, False, False
        self.idle: frozenset[str] = frozenset()  # kinds of operations that Megatron calls without doing anything
        self.parts: Parts | None = None  # from the first step on, when ranks and model are known
        self.clock: CommonClock | None = None
        self.live: Live | None = None
        self.start: Callable[[Recorder, Sequence[Any], Any], None] = lambda recorder, model, optimizer: None
        self._step: Step | None = None
        self._untold: deque[Step] = deque()
        self._rows: list[Row] = []
        self._forwarded: dict[int, tuple[int, int]] = {}
        self._seen: Any = None
        self._pause_began: float | None = None
        self._said_full = False
        gc.callbacks.append(self._collected)

    # --- within a step: as little as can be

    @_never_stops_training
    def begin(self, model: Sequence[Any], optimizer: Any) -> None:
        """A step begins."""
        from megatron.training import get_args

        if self.parts is None:
            self.start(self, model, optimizer)
        number = int(get_args().curr_iteration) + 1
        self._forwarded.clear()
        if self.options.covers(number):
            if self._step is None:
                self.marks.anchor()  # the job may have trained for hours before the first step that is recorded
            self._step, self.in_step = Step(number), True

    def begin_pass(self) -> Any:
        self.in_pass, self._seen = True, None
        return self.mark()

    def end_pass(self, kind: str, chunk: int, microbatch: int, start: Any) -> None:
        self.add(kind, chunk, microbatch, start)
        self.in_pass = False

    def end_forward(self, kind: str, chunk: int, microbatch: int | None, start: Any, output: Any) -> None:
        """The same for a forward pass, whose backward pass is known by its output."""
        if microbatch is None:
            microbatch = sum(done[0] in (FORWARD, COMBINED) and done[1] == chunk for done in self._step.operations)
        self.end_pass(kind, chunk, microbatch, start)
        self._forwarded[id(_first(output))] = chunk, microbatch
        if self._seen is not None:
            self._step.sequences[chunk, microbatch] = self._seen

    def forwarded(self, output: Any) -> tuple[int, int]:
        """Chunk and micro-batch of the forward pass that gave ``output``."""
        return self._forwarded.pop(id(_first(output)), (0, -1))

    def add(self, kind: str, chunk: int, microbatch: int, start: Any) -> None:
        """An operation ends."""
        self._step.operations.append((kind, chunk, microbatch, start, self.mark()))

    @_never_stops_training
    def see_sequences(self, packed: Any) -> None:
        """The bounds of the sequences of the pass that runs."""
        lengths = getattr(packed, "lengths", None)
        if lengths is None and (bounds := getattr(packed, "cu_seqlens_q", None)) is not None:
            lengths = bounds.to("cpu", non_blocking=True)  # there when the pass has ended
        self._seen = lengths

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._pause_began = time.monotonic() if self.in_step else None
        elif self.in_step and self._pause_began is not None:
            began, end = self._pause_began, time.monotonic()
            if end - began >= _SHORTEST_PAUSE_S:
                self._step.pauses.append((began, end))

    # --- between steps

    @_never_stops_training
    def end(self) -> None:
        """A step has ended: tell of those whose operations are done, and write at intervals."""
        from megatron.training import get_args

        number, recorded = int(get_args().curr_iteration) + 1, self.in_step
        if recorded:
            self.in_step = self.in_pass = False
            self._untold.append(self._step)
        last = self.options.end is not None and number == self.options.end - 1
        due = recorded and (last or number % self.options.interval == 0)
        if due:
            self.marks.anchor()
        self._tell()
        if due:
            self._write()

    @_never_stops_training
    def drop(self) -> None:
        """A step has failed. Nobody waits for the device any more: it may wait for ranks that wait for this one."""
        self.in_step = self.in_pass = False
        self._tell()
        self._untold.clear()

    def _tell(self) -> None:
        while self._untold and self._is_done(self._untold[0]):
            self._rows += self._told(self._untold.popleft())

    def _is_done(self, step: Step) -> bool:
        return not step.operations or self.marks.done(step.operations[-1][4])

    def _told(self, step: Step) -> list[Row]:
        offset_s = 0.0 if self.clock is None else self.clock.offset_s
        seconds = self.marks.seconds
        operations = [
            (kind, chunk, microbatch, seconds(start) + offset_s, seconds(end) + offset_s)
            for kind, chunk, microbatch, start, end in step.operations
        ]
        self.marks.release([mark for *_, start, end in step.operations for mark in (start, end)])
        if self.live is not None:
            self.live.take(operations, sum(end - start for start, end in step.pauses))
        base_s = self.marks.epoch_s + offset_s
        operations += [(PAUSE, -1, -1, start + base_s, end + base_s) for start, end in step.pauses]
        return list(self._rows_of(step, apart(operations)))

    def _rows_of(self, step: Step, operations: Sequence[tuple[str, int, int, float, float]]) -> Iterator[Row]:
        counts: Counter[str] = Counter()
        rank = 0 if self.parts is None else self.parts.same["stage"]
        for kind, chunk, microbatch, start_s, end_s in sorted(operations, key=lambda operation: operation[3]):
            place = -1 if chunk < 0 else chunk * self.topology.pipeline_size + rank
            sizes = (None, None, None)
            if kind in (FORWARD, COMBINED):
                sizes = _sizes(step.sequences.get((chunk, microbatch)), self.row_tokens)
            yield Row(step.number, kind, start_s, end_s - start_s, counts[kind], chunk, place, microbatch, *sizes)
            counts[kind] += 1

    def _write(self) -> None:
        if not self.parts.is_full:
            self.parts.write(self._rows)
        elif not self._said_full:
            self._said_full = True
            _warn(f"{self.parts.bytes / 1e6:.0f} MB are written, no more will be; the log lines go on")
        self._rows.clear()
        if self.live is not None:
            self.live.exchange()
        if self.clock is not None:
            self.clock.synchronize()

    @_never_stops_training
    def log(self, iteration: int) -> None:
        """Log what the last interval says, where and when Megatron logs its step."""
        if self.live is not None:
            self.live.log(iteration)

    @_never_stops_training
    def finish(self) -> None:
        """Write what is left, and make one file of it."""
        self._tell()
        deadline = time.monotonic() + _PATIENCE_S  # a job that failed may leave its device waiting for ever
        while self._untold and time.monotonic() < deadline:
            time.sleep(0.01)
            self._tell()
        if self.parts is not None:
            if not self.parts.is_full:
                self.parts.write(self._rows)
            self.parts.join()
        self.is_on = False

    def give_up(self, error: Exception) -> None:
        """Record no more. What was written stays."""
        self.is_on = self.in_step = self.in_pass = False
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._collected)
        self._rows.clear()
        self._untold.clear()
        _warn(f"recording ends, training goes on ({type(error).__name__}: {error})")


def apart(operations: Sequence[tuple[str, int, int, float, float]]) -> list[tuple[str, int, int, float, float]]:
    """What is done once a step as one operation of its kind each, with nothing in two of them.

    Megatron calls for each model chunk, and one within the other: the optimizer's step holds clipping and the gathering of
    parameters, the reduction of gradients that of norms and embedding. What surrounds keeps what comes before what it holds for
    the former, and what comes after it for itself: clipping begins with the optimizer's step, as what is before it (copying and
    checking gradients) belongs to it.
    """
    once: dict[str, list[float]] = {}
    others: list[tuple[str, int, int, float, float]] = []
    for operation in operations:
        kind, _, microbatch, start_s, end_s = operation
        if microbatch >= 0 or kind in (*PASSES, *TRANSFERS, PAUSE):
            others.append(operation)
        else:
            span = once.setdefault(kind, [start_s, end_s])
            span[0], span[1] = min(span[0], start_s), max(span[1], end_s)
    if (whole := once.get(OPTIMIZER)) is not None:
        if (clip := once.get(CLIP)) is not None:
            clip[0], whole[0] = whole[0], clip[1]
        if (gather := once.get(GATHER)) is not None and whole[0] <= gather[0] <= whole[1]:
            whole[1] = gather[0]
    if (rest := once.get(SEPARATE)) is not None:
        inner = (SCATTER, LAYERNORM, EMBEDDING)
        rest[0] = max((once[kind][1] for kind in inner if kind in once), default=rest[0])
        first = once.get(CLIP, whole)
        if first is not None and rest[1] <= first[0]:  # Megatron's checks in between have no name of their own
            first[0] = rest[1]
    return others + [(kind, -1, -1, *span) for kind, span in once.items()]


def _sizes(seen: Any, row_tokens: int) -> tuple[int, int | None, int | None]:
    """Tokens, of the longest sequence, sum of squares."""
    if seen is None:
        return row_tokens, None, None
    lengths = seen if isinstance(seen, list) else seen.flatten().diff().tolist()
    lengths = [length for length in lengths if length > 0]  # bounds may be filled up with the last one
    return sum(lengths), max(lengths, default=0), sum(length**2 for length in lengths)


def _first(tensors: Any) -> Any:
    """The tensor, or the first of nested lists of them: Megatron passes either."""
    while isinstance(tensors, list | tuple) and tensors:
        tensors = tensors[0]
    return tensors


def _warn(text: str) -> None:
    print(f"megatron-balance: warning: {FLAG}: {text}", file=sys.stderr, flush=True)
