"""The flags of `--straggler-trace`, and what cannot go with it."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_balance.errors import BalanceError

FLAG = "--straggler-trace"
STEPS, INTERVAL = f"{FLAG}-steps", f"{FLAG}-interval"
_INTERVAL_STEPS = 100


@dataclass(frozen=True)
class TraceOptions:
    """Our flags, checked.

    Attributes:
        folder: for the files, one a rank.
        first, end: the steps ``first <= step < end`` are recorded; steps count from 1. None for no end.
        interval: steps between two writes.
    """

    folder: Path
    first: int
    end: int | None
    interval: int

    def covers(self, step: int) -> bool:
        """Whether a step is to be recorded."""
        return step >= self.first and (self.end is None or step < self.end)

    @classmethod
    def from_args(cls, args: Any) -> TraceOptions | None:
        """The options of parsed arguments; None when no trace is asked for.

        Raises:
            BalanceError: a value is not usable, or an option is given without the flag that it belongs to.
        """
        folder, steps, interval = (
            getattr(args, f"straggler_trace{name}", None) for name in ("", "_steps", "_interval")
        )
        if folder is None:
            for name, value in ((STEPS, steps), (INTERVAL, interval)):
                if value is not None:
                    raise BalanceError(f"{name} does nothing without {FLAG}: add it or leave both out")
            return None
        if not folder:
            raise BalanceError(f"{FLAG} needs the name of a folder, not an empty one")
        if interval is not None and interval < 1:
            raise BalanceError(f"{INTERVAL} {interval}: must be 1 step or more")
        return cls(Path(folder), *_range(steps), interval or _INTERVAL_STEPS)


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags to Megatron's parser."""
    group.add_argument(
        FLAG,
        metavar="DIR",
        help="Record when each operation ran on each rank, for `megatron-balance diagnose DIR`: one parquet file a rank, of 9 to"
        " 13 bytes an operation (a step of 16 micro-batches has about 70, 1 kB), and at most 256 MB a rank, after which nothing"
        " more is written. Memory does not grow with steps. Does not wait for the GPU in a step, and changes no loss; if it fails"
        " it says so, and training goes on without. A trace that is in DIR already moves to DIR/earlier-N. Needs pyarrow.",
    )
    group.add_argument(
        STEPS,
        metavar="A:B",
        help="Record the steps from A up to, not including, B; either may be left out. Default: all.",
    )
    group.add_argument(
        INTERVAL,
        type=int,
        metavar="N",
        help=f"Write what was recorded, and log what it says of the stages, every N steps (default: {_INTERVAL_STEPS}).",
    )


def refuse_conflicts(args: Any, options: TraceOptions) -> None:
    """Refuse what would give no trace.

    Raises:
        BalanceError: says why, and what to do.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise BalanceError(f'{FLAG} writes parquet files and needs pyarrow: pip install "megatron-balance[trace]"')
    costs = getattr(args, "balanced_pipeline_costs", None)
    if costs and os.path.realpath(costs) == os.path.realpath(options.folder):
        raise BalanceError(
            f"{FLAG} {options.folder} would move the trace aside that --balanced-pipeline-costs plans on: name another folder"
        )
    scopes = getattr(args, "cuda_graph_scope", None) or ()
    implementation = getattr(args, "cuda_graph_impl", None)
    if "full_iteration" in str(scopes) or implementation == "full_iteration":
        raise BalanceError(
            f"{FLAG} sees nothing of a step that replays as one CUDA graph (full_iteration): leave one of the two out"
        )


def prepare_folder(options: TraceOptions) -> None:
    """Make the folder, with what an earlier run left out of the way. For rank 0.

    Raises:
        BalanceError: it cannot be written to.
    """
    folder = options.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if earlier := list(folder.glob("rank-*.parquet")):
            numbers = [
                int(found[1]) for path in folder.iterdir() if (found := re.fullmatch(r"earlier-(\d+)", path.name))
            ]
            aside = folder / f"earlier-{max(numbers, default=0) + 1}"
            aside.mkdir()
            for path in earlier:
                path.rename(aside / path.name)
    except OSError as error:
        raise BalanceError(f"{FLAG} {folder} cannot be used ({error.strerror}): name another folder") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BalanceError(f"{FLAG} {folder} cannot be written to: name another folder")


def _range(steps: str | None) -> tuple[int, int | None]:
    if steps is None:
        return 1, None
    found = re.fullmatch(r"(\d*):(\d*)", steps)
    first, end = (int(found[1] or 1), int(found[2]) if found[2] else None) if found else (0, 0)
    if not found or first < 1 or (end is not None and end <= first):
        raise BalanceError(f"{STEPS} {steps}: must be A:B with 1 <= A < B, as 100:150 for the steps 100 to 149")
    return first, end
