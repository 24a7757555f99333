"""What one rank records: noted within a step, told between steps, written and logged at intervals."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_balance.diagnosis.trace import (
    BACKWARD,
    BEGIN,
    CLIP,
    COMBINED,
    EMBEDDING,
    FINISH,
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
from megatron_balance.megatron.chunks import first_tensor
from megatron_balance.megatron.recorder.common_clock import CommonClock
from megatron_balance.megatron.recorder.live import Live
from megatron_balance.megatron.recorder.marks import Marks
from megatron_balance.megatron.recorder.options import FLAG, TraceOptions
from megatron_balance.megatron.recorder.parts import Parts, Row
from megatron_balance.topology import Topology

_PATIENCE_S = 5.0
# Operations. What runs once a step finds nothing in the processor's caches: told one by one, steps take three times as long.
_TOLD_AT_ONCE = 2000
_SHORTEST_PAUSE_S = 1e-4  # collections of the youngest objects, many a step, hold up nothing


@dataclass
class Step:
    """What was noted of one step; times are marks until it is told.

    Attributes:
        number: of the step.
        began: where the step before ended, or where this one began if that was not recorded.
        ended: where it ended.
        operations: (kind, chunk, micro-batch, start, end) in the order in which they ended.
        pauses: (start, end) of the garbage collector's, seconds of the monotonic clock.
        sequences: of (chunk, micro-batch), the bounds as a tensor or the lengths as a list, and the real tokens where they are
            told.
        embeddings: of a pass (kind, chunk, micro-batch), where the embedding ended if forward, began if backward.
    """

    number: int
    began: Any
    ended: Any = None
    operations: list[tuple[str, int, int, Any, Any]] = field(default_factory=list)
    pauses: list[tuple[float, float]] = field(default_factory=list)
    sequences: dict[tuple[int, int], Any] = field(default_factory=dict)
    embeddings: dict[tuple[str, int, int], Any] = field(default_factory=dict)


def never_stops_training(function: Callable[..., Any]) -> Callable[..., Any]:
    """For all that Megatron calls of ours; its first argument is the recorder.

    Whatever fails in it ends the recording, with one warning, and not the job. Returns None from then on.
    """

    @functools.wraps(function)
    def call(recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
        if not recorder.is_on:
            return None
        try:
            return function(recorder, *args, **kwargs)
        except Exception as error:
            recorder.give_up(error)
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
        self.is_on, self.in_step, self.in_pass = True, False, False
        self.idle: frozenset[str] = frozenset()  # kinds of operations that Megatron calls without doing anything
        self.parts: Parts | None = None  # from the first recorded step on, when ranks and model are known
        self.clock: CommonClock | None = None
        self.live: Live | None = None
        self.start: Callable[[Recorder, Sequence[Any], Any], None] = lambda recorder, model, optimizer: None
        self._step: Step | None = None
        self._before: tuple[int, Any] | None = None  # number and end of the step before, if it was recorded
        self._untold: deque[Step] = deque()
        self._num_untold = 0  # operations
        self._rows: list[Row] = []
        self._forwarded: dict[int, tuple[int, int]] = {}
        self._pass: tuple[Any, int, int] = (None, 0, -1)  # that runs: start; if backward, chunk and micro-batch
        self._seen: Any = None
        self._embedding: Any = None
        self._pauses: list[tuple[float, float]] = []
        self._pause_began: float | None = None
        self._said_full = False
        gc.callbacks.append(self._collected)

    # --- within a step: as little as can be

    @never_stops_training
    def begin(self, number: int, model: Sequence[Any], optimizer: Any) -> None:
        """A step begins, which are counted from 1."""
        if not self.options.covers(number):
            self._before = None
            return
        if self.parts is None:
            self.start(self, model, optimizer)
            self.marks.anchor()  # the job may have trained for hours before the first step that is recorded
        self._forwarded.clear()
        follows = self._before is not None and self._before[0] == number - 1
        self._step = Step(number, self._before[1] if follows else self.marks.mark())
        if not follows:
            self._pauses.clear()
        self.in_step = True

    @never_stops_training
    def mark(self) -> Any:
        """Where an operation begins."""
        return self.marks.mark()

    @never_stops_training
    def add(self, kind: str, start: Any, end: Any = None) -> None:
        """An operation that is no pass has ended; now, where no ``end`` is given."""
        self._step.operations.append((kind, -1, -1, start, self.marks.mark() if end is None else end))

    @never_stops_training
    def begin_pass(self, output: Any = None) -> None:
        """A pass begins; a backward pass with the ``output`` that a forward pass gave."""
        self.in_pass, self._seen, self._embedding = True, None, None
        behind = (0, -1) if output is None else self._forwarded.pop(id(first_tensor(output)), (0, -1))
        self._pass = (self.marks.mark(), *behind)

    @never_stops_training
    def end_backward(self) -> None:
        """The pass that runs ends."""
        start, chunk, microbatch = self._pass
        self._step.operations.append((BACKWARD, chunk, microbatch, start, self.marks.mark()))
        self._keep_embedding(BACKWARD, chunk, microbatch)
        self.in_pass = False

    @never_stops_training
    def end_forward(self, kind: str, chunk: int | None, microbatch: int | None, result: Any) -> None:
        """The pass that runs ends: a forward pass, or a combined one.

        Args:
            kind: which of the two.
            chunk, microbatch: as Megatron tells them; None for what it does not tell.
            result: of its forward step, whose first element tells the backward pass.
        """
        chunk = chunk or 0
        if microbatch is None:
            microbatch = sum(done[0] in (FORWARD, COMBINED) and done[1] == chunk for done in self._step.operations)
        self._step.operations.append((kind, chunk, microbatch, self._pass[0], self.marks.mark()))
        if kind == FORWARD:
            self._keep_embedding(kind, chunk, microbatch)
        self.in_pass = False
        self._forwarded[id(first_tensor(result[0]))] = chunk, microbatch
        if self._seen is not None:
            self._step.sequences[chunk, microbatch] = self._seen

    @never_stops_training
    def see_embedding(self) -> None:
        """The embedding ends, or in a backward pass begins; of several the first counts."""
        if self._embedding is None:
            self._embedding = self.marks.mark()

    def _keep_embedding(self, kind: str, chunk: int, microbatch: int) -> None:
        if self._embedding is not None:
            self._step.embeddings[kind, chunk, microbatch] = self._embedding

    @never_stops_training
    def see_sequences(self, packed: Any) -> None:
        """The bounds of the sequences of the pass that runs."""
        lengths = getattr(packed, "lengths", None)
        if lengths is None and (bounds := getattr(packed, "cu_seqlens_q", None)) is not None:
            lengths = bounds.to("cpu", non_blocking=True)  # there when the pass has ended
        self._seen = None if lengths is None else (lengths, getattr(packed, "real_tokens", None))

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if not self.in_step and self._before is None:
            return
        if phase == "start":
            self._pause_began = time.monotonic()
        elif self._pause_began is not None:
            began, end = self._pause_began, time.monotonic()
            self._pause_began = None
            if end - began >= _SHORTEST_PAUSE_S:
                self._pauses.append((began, end))

    # --- between steps

    @never_stops_training
    def end(self) -> None:
        """A step has ended: tell of those whose operations are done, and write at intervals."""
        due = False
        if self.in_step:
            self.in_step = self.in_pass = False
            step = self._step
            step.ended = self.marks.mark()
            step.pauses, self._pauses = self._pauses, []
            self._before = step.number, step.ended
            self._untold.append(step)
            last = self.options.end is not None and step.number == self.options.end - 1
            due = last or step.number % self.options.interval == 0
            self._num_untold += len(step.operations)
        if due:
            self.marks.wait(step.ended)
        if due or self._num_untold >= _TOLD_AT_ONCE:
            self._tell()
        if due:
            self.marks.anchor()
            self._write()

    @never_stops_training
    def part(self) -> None:
        """What comes now is of no step, as an evaluation."""
        self._before = None

    @never_stops_training
    def drop(self) -> None:
        """A step has failed. Nobody waits for the device any more: it may wait for ranks that wait for this one."""
        self.in_step = self.in_pass = False
        self._before = None
        self._tell()
        self._forget()

    def _forget(self) -> None:
        self._untold.clear()
        self._num_untold = 0

    def _tell(self) -> None:
        while self._untold and self.marks.done(self._untold[0].ended):
            step = self._untold.popleft()
            self._num_untold -= len(step.operations)
            self._rows += self._told(step)

    def _told(self, step: Step) -> list[Row]:
        offset_s = 0.0 if self.clock is None else self.clock.offset_s

        def seconds(mark: Any) -> float:
            return self.marks.seconds(mark) + offset_s

        self.marks.tell_from(step.began)
        operations = [(*what, seconds(start), seconds(end)) for *what, start, end in step.operations]
        operations = in_turn(apart(operations), seconds(step.began), seconds(step.ended))
        noted_s = {which: seconds(mark) for which, mark in step.embeddings.items()}
        embeddings = {
            (kind, chunk, which): noted - start_s if kind == FORWARD else end_s - noted
            for kind, chunk, which, start_s, end_s in operations
            if (noted := noted_s.get((kind, chunk, which))) is not None
        }
        # The end of a step may be the beginning of the next, which then gives it back.
        marks = (mark for *_, start, end in step.operations for mark in (start, end))
        self.marks.release([step.began, *marks, *step.embeddings.values()])
        base_s = self.marks.epoch_s + offset_s
        pauses = [(PAUSE, -1, -1, start + base_s, end + base_s) for start, end in step.pauses]
        self._aside(lambda live: live.take(operations, sum(end - start for start, end in step.pauses), embeddings))
        return list(self._rows_of(step, operations + pauses, embeddings))

    def _rows_of(
        self,
        step: Step,
        operations: Sequence[tuple[str, int, int, float, float]],
        embeddings: Mapping[tuple[str, int, int], float],
    ) -> Iterator[Row]:
        counts: Counter[str] = Counter()
        rank = 0 if self.parts is None else self.parts.same["stage"]
        for kind, chunk, microbatch, start_s, end_s in operations:
            place = -1 if chunk < 0 else chunk * self.topology.pipeline_size + rank
            sizes = (None, None, None)
            if kind in (FORWARD, COMBINED):
                sizes = _sizes(step.sequences.get((chunk, microbatch)), self.row_tokens)
            within_s = embeddings.get((kind, chunk, microbatch))
            yield Row(
                step.number, kind, start_s, end_s - start_s, counts[kind], chunk, place, microbatch, *sizes, within_s
            )
            counts[kind] += 1

    def _write(self) -> None:
        if self.clock is not None:
            self.clock.synchronize()  # first, as all ranks come from the same step: writing takes some of them longer
        if not self.parts.is_full:
            self.parts.write(self._rows)
        elif not self._said_full:
            self._said_full = True
            _warn(f"{self.parts.bytes / 1e6:.0f} MB are written, no more will be; the log lines go on")
        self._rows.clear()
        self._aside(lambda live: live.exchange())  # last: rank 0 may search a split meanwhile

    def speak(self, live: Live) -> None:
        """Have log lines from now on."""
        self.live = live
        self._aside(lambda live: live.prepare())

    def _aside(self, act: Callable[[Live], None]) -> None:
        """Do the log line's part; where that fails, the trace goes on without it."""
        if self.live is None:
            return
        try:
            act(self.live)
        except Exception as error:
            self.live = None
            _warn(f"no more log lines, recording goes on ({type(error).__name__}: {error})")

    @never_stops_training
    def log(self, iteration: int) -> None:
        """Log what the last interval says, where and when Megatron logs its step."""
        self._aside(lambda live: live.log(iteration))

    @never_stops_training
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
        self._end()

    def give_up(self, error: Exception) -> None:
        """Record no more. What was written stays."""
        self._end()
        self._rows.clear()
        self._forget()
        _warn(f"recording ends, training goes on ({type(error).__name__}: {error})")

    def _end(self) -> None:
        self.is_on = self.in_step = self.in_pass = False
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._collected)


