"""The benchmark of splits: other frameworks' rules and published layouts take what was published for them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_balance.diagnosis.costs import RecordedSplit
from megatron_balance.errors import BalanceError
from megatron_balance.schedule.simulate import Simulator

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))

import split_models
from split_cases import TOLERANCE, Case, PeerRow, cases, even_s, peer_rows, step_s
from split_trace import RECORDED, UNSETTLED, read_split

PUBLISHED = [case for case in cases() if case.published_reference is not None]


@pytest.mark.parametrize("row", peer_rows(), ids=lambda row: row.name)
def test_rules_of_others_give_their_published_figures(row: PeerRow) -> None:
    simulator, even = Simulator(row.topology), even_s(row.costs, row.topology)
    for layers, published in zip(row.splits(), row.published, strict=True):
        assert (layers is None) == (published is None)
        if layers is not None:
            assert step_s(row.costs, simulator, layers) / even == pytest.approx(published, abs=TOLERANCE)


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: case.name)
def test_published_layouts_take_their_published_figures(case: Case) -> None:
    step = step_s(case.costs, Simulator(case.topology), case.reference.layers, case.reference_mtp_stage)
    assert step / case.even_s == pytest.approx(case.published_reference, abs=TOLERANCE)


# --- a real job's recorded steps


@pytest.fixture(scope="module")
def trace() -> RecordedSplit:
    try:
        return read_split()
    except BalanceError as error:
        pytest.skip(str(error))


def test_replaying_recorded_passes_takes_the_recorded_pipelines_time(trace: RecordedSplit) -> None:
    """Every replica of every step, with what the last stage's transfers take, whose receivers wait for them."""
    replay, passes = read_split(unsettled=0).replay, trace.signals.nodes
    last = replay.nodes.of("backward-send", 3)
    sent_s = (replay.end_s - replay.start_s)[UNSETTLED:, last]
    simulator = Simulator(trace.simulator.topology, p2p_s=float(np.median(sent_s)))
    recorded_s = replay.end_s[:, passes].max(axis=(1, 2, 3)) - replay.start_s[:, passes].min(axis=(1, 2, 3))
    assert recorded_s.shape == (32, 2)
    for step, replica in np.ndindex(recorded_s.shape):
        seconds = (replay.end_s - replay.start_s)[step, passes, replica]
        assert simulator.step_s(*seconds) == pytest.approx(recorded_s[step, replica], rel=0.001)


def test_costs_of_the_trace_are_those_published(trace: RecordedSplit) -> None:
    published = split_models.st_trace_costs()
    for ours, theirs in ((trace.costs.mean_layer, published.mean_layer), (trace.costs.head, published.head)):
        assert (ours.forward_s, ours.backward_s) == pytest.approx((theirs.forward_s, theirs.backward_s), rel=0.02)


@pytest.mark.parametrize(("layers", "gain"), [((9, 11, 11, 5), 0.136), ((13, 10, 10, 3), 0.191)])
def test_whole_step_of_the_trace_gains_what_is_published(
    trace: RecordedSplit, layers: tuple[int, ...], gain: float
) -> None:
    unchanged = trace.step_with_s(layers)
    assert trace.step_s / unchanged - 1 == pytest.approx(gain, abs=TOLERANCE)
    by_layers = trace.simulated_s(layers) + trace.grown_rest_s(layers)
    assert unchanged < by_layers < trace.step_with_s(RECORDED)
