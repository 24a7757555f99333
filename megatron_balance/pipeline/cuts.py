"""A bound by cutting planes: no split is faster than the longest of the paths known so far.

The length of a path through a step's operations is linear in the stages' seconds (how often it runs each stage's passes),
and those in the numbers of layers, of each block of equal layers, that the stages hold. So the splits under the known paths
are a mixed-integer linear program. Its relaxation proposes where to look for more paths; its optimum, or what a limited
tree search proves, is a bound on every split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from megatron_balance.kernels import find_paths
from megatron_balance.pipeline.case import Case

_MOST_BLOCKS = 4  # in model order; with more of them their order is left out of account
_MOST_KINDS = 12
_NEAR_CRITICAL = 0.02  # share of the step that a path may lack to become a cut
_CLOSED = 1e-6
_TURNS, _TREES, _NODES = 60, 4, 2000
_STEPS_INWARD = (1.0, 0.3)  # where between the best point known and the relaxation's optimum paths are looked for


@dataclass(frozen=True)
class _Blocks:
    """Runs of equal layers; or all layers of a kind together, as if their order were free.

    Attributes:
        counts: layers of each block, [B].
        seconds: forward and backward seconds of a layer of each block, [2, B].
        updates: seconds of its update, [B].
        held: its bytes of state and activations, [2, B].
        working_bytes: the least that any layer takes while it runs.
        ordered: whether a stage must have the blocks in turn.
    """

    counts: np.ndarray
    seconds: np.ndarray
    updates: np.ndarray
    held: np.ndarray
    working_bytes: float
    ordered: bool

    @classmethod
    def of(cls, case: Case) -> _Blocks | None:
        """The blocks of the chain; None where it has too many kinds of layers."""
        memories = case.memory.chain.layers if case.memory is not None else (None,) * len(case.costs.layers)
        layers = list(zip(case.costs.layers, memories, strict=True))
        runs = [(kind, len(list(run))) for kind, run in groupby(layers)]
        ordered = len(runs) <= _MOST_BLOCKS
        if not ordered:
            runs = [(kind, layers.count(kind)) for kind in dict.fromkeys(layers)]
            if len(runs) > _MOST_KINDS:
                return None
        costs, held = [kind[0] for kind, _ in runs], [kind[1] for kind, _ in runs if kind[1] is not None]
        return cls(
            counts=np.array([count for _, count in runs]),
            seconds=np.array([[cost.forward_s for cost in costs], [cost.backward_s for cost in costs]]),
            updates=np.array([cost.update_s for cost in costs]),
            held=np.array([[one.state_bytes for one in held], [one.activation_bytes for one in held]]),
            working_bytes=min((one.working_bytes for one in held), default=0.0),
            ordered=ordered,
        )


class CutBound:
    """The program: variables are the pipeline's seconds, the longest update's, and the layers of each block in each stage.

    Where the blocks have an order there is a switch more for each stage and block but the last: whether the block's layers
    are all in this stage or before it.
    """

    def __init__(self, case: Case, blocks: _Blocks) -> None:
        self.case, self.blocks = case, blocks
        problem = case.problem
        self.stages, self.kinds = problem.least.size, blocks.counts.size
        self.num_layers_at = slice(2, 2 + self.stages * self.kinds)
        switches = self.stages * (self.kinds - 1) if blocks.ordered else 0
        self.size = self.num_layers_at.stop + switches
        self.unit_s = case.costs.total.total_s  # seconds are in these, to keep the figures near one
        self.rows: list[np.ndarray] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.cuts: list[np.ndarray] = []
        self.cut_floors: list[float] = []
        self._seen: set[bytes] = set()
        self._add_layers()
        self._add_updates()
        self._add_memory()
        if blocks.ordered:
            self._add_order()

    # --- constraints

    def _row(self, lower: float, upper: float) -> tuple[np.ndarray, np.ndarray]:
        """A new constraint: its coefficients, and those of the layers as [stages, blocks], both to be filled."""
        row = np.zeros(self.size)
        self.rows.append(row)
        self.lower.append(lower)
        self.upper.append(upper)
        return row, row[self.num_layers_at].reshape(self.stages, self.kinds)

    def _add_layers(self) -> None:
        for block, count in enumerate(self.blocks.counts):
            self._row(count, count)[1][:, block] = 1.0
        problem = self.case.problem
        for stage in range(self.stages):
            self._row(problem.least[stage], problem.most[stage])[1][stage] = 1.0

    def _add_updates(self) -> None:
        problem = self.case.problem
        for rank in range(problem.ranks):
            row, layers = self._row(-np.inf, -problem.end_updates[rank :: problem.ranks].sum() / self.unit_s)
            row[1] = -1.0
            layers[rank :: problem.ranks] = self.blocks.updates / self.unit_s

    def _add_memory(self) -> None:
        problem, room = self.case.problem, self.case.problem.room
        if np.isinf(room.limit_bytes):
            return
        for rank in range(problem.ranks):
            chunks = slice(rank, None, problem.ranks)
            working = max(
                room.end_working[chunks].max(), self.blocks.working_bytes if problem.least[chunks].any() else 0.0
            )
            for flights in room.flights[room.first_flight[rank] : room.first_flight[rank + 1]]:
                fixed = room.ends[0, chunks].sum() + flights @ room.ends[1, chunks] + working
                _, layers = self._row(-np.inf, 1.0 + 1e-9 - fixed / room.limit_bytes)
                held = self.blocks.held / room.limit_bytes
                layers[chunks] = held[0] + flights[:, None] * held[1]

    def _add_order(self) -> None:
        counts = self.blocks.counts
        for stage in range(self.stages):
            for block in range(self.kinds - 1):
                switch = self.num_layers_at.stop + stage * (self.kinds - 1) + block
                row, layers = self._row(0.0, np.inf)
                layers[: stage + 1, block], row[switch] = 1.0, -counts[block]
                row, layers = self._row(-np.inf, 0.0)
                layers[stage, block + 1], row[switch] = 1.0, -counts[block + 1]

    # --- cuts

    def seconds_of(self, layers: np.ndarray) -> np.ndarray:
        """Seconds of each stage's passes, [2 * stages], from the layers [stages, blocks]."""
        return (self.blocks.seconds @ layers.T + self.case.problem.ends[0]).ravel()

    def look(self, layers: np.ndarray) -> float:
        """Add the long paths of this point, layers [stages, blocks], and return its step."""
        problem = self.case.problem
        durations = self.seconds_of(layers)
        counts = np.empty((self.stages, 2 * self.stages))
        pipeline_s, lengths = find_paths(problem, durations, counts)
        for stage in np.flatnonzero(lengths >= (1 - _NEAR_CRITICAL) * pipeline_s):
            path = counts[stage]
            key = path.tobytes()
            if key in self._seen:
                continue
            self._seen.add(key)
            waits_s = lengths[stage] - path @ durations
            passes = path.reshape(2, self.stages)
            cut = np.zeros(self.size)
            cut[0] = 1.0
            cut[self.num_layers_at] = -(passes.T @ self.blocks.seconds).ravel() / self.unit_s
            self.cuts.append(cut)
            self.cut_floors.append((waits_s + path @ problem.ends[0].ravel()) / self.unit_s)
        updates = (layers @ self.blocks.updates + problem.end_updates).reshape(-1, problem.ranks).sum(axis=0)
        return pipeline_s + updates.max()

    def layers_of(self, split: np.ndarray) -> np.ndarray:
        """Layers of each block in each stage, [stages, blocks]."""
        stops, ends = np.cumsum(split)[:, None], np.cumsum(self.blocks.counts)
        return np.maximum(np.minimum(stops, ends) - np.maximum(stops - split[:, None], ends - self.blocks.counts), 0)

    # --- solving

    def solve(self, integral: bool, nodes: int = 0) -> tuple[float, np.ndarray | None]:
        """A bound in seconds, and the layers [stages, blocks] found, if any; infinite where nothing fits."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        cuts = [*self.cuts]
        constraints = LinearConstraint(
            csr_array(np.vstack([*self.rows, *cuts])),
            np.array([*self.lower, *self.cut_floors]),
            np.array([*self.upper, *(np.inf for _ in cuts)]),
        )
        upper = np.full(self.size, np.inf)
        upper[self.num_layers_at.stop :] = 1.0
        cost = np.zeros(self.size)
        cost[:2] = 1.0
        kinds = np.zeros(self.size)
        kinds[2:] = integral
        options = {"mip_rel_gap": 1e-6, "node_limit": nodes} if integral else {}
        found = milp(cost, integrality=kinds, bounds=Bounds(0.0, upper), constraints=constraints, options=options)
        if found.status == 2:
            return np.inf, None
        bound = found.mip_dual_bound if integral else found.fun
        layers = None if found.x is None else found.x[self.num_layers_at].reshape(self.stages, self.kinds)
        return (-np.inf if bound is None else bound * self.unit_s), layers


def fitting_split(case: Case) -> np.ndarray | None:
    """A split that keeps within the limits, memory included; None where there is none, or none can be told."""
    blocks = _Blocks.of(case)
    if blocks is None:
        return None
    _, layers = CutBound(case, blocks).solve(integral=True, nodes=_NODES)
    return None if layers is None else np.rint(layers.sum(axis=1)).astype(np.int64)


def cut_bound(case: Case, best_s: float, best: np.ndarray | None) -> Iterator[tuple[float, np.ndarray]]:
    """Ever better bounds on the step in seconds, each with splits [count, stages] that were met on the way.

    Args:
        case: whose splits are bounded.
        best_s: seconds of the best split known, of this case or another; the search for cuts ends when the bound is there.
        best: the best split known of this case.
    """
    blocks = _Blocks.of(case)
    if blocks is None:
        return
    program = CutBound(case, blocks)
    inner, inner_s = None, np.inf
    if best is not None:
        inner = program.layers_of(best).astype(float)
        inner_s = program.look(inner)
    nothing = np.empty((0, program.stages), dtype=np.int64)
    bound_s = -np.inf
    for turn in range(_TURNS):
        bound_s, outer = program.solve(integral=False)
        if outer is None or bound_s >= best_s * (1 - _CLOSED):
            break
        if inner is None:
            inner = outer
        for share in _STEPS_INWARD:
            point = inner + share * (outer - inner)
            step_s = program.look(point)
            if step_s < inner_s:
                inner, inner_s = point, step_s
        if inner_s <= bound_s * (1 + 1e-4):
            break
        if turn % 10 == 9:
            yield bound_s, nothing
    yield bound_s, nothing
    if np.isinf(bound_s):
        return
    for _ in range(_TREES):
        if bound_s >= best_s * (1 - _CLOSED):
            return
        tree_s, layers = program.solve(integral=True, nodes=_NODES)
        bound_s = max(bound_s, tree_s)
        if layers is None:
            yield bound_s, nothing
            return
        layers = np.rint(layers)
        split = layers.sum(axis=1).astype(np.int64)
        yield bound_s, split[None]
        step_s = program.look(program.layers_of(split).astype(float))
        best_s = min(best_s, step_s)
