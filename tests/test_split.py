"""The split search: what it reaches on public models, against brute force, and against its own bound."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.costs.chain import ChainCosts, ElementCost
from megatron_balance.costs.memory import ChainMemory, ElementMemory
from megatron_balance.errors import BalanceError
from megatron_balance.kernels import find_paths
from megatron_balance.pipeline import cuts, search
from megatron_balance.pipeline.case import Case
from megatron_balance.pipeline.chain import stage_costs, uniform_layers
from megatron_balance.pipeline.memory import MemoryLimit, rank_peaks
from megatron_balance.pipeline.search import HEAD_SCALES, NEAR, Split, find_split
from megatron_balance.pipeline.starts import starting_splits
from megatron_balance.schedule.simulate import Simulator
from megatron_balance.topology import Topology


def dense(
    num_layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int, sequence: int
) -> ChainCosts:
    """FLOPs of a token as picoseconds: matrix products, causal attention, backward 2 and 2.5 times those."""
    matrix = 2 * (2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim + 3 * hidden * ffn)
    attention = 2 * heads * head_dim * sequence
    layer = ElementCost(1e-12 * (matrix + attention), 1e-12 * (2 * matrix + 2.5 * attention))
    head = 2e-12 * hidden * vocabulary
    return ChainCosts(ElementCost(0.0, 0.0), (layer,) * num_layers, ElementCost(head, 2 * head), "FLOPs")


LLAMA_3_8B = dense(32, 4096, 14336, 32, 8, 128, 128256, 8192)
LLAMA_3_70B = dense(80, 8192, 28672, 64, 8, 128, 128256, 8192)
LLAMA_31_405B = dense(126, 16384, 53248, 128, 8, 128, 128256, 8192)
QWEN_25_7B = dense(28, 3584, 18944, 28, 4, 128, 152064, 4096)
GEMMA_2_9B = dense(42, 3584, 14336, 16, 8, 256, 256000, 8192)
GEMMA_2_27B = dense(46, 4608, 36864, 32, 16, 128, 256000, 8192)


def step_s(costs: ChainCosts, simulator: Simulator, layers: tuple[int, ...]) -> float:
    stages = stage_costs(costs, layers)
    return simulator.step_s([stage.forward_s for stage in stages], [stage.backward_s for stage in stages])


def even_s(costs: ChainCosts, topology: Topology) -> float:
    """A perfectly even split's step, by the textbook formula."""
    passes = topology.num_microbatches + (topology.pipeline_size - 1) / topology.virtual_size
    return passes * costs.total.total_s / topology.pipeline_size


@pytest.mark.parametrize(
    ("costs", "topology", "target"),
    [
        (LLAMA_3_8B, Topology(4, 32), 1.044),
        (LLAMA_3_8B, Topology(8, 32), 1.103),
        (LLAMA_3_8B, Topology(16, 64), 1.2456),
        (LLAMA_3_8B, Topology(4, 32, 4), 1.046),
        (LLAMA_3_70B, Topology(8, 128, 5), 1.077),
        (LLAMA_3_70B, Topology(4, 32, 5), 1.023),
        (LLAMA_31_405B, Topology(16, 256, 8), 1.0099),
        (QWEN_25_7B, Topology(4, 32), 1.047),
        (QWEN_25_7B, Topology(8, 64), 1.047),
        (GEMMA_2_9B, Topology(4, 32), 1.036),
        (GEMMA_2_9B, Topology(16, 64), 1.278),
        (GEMMA_2_27B, Topology(4, 32), 1.001),
        (GEMMA_2_27B, Topology(8, 64), 1.001),
        (GEMMA_2_27B, Topology(16, 128), 1.001),
    ],
)
def test_reaches_the_best_known_step(costs: ChainCosts, topology: Topology, target: float) -> None:
    simulator = Simulator(topology)
    split = find_split(costs, simulator)
    step = step_s(costs, simulator, split.layers)
    assert step / even_s(costs, topology) <= target + 0.002
    assert split.bound_s <= step
    assert split.proven == (step <= split.bound_s * (1 + NEAR))
    assert split.proven or topology.virtual_size > 1, "without interleaving these are proven"


