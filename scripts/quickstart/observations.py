"""What the processes of one run saw, put together."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Operation:
    """One micro-batch on one rank; times in seconds of a clock that all ranks share."""

    kind: str  # "forward" or "backward"
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Step:
    """One training step on all pipeline ranks.

    Attributes:
        start_s, end_s: from the first rank's start to the last rank's end, the optimizer included.
        loss: the mean loss that the last pipeline rank returned.
        operations: for each pipeline rank.
    """

    start_s: float
    end_s: float
    loss: float
    operations: tuple[tuple[Operation, ...], ...]

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Time that each rank spent in forward and backward, waiting for its neighbours excluded."""
        return tuple(sum(one.end_s - one.start_s for one in rank) for rank in self.operations)


def read_run(folder: Path) -> tuple[tuple[int, ...], tuple[Step, ...]]:
    """Read `rank-<r>.json` of every rank: the layers that each stage was built with, and the steps.

    Raises:
        ValueError: ranks saw different numbers of steps, or none returned a loss.
    """
    ranks = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
    ranks.sort(key=lambda rank: rank["pipeline_rank"])
    counts = [len(rank["steps"]) for rank in ranks]
    if len(set(counts)) != 1:
        raise ValueError(f"{folder}: the ranks saw {counts} steps")
    layers = tuple(sum(len(chunk["layers"]) for chunk in rank["chunks"]) for rank in ranks)
    return layers, tuple(_join(step) for step in zip(*(rank["steps"] for rank in ranks), strict=True))


def _join(ranks: tuple[dict, ...]) -> Step:
    losses = [rank["loss"] for rank in ranks if rank["loss"] is not None]
    if not losses:
        raise ValueError("no rank returned a loss")
    return Step(
        start_s=min(rank["start_s"] for rank in ranks),
        end_s=max(rank["end_s"] for rank in ranks),
        loss=losses[-1],
        operations=tuple(
            tuple(Operation(kind, microbatch, start, end) for kind, _, microbatch, start, end in rank["operations"])
            for rank in ranks
        ),
    )
