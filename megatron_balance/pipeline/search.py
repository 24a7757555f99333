"""Choosing the split: the one whose simulated step is shortest, and among near-equal ones the most robust.

Deterministic: no clock, no shared random state, ties broken by the numbers. Where whole layers are bounded by a tree search
(``cuts.py``), a better split that this meets may depend on the version of scipy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_balance.costs.chain import ChainCosts
from megatron_balance.errors import BalanceError, MemoryLack
from megatron_balance.kernels import Problem, anneal, judge_all, lighten, peaks_of
from megatron_balance.pipeline.bound import floor_bound, open_splits
from megatron_balance.pipeline.case import Case
from megatron_balance.pipeline.chain import check_stages
from megatron_balance.pipeline.cuts import CUT_WORK, CutSearch, fitting_split
from megatron_balance.pipeline.memory import MemoryLimit
from megatron_balance.pipeline.starts import megatron_splits, starting_splits
from megatron_balance.schedule.simulate import Simulator

# What the head costs is the least certain of all costs. Among splits within NEAR of the shortest step (half of it where
# that is not nearly proven) the one is taken whose step, over that of an even split, is best in the worst case of HEAD_SCALES
# times the head's cost.
NEAR = 1e-3
HEAD_SCALES = (1.0, 0.8, 1.2)

_HOT = (0.1, 0.03, 0.01, 0.003, 0.0)  # thresholds of annealing, in rounds that coarsen long steps
_COOL = (0.0015, 0.0005)  # then in rounds of the whole step, with each of several streams of proposals
_SEEDS = (10, 20, 30)
_ROBUST = (0.003, 0.0)
_ROUND_EVALUATIONS = 10_000
_ROUND_OPERATIONS = 320_000_000  # about 0.5 s
_COARSE_ROUND = 50_000_000
_MOST_OPEN_SPLITS = 20_000
_COARSE_OPERATIONS = 20_000  # of a step; longer steps are first searched with fewer micro-batches
_MOST_CASES = (
    2  # places of multi-token prediction that are searched in full; together, the others take as long as these
)
_HOPEFUL = 0.03  # share of a step by which a place may be behind the best and still be searched in full
_CLOSED = 1e-9
_WORTH_SAYING = 2e-4  # by how much a bound rises
_GB = 1e9


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


@dataclass
class _Found:
    """The state of the search in one case.

    Attributes:
        case: what is searched.
        starts: splits to begin from, [count, stages]; they need not fit.
        bound_s: seconds that a step takes at least; infinite where no split fits.
        layers: the best split so far, int64 [stages]; None before there is one that fits.
        step_s: its step.
        candidates: all splits [count, stages] that may be near the best; None where they are too many to simulate.
    """

    case: Case
    starts: np.ndarray
    bound_s: float = 0.0
    layers: np.ndarray | None = None
    step_s: float = np.inf
    candidates: np.ndarray | None = None

    def take(self, splits: np.ndarray) -> None:
        """Remember the best of the splits [count, stages], if it is better."""
        if len(splits) == 0:
            return
        steps = judge_all(self.case.problem, splits)
        if steps.min() < self.step_s:
            self.layers, self.step_s = splits[steps.argmin()].copy(), float(steps.min())

    @property
    def is_closed(self) -> bool:
        return self.step_s <= self.bound_s * (1 + _CLOSED)


def find_split(
    costs: ChainCosts,
    simulator: Simulator,
    *,
    memory: MemoryLimit | None = None,
    allow_empty: bool = False,
    mtp_stages: Sequence[int] | None = None,
    starts: Sequence[Sequence[int]] = (),
    say: Callable[[str], None] = lambda text: None,
    sharpens_bound: bool = True,
) -> Split:
    """The split with the shortest simulated step, of those that fit the memory.

    It is never slower than the uniform split and those of ``starts``, where they are legal and fit.

    Args:
        costs: of the elements.
        simulator: of the schedule.
        memory: what a rank may occupy; None is no limit.
        allow_empty: whether stages between the first and the last may hold no layer.
        mtp_stages: stages in which multi-token prediction may stand; None is the last only.
        starts: more splits to begin from, such as the user's own layout.
        say: told what goes on, a line at a time.
        sharpens_bound: whether to spend time on a bound that comes near the step, which may find a better split, too.

    Raises:
        BalanceError: more stages than elements, or no split fits the memory.
    """
    cases = list(_cases(costs, simulator, memory, allow_empty, mtp_stages))
    known = _known_splits(cases[0], starts)
    searched = [_begun(case, known) for case in cases]
    for found in sorted(searched, key=lambda found: found.bound_s):
        if np.isfinite(found.bound_s) and found.bound_s <= min(other.step_s for other in searched):
            _search(found, _COARSE_ROUND * _MOST_CASES // max(_MOST_CASES, len(searched)))
    best_s = min(found.step_s for found in searched)
    for found in sorted(searched, key=lambda found: found.step_s)[:_MOST_CASES]:
        if found.step_s <= (1 + _HOPEFUL) * best_s:
            if len(searched) > _MOST_CASES:
                _search(found, _COARSE_ROUND)
            _refine(found)
    best = min(searched, key=lambda found: found.step_s)
    if best.layers is None:
        raise _no_room(cases, certain=all(np.isinf(found.bound_s) for found in searched))
    say(_progress(best, min(found.bound_s for found in searched)))
    if sharpens_bound:
        best = _raise_bounds(searched, best, say)
    bound_s = min(best.step_s, *(found.bound_s for found in searched))
    known_s = min(_shortest_s(case, known) for case in cases)
    layers, step_s = _most_robust(best, known_s, bound_s)
    return Split(tuple(layers.tolist()), best.case.mtp_stage, float(bound_s), bool(step_s <= bound_s * (1 + NEAR)))


def _cases(
    costs: ChainCosts,
    simulator: Simulator,
    memory: MemoryLimit | None,
    allow_empty: bool,
    mtp_stages: Sequence[int] | None,
) -> Iterator[Case]:
    """One for each possible place of multi-token prediction; where it costs nothing by itself, it stays with the head."""
    topology = simulator.topology
    last = topology.num_stages - 1
    if memory is not None and not memory.limit_bytes > 0:
        raise BalanceError(f"a memory limit of {memory.limit_bytes} bytes leaves no room: give more than 0")
    places = {last} if mtp_stages is None or costs.mtp.total_s == 0 else {*mtp_stages}
    first = last + 1 - topology.pipeline_size
    if not places <= {*range(first, last + 1)}:
        raise BalanceError(
            f"multi-token prediction can stand in stages {first} to {last}, each rank's last, not in {sorted(places)}"
        )
    cases = [Case(costs, simulator, place, memory, allow_empty) for place in sorted(places, reverse=True)]
    possible = [case for case in cases if case.is_possible]
    if not possible:
        check_stages(len(costs.layers), topology.num_stages)
        raise BalanceError(
            f"{len(costs.layers)} layers cannot fill the stages before {sorted(places)}, where multi-token prediction may "
            "stand: let it stand in the last stage"
        )
    yield from possible


def _known_splits(case: Case, starts: Sequence[Sequence[int]]) -> np.ndarray:
    """What the result must not be slower than: Megatron's own splits and those given, int64 [count, stages]."""
    num_layers, stages = len(case.costs.layers), case.topology.num_stages
    for split in starts:
        if len(split) != stages or sum(split) != num_layers or min(split) < 0:
            raise BalanceError(
                f"a split to start from has {sum(split)} layers in {len(split)} stages: {num_layers} in {stages} are needed"
            )
    splits = [*megatron_splits(num_layers, stages), *starts]
    return np.array(splits, dtype=np.int64).reshape(-1, stages)