recording: list[Recorder] = []  # in this process


def leave_out() -> None:
    """What comes now is of no recorded step. For what holds a job up from outside, as its turns with another job do."""
    for recorder in recording:
        recorder.part()


def in_turn(
    operations: Sequence[tuple[str, int, int, float, float]], began_s: float, ended_s: float
) -> list[tuple[str, int, int, float, float]]:
    """A step without gaps: each operation from the end of the one before, with what comes before the first and after the last.

    The stream that computes runs one after the other; in a gap it waits for the host to come to what follows. Operations that
    begin and end at once are one call's, and stay together.
    """
    ordered = sorted(operations, key=lambda operation: operation[3:])
    free_s = ordered[0][3] if ordered else ended_s
    turn = [(BEGIN, -1, -1, began_s, free_s)]
    call, start_s = None, free_s
    for *what, first_s, end_s in ordered:
        if (first_s, end_s) != call:
            call, start_s = (first_s, end_s), min(free_s, end_s)
        turn.append((*what, start_s, end_s))
        free_s = max(free_s, end_s)
    return [*turn, (FINISH, -1, -1, free_s, max(free_s, ended_s))]


def apart(operations: Sequence[tuple[str, int, int, float, float]]) -> list[tuple[str, int, int, float, float]]:
    """What is done once a step as one operation of its kind each, with nothing in two of them.

    Megatron calls for each model chunk, and one within the other: the optimizer's step holds clipping and the gathering of
    parameters, the reduction of gradients that of norms and embedding. What surrounds keeps what comes before what it holds for
    the former, and what comes after it for itself: clipping begins with the optimizer's step, as what is before it (copying and
    checking gradients) belongs to it. A gathering of parameters before the last pass only begins there, as interleaved schedules
    have it of one chunk after the other (``--overlap-param-gather``): the passes wait for it, and it is no operation.
    """
    once: dict[str, list[float]] = {}
    others: list[tuple[str, int, int, float, float]] = []
    last_s = max((end_s for kind, *_, end_s in operations if kind in PASSES), default=-math.inf)
    for operation in operations:
        kind, _, microbatch, start_s, end_s = operation
        if microbatch >= 0 or kind in (*PASSES, *TRANSFERS):
            others.append(operation)
        elif kind != GATHER or start_s >= last_s:
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
    """Real tokens, all tokens of the longest sequence, sum of squares of all tokens."""
    if seen is None:
        return row_tokens, None, None
    lengths, real_tokens = seen
    lengths = lengths if isinstance(lengths, list) else lengths.flatten().diff().tolist()
    lengths = [length for length in lengths if length > 0]  # bounds may be filled up with the last one
    tokens = sum(lengths) if real_tokens is None else real_tokens
    return tokens, max(lengths, default=0), sum(length**2 for length in lengths)


def _warn(text: str) -> None:
    print(f"megatron-balance: warning: {FLAG}: {text}", file=sys.stderr, flush=True)
