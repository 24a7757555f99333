"""The recorded steps of a real job: trace ST of ByteDance's study of stragglers (36 layers as 9 a stage, PP4, DP2, M=4).

The trace names every operation of 32 recorded steps on 8 ranks: the forward and the backward pass of each micro-batch,
transfers between stages, what data parallelism exchanges, and the optimizer, with start and duration. Clocks start anew with
each step, so what a job does between two steps (logging, checkpoints) is in no figure.

What a split gains on the whole step is computed so:

1. Step seconds are the last end minus the first start of the step's operations on all ranks; the median over steps. The
   first five recorded steps are left out: unlike the others they differ among each other, in the optimizer by 0.26 s.
2. A layer costs the median pass of the stages without embedding and head, over nine; the head costs what the last stage's
   median pass takes beyond nine layers. The embedding, whose stage is no slower than the two after it, costs nothing.
3. The rest of the step is the step minus the simulated pipeline of the recorded split on these costs, without transfers: the
   parameters' all-gather, the gradients' all-reduce and reduce-scatter, clipping, the optimizer, gaps, and transfers and
   variation inside the pipeline.
4. A split takes its simulated pipeline plus the same rest; its gain is the recorded split's step over that, minus 1.

Not every part of the rest stays: the optimizer and data parallelism work on a rank's parameters. As every recorded stage has
nine layers, how much of their time is by layer cannot be told from the trace; ``grown_rest_s`` takes all of it, which is the
most that it can be.

Data: https://github.com/ByteDance-Seed/StragglerAnalysis, folder ``data`` (Apache-2.0), read in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import yaml
from public_data import data_folder

from megatron_balance.costs.chain import ChainCosts, ElementCost
from megatron_balance.errors import BalanceError
from megatron_balance.schedule.simulate import Simulator
from megatron_balance.topology import Topology

RECORDED = (9, 9, 9, 9)  # layers of each stage
UNSETTLED = 5  # recorded steps that are left out
NUM_MICROBATCHES = 4
COMPUTE = ("forward-compute", "backward-compute")


@dataclass(frozen=True)
class Trace:
    """Operations of a job, one array element each.

    Attributes:
        topology: of the job.
        operation: kind; names as in the file.
        step, dp_rank, stage, microbatch: where it belongs; a micro-batch of -1 is none.
        start_s, end_s: seconds since the step began.
    """

    topology: Topology
    operation: np.ndarray
    step: np.ndarray
    dp_rank: np.ndarray
    stage: np.ndarray
    microbatch: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray

    @cached_property
    def steps(self) -> np.ndarray:
        """Numbers of the steps that count, ascending."""
        return np.unique(self.step)[UNSETTLED:]

    @cached_property
    def step_s(self) -> float:
        """Median seconds of a step."""
        return float(np.median([self._span_s(self.step == step) for step in self.steps]))

    @cached_property
    def costs(self) -> ChainCosts:
        """Medians of the passes; forward and backward apart."""
        forward, backward = (self._layer_and_head_s(kind) for kind in COMPUTE)
        layer, head = (ElementCost(*seconds) for seconds in zip(forward, backward, strict=True))
        return ChainCosts(ElementCost(0.0, 0.0), (layer,) * sum(RECORDED), head, "trace")

    @cached_property
    def rest_s(self) -> float:
        """Seconds of the median step that are not the simulated pipeline of the recorded split."""
        return self.step_s - self.simulated_s(RECORDED)

    def simulated_s(self, layers: Sequence[int]) -> float:
        """Seconds of the pipeline with these layers in each stage, on ``costs``."""
        costs, simulator = self.costs, Simulator(self.topology)
        layer, head = costs.mean_layer, costs.head
        forward, backward = np.array(layers) * layer.forward_s, np.array(layers) * layer.backward_s
        forward[-1] += head.forward_s
        backward[-1] += head.backward_s
        return simulator.step_s(forward, backward)

    def step_with_s(self, layers: Sequence[int]) -> float:
        """Seconds of a step with these layers in each stage, the rest unchanged."""
        return self.simulated_s(layers) + self.rest_s

    def grown_rest_s(self, layers: Sequence[int]) -> float:
        """The rest, if the optimizer and the exchange of parameters and gradients took time by a rank's layers alone.

        The first rank is the first to compute and the last to end, so its all-gather and reduce-scatter are those that
        count; the optimizer starts on all ranks together, after the norm of all gradients, and the slowest rank counts.
        """
        gather, scatter, optimizer = (
            self._parameters_s(kind) for kind in ("params-all-gather", "grads-reduce-scatter", "optimizer")
        )
        more = np.array(layers) / np.array(RECORDED) - 1
        middle = [float(np.mean(kind[1:-1])) for kind in (gather, scatter, optimizer)]  # has no embedding table
        slowest = float((optimizer + more * middle[2]).max() - optimizer.max())
        return self.rest_s + float(more[0]) * (middle[0] + middle[1]) + slowest

    def passes_s(self, step: int, dp_rank: int) -> np.ndarray:
        """Seconds of each pass of a replica's step, shape [2, PP, M]: forward, then backward."""
        passes = np.full((2, self.topology.pipeline_size, self.topology.num_microbatches), np.nan)
        for way, kind in enumerate(COMPUTE):
            mine = (self.step == step) & (self.dp_rank == dp_rank) & (self.operation == kind)
            passes[way, self.stage[mine], self.microbatch[mine]] = (self.end_s - self.start_s)[mine]
        return passes

    def pipeline_s(self, step: int, dp_rank: int) -> float:
        """Recorded seconds from a replica's first forward to its last backward pass."""
        return self._span_s((self.step == step) & (self.dp_rank == dp_rank) & np.isin(self.operation, COMPUTE))

    def _layer_and_head_s(self, kind: str) -> tuple[float, float]:
        mine = (self.operation == kind) & np.isin(self.step, self.steps)
        last = self.stage == self.topology.pipeline_size - 1
        layer = self._median_s(mine & (self.stage > 0) & ~last) / RECORDED[1]
        return layer, self._median_s(mine & last) - RECORDED[-1] * layer

    def _parameters_s(self, kind: str) -> np.ndarray:
        """Median seconds of an operation on each rank's parameters, shape [PP]."""
        mine = (self.operation == kind) & np.isin(self.step, self.steps)
        return np.array([self._median_s(mine & (self.stage == stage)) for stage in range(len(RECORDED))])

    def _median_s(self, mine: np.ndarray) -> float:
        return float(np.median((self.end_s - self.start_s)[mine]))

    def _span_s(self, mine: np.ndarray) -> float:
        return float(self.end_s[mine].max() - self.start_s[mine].min())


