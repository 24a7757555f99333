"""Choosing the split: the one whose simulated step is shortest, and among near-equal ones the most robust.

Deterministic: no clock, no shared random state, ties broken by the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_balance.costs.chain import ChainCosts
from megatron_balance.kernels import Problem, anneal, judge_all
from megatron_balance.pipeline.bound import OpenSplits, interleaved_bound_s, smallest_floor, stage_floors
from megatron_balance.pipeline.chain import end_costs, least_layers, prefix_costs, uniform_layers
from megatron_balance.pipeline.memory import MemoryLimit
from megatron_balance.pipeline.starts import starting_splits
from megatron_balance.schedule.simulate import Simulator

# What the head costs is the least certain of all costs. Among splits within NEAR of the shortest step the one is taken
# whose step, over that of an even split, is best in the worst case of HEAD_SCALES times the head's cost.
NEAR = 1e-3
HEAD_SCALES = (1.0, 0.8, 1.2)
_TIE_WEIGHT = 1e-5  # far below NEAR: decides between splits that the simulation finds equal

_THRESHOLDS = (0.0, 0.003, 0.01, 0.03, 0.1)
_ROUND_EVALUATIONS = 10_000
_ROUND_OPERATIONS = 50_000_000  # about 0.2 s
_MOST_OPEN_SPLITS = 20_000
_COARSE_OPERATIONS = 20_000  # of a step; longer steps are first searched with fewer micro-batches


@dataclass(frozen=True)
class Split:
    """The layers of each stage that the search chose.

    Attributes:
        layers: in the order in which data passes the stages.
        mtp_stage: stage of multi-token prediction; the last where there is none.
        bound_s: seconds that a step, the longest rank's update included, takes at least with any split.
        proven: no split is faster by more than NEAR, as ``bound_s`` shows.
    """

    layers: tuple[int, ...]
    mtp_stage: int
    bound_s: float
    proven: bool


def find_split(
    costs: ChainCosts,
    simulator: Simulator,
    *,
    memory: MemoryLimit | None = None,
    allow_empty: bool = False,
    mtp_stages: Sequence[int] | None = None,
    starts: Sequence[Sequence[int]] = (),
    say: Callable[[str], None] = lambda text: None,
) -> Split:
    """The split with the shortest simulated step, of those that fit the memory.

    It is never slower than the uniform split where that is legal.

    Args:
        costs: of the elements.
        simulator: of the schedule.
        memory: what a rank may occupy; None is no limit.
        allow_empty: whether stages between the first and the last may hold no layer.
        mtp_stages: stages in which multi-token prediction may stand; None is the last only.
        starts: more splits to begin from, such as the user's own layout.
        say: told what goes on, a line at a time.

    Raises:
        BalanceError: more stages than elements, or no split fits the memory.
    """
    nominal = _problem(costs, simulator)
    bound_s, suggested = _bound(costs, simulator)
    starts = np.vstack([starting_splits(costs, simulator.topology), suggested])
    shortest, shortest_s = _shortest(costs, simulator, starts, bound_s)
    open_splits = _open_splits(costs, simulator, (1 + NEAR) * shortest_s)
    if open_splits is not None:
        shortest_s = bound_s = judge_all(nominal, open_splits).min()
    limit_s = min((1 + NEAR) * shortest_s, _uniform_s(nominal, costs))
    robust = _robust_problem(costs, simulator, limit_s)
    if open_splits is not None:
        chosen = open_splits[judge_all(robust, open_splits).argmin()]
    else:
        chosen, _ = _annealed(robust, shortest, _THRESHOLDS[1::-1])
    bound_s = float(min(bound_s, shortest_s))
    proven = bool(judge_all(nominal, chosen[None])[0] <= bound_s * (1 + NEAR))
    return Split(tuple(chosen.tolist()), simulator.topology.num_stages - 1, bound_s, proven)


def _problem(costs: ChainCosts, simulator: Simulator) -> Problem:
    """The problem whose worth is the step itself."""
    stages = simulator.topology.num_stages
    return Problem(
        program=simulator.program,
        p2p_s=simulator.p2p_s,
        before=prefix_costs(costs),
        ends=end_costs(costs, stages)[None],
        weights=np.ones(1),
        limit_s=np.inf,
        tie_weight=0.0,
        least=least_layers(len(costs.layers), stages),
        equal_layers=len(set(costs.layers)) == 1,
        ranks=simulator.topology.pipeline_size,
    )


def _robust_problem(costs: ChainCosts, simulator: Simulator, limit_s: float) -> Problem:
    """The problem of the worst case over HEAD_SCALES, each weighed by an even split's step, within ``limit_s``."""
    scaled = [replace(costs, head=costs.head * scale) for scale in HEAD_SCALES]
    return _problem(costs, simulator)._replace(
        ends=np.stack([end_costs(variant, simulator.topology.num_stages) for variant in scaled]),
        weights=np.array([costs.total.total_s / variant.total.total_s for variant in scaled]),
        limit_s=limit_s,
        tie_weight=_TIE_WEIGHT,
    )


