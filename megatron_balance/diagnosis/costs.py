"""What layers and head cost in a recorded job, and what its step takes under another split.

What a split gains on the whole step is computed so:

1. Step seconds are the last end minus the first start of the step's operations on all ranks; the median over steps.
2. Of a stage counts its typical pass: the median over data-parallel ranks of the median over a rank's passes. A layer costs the
   median over the stages without embedding and head, each over its layers; the head what the last stage takes beyond its layers;
   the embedding what the recorder noted of it, or else what the first takes beyond its layers, nothing where that is within the
   spread of the stages between. Without a note nothing tells the embedding from the first of two stages' layers: it costs nothing.
3. The rest of the step is the step minus the simulated pipeline of the recorded split on these costs, without transfers: the
   parameters' all-gather, the gradients' all-reduce and reduce-scatter, clipping, the optimizer, gaps, and transfers and
   variation inside the pipeline.
4. A split takes its simulated pipeline plus the same rest.

Not every part of the rest stays: the optimizer and data parallelism work on a rank's parameters. Where all stages have as many
layers, how much of their time is by layer cannot be told from the trace; ``grown_rest_s`` takes all of it, which is the most
that it can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from megatron_balance import __version__
from megatron_balance.costs.chain import ChainCosts, ElementCost
from megatron_balance.costs.table import ANY_LAYER, DIAGNOSED, CostTable, ElementRow, LayerRow
from megatron_balance.diagnosis.replay import Replay
from megatron_balance.diagnosis.signals import Signals
from megatron_balance.diagnosis.trace import BACKWARD, FORWARD, GATHER, OPTIMIZER, SCATTER, Trace
from megatron_balance.errors import BalanceError
from megatron_balance.pipeline.chain import stage_costs

if TYPE_CHECKING:
    from megatron_balance.schedule.simulate import Simulator

_NO_FITS = {"forward_fit": (0.0, 0.0), "backward_fit": (0.0, 0.0)}


@dataclass(frozen=True, eq=False)
class RecordedSplit:
    """A recorded job with the layers that its stages hold.

    Attributes:
        replay: of its trace.
        signals: its passes.
        layers: of each stage; stage ``chunk * PP + rank`` is a rank's chunk.

    Raises:
        BalanceError: another number of stages than the trace has, or fewer layers than none.
    """

    replay: Replay
    signals: Signals
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        stages, layers = self.replay.trace.job.topology.num_stages, self.layers
        given = ",".join(map(str, layers))
        if len(layers) != stages:
            raise BalanceError(f"layers {given} are of {len(layers)} stages, the trace has {stages}: give each stage's")
        if min(layers) < 0:
            raise BalanceError(f"layers {given}: no stage holds fewer than none; correct them")

    @cached_property
    def step_s(self) -> float:
        """Median seconds of a step."""
        return float(np.median(self.replay.recorded_step_s))

    @cached_property
    def costs(self) -> ChainCosts:
        """As ``chain_of``, which see."""
        return chain_of(self.signals.typical_s, self.layers, typical_embedding_s(self.replay.trace))

    @cached_property
    def rest_s(self) -> float:
        """Seconds of the median step that are not the simulated pipeline of the recorded split."""
        return self.step_s - self.simulated_s(self.layers)

    def simulated_s(self, layers: Sequence[int]) -> float:
        """Seconds of the pipeline with these layers in each stage, on ``costs``."""
        stages = stage_costs(self.costs, layers)
        return self.simulator.step_s([stage.forward_s for stage in stages], [stage.backward_s for stage in stages])

    @cached_property
    def simulator(self) -> Simulator:
        """Of the job's schedule."""
        from megatron_balance.schedule.simulate import Simulator  # compiled code, which only a split needs

        return Simulator(self.replay.trace.job.topology)

    def step_with_s(self, layers: Sequence[int]) -> float:
        """Seconds of a step with these layers in each stage, the rest unchanged."""
        return self.simulated_s(layers) + self.rest_s

    def grown_rest_s(self, layers: Sequence[int]) -> float:
        """The rest, if the optimizer and the exchange of parameters and gradients took time by a rank's layers alone.

        The first rank is the first to compute and the last to end, so its all-gather and reduce-scatter are those that
        count; the optimizer starts on all ranks together, after the norm of all gradients, and the slowest rank counts.
        """
        ranks = self.replay.trace.job.topology.pipeline_size
        held, recorded = (np.reshape(each, (-1, ranks)).sum(axis=0) for each in (layers, self.layers))
        inner = slice(1, -1) if ranks > 2 else slice(None)  # has no embedding table
        between = recorded[inner] if recorded[inner].any() else recorded
        more = (held - recorded) / between.mean()
        gather, scatter, optimizer = (self._median_s(kind) for kind in (GATHER, SCATTER, OPTIMIZER))
        middle = [float(np.mean(kind[inner])) for kind in (gather, scatter, optimizer)]
        slowest = float((optimizer + more * middle[2]).max() - optimizer.max())
        return self.rest_s + float(more[0]) * (middle[0] + middle[1]) + slowest

    def _median_s(self, kind: str) -> np.ndarray:
        """Median recorded seconds of an operation on each pipeline rank, [PP]; 0 where there is none."""
        replay, ranks = self.replay, self.replay.trace.job.topology.pipeline_size
        found = [replay.nodes.of(kind, rank) for rank in range(ranks)]
        return np.array(
            [float(np.median(replay.end_s[:, own] - replay.start_s[:, own])) if own else 0.0 for own in found]
        )

    def table(self) -> CostTable:
        """The costs as the file that ``plan`` and training take; of the model's shapes where the trace has them.

        Raises:
            BalanceError: as ``costs``.
        """
        costs, job = self.costs, self.replay.trace.job
        known = {} if job.topology.tensor_size == 1 else {"tensor_size": job.topology.tensor_size}
        steps = self.replay.steps
        return CostTable(
            kind=DIAGNOSED,
            device=f"trace of {job.world_size} devices",
            embedding=_row(costs.embedding),
            layers={ANY_LAYER: LayerRow(**vars(_row(costs.mean_layer)), by_length=(), **_NO_FITS)},
            head=_row(costs.head),
            update_s_per_parameter=None,
            holds_for={**known, **job.shapes},
            provenance={
                "steps": f"{steps.size} of {steps[0]} to {steps[-1]}",
                "layers of each stage": ",".join(map(str, self.layers)),
                "step_s": self.step_s,
            },
            created_by=f"megatron_balance {__version__}",
        )