@pytest.fixture(autouse=True)
def _short_tree_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few cuts are enough to see that they hold."""
    monkeypatch.setattr(cuts, "_TREES", 2)


def test_empty_stages_help_a_heavy_head() -> None:
    costs, topology = LLAMA_31_405B, Topology(16, 256, 8)
    costs = replace(costs, head=costs.from_layers(2.51, 2.51))
    simulator, told = Simulator(topology), []
    split = find_split(costs, simulator, allow_empty=True, say=told.append)
    assert step_s(costs, simulator, split.layers) / even_s(costs, topology) <= 1.145 + 0.002
    assert told and all("faster" in text for text in told)


def deepseek_v3() -> ChainCosts:
    """3 dense layers, 58 of experts, one depth of prediction; FLOPs of a token as picoseconds."""
    hidden, core = 7168, 4096 * 128 * (128 + 64 + 128)
    attention = hidden * (1536 + 512 + 64) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * hidden
    experts = 9 * 3 * hidden * 2048 + 256 * hidden

    def cost(weights: int, flops: float = 0.0) -> ElementCost:
        return ElementCost(1e-12 * (2 * weights + flops), 1e-12 * (4 * weights + 2.5 * flops))

    return ChainCosts(
        ElementCost(0.0, 0.0),
        (cost(attention + 3 * hidden * 18432, core),) * 3 + (cost(attention + experts, core),) * 58,
        cost(hidden * 129280) * 2,
        "FLOPs",
        cost(attention + experts + 2 * hidden**2, core),
    )


def test_prediction_may_leave_the_head() -> None:
    costs, topology = deepseek_v3(), Topology(16, 16)
    simulator = Simulator(topology)
    split = find_split(costs, simulator, mtp_stages=(14, 15))
    stages = stage_costs(costs, split.layers, split.mtp_stage)
    step = simulator.step_s([stage.forward_s for stage in stages], [stage.backward_s for stage in stages])
    assert step / even_s(costs, topology) <= 0.9925 + 0.002
    assert split.proven


def test_all_places_of_prediction_share_one_budget_of_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is the lowest of all places, so raising each to the end would be work for nothing."""
    costs, topology, budget = deepseek_v3(), Topology(8, 8, 2), 3e6
    spent, solve = [], cuts.CutBound.solve

    def recorded(program: cuts.CutBound, *arguments: object) -> cuts.Tree:
        tree = solve(program, *arguments)
        spent.append((program.case.mtp_stage, tree.work))
        return tree

    monkeypatch.setattr(cuts.CutBound, "solve", recorded)
    monkeypatch.setattr(search, "CUT_WORK", budget)
    split = find_split(costs, Simulator(topology), allow_empty=True, mtp_stages=range(9, 16))
    assert len({place for place, _ in spent}) > 2
    assert sum(work for _, work in spent) <= 1.02 * budget
    assert not split.proven


def in_flight_layers(num_layers: int) -> ChainMemory:
    """A byte for each layer of a micro-batch in flight."""
    nothing = ElementMemory()
    return ChainMemory(nothing, (ElementMemory(activation_bytes=1.0),) * num_layers, nothing, nothing)


def test_measured_head_gives_the_gain_of_the_published_job() -> None:
    """36 layers on 4 ranks: a head of 9.7 layers forward and 3.8 backward, where FLOPs would say 2."""
    layer, head = ElementCost(7.48e-3, 15.94e-3), ElementCost(72.4e-3, 60.0e-3)
    costs, simulator = ChainCosts(ElementCost(0.0, 0.0), (layer,) * 36, head, "trace"), Simulator(Topology(4, 4))
    even = step_s(costs, simulator, (9, 9, 9, 9))
    assert even / step_s(costs, simulator, find_split(costs, simulator).layers) >= 1.215 - 0.002
    limited = find_split(costs, simulator, memory=MemoryLimit(in_flight_layers(36), 36.0))
    assert even / step_s(costs, simulator, limited.layers) >= 1.152 - 0.002
    assert limited.proven


