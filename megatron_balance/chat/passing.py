"""The pass over a chat file: part after part to a shard each, by several processes; what is there already stays.

Every part that a killed pass has finished is kept, so that at most one part of each worker is done again.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue

from megatron_balance.chat import shards
from megatron_balance.chat.encoder import Encoder
from megatron_balance.chat.lines import LineError, conversations_of, lines_between
from megatron_balance.chat.shards import Fault, Span
from megatron_balance.errors import BalanceError
from megatron_balance.processes import die_with_parent
from megatron_balance.reporting import progress

PART_BYTES = 1 << 22  # of the file: about a second of work
_DONE, _FAILED = "megatron-balance: part done", "megatron-balance: part failed: "
_MOST_WORKERS = 64
_WORTH_A_WORKER = 4  # parts: a process takes seconds to begin


def spans_of(path: Path, part_bytes: int) -> list[Span]:
    """The parts of a file."""
    return [Span(start, start + part_bytes) for start in range(0, path.stat().st_size, part_bytes)]


def write_parts(
    path: Path, folder: Path, missing: Sequence[Span], tokenizer: str, encoder: Encoder, workers: int | None = None
) -> None:
    """Write the ``missing`` shards of a chat file.

    Args:
        tokenizer: that ``encoder`` was loaded from; other processes load it again.
        workers: processes; default: as many as there are cores.

    Raises:
        BalanceError: a process ended before its work did.
    """
    worth = -(-len(missing) // _WORTH_A_WORKER)
    workers = workers or min(len(os.sched_getaffinity(0)), worth, _MOST_WORKERS)
    with progress(f"tokenising {path}", len(missing)) as advance:
        if workers <= 1:
            for span in missing:
                write_part(path, folder, span, encoder)
                advance(1)
        else:
            _share_out(path, folder, missing, [tokenizer, encoder.template], workers, advance)


def write_part(path: Path, folder: Path, span: Span, encoder: Encoder) -> None:
    """Write one shard: the conversations of the lines that begin in its part of the file."""
    encoded, faults, kinds, blank = [], [], Counter(), 0
    for start, line in lines_between(path, span.start, span.stop):
        if not line.strip():
            blank += 1
            continue
        try:
            encoded += [encoder.encode(conversation) for conversation in conversations_of(line)]
        except LineError as error:
            kinds[error.kind] += 1
            faults.append(Fault(start, error.kind, error.detail))
    shards.write(span.shard(folder), encoded, blank, dict(kinds), faults)


def _share_out(
    path: Path,
    folder: Path,
    missing: Sequence[Span],
    encoder: Sequence[str],
    workers: int,
    advance: Callable[[float], None],
) -> None:
    spans, done = SimpleQueue(), SimpleQueue()
    for span in missing:
        spans.put(span)
    with ThreadPoolExecutor(workers) as threads:
        running = [threads.submit(_drive, path, folder, encoder, spans, done) for _ in range(workers)]
        while not all(each.done() for each in running):
            if any(each.done() and each.exception() for each in running):
                _empty(spans)  # the others end with what they are at
            try:
                done.get(timeout=0.1)
            except Empty:
                continue
            advance(1)
        for each in running:
            each.result()


def _empty(spans: SimpleQueue) -> None:
    with contextlib.suppress(Empty):
        while True:
            spans.get_nowait()


def _drive(path: Path, folder: Path, encoder: Sequence[str], spans: SimpleQueue, done: SimpleQueue) -> None:
    """Give a process of its own one part after the other."""
    job = json.dumps([os.getpid(), os.fspath(path), os.fspath(folder), *encoder])
    package = os.fspath(Path(__file__).parents[2])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", "megatron_balance.chat.passing"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=environment
    ) as process:
        try:
            process.stdin.write(f"{job}\n")
            while True:
                try:
                    span = spans.get_nowait()
                except Empty:
                    return
                process.stdin.write(f"{span.start} {span.stop}\n")
                process.stdin.flush()
                for line in process.stdout:
                    if line.strip() == _DONE:
                        break
                    if line.startswith(_FAILED):
                        raise OSError(*json.loads(line.removeprefix(_FAILED)))
                else:
                    raise BrokenPipeError
                done.put(span)
        except BrokenPipeError:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            raise BalanceError(
                f"a process that tokenised {path} ended with status {process.wait()}: what was finished is kept, start again"
            ) from None


def _work() -> None:
    """A process of `_drive`: the job in the first line, the bytes of a part in each that follows."""
    parent, path, folder, tokenizer, template = json.loads(sys.stdin.readline())
    die_with_parent(parent)
    encoder = Encoder.load(tokenizer, template)
    for line in sys.stdin:
        try:
            write_part(Path(path), Path(folder), Span(*map(int, line.split())), encoder)
        except OSError as error:  # as a full disk, which is told as such
            print(f"{_FAILED}{json.dumps([error.errno or 0, error.strerror or str(error)])}", flush=True)
            return
        print(_DONE, flush=True)


if __name__ == "__main__":
    _work()