def typical_embedding_s(trace: Trace) -> np.ndarray | None:
    """Seconds of the embedding in a typical pass of the first stage: the median over data-parallel ranks of the median over a
    rank's passes, forward and backward, [2]; None where the trace does not tell.
    """
    if trace.embedding_s is None:
        return None
    typical_s = []
    for way in (FORWARD, BACKWARD):
        mine = np.isfinite(trace.embedding_s) & (trace.pp_rank == 0) & (trace.chunk == 0) & trace.are(way)
        ranks = np.unique(trace.dp_rank[mine])
        if not ranks.size:
            return None
        typical_s.append(np.median([np.median(trace.embedding_s[mine & (trace.dp_rank == rank)]) for rank in ranks]))
    return np.array(typical_s)


def chain_of(typical_s: np.ndarray, layers: Sequence[int], noted_embedding_s: np.ndarray | None = None) -> ChainCosts:
    """What embedding, layers and head cost, as the stages tell it; forward and backward apart.

    Args:
        typical_s: seconds of each stage's typical pass, [2, stages].
        layers: of each stage.
        noted_embedding_s: of the first stage's pass, what the embedding takes, [2]; None where it was not noted.

    Raises:
        BalanceError: one stage, which cannot tell layers from embedding and head; no stage between the ends (of two, the first)
            has layers; or layers that cost nothing.
    """
    held = np.array(layers)
    if held.size == 1:
        raise BalanceError("one stage does not tell what layers, embedding and head cost apart")
    between = np.arange(1, held.size - 1) if held.size > 2 else np.zeros(1, dtype=int)
    telling = between[held[between] > 0]
    if not telling.size:
        raise BalanceError("no stage tells what a layer costs: none between the ends (of two, the first) has any")
    elements_s = []
    noted_s = [None, None] if noted_embedding_s is None else noted_embedding_s
    for typical, noted in zip(typical_s, noted_s, strict=True):
        first = typical[0] - (noted or 0.0)
        each_s = np.array([first, *typical[1:]])[telling] / held[telling]
        layer_s = float(np.median(each_s))
        if noted is None:
            spread_s = np.ptp(each_s) * held[0] if telling.size > 1 else 0.1 * typical[0]
            left_s = float(first - held[0] * layer_s) if held.size > 2 else 0.0
            noted = left_s if left_s > spread_s else 0.0
        elements_s.append((float(noted), layer_s, max(0.0, float(typical[-1] - held[-1] * layer_s))))
    embedding, layer, head = (ElementCost(*seconds) for seconds in zip(*elements_s, strict=True))
    return ChainCosts(embedding, (layer,) * int(held.sum()), head, "trace")


def _row(cost: ElementCost) -> ElementRow:
    return ElementRow(cost.forward_s, cost.backward_s, None, None, parameters=0)
