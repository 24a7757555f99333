"""Packing changes no gradient of the same documents, and no document sees another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOLERANCE = 1e-5  # relative, of fp32 sums in another order


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    pytest.importorskip("megatron.core")
    script, store = Path(__file__).with_name("packed_model.py"), tmp_path_factory.mktemp("rendezvous") / "store"
    command = [sys.executable, "-W", "ignore", str(script), str(store)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("attention", ["full", "window"])
@pytest.mark.parametrize("grouping", ["two bins", "other bins", "one row", "backwards"])
def test_gradient_is_that_of_one_document_a_row(found, attention, grouping):
    assert found[attention][grouping] <= TOLERANCE


@pytest.mark.parametrize("attention", ["full", "window"])
def test_no_document_sees_another(found, attention):
    assert found[attention]["changed"] > 0.01  # the test would see it
    assert found[attention]["leaked"] == 0.0
