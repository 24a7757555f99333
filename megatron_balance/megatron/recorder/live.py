"""What the recorder says while the job runs: which stage takes longest, what the head costs, what another split would save."""

from __future__ import annotations

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from megatron_balance.costs.chain import ChainCosts
from megatron_balance.diagnosis.costs import chain_of
from megatron_balance.diagnosis.fix import best_split
from megatron_balance.diagnosis.trace import BACKWARD, COMBINED, FORWARD
from megatron_balance.errors import BalanceError
from megatron_balance.megatron.agreement import said_by_all
from megatron_balance.topology import Topology

_PATIENCE_S = 1.0
_WORTH = 0.01  # of the step: a split that saves less is not named
_CHANGE = 0.03  # of a stage's share, below which the split is not searched again


@dataclass(frozen=True, eq=False)
class Stages:
    """Medians of an interval, over micro-batches and then data-parallel ranks.

    Attributes:
        forward_s, backward_s: of a micro-batch in each stage, shape [stages]; a combined pass counts as a third forward.
        layers: transformer layers of each stage.
        step_s: seconds of a step on the rank where it takes longest.
        dp_busy_s: seconds that the pipeline of each data-parallel rank of which all was heard computes in a step; one of 1 where
            there is none.
        gc_s: seconds a step that the garbage collector takes on the rank where it takes most.
        embedding_s: of a micro-batch, forward and backward, shape [2]; None where it was not told.
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    layers: tuple[int, ...]
    step_s: float
    dp_busy_s: np.ndarray
    gc_s: float
    embedding_s: np.ndarray | None = None


@dataclass(frozen=True)
class Finding:
    """What an interval says.

    Attributes:
        last_over_mean: seconds of the last pipeline rank over the mean of all; None where there is one.
        head_layers: head in layers of mean cost; None in a single stage.
        split: layers of each stage that take less; None where none was found.
        saving: share of the step that they save, memory and what else a split changes aside.
        slowest_dp: the slowest data-parallel rank over the mean.
        gc_s: as in ``Stages``.
    """

    last_over_mean: float | None
    head_layers: float | None
    split: tuple[int, ...] | None
    saving: float
    slowest_dp: float
    gc_s: float

    @property
    def text(self) -> str:
        parts = []
        if self.last_over_mean is not None:
            parts.append(f"last stage {self.last_over_mean:.2f}x the mean")
        if self.head_layers is not None:
            parts.append(f"head = {self.head_layers:.1f} layers")
        if self.split is not None:
            shown = ",".join(map(str, self.split))
            parts.append(f"({shown}) would save {100 * self.saving:.0f} %, memory aside")
        if self.slowest_dp > 1.02:
            parts.append(f"slowest data-parallel rank {self.slowest_dp:.2f}x the mean")
        if self.gc_s > 1e-3:
            parts.append(f"garbage collection {1000 * self.gc_s:.0f} ms a step")
        return "; ".join(parts)

    @property
    def scalars(self) -> dict[str, float]:
        values = {
            "last stage over mean": self.last_over_mean,
            "head in layers": self.head_layers,
            "saving by another split": self.saving,
            "slowest data-parallel rank over mean": self.slowest_dp,
            "garbage collection seconds a step": self.gc_s,
        }
        return {name: value for name, value in values.items() if value is not None}


class Live:
    """One rank's part: what it took, sent to rank 0, which logs, and to the last, which has Megatron's writers."""

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        place: tuple[int, int],
        layers: Sequence[int],
        topology: Topology,
        speaks: bool,
    ) -> None:
        """Begin an interval.

        Args:
            store: rendezvous store.
            rank, world_size: of the job.
            place: (data-parallel rank, pipeline rank).
            layers: of each model chunk here.
            topology: sizes of the job.
            speaks: whether this rank is the one of its tensor- and context-parallel ranks that tells the others.
        """
        self.store, self.rank, self.place, self.layers = store, rank, place, list(layers)
        self.topology, self.speaks = topology, speaks
        self.hears = rank in (0, world_size - 1)
        self._others: list[int] | None = None
        self._world_size = world_size
        self._round = 0
        self._last: tuple[np.ndarray, tuple[int, ...]] | None = None  # shares of the stages, best split
        self.finding: Finding | None = None
        self._clear()
        store.set(f"live/speaks/{rank}", str(int(speaks)))

    def prepare(self) -> None:
        """Load what the first interval needs, before the first step rather than after it, on the ranks that hear: a second,
        half a minute where nothing is compiled yet.
        """
        if self.hears and self.topology.num_stages > 1:
            stages = Stages(np.ones(2), np.ones(2), (2, 2), 8.0, np.ones(1), 0.0)
            chain, topology = chain_of(np.ones((2, 2)), stages.layers), Topology(2, 2)
            _saving(chain, stages, _sought(chain, stages.layers, topology), topology)

    def _clear(self) -> None:
        self._passes: dict[tuple[int, int], list[float]] = defaultdict(list)
        self._step_s: list[float] = []
        self._busy_s: list[float] = []
        self._gc_s: list[float] = []
        self._embedding_s: dict[str, list[float]] = defaultdict(list)

    def take(
        self,
        operations: Sequence[tuple[str, int, int, float, float]],
        gc_s: float,
        embeddings: Mapping[tuple[str, int, int], float] = MappingProxyType({}),
    ) -> None:
        """Take a step.

        Args:
            operations: in turn and without gaps: kind, chunk, micro-batch, start, end.
            gc_s: seconds of the garbage collector's pauses.
            embeddings: seconds of the embedding in the first stage's passes (kind, chunk, micro-batch).
        """
        busy_s = 0.0
        last = max(which for _, _, which, _, _ in operations)
        if last + 1 not in (0, self.topology.num_microbatches):  # a ramp-up of the batch size changes it
            self.topology = replace(self.topology, num_microbatches=last + 1)
        for kind, chunk, _, start_s, end_s in operations:
            if kind in (FORWARD, BACKWARD, COMBINED):
                duration_s = end_s - start_s
                busy_s += duration_s
                shares = {FORWARD: (1.0, None), BACKWARD: (None, 1.0), COMBINED: (1 / 3, 2 / 3)}[kind]
                for back, share in enumerate(shares):
                    if share is not None:
                        self._passes[chunk, back].append(share * duration_s)
        self._step_s.append(operations[-1][4] - operations[0][3])
        self._busy_s.append(busy_s)
        self._gc_s.append(gc_s)
        for (kind, *_), seconds in embeddings.items():
            self._embedding_s[kind].append(seconds)

    def exchange(self) -> None:
        """End the interval: tell, and where this rank hears, find out. Waits a second at most for ranks that do not come."""
        self._round += 1
        if self.speaks and self._busy_s:
            chunks = range(len(self.layers))
            told = {
                "round": self._round,
                "place": self.place,
                "layers": self.layers,
                "seconds": [
                    [float(np.median(self._passes[chunk, back] or [0.0])) for chunk in chunks] for back in (0, 1)
                ],
                "step_s": float(np.median(self._step_s)),
                "busy_s": float(np.median(self._busy_s)),
                "gc_s": float(np.mean(self._gc_s)),
                "embedding_s": [float(np.median(self._embedding_s[kind])) for kind in (FORWARD, BACKWARD)]
                if len(self._embedding_s) == 2
                else None,
            }
            self.store.set(f"live/{self.rank}", json.dumps(told))
        self._clear()
        if self.hears:
            stages = _stages(self._heard(), self.topology)
            self.finding = None if stages is None else self._find(stages)

    def log(self, iteration: int) -> None:
        """Log the finding, once, and give it to Megatron's writers."""
        finding, self.finding = self.finding, None
        if finding is None:
            return
        from megatron.training import get_tensorboard_writer, get_wandb_writer

        if self.rank == 0 and finding.text:
            print(f"megatron-balance: iteration {iteration}: {finding.text}", flush=True)
        for name, value in finding.scalars.items():
            if (writer := get_tensorboard_writer()) is not None:
                writer.add_scalar(f"straggler/{name}", value, iteration)
            if (wandb := get_wandb_writer()) is not None:
                wandb.log({f"straggler/{name}": value}, iteration)

    def _heard(self) -> list[dict[str, Any]]:
        if self._others is None:
            flags = said_by_all(self.store, [f"live/speaks/{rank}" for rank in range(self._world_size)])
            self._others = [rank for rank, flag in enumerate(flags) if flag == b"1"]
        deadline, told = time.monotonic() + _PATIENCE_S, {rank: {"round": 0} for rank in self._others}
        while True:
            missing = [rank for rank in told if told[rank]["round"] < self._round]
            there = [rank for rank in missing if self.store.check([f"live/{rank}"])]
            for rank, text in zip(there, self.store.multi_get([f"live/{rank}" for rank in there]), strict=True):
                told[rank] = json.loads(text)
            heard = [each for each in told.values() if each["round"] >= self._round]
            if len(heard) == len(told):
                return heard
            if time.monotonic() > deadline:
                # Some are late this once, as they write slowly; who told nothing in the interval before either records no more.
                self._others = [rank for rank in told if told[rank]["round"] >= self._round - 1]
                return heard
            time.sleep(1e-3)

    def _find(self, stages: Stages) -> Finding:
        busy = stages.forward_s + stages.backward_s
        shares = busy / busy.sum()
        chain, split, saving = None, None, 0.0
        with contextlib.suppress(BalanceError):  # the stages do not tell, or their schedule is none that is simulated
            chain = chain_of(np.stack([stages.forward_s, stages.backward_s]), stages.layers, stages.embedding_s)
            if self._last is None or np.abs(shares - self._last[0]).max() >= _CHANGE * shares.mean():
                self._last = shares, _sought(chain, stages.layers, self.topology)
            saving = _saving(chain, stages, self._last[1], self.topology)
            split, saving = (self._last[1], saving) if saving >= _WORTH else (None, 0.0)
        by_rank = busy.reshape(-1, self.topology.pipeline_size).sum(axis=0)
        return Finding(
            last_over_mean=float(by_rank[-1] / by_rank.mean()) if by_rank.size > 1 else None,
            head_layers=None if chain is None else chain.head.total_s / chain.mean_layer.total_s,
            split=split,
            saving=saving,
            slowest_dp=float(stages.dp_busy_s.max() / stages.dp_busy_s.mean()),
            gc_s=stages.gc_s,
        )