def _begun(case: Case, known: np.ndarray) -> _Found:
    """The best of the starts, and the bound that floors give."""
    found = _Found(case, starts=np.vstack([starting_splits(case), known[case.admits(known)]]))
    found.take(found.starts)
    found.bound_s, suggested = floor_bound(case, found.step_s)
    if np.isfinite(found.bound_s):
        found.starts = np.vstack([found.starts, suggested])
        found.take(suggested)
    return found


def _search(found: _Found, operations: int) -> None:
    """Try all splits of a case where they are few, and find a good one by annealing, in rounds of so much, where many."""
    case = found.case
    if found.candidates is not None:
        return
    if case.floors.interleaved:
        found.candidates = open_splits(case, np.finfo(float).max, _most_open(case))
    if found.candidates is None and not found.is_closed:
        _anneal_coarsely(found, operations)
    if found.candidates is None and not case.floors.interleaved and found.layers is not None:
        found.candidates = open_splits(case, (1 + NEAR) * found.step_s, _most_open(case))
    if found.candidates is not None:
        found.take(found.candidates)
        found.bound_s = found.step_s


def _most_open(case: Case) -> int:
    return min(_MOST_OPEN_SPLITS, 2 * _COARSE_ROUND // case.problem.program.cost.size)


def _anneal_coarsely(found: _Found, operations: int) -> None:
    """Annealing from the best start, or one that fits the memory as far as can be told."""
    case, start = found.case, found.layers
    if start is None:
        start = _lightest(case, found.starts)
        if not case.fits(start):
            fits, fitting = fitting_split(case, start)
            if not fits:
                found.bound_s = np.inf
                return
            start = start if fitting is None else fitting
    coarse = _coarse(case)
    if coarse is not case:
        splits = np.vstack([found.starts, start[None]])
        steps = judge_all(coarse.problem, splits)
        if np.isfinite(steps.min()):
            start = splits[steps.argmin()]
    found.take(np.stack([start, _annealed(coarse.problem, start, _HOT, operations, seed=0)]))


def _refine(found: _Found) -> None:
    """Annealing of the whole step from the best start, several times: that of coarse steps ends in other valleys."""
    if found.candidates is not None or found.layers is None or found.is_closed:
        return
    problem = found.case.problem
    steps = judge_all(problem, found.starts)
    if np.isfinite(steps.min()):
        start = found.starts[steps.argmin()]
        for seed in _SEEDS:
            found.take(_annealed(problem, start, _COOL, _ROUND_OPERATIONS, seed)[None])
        return
    # Memory keeps all good starts out, so that the way is far: hot rounds of coarse steps, then of the whole step.
    coarse = _coarse(found.case).problem
    for seed in _SEEDS:
        start = _annealed(coarse, found.layers, _HOT, 2 * _COARSE_ROUND, seed)
        found.take(np.stack([start, _annealed(problem, start, _COOL, _ROUND_OPERATIONS // 4, seed)]))


def _lightest(case: Case, splits: np.ndarray) -> np.ndarray:
    """The split whose largest peak is lowest, of what descents from several splits [count, stages] find."""
    lightened = [lighten(case.problem, split) for split in splits[:: max(1, len(splits) // 4)]]
    return min(lightened, key=lambda split: peaks_of(case.problem, split).max())


def _coarse(case: Case) -> Case:
    """The same with so few groups of micro-batches that a step has about _COARSE_OPERATIONS, at least two."""
    topology = case.topology
    group = topology.group_size
    groups, remainder = divmod(topology.num_microbatches, group)
    kept = max(2, _COARSE_OPERATIONS // (2 * topology.num_stages * group))
    if kept >= groups:
        return case
    topology = replace(topology, num_microbatches=kept * group + remainder)
    return replace(case, simulator=Simulator(topology, case.simulator.p2p_s))


def _annealed(
    problem: Problem, layers: np.ndarray, thresholds: Sequence[float], operations: int, seed: int
) -> np.ndarray:
    """The best split that rounds of annealing find, each of about so many operations, from where the one before ended."""
    evaluations = max(min(_ROUND_EVALUATIONS, operations // (problem.program.cost.size * problem.weights.size)), 1)
    for turn, threshold in enumerate(thresholds):
        layers, _ = anneal(problem, layers, threshold, evaluations, seed + turn)
    return layers


def _raise_bounds(searched: list[_Found], best: _Found, say: Callable[[str], None]) -> _Found:
    """Cutting planes, always for the case with the lowest bound, until that is near the best step or the work is spent.

    They may find better splits, too. Cases whose bound is not below the best step cost nothing.
    """
    trees: dict[int, CutSearch] = {}
    said_s, work = 0.0, CUT_WORK
    while True:
        place, lowest = min(enumerate(searched), key=lambda each: each[1].bound_s)
        if lowest.bound_s > said_s * (1 + _WORTH_SAYING):
            say(_progress(best, lowest.bound_s))
            said_s = lowest.bound_s
        if lowest.bound_s * (1 + NEAR / 2) >= best.step_s:
            return best
        if place not in trees:
            start = starting_splits(lowest.case)[0] if lowest.layers is None else lowest.layers
            trees[place] = CutSearch(lowest.case, lowest.bound_s, best.step_s, start)
        tree = trees[place]
        if tree.is_over:
            return best
        before = tree.work
        split = tree.advance(best.step_s, work)
        work -= tree.work - before
        lowest.take(np.empty((0, 0)) if split is None else split[None])
        best = min(best, lowest, key=lambda each: each.step_s)
        lowest.bound_s = min(tree.bound_s, best.step_s)


def _progress(best: _Found, bound_s: float) -> str:
    gap = max(0.0, best.step_s / bound_s - 1)
    return f"step {best.step_s:.6g} s, no split below {bound_s:.6g} s (at most {100 * gap:.2f} % faster)"


def _shortest_s(case: Case, splits: np.ndarray) -> float:
    """The shortest step of those splits [count, stages] that are legal and fit."""
    return judge_all(case.problem, splits[case.admits(splits)]).min(initial=np.inf)


def _most_robust(best: _Found, known_s: float, bound_s: float) -> tuple[np.ndarray, float]:
    """Of the splits within NEAR of the shortest the one least hurt by a wrong head, and its step, at most ``known_s``."""
    case, nominal = best.case, best.case.problem
    near_s = (1 + NEAR) * bound_s if best.step_s <= (1 + NEAR / 2) * bound_s else (1 + NEAR / 2) * best.step_s
    robust = case.robust(HEAD_SCALES, min(near_s, known_s) * (1 + 1e-12))
    if best.candidates is not None:
        layers = best.candidates[judge_all(robust, best.candidates).argmin()]
    else:
        layers = _annealed(robust, best.layers, _ROBUST, _COARSE_ROUND, seed=0)
    return layers, float(judge_all(nominal, layers[None])[0])


def _no_room(cases: Sequence[Case], certain: bool) -> MemoryLack:
    """What is lacking where, with the lightest split; ``certain``: that none fits, and not only that none was found."""
    lightest = [(case, _lightest(case, starting_splits(case))) for case in cases]
    case, split = min(lightest, key=lambda each: peaks_of(each[0].problem, each[1]).max())
    peaks, limit = peaks_of(case.problem, split), case.problem.room.limit_bytes
    rank = int(peaks.argmax())
    fits = "fits" if certain else "was found that fits"
    return MemoryLack(
        f"no split of {split.sum()} layers on {split.size} stages {fits} {limit / _GB:.2f} GB on every rank: with "
        f"{' '.join(map(str, split))}, the lightest found, pipeline rank {rank} needs {peaks[rank] / _GB:.2f} GB, "
        f"{(peaks[rank] - limit) / _GB:.2f} GB too much; what helps: more pipeline or tensor parallel ranks, "
        "--recompute-granularity, --use-distributed-optimizer, a smaller --micro-batch-size"
    )