def read_trace(folder: Path | None = None) -> Trace:
    """Read trace ST.

    Args:
        folder: of the public data; None takes ``data_folder()``.

    Raises:
        BalanceError: the files are not there or are no such trace, or pyarrow is not installed.
    """
    folder = (folder or data_folder()) / "straggler-traces"
    file, meta = folder / "trace-ST.parquet", folder / "meta-ST.yaml"
    for needed in (file, meta):
        if not needed.is_file():
            raise BalanceError(f"no file {needed}; MEGATRON_BALANCE_DATA names the folder that has straggler-traces")
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise BalanceError(f"{file} needs pyarrow, which the extra 'trace' installs ({error})") from error
    try:
        topology = Topology(int(yaml.safe_load(meta.read_text(encoding="utf-8"))["pp_size"]), NUM_MICROBATCHES)
        table = parquet.read_table(file)
        columns = {
            name: table[name].to_numpy() for name in ("step", "dp_rank", "stage", "mb_id", "start_ts", "duration")
        }
        operation = np.array(table["optype"].to_pylist())
    except (ArrowException, KeyError, OSError, TypeError, ValueError, yaml.YAMLError) as error:
        raise BalanceError(f"{file} with {meta.name} is no trace: {error}") from error
    start_s, duration_s = (columns[name].astype(np.float64) for name in ("start_ts", "duration"))
    return Trace(
        topology,
        operation,
        step=columns["step"],
        dp_rank=columns["dp_rank"],
        stage=columns["stage"],
        microbatch=columns["mb_id"],
        start_s=start_s,
        end_s=start_s + duration_s,
    )