def test_tight_memory_is_crossed_by_splits_that_do_not_fit() -> None:
    """A near-even split takes 35 GB on a rank, and few of those that fit in 26 are a move of one layer apart."""
    costs, topology = LLAMA_3_70B, Topology(8, 128, 5)
    table = ElementMemory(0.8, 0.0, 0.26)
    memory = ChainMemory(table, (ElementMemory(0.65, 0.27, 0.16),) * 80, ElementMemory(), table)
    simulator, room = Simulator(topology), MemoryLimit(memory, 26.0)
    split = find_split(costs, simulator, memory=room, allow_empty=True, sharpens_bound=False)
    assert rank_peaks(memory, topology, split.layers).max() <= 26.0 * (1 + 1e-9)
    assert step_s(costs, simulator, split.layers) / even_s(costs, topology) <= 1.41


def test_a_split_that_fits_is_found_where_stages_may_be_empty() -> None:
    """The rows of the program cannot know which ranks hold a layer, and so need what it takes while it runs."""
    layer, table = ElementMemory(2.43, 0.533, 0.327), ElementMemory(1.6, 0.0, 0.5)
    memory = ChainMemory(table, (layer,) * 126, ElementMemory(), table)
    case = Case(LLAMA_31_405B, Simulator(Topology(16, 32, 8)), 127, MemoryLimit(memory, 66.0), allow_empty=True)
    _, split = cuts.fitting_split(case, search._lightest(case, starting_splits(case)))
    assert split is not None and case.fits(split)


# --- properties, on small cases


@dataclass(frozen=True)
class Job:
    """A small job of which every split can be tried."""

    costs: ChainCosts
    topology: Topology
    p2p_s: float = 0.0
    allow_empty: bool = False
    mtp_stages: tuple[int, ...] | None = None
    memory: ChainMemory | None = None
    room: float = 1.0  # where the limit lies between the lightest (0) and the heaviest split's peak; below 0 none fits

    def legal(self, layers: tuple[int, ...], mtp_stage: int) -> bool:
        last = len(layers) - 1
        own = {0, last, mtp_stage} if self.mtp_stages else {0, last}
        return not any(layers[mtp_stage + 1 :]) and (
            self.allow_empty or all(count or stage in own for stage, count in enumerate(layers))
        )

    def splits(self) -> list[tuple[tuple[int, ...], int]]:
        """All splits, with the stage of multi-token prediction."""
        stages = self.topology.num_stages
        return [
            (layers, place)
            for layers in all_ways(len(self.costs.layers), stages)
            for place in self.mtp_stages or (stages - 1,)
            if self.legal(layers, place)
        ]

    def step_s(self, simulator: Simulator, layers: tuple[int, ...], mtp_stage: int) -> float:
        stages, ranks = stage_costs(self.costs, layers, mtp_stage), self.topology.pipeline_size
        update_s = max(sum(stage.update_s for stage in stages[rank::ranks]) for rank in range(ranks))
        return simulator.step_s([each.forward_s for each in stages], [each.backward_s for each in stages]) + update_s


