"""The figures of a comparison: from what the ranks saw, and from the simulator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_balance.costs.table import CostTable
from megatron_balance.packing.cost import FIXED, VARIABLE, BinCost, SequenceCost
from megatron_balance.packing.grid import Grid
from megatron_balance.packing.step import judge_of, micro_batch_s
from megatron_balance.planning.job import read_job
from quickstart.observations import read_run
from quickstart.packed.jobs import PACKED, WARMUP, Case

_RESAMPLES = 4000


@dataclass(frozen=True)
class Median:
    """A median with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Median:
        values = np.asarray(values)
        drawn = np.random.default_rng(0).choice(values, (_RESAMPLES, values.size))
        low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
        return cls(float(np.median(values)), float(low), float(high))

    def interval(self, digits: int) -> str:
        return f"{self.low:.{digits}f} to {self.high:.{digits}f}"


@dataclass(frozen=True)
class Overhead:
    """One batch after the other, trained with our forward step and with Megatron's own.

    Attributes:
        steps: that count.
        loader_share: seconds in our loader over those of the step and the loader.
        idle_share: the same of a loader that has nothing to do.
        own_share: the difference of both.
        step: our step over Megatron's own, both without a loader.
        whole: our loader and step over Megatron's step alone.
        step_s: median seconds of our step.
        loss_difference: the largest, relative.
    """

    steps: int
    loader_share: Median
    idle_share: Median
    own_share: Median
    step: Median
    whole: Median
    step_s: float
    loss_difference: float

    @classmethod
    def read(cls, folder: Path) -> Overhead:
        steps = json.loads((folder / "batches-0.json").read_text())[2 * WARMUP :]
        names = ("loader_s", "idle_s", "ours", "theirs")
        loader, idle, ours, theirs = (np.array([step[name] for step in steps]) for name in names)
        return cls(
            len(steps),
            *(Median.of(seconds / (loader + ours)) for seconds in (loader, idle, loader - idle)),
            Median.of(ours / theirs),
            Median.of((loader + ours) / theirs),
            float(np.median(ours)),
            float(np.max([step["loss_difference"] for step in steps])),
        )


@dataclass(frozen=True, eq=False)
class Side:
    """The steps of one side that count.

    Attributes:
        step_s: seconds, shape [steps].
        predicted_s: the same by the simulator.
        ideal_s: by the simulator, if no rank ever waited.
        labels: learned, shape [steps].
        loader_s: seconds in the loader, of the rank that took longest.
    """

    step_s: np.ndarray
    predicted_s: np.ndarray
    ideal_s: np.ndarray
    labels: np.ndarray
    loader_s: np.ndarray

    @property
    def waiting(self) -> float:
        """Simulated steps over ideal ones."""
        return float(self.predicted_s.sum() / self.ideal_s.sum())

    @property
    def loader_share(self) -> float:
        """Median share of the step that is spent in the loader."""
        return float(np.median(self.loader_s / self.step_s))


@dataclass(frozen=True)
class Predictor:
    """Simulated steps of a case, with costs measured on this machine."""

    cost: BinCost
    grid: Grid
    update_s: float

    @classmethod
    def of(cls, case: Case, table: CostTable, side: str) -> Predictor:
        job = read_job(case.flags(side), world_size=case.processes)
        shapes = VARIABLE if side == PACKED else FIXED
        cost = BinCost(SequenceCost.of_table(table, job.model, job.topology), case.sequence, shapes)
        elements = (table.embedding, table.head, *[table.layers[str(kind)] for kind in job.model.layers])
        update_s = (table.update_s_per_parameter or 0.0) * sum(one.parameters for one in elements) / case.pipeline
        return cls(cost, Grid(case.topology), update_s)

    def step(self, sequences: Sequence[Sequence[Sequence[int]]]) -> tuple[float, float]:
        """Simulated and ideal seconds of a step; ``sequences`` are the tokens of each, by data-parallel rank and micro-batch."""
        data_size = self.grid.topology.data_size
        bins, tokens = [], []
        for rank, micro_batches in enumerate(sequences):
            for k, lengths in enumerate(micro_batches):
                bins += [k * data_size + rank] * len(lengths)
                tokens += lengths
        piece_s, judge = self.cost.piece_s(np.array(tokens)), judge_of(self.grid)
        seconds = micro_batch_s(np.array(bins), piece_s, self.cost.empty_s, self.grid)
        return judge.step_s(seconds) + self.update_s, judge.ideal_s(seconds) + self.update_s


def read_side(folder: Path, case: Case, predictor: Predictor) -> Side:
    """What all ranks of a job saw."""
    _, steps = read_run(folder)
    fed = _fed(folder, case)
    simulated = np.array([predictor.step([rank["sequences"] for rank in step]) for step in fed])
    return Side(
        np.array([step.duration_s for step in steps[WARMUP : WARMUP + case.pairs]]),
        simulated[:, 0],
        simulated[:, 1],
        np.array([sum(rank["labels"] for rank in step) for step in fed]),
        np.array([max(rank["loader_s"] for rank in step) for step in fed]),
    )


def _fed(folder: Path, case: Case) -> list[tuple[dict, ...]]:
    """What the ranks of the first stage were fed in each step that counts."""
    ranks = [json.loads((folder / f"batches-{rank}.json").read_text()) for rank in range(case.data)]
    return list(zip(*ranks, strict=True))[WARMUP : WARMUP + case.pairs]


@dataclass(frozen=True, eq=False)
class Gain:
    """Stock inter-document masking (or packing with fixed shapes) against packing, in labels learned a second."""

    case: Case
    stock: Side
    packed: Side

    @property
    def measured(self) -> Median:
        """Of pairs of steps."""
        return Median.of(self._rate(self.packed, "step_s") / self._rate(self.stock, "step_s"))

    @property
    def predicted(self) -> float:
        """Of the same pairs."""
        return float(np.median(self._rate(self.packed, "predicted_s") / self._rate(self.stock, "predicted_s")))

    @property
    def off(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured.value - 1

    @property
    def measured_in_all(self) -> float:
        """Of all steps together."""
        return self._in_all("step_s")

    @property
    def predicted_in_all(self) -> float:
        return self._in_all("predicted_s")

    @property
    def fill(self) -> float:
        """Share of the bins' places whose labels count, with packing."""
        topology = self.case.topology
        places = topology.data_size * topology.num_microbatches * self.case.sequence
        return float(self.packed.labels.mean() / places)

    @property
    def work(self) -> float:
        """Ideal seconds for each label, packed over stock: chopped documents have less attention, and padding costs."""
        return float(
            (self.packed.ideal_s.sum() / self.packed.labels.sum())
            / (self.stock.ideal_s.sum() / self.stock.labels.sum())
        )

    def _rate(self, side: Side, seconds: str) -> np.ndarray:
        return side.labels / getattr(side, seconds)

    def _in_all(self, seconds: str) -> float:
        ours, theirs = (side.labels.sum() / getattr(side, seconds).sum() for side in (self.packed, self.stock))
        return float(ours / theirs)