def _bound(costs: ChainCosts, simulator: Simulator) -> tuple[float, np.ndarray]:
    """Seconds that every split's step takes at least, and the splits [count, stages] that this suggests."""
    if simulator.topology.virtual_size > 1:
        bound_s = interleaved_bound_s(costs, simulator.topology, simulator.p2p_s)
        return bound_s, np.empty((0, simulator.topology.num_stages), dtype=np.int64)
    bound_s, layers = smallest_floor(stage_floors(costs, simulator.topology, simulator.p2p_s))
    return bound_s, layers[None]


def _shortest(costs: ChainCosts, simulator: Simulator, splits: np.ndarray, bound_s: float) -> tuple[np.ndarray, float]:
    """The best split that annealing finds from the best of ``splits``, and its step."""
    nominal = _problem(costs, simulator)
    steps = judge_all(nominal, splits)
    if steps.min() <= bound_s * (1 + 1e-9):
        return splits[steps.argmin()], float(steps.min())
    coarse = _coarse(simulator)
    if coarse is not simulator:
        problem = _problem(costs, coarse)
        start = splits[judge_all(problem, splits).argmin()]
        splits = np.vstack([splits, _annealed(problem, start, _THRESHOLDS)[0]])
        steps = judge_all(nominal, splits)
    return _annealed(nominal, splits[steps.argmin()], _THRESHOLDS)


def _coarse(simulator: Simulator) -> Simulator:
    """The same pipeline with so few groups of micro-batches that a step has about _COARSE_OPERATIONS, at least two."""
    topology = simulator.topology
    group = topology.group_size
    groups, remainder = divmod(topology.num_microbatches, group)
    kept = max(2, _COARSE_OPERATIONS // (2 * topology.num_stages * group))
    if kept >= groups:
        return simulator
    return Simulator(replace(topology, num_microbatches=kept * group + remainder), simulator.p2p_s)


def _open_splits(costs: ChainCosts, simulator: Simulator, cap_s: float) -> np.ndarray | None:
    """All splits [count, stages] that may take no longer than ``cap_s``; None where they are too many to simulate."""
    num_layers, topology = len(costs.layers), simulator.topology
    most = min(_MOST_OPEN_SPLITS, 2 * _ROUND_OPERATIONS // simulator.program.cost.size)
    if topology.virtual_size > 1 and math.comb(num_layers + 1, topology.num_stages - 1) > most:
        return None
    splits = OpenSplits.under(stage_floors(costs, topology, simulator.p2p_s), cap_s)
    return splits.enumerate() if splits.count <= most else None


def _uniform_s(nominal: Problem, costs: ChainCosts) -> float:
    """Seconds of a step with the uniform split; infinite where it is not legal."""
    uniform = uniform_layers(len(costs.layers), nominal.least.size)
    return np.inf if uniform is None else float(judge_all(nominal, np.array([uniform]))[0])


def _annealed(problem: Problem, layers: np.ndarray, thresholds: Sequence[float]) -> tuple[np.ndarray, float]:
    """The best split that rounds of annealing find, each of bounded work and from where the one before ended."""
    operations = problem.program.cost.size * problem.weights.size
    evaluations = max(min(_ROUND_EVALUATIONS, _ROUND_OPERATIONS // operations), 1)
    worth = np.inf
    for threshold in thresholds:
        layers, worth = anneal(problem, layers, threshold, evaluations)
    return layers, worth
