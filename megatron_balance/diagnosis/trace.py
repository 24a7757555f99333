"""The operations of a job's recorded steps, in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_balance.reading import Scalar
from megatron_balance.topology import Topology

FORWARD, BACKWARD = "forward-compute", "backward-compute"
TRANSFERS = ("forward-send", "forward-recv", "backward-send", "backward-recv")
# What data parallelism and the optimizer do once a step, in the names of the published traces.
GATHER, SCATTER, SEPARATE = "params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"
LAYERNORM, EMBEDDING = "layernorm-grads-all-reduce", "embedding-grads-all-reduce"
CLIP, OPTIMIZER = "optimizer-clip-main-grad", "optimizer"
PAUSE = "gc"  # of the garbage collector
ONCE = (GATHER, SCATTER, LAYERNORM, EMBEDDING, SEPARATE, CLIP, OPTIMIZER, PAUSE)
OPERATIONS = (FORWARD, BACKWARD, *TRANSFERS, *ONCE)
COMBINED = "forward-backward-compute"  # ours: a forward and a backward pass that run as one (MoE overlap)
# Ours: from the end of the step before to the first operation, as logging and emptying gradients; and what follows the optimizer,
# as asking all ranks whether they could update.
BEGIN, FINISH = "step-begin", "step-end"
OURS = (COMBINED, BEGIN, FINISH)
PASSES = (FORWARD, BACKWARD, COMBINED)


def of_kinds(kind: np.ndarray, kinds: tuple[str, ...], names: Collection[str]) -> np.ndarray:
    """Whether each operation is of one of the kinds ``names``.

    Args:
        kind: numbers in ``kinds``, -1 for none of them; any shape.
        kinds: names of all kinds.
        names: those asked for.

    Returns:
        bool, shape of ``kind``.
    """
    wanted = [name in names for name in kinds]
    return np.array([*wanted, False])[kind]  # -1 is the last place


@dataclass(frozen=True)
class Job:
    """The job that was recorded.

    Attributes:
        name: as its owner calls it; any text, never to be trusted as markup.
        topology: PP, V, M, DP and more. The workers of a trace are its (data-parallel rank, pipeline rank) pairs.
        world_size: GPUs of the job, for the waste in GPU-hours.
        layers: transformer layers of each stage; stage ``chunk * PP + rank`` is a rank's chunk. None where it is not known.
        in_turn: whether the operations of a rank run one after the other, each from the end of the one before, and clocks are
            those of one rank: our recorder notes what the stream that computes does. Published traces note several streams.
        sends_ahead: with ``in_turn``, whether a rank that sends goes on without waiting for the receiver (Megatron's
            ``overlap_p2p_comm``, which interleaved schedules have unless ``--no-overlap-p2p-communication`` is given).
        shapes: of the model, by name, as a costs file has them (``holds_for``); empty where they are not known.
    """

    name: str
    topology: Topology
    world_size: int
    layers: tuple[int, ...] | None = None
    in_turn: bool = False
    sends_ahead: bool = False
    shapes: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Sequences:
    """What the micro-batches hold, where the recorder wrote it. Arrays of shape [steps, M, DP].

    Attributes:
        tokens: real tokens.
        longest: tokens of the longest sequence.
        squares: sum of the squares of the sequences' tokens.
    """

    tokens: np.ndarray
    longest: np.ndarray
    squares: np.ndarray

    def at(self, place: Any) -> Sequences:
        """Those at ``place``, which indexes the arrays."""
        return Sequences(self.tokens[place], self.longest[place], self.squares[place])


@dataclass(frozen=True, eq=False)
class Trace:
    """Operations of all ranks, one array element each.

    Attributes:
        job: sizes of the job.
        kind: number in ``kinds``, int16.
        kinds: names of the operations.
        step: number of the training step, int64.
        dp_rank, pp_rank: the worker, int32.
        chunk: model chunk of the rank (VPP), -1 where the operation belongs to none, int16.
        microbatch: of the step and data-parallel rank, -1 where the operation belongs to none, int32.
        start_s, end_s: seconds on the clock all ranks share; the published traces begin anew with each step. float64.
        sequences: None where the trace does not tell.
        embedding_s: of a pass of the first stage, seconds that its embedding takes; NaN where it does not tell. float64; None where
            it tells of none.
        problems: what is missing or odd, a line each; what is said of the job is then partial.
    """

    job: Job
    kind: np.ndarray
    kinds: tuple[str, ...]
    step: np.ndarray
    dp_rank: np.ndarray
    pp_rank: np.ndarray
    chunk: np.ndarray
    microbatch: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray
    sequences: Sequences | None = None
    embedding_s: np.ndarray | None = None
    problems: tuple[str, ...] = ()

    def are(self, *names: str) -> np.ndarray:
        """Whether each operation is of one of these kinds, bool."""
        return of_kinds(self.kind, self.kinds, names)

    @property
    def steps(self) -> np.ndarray:
        """Numbers of the recorded steps, ascending."""
        return np.unique(self.step)
