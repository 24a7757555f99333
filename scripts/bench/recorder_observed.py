"""What ``recorder.py`` starts on each rank: FOLDER, then the arguments of `megatron_balance.run`.

The recorder records every other step. ``steps-<rank>.json`` gets of each step its number, whether it was recorded, and the
seconds from its beginning to the beginning of the next: all that the recorder does between steps is in it.
"""

import atexit
import json
import sys
import time
from itertools import pairwise
from pathlib import Path

from megatron_balance import run
from megatron_balance.files import write_atomically
from megatron_balance.megatron.recorder.options import TraceOptions

folder, *arguments = sys.argv[1:]
BLOCK = 4  # the order within a block is on, off, off, on: a drift of the machine's speed takes from both alike
begun: list[tuple[int, bool, float]] = []


def covers(self: TraceOptions, step: int) -> bool:
    recorded = step % BLOCK in (0, 1)
    begun.append((step, recorded, time.perf_counter()))
    return recorded


def write() -> None:
    from megatron_balance.reporting import global_rank

    seconds = [[step, on, after[2] - start] for (step, on, start), after in pairwise(begun)]
    write_atomically(Path(folder) / f"steps-{global_rank()}.json", json.dumps(seconds))


TraceOptions.covers = covers
atexit.register(write)
run.main(arguments)
