"""What training logs of packing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MODELS = (
    "",
    "--group-query-attention --num-query-groups 2 --swiglu",
    "--multi-latent-attention",
    "--num-experts 4 --moe-ffn-hidden-size 128",
    "--varlen-packing --varlen-packing-shapes variable",
)


@pytest.fixture(scope="module")
def counts() -> list[list[float]]:
    pytest.importorskip("megatron.training")
    script = Path(__file__).with_name("packed_counts.py")
    command = [sys.executable, "-W", "ignore", str(script), json.dumps(MODELS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "model", range(len(MODELS)), ids=("multi-head", "grouped-queries", "latent", "experts", "variable")
)
def test_operations_are_those_that_megatron_counts_from_the_bounds(counts, model):
    count, by_bounds, whole = counts[model]
    assert count == pytest.approx(by_bounds, rel=1e-12)
    assert count < 0.96 * whole  # else it would not matter
