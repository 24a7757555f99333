"""Where the pieces of a global batch go: always a legal placement, judged by the exact schedule, better than first-fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_balance.errors import BalanceError
from megatron_balance.packing.bins import Load, fill_bins, order_bins
from megatron_balance.packing.cost import FIXED, SHAPES, VARIABLE, BinCost, SequenceCost
from megatron_balance.packing.grid import Grid
from megatron_balance.packing.pieces import PieceRule
from megatron_balance.packing.placement import FALLBACK, PROFILE, place
from megatron_balance.packing.profile import Profile, from_json, load_or_tune, profile_key, to_json, tune, tuning_grid
from megatron_balance.packing.step import StepJudge, micro_batch_s
from megatron_balance.reading import DamageError
from megatron_balance.schedule.simulate import Simulator
from megatron_balance.topology import Topology

RATIO = 49152.0
HUMP = Profile((0.0, 0.3, 0.9, 1.9, 3.2, 3.8, 4.6, 4.9, 4.3, 2.9, 1.7, 0.4), alpha=8.0)
STRETCHED = {"max_examples": 60, "deadline": None, "suppress_health_check": list(HealthCheck)}


def grid_of(pipeline=1, microbatches=4, virtual=1, data=2, size=1, lockstep=1) -> Grid:
    return Grid(Topology(pipeline, microbatches, virtual, size, data_size=data), lockstep)


def first_fit(room: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """First-fit-decreasing bins of the pieces and their number."""
    bins, free = np.empty(room.size, dtype=np.int32), []
    for piece in np.argsort(-room, kind="stable"):
        fitting = next((number for number, left in enumerate(free) if left >= room[piece]), len(free))
        if fitting == len(free):
            free.append(capacity)
        free[fitting] -= room[piece]
        bins[piece] = fitting
    return bins, len(free)


def fill_all(room: np.ndarray, bins: np.ndarray, count: int) -> np.ndarray:
    """Of each bin of several pieces one to each empty bin, until there is none."""
    bins = bins.copy()
    while (held := np.bincount(bins, minlength=count)).min() == 0:
        bins[np.flatnonzero(held[bins] > 1)[0]] = held.argmin()
    return bins


def log_normal(seed: int, count: int, capacity: int, median: float = 1024.0) -> np.ndarray:
    lengths = np.random.RandomState(seed).lognormal(np.log(median), 1.4, count)
    return np.clip(np.rint(lengths), 16, capacity).astype(np.int64)


def over_ideal(bins: np.ndarray, tokens: np.ndarray, cost: BinCost, grid: Grid) -> float:
    return StepJudge(grid).step_over_ideal(micro_batch_s(bins, cost.piece_s(tokens), cost.empty_s, grid))


@st.composite
def grids(draw) -> Grid:
    pipeline, virtual = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (2, 3), (4, 2)]))
    microbatches = draw(st.integers(1, 3)) * pipeline if virtual > 1 else draw(st.integers(1, 9))
    lockstep = draw(st.sampled_from([1, 1, 2, 4]))
    return grid_of(
        pipeline, microbatches, virtual, lockstep * draw(st.integers(1, 3)), draw(st.integers(1, 3)), lockstep
    )


@st.composite
def batches(draw) -> tuple[np.ndarray, BinCost, PieceRule, Grid, np.ndarray]:
    """Pieces that some bins hold: each bin is cut at random places, and some are left nearly empty."""
    grid, alignment = draw(grids()), draw(st.sampled_from([1, 8]))
    capacity = alignment * draw(st.integers(8, 64))
    random = np.random.RandomState(draw(st.integers(0, 2**32 - 1)))
    most = draw(st.sampled_from([1, 3, 12]))
    tokens, bins = [], []
    for number in range(grid.num_bins):
        cuts = np.sort(random.randint(0, capacity // alignment, random.randint(0, most)))
        parts = np.diff(np.concatenate([[0], cuts, [capacity // alignment]]))
        parts = parts[parts > 0][: random.randint(1, most + 1)] * alignment - random.randint(0, alignment)
        tokens.extend(parts)
        bins.extend([number] * parts.size)
    order = random.permutation(len(tokens))
    cost = BinCost(SequenceCost.of_ratio(draw(st.sampled_from([0.0, 50.0]))), capacity, draw(st.sampled_from(SHAPES)))
    rule = PieceRule(capacity, alignment)
    return np.array(tokens)[order], cost, rule, grid, np.array(bins, dtype=np.int32)[order]


# --- any placement


@given(batches(), st.sampled_from([0, 40]), st.floats(0.0, 20.0))
@settings(**STRETCHED)
def test_every_piece_has_a_bin_within_capacity_and_no_bin_is_empty(batch, evaluations, alpha):
    tokens, cost, rule, grid, bins = batch
    profile = Profile(HUMP.knots, alpha, by_group=grid.topology.virtual_size > 1)
    placement = place(tokens, cost, rule, grid, profile, bins, evaluations)
    assert placement.bins.dtype == np.int32 and placement.bins.shape == tokens.shape
    assert set(placement.bins.tolist()) == set(range(grid.num_bins))
    assert np.bincount(placement.bins, rule.room(tokens)).max() <= rule.seq_length
    again = place(tokens, cost, rule, grid, profile, bins, evaluations)
    np.testing.assert_array_equal(again.bins, placement.bins)
    seconds = micro_batch_s(placement.bins, cost.piece_s(tokens), cost.empty_s, grid)
    assert placement.step_s == StepJudge(grid).step_s(seconds)
    if evaluations:
        assert placement.step_s <= place(tokens, cost, rule, grid, profile, bins, 0).step_s


@given(batches())
@settings(**STRETCHED)
def test_the_order_of_given_bins_keeps_them_together(batch):
    tokens, cost, rule, grid, bins = batch
    ordered = order_bins(Load.of(tokens, cost, rule), grid, HUMP.targets(grid.topology), bins)
    assert len({*zip(bins.tolist(), ordered.tolist(), strict=True)}) == grid.num_bins == len({*ordered.tolist()})


def test_the_bins_given_are_the_way_out_where_the_profile_fits_nothing():
    tokens, bins = np.array([6, 5, 5, 4, 4, 3, 3]), np.array([0, 1, 1, 0, 2, 2, 2])  # three full bins
    cost, rule, grid = BinCost(SequenceCost.of_ratio(10.0), 10, VARIABLE), PieceRule(10), grid_of(1, 3, data=1)
    flat = Profile((1.0,), alpha=0.0)
    assert fill_bins(Load.of(tokens, cost, rule), grid, flat.targets(grid.topology), 0.0) is None
    placement = place(tokens, cost, rule, grid, flat, bins, 0)
    assert placement.method == FALLBACK
    assert sorted(np.bincount(placement.bins, tokens)) == [10, 10, 10]


def test_a_swap_makes_room():
    """After 6 and 6, 3 and 3 neither bin takes the 2: it fits once a 3 and a piece of the other bin have changed places."""
    tokens = np.array([7, 5, 4, 4, 2])
    cost, rule, grid = BinCost(SequenceCost.of_ratio(0.0), 11, VARIABLE), PieceRule(11), grid_of(1, 1, data=2)
    bins = fill_bins(Load.of(tokens, cost, rule), grid, np.ones(1), 1.0)
    assert bins is not None
    assert np.bincount(bins, tokens).max() <= 11


def test_equal_pieces_go_by_number_whatever_the_threads():
    code = (
        "import numpy as np; from test_packing_placement import *;"
        "t = np.tile([700, 300, 100], 40); g = grid_of(2, 4, data=4); r = PieceRule(4000);"
        "c = BinCost(SequenceCost.of_ratio(RATIO), 4000); b = fill_all(t, first_fit(t, 4000)[0], 16);"
        "p = place(t, c, r, g, HUMP, b, 300); print(p.bins.tolist(), p.step_s)"
    )
    paths = os.pathsep.join(path for path in (*sys.path, os.path.dirname(__file__)) if path)
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": paths, "NUMBA_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in ("1", "2")
    ]
    assert said[0] == said[1] != ""


@pytest.mark.parametrize(
    ("tokens", "bins", "said"),
    [
        ([5, 5, 5], [0, 1, 2], "3 pieces of documents cannot fill 4 bins"),
        ([5, 5, 5, 5], [0, 1, 2, 4], "not numbers of 4 bins"),
        ([5, 5, 5, 5], [0, 1, 2, 2], "bin 3 of those given is empty"),
        ([9, 9, 5, 5, 5], [0, 0, 1, 2, 3], "holds 18 tokens, 10 fit"),
    ],
)
def test_what_no_placement_can_hold_is_refused(tokens, bins, said):
    with pytest.raises(BalanceError, match=said):
        place(
            np.array(tokens),
            BinCost(SequenceCost.of_ratio(1.0), 10),
            PieceRule(10),
            grid_of(1, 2),
            HUMP,
            np.array(bins),
        )


# --- the step


@given(grids(), st.integers(0, 2**32 - 1))
@settings(**STRETCHED)
def test_the_judge_is_the_simulator_with_stages_and_micro_batches(grid, seed):
    topology, lockstep = grid.topology, grid.lockstep_size
    shape = (2, topology.data_size, topology.num_microbatches)
    seconds = np.random.RandomState(seed).random_sample(shape)
    slowest = seconds.reshape(2, -1, lockstep, topology.num_microbatches).max(axis=2)
    stages = np.repeat(slowest[:, :, None] / topology.num_stages, topology.num_stages, axis=2)
    simulator = Simulator(topology)
    expected = [simulator.step_s(*stages[:, group]) for group in range(stages.shape[1])]
    np.testing.assert_allclose(StepJudge(grid).rank_steps(seconds), expected, rtol=1e-12)


def test_steps_by_hand():
    """Two stages of 1 s and 2 s, two micro-batches, the second twice the first: F1 F2, B1 B2 with one wait each way."""
    judge = StepJudge(grid_of(2, 2, data=1))
    assert judge.step_s(np.array([[[2.0, 2.0]], [[4.0, 4.0]]])) == 9.0  # (M + PP - 1) * (1 + 2)
    assert (
        judge.step_s(np.array([[[2.0, 4.0]], [[4.0, 8.0]]])) == 1 + 1 + 2 + 2 + 4 + 4
    )  # last rank: wait F1, F1 B1 F2 B2, B2
    assert judge.ideal_s(np.array([[[2.0, 4.0]], [[4.0, 8.0]]])) == 9.0
    plain = StepJudge(grid_of(1, 3, data=2))
    assert plain.step_s(np.array([[[1.0, 2, 3], [1, 1, 1]], [[2.0, 2, 2], [9, 0, 0]]])) == 12.0
    together = StepJudge(grid_of(1, 3, data=2, lockstep=2))
    assert together.step_s(np.array([[[1.0, 2, 3], [1, 1, 1]], [[2.0, 2, 2], [9, 0, 0]]])) == 1 + 2 + 3 + 9 + 2 + 2


def test_padding_belongs_to_every_bin():
    grid, cost = grid_of(1, 2, data=1), BinCost(SequenceCost.of_ratio(3.0), 100, FIXED)
    seconds = micro_batch_s(np.array([0, 0, 1]), cost.piece_s(np.array([10, 20, 5])), cost.empty_s, grid)
    np.testing.assert_allclose(seconds.sum(axis=0), [[300 + 100 + 400, 300 + 25]])


def test_lockstep_must_divide_the_ranks():
    with pytest.raises(BalanceError, match="4 data-parallel ranks do not divide into groups of 3"):
        StepJudge(grid_of(2, 2, data=4, lockstep=3))


# --- how good


def test_ours_beats_first_fit_by_a_margin():
    """4,096 documents on 16 ranks of 8 stages: against first-fit bins, balanced over the ranks, in random and in good order."""
    tokens, capacity, data = log_normal(3, 4096, 32768), 32768, 16
    first, count = first_fit(tokens, capacity)
    grid = grid_of(8, -(-count // data), data=data)
    cost, rule = BinCost(SequenceCost.of_ratio(RATIO), capacity, VARIABLE), PieceRule(capacity)
    bins = fill_all(tokens, first, grid.num_bins)
    targets = HUMP.targets(grid.topology)
    order = np.random.RandomState(0).permutation(targets.size)
    shuffled = over_ideal(order_bins(Load.of(tokens, cost, rule), grid, targets[order], bins), tokens, cost, grid)
    ordered = over_ideal(order_bins(Load.of(tokens, cost, rule), grid, targets, bins), tokens, cost, grid)
    placed = place(tokens, cost, rule, grid, HUMP, bins, 0)
    improved = place(tokens, cost, rule, grid, HUMP, bins)
    assert placed.method == PROFILE
    steps = [placement.step_s / placement.ideal_s for placement in (improved, placed)]
    assert steps[0] < 0.998 * steps[1] < 0.97 * ordered < 0.85 * shuffled, (steps, ordered, shuffled)


def test_micro_batches_in_lockstep_are_matched():
    tokens, capacity = log_normal(4, 1024, 32768), 32768
    cost, rule = BinCost(SequenceCost.of_ratio(RATIO), capacity, VARIABLE), PieceRule(capacity)
    first, count = first_fit(tokens, capacity)
    apart = grid_of(4, -(-count // 8), data=8)
    together = replace(apart, lockstep_size=4)
    bins = fill_all(tokens, first, apart.num_bins)
    unaware = place(tokens, cost, rule, apart, HUMP, bins, 1000).bins
    aware = place(tokens, cost, rule, together, HUMP, bins, 1000).bins
    assert over_ideal(aware, tokens, cost, together) < 0.995 * over_ideal(unaware, tokens, cost, together)


# --- profiles


def test_targets_go_by_place_or_by_group():
    assert Profile((0.0, 2.0)).targets(Topology(2, 5)).tolist() == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert Profile((0.0, 2.0, 0.0)).targets(Topology(2, 1)).tolist() == [2.0]
    groups = Profile((0.5, 2.0, 1.0), by_group=True)
    assert groups.targets(Topology(2, 6, 2)).tolist() == [0.5, 0.5, 2.0, 2.0, 1.0, 1.0]
    assert groups.targets(Topology(2, 8, 2, microbatch_group_size=3)).tolist() == [0.5] * 3 + [2.0] * 3 + [1.0] * 2
    assert groups.targets(Topology(2, 10, 2)).tolist() == [0.5, 0.5, 1.25, 1.25, 2.0, 2.0, 1.5, 1.5, 1.0, 1.0]


SMALL = dict(
    zip(("bin_cost", "rule"), (BinCost(SequenceCost.of_ratio(RATIO), 8192, VARIABLE), PieceRule(8192)), strict=True)
)


def samples(count: int = 2) -> list[np.ndarray]:
    return [log_normal(seed, 60, 8192, 700.0) for seed in range(count)]


def mean_over_ideal(profile: Profile, grid: Grid) -> float:
    reached = []
    for tokens in samples():
        bins = fill_bins(Load.of(tokens, **SMALL), grid, profile.targets(grid.topology), profile.alpha)
        reached.append(over_ideal(bins, tokens, SMALL["bin_cost"], grid))
    return float(np.mean(reached))


@pytest.mark.parametrize("grid", [grid_of(4, 8, data=2), grid_of(4, 12, 2, data=2)])
def test_tuning_is_deterministic_and_better_than_its_starts(grid):
    told: list[float] = []
    tuned = tune(samples(), grid=grid, advance=told.append, **SMALL)
    assert tuned == tune(samples(), grid=grid, **SMALL)
    assert min(told) > 0 and sum(told) == pytest.approx(1.0)
    assert tuned.by_group == (grid.topology.virtual_size > 1)
    assert mean_over_ideal(tuned, grid) == pytest.approx(tuned.step_over_ideal, rel=1e-12)
    assert tuned.step_over_ideal < 0.97 * mean_over_ideal(Profile((1.0,)), grid)


def test_a_profile_is_kept_and_a_damaged_one_made_anew(tmp_path):
    grid = grid_of(2, 4, data=2)
    first = load_or_tune(tmp_path, samples(1), grid=grid, **SMALL)
    (file,) = tmp_path.iterdir()
    content = file.read_text()
    told: list[float] = []
    assert load_or_tune(tmp_path, samples(1), grid=grid, advance=told.append, **SMALL) == first
    assert told == []
    for damaged in (
        content[:40],
        content.replace("knots", "nots"),
        content.replace('"format_version": 1', '"format_version": 0'),
        "",
    ):
        file.write_text(damaged)
        assert load_or_tune(tmp_path, samples(1), grid=grid, **SMALL) == first
        assert file.read_text() == content


def test_a_folder_that_cannot_be_written_costs_only_the_tuning(tmp_path):
    (tmp_path / "file").write_text("")
    grid = grid_of(2, 4, data=2)
    assert load_or_tune(tmp_path / "file" / "cache", samples(1), grid=grid, **SMALL) == tune(
        samples(1), grid=grid, **SMALL
    )


def test_the_key_tells_apart_what_matters():
    grid = grid_of(2, 4, data=2)
    keys = [profile_key(samples(1), grid=grid, **SMALL)]
    keys.append(profile_key(samples(2), grid=grid, **SMALL))
    keys.append(profile_key(samples(1), grid=replace(grid, lockstep_size=2), **SMALL))
    keys.append(profile_key(samples(1), grid=grid, **{**SMALL, "rule": PieceRule(8192, alignment=8)}))
    keys.append(profile_key(samples(1), grid=grid, **{**SMALL, "bin_cost": replace(SMALL["bin_cost"], shapes=FIXED)}))
    keys.append(profile_key(samples(1), grid=grid_of(2, 4, 2, data=2), **SMALL))
    assert len({*keys}) == len(keys)
    assert profile_key([samples(1)[0][::-1]], grid=grid, **SMALL) == keys[0]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("knots", [], "at least one number"),
        ("knots", [1.0, -1.0], r"knots\[1\] is -1.0"),
        ("alpha", "2", "alpha is '2'"),
        ("alpha", 1e9, "crc32 is .*, not that of its content"),
        ("by_group", 1, "by_group is 1"),
        ("key", "other", "for which it is looked up"),
        ("more", 1, "unknown more"),
    ],
)
def test_damage_of_a_profile_is_named(key, value, said):
    values = json.loads(to_json(HUMP, "abc"))
    assert from_json(json.dumps(values), "abc") == HUMP
    with pytest.raises(DamageError, match=said):
        from_json(json.dumps({**values, key: value}), "abc")


def test_some_ranks_stand_for_thousands_when_a_profile_is_tuned():
    apart = grid_of(4, 8, data=1024)
    assert tuning_grid(apart).topology.data_size == 16
    assert tuning_grid(grid_of(4, 8, data=12)) == grid_of(4, 8, data=12)
    for group, ranks in ((4, 16), (6, 12), (32, 32)):  # whole groups
        together = replace(apart, topology=replace(apart.topology, data_size=96 * group), lockstep_size=group)
        assert tuning_grid(together).topology.data_size == ranks
