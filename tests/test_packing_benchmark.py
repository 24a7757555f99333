"""The benchmark of packing, on a set small enough for seconds: rows, targets, exit status, and peers that are not there."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))

import packing
import packing_peers
from packing_sets import LengthSet, length_sets

from megatron_balance.packing.bins import first_fit_bins


def _draw(seed: int, count: int) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(6.0, 1.2, count).round(), 16, 8192).astype(np.int64)


SMALL = LengthSet("small", 8192, _draw, documents=912, microbatches=4)
PP4 = next(section for section in packing.SECTIONS if section.pipeline_size == 4)


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    monkeypatch.setattr(packing, "length_sets", lambda: (SMALL,))
    monkeypatch.setattr(packing, "SECTIONS", (replace(PP4, peers=True),))
    monkeypatch.setattr(packing, "MOST_MS", 1e6)  # what a batch takes here is no test's business


def test_others_run_side_by_side_and_who_is_missing_is_named(capsys) -> None:
    assert packing.main(["--quick", "--only", "PP4"]) == 0
    shown = capsys.readouterr().out
    assert "all reached" in shown
    rows = {
        cells[1].strip(): cells[2].strip()
        for cells in (line.split("|") for line in shown.splitlines())
        if len(cells) > 2
    }
    for peer in packing_peers.peers():
        assert (rows[peer.name] == "not installed") == (peer.pack is None)
        assert (f"{peer.name}: {peer.missing}" in shown) == (peer.pack is None)


def test_a_target_that_is_not_reached_fails(monkeypatch, capsys) -> None:
    monkeypatch.setattr(packing, "SECTIONS", (replace(PP4, targets=(("small", 1.0),)),))
    assert packing.main(["--quick", "--only", "PP4"]) == 1
    assert "NOT REACHED: PP4, 1F1B, small: 1." in capsys.readouterr().out


@pytest.mark.parametrize("peer", packing_peers.peers(), ids=lambda peer: peer.name)
def test_packers_keep_every_document(peer: packing_peers.Peer) -> None:
    if peer.pack is None:
        pytest.skip(peer.missing)
    batch = packing._batch(PP4, SMALL, 7)
    packed = peer.pack(batch)
    assert sorted(packed.tokens.tolist()) == sorted(batch.tokens.tolist())
    if "flops" not in peer.name and "OpenRLHF" not in peer.name:  # those two know no capacity
        assert np.bincount(packed.bins, packed.tokens).max() <= SMALL.capacity


def test_sets_make_as_many_micro_batches_as_published() -> None:
    sets = {lengths.name: lengths for lengths in length_sets()}
    for name, published in (("LN-32k", 20), ("LN-128k", 23)):
        drawn = [sets[name].draw(seed, sets[name].documents) for seed in range(5)]
        bins = [first_fit_bins(tokens, sets[name].capacity).max() + 1 for tokens in drawn]
        assert np.mean(bins) / packing.DATA_SIZE == pytest.approx(published, abs=1)
