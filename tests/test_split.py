"""The split search: what it reaches on public models, against brute force, and against its own bound."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.costs.chain import ChainCosts, ElementCost
from megatron_balance.errors import BalanceError
from megatron_balance.pipeline import search
from megatron_balance.pipeline.bound import OpenSplits, smallest_floor, stage_floors
from megatron_balance.pipeline.chain import stage_costs, uniform_layers
from megatron_balance.pipeline.search import HEAD_SCALES, NEAR, find_split
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
    if topology.virtual_size == 1:
        assert step <= split.bound_s * (1 + NEAR), "without interleaving these are proven"


def test_measured_head_gives_the_gain_of_the_published_job() -> None:
    """36 layers on 4 ranks: a head of 9.7 layers forward and 3.8 backward, where FLOPs would say 2."""
    layer, head = ElementCost(7.48e-3, 15.94e-3), ElementCost(72.4e-3, 60.0e-3)
    costs, simulator = ChainCosts(ElementCost(0.0, 0.0), (layer,) * 36, head, "trace"), Simulator(Topology(4, 4))
    gain = step_s(costs, simulator, (9, 9, 9, 9)) / step_s(costs, simulator, find_split(costs, simulator).layers)
    assert gain >= 1.214


# --- properties, on small cases


@st.composite
def chains(draw: st.DrawFn, equal_layers: bool = False) -> ChainCosts:
    seconds = st.floats(0.1, 3.0)
    layer = ElementCost(draw(seconds), draw(seconds))
    count = draw(st.integers(2, 9))
    layers = [layer] * count
    if not equal_layers and draw(st.booleans()):
        layers[: draw(st.integers(1, count))] = [ElementCost(draw(seconds), draw(seconds))]
    embedding = ElementCost(draw(st.floats(0.0, 2.0)), draw(st.floats(0.0, 2.0)))
    head = ElementCost(draw(st.floats(0.0, 8.0)), draw(st.floats(0.0, 8.0)))
    return ChainCosts(embedding, tuple(layers), head, "drawn")


@st.composite
def topologies(draw: st.DrawFn, max_stages: int = 6) -> Topology:
    ranks = draw(st.integers(1, 4))
    chunks = draw(st.integers(1, max(1, max_stages // ranks))) if ranks > 1 else 1
    microbatches = ranks * draw(st.integers(1, 4)) if chunks > 1 else draw(st.integers(1, 12))
    return Topology(ranks, microbatches, chunks)


def all_splits(num_layers: int, stages: int) -> list[tuple[int, ...]]:
    """Every split without empty stages, spelled out."""
    if stages == 1:
        return [(num_layers,)]
    middle = itertools.product(range(1, num_layers + 1), repeat=stages - 2)
    return [
        (first, *between, num_layers - first - sum(between))
        for between in middle
        for first in range(num_layers - sum(between) + 1)
    ]


def check_against_brute_force(costs: ChainCosts, topology: Topology, p2p_s: float) -> None:
    simulator = Simulator(topology, p2p_s)
    splits = all_splits(len(costs.layers), topology.num_stages)
    if not splits:
        with pytest.raises(BalanceError, match="would leave"):
            find_split(costs, simulator)
        return
    best = min(step_s(costs, simulator, layers) for layers in splits)
    split = find_split(costs, simulator)
    step = step_s(costs, simulator, split.layers)
    assert split.layers in splits
    assert step <= (1 + NEAR) * best * (1 + 1e-9)
    assert split.bound_s <= best * (1 + 1e-9)
    uniform = uniform_layers(len(costs.layers), topology.num_stages)
    assert uniform is None or step <= step_s(costs, simulator, uniform)


@settings(max_examples=60, deadline=None)
@given(chains(), topologies(), st.sampled_from([0.0, 0.2]))
def test_is_the_best_of_all_splits(costs: ChainCosts, topology: Topology, p2p_s: float) -> None:
    check_against_brute_force(costs, topology, p2p_s)


@settings(max_examples=60, deadline=None)
@given(chains(equal_layers=True), topologies(), st.sampled_from([0.0, 0.2]))
def test_annealing_alone_finds_it_too(costs: ChainCosts, topology: Topology, p2p_s: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_MOST_OPEN_SPLITS", 0)
        check_against_brute_force(costs, topology, p2p_s)


@settings(max_examples=80, deadline=None)
@given(chains(), st.integers(1, 5), st.integers(1, 14), st.sampled_from([0.0, 0.2]))
def test_floors_hold_for_every_split(costs: ChainCosts, ranks: int, microbatches: int, p2p_s: float) -> None:
    topology = Topology(ranks, microbatches)
    splits = all_splits(len(costs.layers), ranks)
    if not splits:
        return
    simulator, floors = Simulator(topology, p2p_s), stage_floors(costs, topology, p2p_s)
    for layers in splits:
        stops = np.cumsum(layers)
        floor = floors[np.arange(ranks), stops - layers, stops].max()
        assert floor <= step_s(costs, simulator, layers) * (1 + 1e-9)
    bound_s, reaching = smallest_floor(floors)
    assert tuple(reaching) in splits
    stops = np.cumsum(reaching)
    assert floors[np.arange(ranks), stops - reaching, stops].max() == bound_s


@given(st.integers(1, 9), st.integers(1, 5))
def test_open_splits_are_all_splits_when_nothing_is_capped(num_layers: int, stages: int) -> None:
    if num_layers < stages - 2:
        return
    costs = ChainCosts(ElementCost(0, 0), (ElementCost(1, 2),) * num_layers, ElementCost(1, 2), "one")
    floors = stage_floors(costs, Topology(stages, 4), 0.0)
    splits = OpenSplits.under(floors, floors[np.isfinite(floors)].max())
    expected = sorted(all_splits(num_layers, stages))
    assert splits.count == len(expected)
    assert [tuple(layers) for layers in splits.enumerate()] == expected


@settings(max_examples=80, deadline=None)
@given(chains(), topologies(max_stages=8))
def test_starts_are_legal(costs: ChainCosts, topology: Topology) -> None:
    if len(costs.layers) < topology.num_stages - 2:
        return
    starts = starting_splits(costs, topology)
    assert len(starts) > 0
    assert (starts.sum(axis=1) == len(costs.layers)).all()
    assert (starts[:, 1:-1] >= 1).all() and (starts >= 0).all()
    uniform = uniform_layers(len(costs.layers), topology.num_stages)
    assert uniform is None or list(uniform) in starts.tolist()


def test_starts_stand_rounding() -> None:
    """Costs in which many stages are as large as the largest, up to the last bits of their sums."""
    layer = ElementCost(1e-3, 2e-3)
    for num_layers, ranks, head in itertools.product(range(4, 20), range(2, 6), range(14)):
        costs = ChainCosts(ElementCost(0.0, 1e-4), (layer,) * num_layers, layer, "thirds")
        costs = costs.with_weights(head=(head, head))
        assert (starting_splits(costs, Topology(ranks, 8)).sum(axis=1) == num_layers).all()


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
        for layers in all_splits(5, 2)
        if step_s(costs, simulator, layers) <= (1 + NEAR) * step_s(costs, simulator, split.layers)
    }
    assert worst[split.layers] == min(worst.values())


def test_more_stages_than_elements_is_an_error_with_the_arithmetic() -> None:
    costs = ChainCosts(ElementCost(0, 0), (ElementCost(1, 2),) * 12, ElementCost(1, 2), "one")
    with pytest.raises(BalanceError, match=r"12 layers, embedding and head are 14 elements; 16 stages would leave 2"):
        find_split(costs, Simulator(Topology(16, 16)))


def test_layers_just_enough_for_the_stages() -> None:
    costs = ChainCosts(ElementCost(0, 0), (ElementCost(1, 2),) * 6, ElementCost(1, 2), "one")
    assert find_split(costs, Simulator(Topology(8, 8))).layers == (0, 1, 1, 1, 1, 1, 1, 0)


def test_every_process_comes_to_the_same_split() -> None:
    code = "from tests.test_split import *; print(find_split(LLAMA_3_70B, Simulator(Topology(8, 64, 5), 1e-5)))"
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
    assert runs == {f"{find_split(LLAMA_3_70B, Simulator(Topology(8, 64, 5), 1e-5))}\n"}
