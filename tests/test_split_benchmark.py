"""The benchmark of splits: other frameworks' rules and published layouts take what was published for them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_balance.schedule.simulate import Simulator

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))

from split_cases import TOLERANCE, Case, PeerRow, cases, even_s, peer_rows, step_s

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