def all_ways(num_layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to deal out the layers."""
    for bars in itertools.combinations(range(num_layers + stages - 1), stages - 1):
        places = (-1, *bars, num_layers + stages - 1)
        yield tuple(stop - start - 1 for start, stop in itertools.pairwise(places))


@st.composite
def elements(draw: st.DrawFn, most: float) -> ElementCost:
    seconds = st.floats(0.0, most)
    return ElementCost(draw(seconds), draw(seconds), draw(st.sampled_from([0.0, 0.0, 0.5, 3.0])))


@st.composite
def memories(draw: st.DrawFn, costs: ChainCosts) -> ChainMemory:
    def element() -> ElementMemory:
        return ElementMemory(*(draw(st.sampled_from([0.0, 0.5, 1.0, 3.0])) for _ in range(3)))

    kinds = {kind: element() for kind in dict.fromkeys(costs.layers)}
    return ChainMemory(element(), tuple(kinds[layer] for layer in costs.layers), element(), element())


@st.composite
def chains(draw: st.DrawFn, equal_layers: bool = False, most_layers: int = 10) -> ChainCosts:
    seconds = st.floats(0.1, 3.0)
    kinds = [ElementCost(draw(seconds), draw(seconds), draw(st.sampled_from([0.0, 1.0]))) for _ in range(2)]
    count = draw(st.integers(1, most_layers))
    pattern = [0] * count if equal_layers else draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    return ChainCosts(draw(elements(2.0)), tuple(kinds[kind] for kind in pattern), draw(elements(8.0)), "drawn")


@st.composite
def jobs(draw: st.DrawFn, equal_layers: bool = False) -> Job:
    ranks = draw(st.integers(1, 4))
    chunks = draw(st.integers(1, 2)) if ranks > 1 else 1
    microbatches = ranks * draw(st.integers(1, 4)) if chunks > 1 else draw(st.integers(1, 12))
    allow_empty = draw(st.booleans())
    stages = ranks * chunks
    costs = draw(chains(equal_layers, 5 if allow_empty and stages > 6 else 10))
    mtp_stages = None
    if draw(st.booleans()):
        costs = replace(costs, mtp=ElementCost(draw(st.floats(0.1, 3.0)), draw(st.floats(0.1, 3.0)), 1.0))
        mtp_stages = tuple(draw(st.sets(st.integers(stages - ranks, stages - 1), min_size=1)))
    memory = draw(st.none() | memories(costs))
    room = draw(st.sampled_from([-0.1, 0.0, 0.1, 0.3, 0.6]))
    return Job(
        costs,
        Topology(ranks, microbatches, chunks),
        draw(st.sampled_from([0.0, 0.2])),
        allow_empty,
        mtp_stages,
        memory,
        room,
    )


def check_against_all_splits(job: Job) -> None:
    simulator = Simulator(job.topology, job.p2p_s)
    splits, limit = job.splits(), None
    if job.memory is not None and splits:
        peaks = [rank_peaks(job.memory, job.topology, *split).max() for split in splits]
        lowest = min(peaks) + job.room * (max(peaks) - min(peaks)) - (1e-3 if job.room < 0 else 0.0)
        limit = MemoryLimit(job.memory, max(lowest, 1e-9))
        splits = [split for split, peak in zip(splits, peaks, strict=True) if peak <= limit.limit_bytes * (1 + 1e-12)]

    def find() -> Split:
        return find_split(job.costs, simulator, memory=limit, allow_empty=job.allow_empty, mtp_stages=job.mtp_stages)

    if not splits:
        with pytest.raises(BalanceError, match=r"would leave|cannot fill|too much"):
            find()
        return
    best = min(job.step_s(simulator, *each) for each in splits)
    split = find()
    step = job.step_s(simulator, split.layers, split.mtp_stage)
    assert (split.layers, split.mtp_stage) in splits
    assert step <= (1 + NEAR) * best * (1 + 1e-9)
    assert split.bound_s <= best * (1 + 1e-9)
    assert split.proven == (step <= split.bound_s * (1 + NEAR))
    uniform = uniform_layers(len(job.costs.layers), job.topology.num_stages)
    if (uniform, job.topology.num_stages - 1) in splits:
        assert step <= job.step_s(simulator, uniform, job.topology.num_stages - 1) * (1 + 1e-9)


@settings(max_examples=80, deadline=None)
@given(jobs())
def test_is_the_best_of_all_splits(job: Job) -> None:
    check_against_all_splits(job)


@settings(max_examples=40, deadline=None)
@given(jobs())
def test_search_and_cuts_alone_find_it_too(job: Job) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_MOST_OPEN_SPLITS", 0)
        check_against_all_splits(job)


@settings(max_examples=80, deadline=None)
@given(jobs())
def test_starts_keep_within_the_limits_of_the_layers(job: Job) -> None:
    stages = job.topology.num_stages
    for place in job.mtp_stages or (stages - 1,):
        case = Case(job.costs, Simulator(job.topology), place, None, job.allow_empty)
        legal = [layers for layers, mtp_stage in job.splits() if mtp_stage == place]
        assert case.is_possible == bool(legal)
        if legal:
            starts = [tuple(start) for start in starting_splits(case).tolist()]
            assert starts and {*starts} <= {*legal}


@settings(max_examples=80, deadline=None)
@given(jobs(), st.integers(0, 2**32 - 1))
def test_every_path_is_a_cut(job: Job, seed: int) -> None:
    """The longest one is the step where it was found, and none is longer than the step anywhere else."""
    case = Case(job.costs, Simulator(job.topology, job.p2p_s), job.topology.num_stages - 1, None, allow_empty=True)
    stages = job.topology.num_stages
    here, there = np.random.default_rng(seed).uniform(0.0, 2.0, (2, 2, stages))
    paths = np.empty((stages, 2 * stages))
    step, lengths = find_paths(case.problem, here.ravel(), paths)
    assert step == case.simulator.step_s(*here)
    assert lengths.max() == pytest.approx(step)
    waits = lengths - paths @ here.ravel()
    assert waits == pytest.approx(np.rint(waits / (job.p2p_s or 1.0)) * job.p2p_s, abs=1e-9)
    assert (paths @ there.ravel() + waits).max() <= case.simulator.step_s(*there) * (1 + 1e-9)


# --- the rest


def test_near_equal_splits_are_told_apart_by_a_head_that_costs_more_or_less() -> None:
    """Of 1,000 micro-batches on 2 ranks all that counts is the larger stage, so a tie at the given head is broken."""
    layer = ElementCost(1.0, 2.0)
    costs = ChainCosts(ElementCost(0.0, 0.0), (layer,) * 5, ElementCost(1.0, 2.0), "tie")
    simulator = Simulator(Topology(2, 1000))
    split = find_split(costs, simulator)
    worst = {
        layers: max(
            step_s(scaled, simulator, layers) / scaled.total.total_s
            for scaled in (costs.with_weights(head=(scale, scale)) for scale in HEAD_SCALES)
        )
        for layers in all_ways(5, 2)
        if step_s(costs, simulator, layers) <= (1 + NEAR) * step_s(costs, simulator, split.layers)
    }
    assert worst[split.layers] == min(worst.values())


def test_more_stages_than_elements_is_an_error_with_the_arithmetic() -> None:
    costs = ChainCosts(ElementCost(0, 0), (ElementCost(1, 2),) * 12, ElementCost(1, 2), "one")
    with pytest.raises(BalanceError, match=r"12 layers, embedding and head are 14 elements; 16 stages would leave 2"):
        find_split(costs, Simulator(Topology(16, 16)))


def test_memory_that_no_split_fits_says_where_it_lacks() -> None:
    """The head alone is more than there is."""
    costs = ChainCosts(ElementCost(0, 0), (ElementCost(1, 2),) * 36, ElementCost(1, 2), "one")
    memory = replace(in_flight_layers(36), head=ElementMemory(state_bytes=30e9))
    with pytest.raises(
        BalanceError, match=r"36 layers on 4 stages.*rank 3 needs 30.00 GB, 10.00 GB too much.*micro-batch"
    ):
        find_split(costs, Simulator(Topology(4, 8)), memory=MemoryLimit(memory, 20e9))
    with pytest.raises(BalanceError, match=r"rank 3 needs 30.00 GB, 10.00 GB too much"):
        find_split(costs, Simulator(Topology(4, 8, 3)), memory=MemoryLimit(memory, 20e9))
    with pytest.raises(BalanceError, match=r"leaves no room"):
        find_split(costs, Simulator(Topology(4, 8)), memory=MemoryLimit(memory, 0.0))


def test_a_start_of_other_sizes_is_refused() -> None:
    costs = ChainCosts(ElementCost(0, 0), (ElementCost(1, 2),) * 6, ElementCost(1, 2), "one")
    with pytest.raises(BalanceError, match=r"5 layers in 2 stages: 6 in 2 are needed"):
        find_split(costs, Simulator(Topology(2, 8)), starts=[(3, 2)])


@pytest.mark.parametrize("place", [0, 7, -1, 12])
def test_prediction_outside_the_last_chunk_row_is_refused(place: int) -> None:
    costs = replace(LLAMA_3_8B, mtp=ElementCost(1, 2))
    with pytest.raises(BalanceError, match=r"stages 8 to 11"):
        find_split(costs, Simulator(Topology(4, 8, 3)), mtp_stages=(place,))


def test_layers_just_enough_for_the_stages() -> None:
    costs = ChainCosts(ElementCost(0, 0), (ElementCost(1, 2),) * 6, ElementCost(1, 2), "one")
    assert find_split(costs, Simulator(Topology(8, 8))).layers == (0, 1, 1, 1, 1, 1, 1, 0)


def test_every_process_comes_to_the_same_split() -> None:
    code = "from tests.test_split import *; print(find_split(LLAMA_3_8B, Simulator(Topology(4, 16, 2), 1e-5)))"
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=here,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1 and "layers=(4, 4, 4, 4, 5, 5, 4, 2)" in runs.pop()
