"""What is searched: the splits of a job with multi-token prediction in one stage, as the kernels want them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_balance.costs.chain import ChainCosts
from megatron_balance.costs.memory import ChainMemory, ElementMemory
from megatron_balance.kernels import Floors, Problem, Room, peaks_of
from megatron_balance.pipeline.chain import end_costs, end_updates, layer_limits, prefix_costs, prefix_updates
from megatron_balance.pipeline.memory import MemoryLimit
from megatron_balance.schedule.in_flight import in_flight
from megatron_balance.schedule.simulate import Simulator
from megatron_balance.topology import Topology

_TIE_WEIGHT = 1e-5  # far below what counts: decides between splits that the simulation finds equal


@dataclass(frozen=True)
class Case:
    """The splits of one job with multi-token prediction in one stage.

    Attributes:
        costs: of the elements.
        simulator: of the schedule.
        mtp_stage: the stage of multi-token prediction.
        memory: what a rank may occupy; None is no limit.
        allow_empty: whether stages between the first and the last may hold no layer.
    """

    costs: ChainCosts
    simulator: Simulator
    mtp_stage: int
    memory: MemoryLimit | None = None
    allow_empty: bool = False

    @property
    def topology(self) -> Topology:
        return self.simulator.topology

    @cached_property
    def limits(self) -> tuple[np.ndarray, np.ndarray]:
        """Layers that each stage holds at least and at most, int64 of shape [stages]."""
        return layer_limits(len(self.costs.layers), self.topology.num_stages, self.mtp_stage, self.allow_empty)

    @property
    def is_possible(self) -> bool:
        """Whether some split keeps within the limits of the layers."""
        least, most = self.limits
        return bool((least <= most).all()) and least.sum() <= len(self.costs.layers)

    def admits(self, splits: np.ndarray) -> np.ndarray:
        """Which of the splits [count, stages] keep within the limits of the layers, bool [count]."""
        least, most = self.limits
        return ((splits >= least) & (splits <= most)).all(axis=1)

    def fits(self, split: np.ndarray) -> bool:
        """Whether a split [stages] keeps within the memory."""
        return bool(peaks_of(self.problem, split).max() <= self.problem.room.limit_bytes * (1 + 1e-12))

    @cached_property
    def problem(self) -> Problem:
        """The problem whose worth is the step itself."""
        least, most = self.limits
        stages = self.topology.num_stages
        return Problem(
            program=self.simulator.program,
            p2p_s=self.simulator.p2p_s,
            before=prefix_costs(self.costs),
            ends=end_costs(self.costs, stages, self.mtp_stage)[None],
            weights=np.ones(1),
            updates=prefix_updates(self.costs),
            end_updates=end_updates(self.costs, stages, self.mtp_stage),
            limit_s=np.inf,
            tie_weight=0.0,
            least=least,
            most=most,
            equal_layers=len(set(self.costs.layers)) == 1,
            ranks=self.topology.pipeline_size,
            room=_room(self.memory, self.topology, len(self.costs.layers), self.mtp_stage),
        )

    def robust(self, head_scales: Sequence[float], limit_s: float) -> Problem:
        """The problem of the worst case over ``head_scales``, each weighed by an even split's step, within ``limit_s``.

        Scale 1 comes first. The head's update is what its parameters make it, whatever its passes take.
        """
        scaled = [replace(self.costs, head=self.costs.head * scale) for scale in head_scales]
        stages = self.topology.num_stages
        return self.problem._replace(
            ends=np.stack([end_costs(variant, stages, self.mtp_stage) for variant in scaled]),
            weights=np.array([self.costs.total.total_s / variant.total.total_s for variant in scaled]),
            limit_s=limit_s,
            tie_weight=_TIE_WEIGHT,
        )

    @cached_property
    def floors(self) -> Floors:
        """What the floors of the stages are made of."""
        topology, stages = self.topology, self.topology.num_stages
        ends = end_costs(self.costs, stages, self.mtp_stage).sum(axis=0)
        above = np.cumsum(ends) - ends
        ways = 2 * np.arange(stages) * self.simulator.p2p_s
        return Floors(
            microbatches=topology.num_microbatches,
            above=above + ways,
            behind=ends.sum() - above - ends + ways[::-1],
            later=np.minimum(stages - 1 - np.arange(stages), topology.num_microbatches - 1),
            interleaved=topology.virtual_size > 1,
        )


def _room(memory: MemoryLimit | None, topology: Topology, num_layers: int, mtp_stage: int) -> Room:
    if memory is None:
        nothing = ElementMemory()
        memory = MemoryLimit(ChainMemory(nothing, (nothing,) * num_layers, nothing, nothing), np.inf)
        flights = (np.zeros((1, topology.virtual_size)),) * topology.pipeline_size
    else:
        flights = in_flight(topology)
    chain, stages = memory.chain, topology.num_stages
    ends, working = np.zeros((2, stages)), np.zeros(stages)
    for stage, element in ((0, chain.embedding), (mtp_stage, chain.mtp), (stages - 1, chain.head)):
        ends[:, stage] += element.state_bytes, element.activation_bytes
        working[stage] = max(working[stage], element.working_bytes)
    held = [(layer.state_bytes, layer.activation_bytes) for layer in chain.layers]
    return Room(
        limit_bytes=float(memory.limit_bytes),
        before=np.concatenate([np.zeros((2, 1)), np.cumsum(held, axis=0).T], axis=1),
        ends=ends,
        working=np.array([float(layer.working_bytes) for layer in chain.layers]),
        end_working=working,
        flights=np.concatenate(flights).astype(np.float64),
        first_flight=np.cumsum([0, *(len(moments) for moments in flights)]),
    )
