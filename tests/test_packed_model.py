"""Packing changes no gradient of the same documents, and no document sees another; with context parallelism, too."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

TOLERANCE = 1e-5  # relative, of fp32 sums in another order
KINDS = pytest.mark.parametrize("kind", ["full", "window", "prediction"])
GROUPINGS = pytest.mark.parametrize("grouping", ["two bins", "other bins", "one row", "backwards"])
Differences = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("megatron.core")
    return tmp_path_factory.mktemp("gradients")


@pytest.fixture(scope="module")
def found(folder: Path) -> Differences:
    return reported(folder, 1)


@pytest.fixture(scope="module")
def shared(found: Differences, folder: Path) -> Differences:
    """By two context-parallel ranks."""
    return reported(folder, 2)


def reported(folder: Path, size: int) -> Differences:
    script = Path(__file__).with_name("packed_model.py")
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), str(folder), str(rank), str(size)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    done = [(*process.communicate(timeout=300), process.returncode) for process in started]
    assert not any(status for _, _, status in done), done
    return json.loads(done[0][0].splitlines()[-1])


@KINDS
@GROUPINGS
def test_gradient_is_that_of_one_document_a_row(found, kind, grouping):
    assert found[kind][grouping] <= TOLERANCE


@pytest.mark.parametrize(("kind", "deterministic"), [("flash", True), ("flash window", False)])
def test_flash_is_asked_for_the_same_attention(found, kind, deterministic):
    asked = found[kind]
    assert max(asked[grouping] for grouping in ("two bins", "other bins", "one row", "backwards")) <= TOLERANCE
    assert asked["deterministic"] == [deterministic]


@KINDS
@GROUPINGS
def test_gradient_of_two_context_parallel_ranks_is_that_of_one_document_a_row(shared, kind, grouping):
    assert shared[kind][grouping] <= TOLERANCE


@pytest.mark.parametrize("kind", ["full", "window"])
def test_no_document_sees_another(found, kind):
    assert found[kind]["changed"] > 0.01  # the test would see it
    assert found[kind]["leaked"] == 0.0


def test_context_parallel_ranks_have_the_slices_of_megatrons_own_function(monkeypatch):
    """For each sequence alone those of the split that Megatron makes of whole rows without Transformer Engine."""
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("megatron.core.utils")
    from megatron.core import parallel_state

    from megatron_balance.megatron.packed.context import places_of

    lengths, size = [8, 48, 16, 8], 4
    split = getattr(utils, "_get_batch_on_this_cp_rank_per_sequence_balancing", utils.get_batch_on_this_cp_rank)
    bounds = np.cumsum([0, *lengths])
    seen = []
    for rank in range(size):
        for module, name, value in (
            (torch.distributed, "get_world_size", size),
            (torch.distributed, "get_rank", rank),
            (parallel_state, "get_context_parallel_world_size", size),
            (parallel_state, "get_context_parallel_rank", rank),
        ):
            monkeypatch.setattr(module, name, lambda *args, value=value: value)
        parts = [
            split({"tokens": torch.arange(start, end)[None]}, cp_group=None)["tokens"][0]
            for start, end in pairwise(bounds)
        ]
        found = places_of(lengths, size, rank)
        assert found.tolist() == torch.cat(parts).tolist()
        seen += found.tolist()
    assert sorted(seen) == list(range(sum(lengths)))
