"""A bound by cutting planes: no split is faster than the longest of the paths known so far.

The length of a path through a step's operations is linear in the stages' seconds (how often it runs each stage's passes),
and those in the numbers of layers, of each block of equal layers, that the stages hold. So the splits under the known paths
are a mixed-integer linear program. What a limited tree search proves about it is a bound on every split, and the split that
it finds, of those near the best known, shows more paths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from megatron_balance.kernels import find_paths
from megatron_balance.pipeline.case import Case

_MOST_BLOCKS = 4  # in model order; with more of them their order is left out of account
_MOST_KINDS = 12
_PATHS_A_LOOK = 12
_NEAR_CRITICAL = 0.02  # share of the step that a path may lack to become a cut
_TREES, _IDLE_TREES, _RISE = 24, 4, 2e-5  # the search ends when so many trees did not raise the bound by that share
_FIRST_NODES, _MOST_NODES = 100, 2000  # of a tree; doubled whenever a tree proves less than is known
CUT_WORK = 1e8  # of all trees together: nodes times rows times variables, in which a tree's root counts as _ROOT_NODES
_ROOT_NODES = 50
_CLOSED = 1e-6  # share of a step by which a better split has to be better
_CLOSE_ENOUGH = 2e-4
_SCALE = 100.0  # of a step in the program, large enough that its tolerances (1e-7) do not matter
_DISTANCE_WEIGHT = 5e-5  # of a step that the farthest split's distance counts, and that is taken off the bound again
_INFEASIBLE = 2  # milp's status


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
    """The program. Its variables, in turn: the pipeline's seconds, the longest update's, the layers of each block in each
    stage; where the blocks have an order, a switch for each stage and block but the last (the block's layers are all in this
    stage or before it); and how many layers each stage has more or fewer than a split that is given.
    """

    def __init__(self, case: Case, blocks: _Blocks, unit_s: float) -> None:
        """Start with what the splits have to keep to, and the paths of ``rank_bound_s``.

        Args:
            case: whose splits are meant.
            blocks: of its layers.
            unit_s: in which the program has its seconds.
        """
        self.case, self.blocks, self.unit_s = case, blocks, unit_s
        self.stages, self.kinds = case.problem.least.size, blocks.counts.size
        switches = self.stages * (self.kinds - 1) if blocks.ordered else 0
        self.at_layers = slice(2, 2 + self.stages * self.kinds)
        self.at_switches = slice(self.at_layers.stop, self.at_layers.stop + switches)
        self.at_distances = slice(self.at_switches.stop, self.at_switches.stop + self.stages)
        self.size = self.at_distances.stop
        self.rows: list[np.ndarray] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self._seen: set[bytes] = set()
        self._add_distances()
        self._add_layers()
        self._add_updates()
        self._add_order()
        self._add_rank_paths()

    # --- constraints

    def _row(self, lower: float, upper: float) -> tuple[np.ndarray, np.ndarray]:
        """A new constraint: its coefficients, and those of the layers as [stages, blocks], both to be filled."""
        row = np.zeros(self.size)
        self.rows.append(row)
        self.lower.append(lower)
        self.upper.append(upper)
        return row, row[self.at_layers].reshape(self.stages, self.kinds)

    def _add_distances(self) -> None:
        """The first rows: whole step, then two a stage; ``solve`` sets their limits."""
        self._row(0.0, np.inf)[0][:2] = 1.0
        for sign in (-1.0, 1.0):
            for stage in range(self.stages):
                row, layers = self._row(0.0, np.inf)
                layers[stage], row[self.at_distances.start + stage] = sign, 1.0

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

    def add_memory(self, split: np.ndarray) -> bool:
        """Add the limit of each rank at the moment that is its worst with this split, [stages]; False if all are there."""
        problem, room = self.case.problem, self.case.problem.room
        if np.isinf(room.limit_bytes):
            return False
        held = self.blocks.held / room.limit_bytes
        activations = self.layers_of(split) @ self.blocks.held[1] + room.ends[1]
        added = False
        for rank in range(problem.ranks):
            chunks = slice(rank, None, problem.ranks)
            moments = room.flights[room.first_flight[rank] : room.first_flight[rank + 1]]
            flights = moments[np.argmax(moments @ activations[chunks])]
            if (key := bytes([*rank.to_bytes(4, "little"), *flights.tobytes()])) in self._seen:
                continue
            self._seen.add(key)
            certain = self.blocks.working_bytes if problem.least[chunks].any() else 0.0
            working = max(room.end_working[chunks].max(), certain)
            fixed = room.ends[0, chunks].sum() + flights @ room.ends[1, chunks] + working
            _, layers = self._row(-np.inf, 1.0 + 1e-9 - fixed / room.limit_bytes)
            layers[chunks] = held[0] + flights[:, None] * held[1]
            added = True
        return added

    def _add_order(self) -> None:
        if not self.blocks.ordered:
            return
        counts = self.blocks.counts
        for stage in range(self.stages):
            for block in range(self.kinds - 1):
                switch = self.at_switches.start + stage * (self.kinds - 1) + block
                row, layers = self._row(0.0, np.inf)
                layers[: stage + 1, block], row[switch] = 1.0, -counts[block]
                row, layers = self._row(-np.inf, 0.0)
                layers[stage, block + 1], row[switch] = 1.0, -counts[block + 1]

    def _add_rank_paths(self) -> None:
        """Down to a rank, all its passes, and up from it."""
        problem, ranks = self.case.problem, self.case.problem.ranks
        for rank in range(ranks):
            passes = np.zeros((2, self.stages))
            passes[:, :rank] = 1.0
            passes[:, rank::ranks] = self.case.topology.num_microbatches
            self._add_path(passes.ravel(), 2 * rank * problem.p2p_s)

    def add_rank_counts(self, best_s: float) -> None:
        """The most layers that a rank may have before its passes alone take longer than the best step known."""
        problem, ranks, microbatches = self.case.problem, self.case.problem.ranks, self.case.topology.num_microbatches
        cheapest_s = self.blocks.seconds.sum(axis=0).min()
        ends_s = problem.ends[0].sum(axis=0)
        way_s = np.cumsum(ends_s + problem.least * cheapest_s)
        for rank in range(ranks):
            chunks = slice(rank, None, ranks)
            taken_s = microbatches * ends_s[chunks].sum() + problem.end_updates[chunks].sum()
            taken_s += way_s[rank - 1] + 2 * rank * problem.p2p_s if rank else 0.0
            fitting = (best_s - taken_s) / (microbatches * cheapest_s + self.blocks.updates.min())
            self._row(-np.inf, np.floor(fitting * (1 + _CLOSED)))[1][chunks] = 1.0

    def _add_path(self, passes: np.ndarray, waits_s: float) -> bool:
        """Add the path that runs these passes, [2 * stages], with so many seconds of transfers; False if it is there."""
        if (key := passes.tobytes()) in self._seen:
            return False
        self._seen.add(key)
        fixed_s = waits_s + passes @ self.case.problem.ends[0].ravel()
        row, layers = self._row(fixed_s / self.unit_s, np.inf)
        row[0] = 1.0
        layers[:] = -(passes.reshape(2, self.stages).T @ self.blocks.seconds) / self.unit_s
        return True

    # --- points

    def seconds_of(self, layers: np.ndarray) -> np.ndarray:
        """Seconds of each stage's passes, [2 * stages], from the layers [stages, blocks]."""
        return (self.blocks.seconds @ layers.T + self.case.problem.ends[0]).ravel()

    def look(self, split: np.ndarray) -> float:
        """Add the longest paths of a split, [stages], and return its step."""
        problem, layers = self.case.problem, self.layers_of(split)
        durations = self.seconds_of(layers)
        paths = np.empty((self.stages, 2 * self.stages))
        pipeline_s, lengths = find_paths(problem, durations, paths)
        added = 0
        for stage in np.argsort(-lengths, kind="stable"):
            if added == _PATHS_A_LOOK or lengths[stage] < (1 - _NEAR_CRITICAL) * pipeline_s:
                break
            added += self._add_path(paths[stage], lengths[stage] - paths[stage] @ durations)
        updates = (layers @ self.blocks.updates + problem.end_updates).reshape(-1, problem.ranks).sum(axis=0)
        return pipeline_s + updates.max()

    def layers_of(self, split: np.ndarray) -> np.ndarray:
        """Layers of each block in each stage, [stages, blocks]."""
        stops, ends = np.cumsum(split)[:, None], np.cumsum(self.blocks.counts)
        return np.maximum(np.minimum(stops, ends) - np.maximum(stops - split[:, None], ends - self.blocks.counts), 0)

    # --- solving

    def solve(self, near: np.ndarray, nodes: int, least_s: float = 0.0, most_s: float = np.inf) -> Tree:
        """Search a tree of so many nodes for a split, of those near the one given, [stages]; steps limited to what is known."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        count = int(self.blocks.counts.sum())
        self.lower[0], self.upper[0] = least_s / self.unit_s, most_s / self.unit_s
        self.lower[1 : 1 + 2 * self.stages] = [*-near, *near]
        most = np.full(self.size, np.inf)
        most[self.at_switches] = 1.0
        cost, integral = np.zeros(self.size), np.zeros(self.size)
        cost[:2] = 1.0
        cost[self.at_distances] = _SCALE * _DISTANCE_WEIGHT / (2 * count)
        integral[self.at_layers.start : self.at_switches.stop] = 1
        found = milp(
            cost,
            integrality=integral,
            bounds=Bounds(0.0, most),
            constraints=LinearConstraint(csr_array(np.array(self.rows)), self.lower, self.upper),
            options={"mip_rel_gap": _CLOSED, "node_limit": nodes},
        )
        work = (_ROOT_NODES + (found.mip_node_count or 0)) * len(self.rows) * self.size
        if found.status == _INFEASIBLE:
            return Tree(np.inf, None, work)
        bound = -np.inf if found.mip_dual_bound is None else found.mip_dual_bound - _SCALE * _DISTANCE_WEIGHT
        if found.x is None:
            return Tree(bound * self.unit_s, None, work)
        layers = np.rint(found.x[self.at_layers]).reshape(self.stages, self.kinds)
        return Tree(bound * self.unit_s, layers.sum(axis=1).astype(np.int64), work)


@dataclass(frozen=True)
class Tree:
    """What a tree search gave.

    Attributes:
        bound_s: seconds that a step takes at least, or more than was allowed; infinite where nothing fits.
        split: the best found, int64 [stages]; None where none was.
        work: how much it was, in no particular unit.
    """

    bound_s: float
    split: np.ndarray | None
    work: float


def fitting_split(case: Case, near: np.ndarray) -> tuple[bool, np.ndarray | None]:
    """Whether some split may keep within the limits, memory included, and one that does as far as blocks of layers tell."""
    blocks = _Blocks.of(case)
    if blocks is None:
        return True, None
    possible, split = _within_memory(case, blocks, near)
    if split is not None and not case.fits(split):
        # Where a rank may be empty, the program leaves out what a layer takes while it runs.
        tighter = replace(case.memory, limit_bytes=case.memory.limit_bytes - case.problem.room.working.max())
        _, other = _within_memory(replace(case, memory=tighter), blocks, near)
        split = split if other is None else other
    return possible, split


def _within_memory(case: Case, blocks: _Blocks, near: np.ndarray) -> tuple[bool, np.ndarray | None]:
    program = CutBound(case, blocks, unit_s=case.costs.total.total_s)
    split = near
    while program.add_memory(split):
        tree = program.solve(near, _MOST_NODES)
        if tree.split is None:
            return tree.bound_s != np.inf, None
        split = tree.split
    return True, split


class CutSearch:
    """Ever better bounds on the step of one case, a tree at a time, so that several cases can share what work there is.

    Attributes:
        bound_s: seconds that a step of this case takes at least, or those of the best step known.
        work: of all trees so far, in the unit of ``CUT_WORK``.
        is_over: there is nothing to prune, or nothing more to learn.
    """

    def __init__(self, case: Case, bound_s: float, best_s: float, near: np.ndarray) -> None:
        """Start from what is known.

        Args:
            case: whose splits are bounded.
            bound_s: the bound known.
            best_s: seconds of the best split known, of this case or another.
            near: a good split of this case, [stages].
        """
        self.case, self.bound_s, self.work = case, bound_s, 0.0
        self._near, self._near_s = near, np.inf
        self._nodes, self._idle, self._trees = _FIRST_NODES, 0, 0
        blocks = _Blocks.of(case)
        self.is_over = blocks is None
        if blocks is not None:
            self._program = CutBound(case, blocks, best_s / _SCALE)
            self._program.add_rank_counts(best_s)
            self._near_s = self._program.look(near) if case.fits(near) else np.inf
            self._program.add_memory(near)

    def advance(self, best_s: float, work: float) -> np.ndarray | None:
        """Search one more tree, with about so much work at most, and return the split [stages] that it met, if any.

        Args:
            best_s: seconds of the best split known by now; no more than at the start.
            work: what is left of it.
        """
        program, a_node = self._program, len(self._program.rows) * self._program.size
        nodes = min(self._nodes, int(work / a_node) - _ROOT_NODES)
        if nodes < 1:
            self.is_over = True
            return None
        most_s = best_s * (1 - _CLOSED)
        tree = program.solve(self._near, nodes, self.bound_s, most_s)
        self.work += tree.work
        self._trees += 1
        self._idle = 0 if tree.bound_s > self.bound_s * (1 + _RISE) else self._idle + 1
        if tree.bound_s <= self.bound_s:
            self._nodes = min(2 * self._nodes, _MOST_NODES)
        self.bound_s = max(self.bound_s, min(tree.bound_s, most_s))
        closed = self.bound_s >= best_s * (1 - _CLOSE_ENOUGH)
        self.is_over = closed or self._idle == _IDLE_TREES or self._trees == _TREES
        if tree.split is not None and not self.is_over:
            self._learn(tree.split)
        return tree.split

    def _learn(self, split: np.ndarray) -> None:
        """Take the split's paths for cuts, and look around it if it is the best of this case."""
        step_s = self._program.look(split)
        fits = not self._program.add_memory(split) and self.case.fits(split)
        if fits and step_s < self._near_s:
            self._near, self._near_s = split, step_s