def _stages(heard: Sequence[dict[str, Any]], topology: Topology) -> Stages | None:
    """None where a stage was not heard of."""
    ranks, chunks = topology.pipeline_size, topology.virtual_size
    seconds: list[list[list[float]]] = [[] for _ in range(ranks * chunks)]
    layers = [0] * (ranks * chunks)
    busy_s: dict[int, list[float]] = defaultdict(list)
    for told in heard:
        dp_rank, pp_rank = told["place"]
        busy_s[dp_rank].append(told["busy_s"])
        for chunk, count in enumerate(told["layers"]):
            stage = chunk * ranks + pp_rank
            layers[stage] = count
            seconds[stage].append([told["seconds"][0][chunk], told["seconds"][1][chunk]])
    if not all(seconds):
        return None
    forward_s, backward_s = np.array([np.median(each, axis=0) for each in seconds]).T
    if not (forward_s + backward_s).all():
        return None
    step_s, gc_s = (max(told[name] for told in heard) for name in ("step_s", "gc_s"))
    by_rank = np.array([sum(of_rank) for of_rank in busy_s.values() if len(of_rank) == ranks] or [1.0])
    embedding_s = [told["embedding_s"] for told in heard if told["embedding_s"] is not None]
    typical_s = np.median(embedding_s, axis=0) if embedding_s else None
    return Stages(forward_s, backward_s, tuple(layers), step_s, by_rank, gc_s, typical_s)


def _sought(chain: ChainCosts, layers: tuple[int, ...], topology: Topology) -> tuple[int, ...]:
    """Layers of the stages that take least; as they are, where no others can be.

    Training waits meanwhile. The splits of an interleaved schedule take longest (nine seconds for PP8, 4 chunks, 64 micro-batches),
    so they are sought for two groups of its micro-batches (two seconds).
    """
    from megatron_balance.schedule.simulate import Simulator

    if topology.virtual_size > 1:
        topology = replace(topology, num_microbatches=min(topology.num_microbatches, 2 * topology.group_size))
    try:
        return best_split(chain, Simulator(topology), layers)
    except BalanceError:
        return layers


def _saving(chain: ChainCosts, stages: Stages, split: tuple[int, ...], topology: Topology) -> float:
    """Share of the step that the split saves."""
    from megatron_balance.pipeline.chain import stage_costs
    from megatron_balance.pipeline.plan import step_seconds
    from megatron_balance.schedule.simulate import Simulator

    simulator = Simulator(topology)
    before_s, after_s = (step_seconds(simulator, stage_costs(chain, layers)) for layers in (stages.layers, split))
    return (before_s - after_s) / stages.step_s
