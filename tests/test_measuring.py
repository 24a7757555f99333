"""Measured costs: of the real modules, in a process of their own, kept, and without a trace in the training."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from launch import TINY, Run, dry_run, launch, trained
from test_balanced_training import UNTIED

from megatron_balance.costs.table import CostTable, load_costs
from megatron_balance.megatron.measuring.launch import measure

pytestmark = pytest.mark.training

WEIGHTS = "--balanced-pipeline-head-weight 3,2 --balanced-pipeline-embedding-weight 0.1,0.4"
PP2 = [*TINY, *UNTIED.split(), *f"--pipeline-model-parallel-size 2 --balanced-pipeline {WEIGHTS}".split()]


def profile(folder: Path, flags: str) -> CostTable:
    """What `megatron-balance profile` writes."""
    file = folder / "costs.json"
    command = [sys.executable, "-m", "megatron_balance.cli", "profile", "--output", str(file), "--device", "cpu"]
    done = subprocess.run([*command, *TINY, *flags.split()], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "head" in done.stdout and "written to" in done.stdout
    return load_costs(file)


def measuring_processes(cache: Path) -> list[psutil.Process]:
    """Those of jobs whose costs are kept in ``cache``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ours = process.environ().get("MEGATRON_BALANCE_CACHE") == str(cache)
            if ours and "megatron_balance.megatron.measuring" in process.cmdline():
                found.append(process)
    return found


def test_a_profile_is_of_one_tensor_parallel_rank(tmp_path):
    costs = profile(tmp_path, f"{UNTIED} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4")
    hidden, ffn, vocabulary, positions = 32, 128 // 2, 128 // 2, 32
    assert costs.kind == "measured" and costs.holds_for["tensor_size"] == 2
    assert costs.embedding.parameters == (vocabulary + positions) * hidden
    assert costs.head.parameters == vocabulary * hidden + 2 * hidden
    (dense,) = costs.layers.values()
    split = 3 * hidden * hidden // 2 + 3 * hidden // 2 + hidden * hidden // 2 + 2 * hidden * ffn + ffn
    assert dense.parameters == split + 2 * hidden + 4 * hidden  # biases after the sums, and norms, are whole
    assert [one.seq_length for one in dense.by_length] == [8, 16, 32]
    assert costs.update_s_per_parameter > 0 and costs.provenance["micro_batches"] >= 15


@pytest.mark.parametrize(
    ("replicas", "more"), [(1, "--mtp-num-layers 1 --position-embedding-type rope"), (2, "")], ids=["MTP", "DP2"]
)
def test_packed_micro_batches_are_measured_at_several_lengths(monkeypatch, tmp_path, replicas, more):
    """In a process that asks none of the job's ranks, whose rendezvous it would disturb or not find."""
    monkeypatch.setenv("MEGATRON_BALANCE_CACHE", str(tmp_path))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")  # nobody may listen there, nor anybody be reached
    flags = f"{UNTIED} --varlen-packing --calculate-per-token-loss {more}"
    costs = measure(None, [*TINY, *flags.split()], "cpu", world_size=replicas)
    (dense,) = costs.layers.values()
    assert costs.kind == "measured" and [one.seq_length for one in dense.by_length] == [8, 16, 32]
    assert (costs.mtp is not None) == bool(more)


def test_each_kind_of_layer_is_measured_with_the_experts_of_one_rank(tmp_path):
    moe = "--num-experts 4 --moe-ffn-hidden-size 64 --expert-model-parallel-size 2 --disable-bias-linear"
    kinds = "--moe-layer-freq [0,1,1,1] --window-size 8,0 --window-attn-skip-freq [1,1,1,1]"
    costs = profile(tmp_path, f"--num-layers 4 {moe} {kinds} --moe-router-topk 2")
    assert set(costs.layers) == {"dense/8", "moe/8"}
    dense, experts = costs.layers["dense/8"], costs.layers["moe/8"]
    assert costs.holds_for["experts_count"] == 4 and costs.holds_for["experts_shards"] == 2
    assert experts.parameters - dense.parameters == 2 * (2 * 32 * 64) + 2 * 32 - 2 * 32 * 128
    assert costs.head.parameters == 128 * 32 + 2 * 32  # weights of its own although they are tied


def test_multi_token_prediction_is_measured_apart_from_the_head(tmp_path):
    costs = profile(tmp_path, "--num-layers 4 --mtp-num-layers 1 --position-embedding-type rope --disable-bias-linear")
    hidden, ffn, vocabulary = 32, 128, 128
    (dense,) = costs.layers.values()
    assert dense.parameters == 4 * hidden * hidden + 2 * hidden * ffn + 4 * hidden
    # Three norms, a projection of both inputs and a layer; a word embedding of its own where it is apart.
    assert costs.mtp.parameters == 3 * 2 * hidden + 2 * hidden * hidden + dense.parameters + vocabulary * hidden
    assert costs.head.parameters == vocabulary * hidden + 2 * hidden
    assert costs.mtp.forward_s > 0 and costs.mtp.backward_s > 0


def _until(condition: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> tuple[Path, Run]:
    """A cache with costs of PP2, and the dry run that measured them, after another that was killed while it measured."""
    folder = tmp_path_factory.mktemp("kept")
    arguments, cache = [*PP2, "--balanced-pipeline-costs", "profile"], folder / "cache"
    environment = {"MEGATRON_BALANCE_CACHE": str(cache)}
    run = [sys.executable, "-m", "megatron_balance.run", "--device", "cpu", *arguments, "--balanced-pipeline-dry-run"]
    killed = subprocess.Popen(run, env={**os.environ, **environment}, cwd=folder, stdout=subprocess.DEVNULL)
    try:
        _until(lambda: bool(measuring_processes(cache)), within_s=300)
    finally:
        killed.kill()  # it alone: what it started ends by itself
        killed.wait()
    _until(lambda: not measuring_processes(cache), within_s=100)
    return cache, dry_run(folder / "measured", arguments, environment=environment)


def test_costs_are_measured_once(kept, tmp_path):
    cache, first = kept
    assert first.status == 0, first.output
    assert "measured in" in first.output and "costs       measured (CPU" in first.output
    (file,) = cache.iterdir()
    costs = load_costs(file)
    again = dry_run(
        tmp_path, [*PP2, "--balanced-pipeline-costs", "profile"], environment={"MEGATRON_BALANCE_CACHE": str(cache)}
    )
    assert again.status == 0 and f"kept in {file}" in again.output and load_costs(file) == costs


def test_measuring_changes_no_loss_by_a_bit(from_checkpoint, checkpoint, tmp_path):
    analytic = "--pipeline-model-parallel-size 2 --balanced-pipeline --balanced-pipeline-costs analytic"
    estimated = from_checkpoint(UNTIED, f"{analytic} {WEIGHTS}", 2)
    load = ["--load", str(checkpoint(UNTIED)), "--finetune", "--no-load-optim", "--no-load-rng"]
    cache = tmp_path / "cache"
    run = trained(launch(tmp_path, [*PP2, *load], 2, environment={"MEGATRON_BALANCE_CACHE": str(cache)}))
    assert "measured in" in run.output and len(list(cache.iterdir())) == 1
    assert run.ranks[0]["layout"] == estimated.ranks[0]["layout"]
    assert run.losses == estimated.losses
    assert not measuring_processes(cache)


OUT_OF_MEMORY = """
import runpy, sys
if "megatron_balance.megatron.measuring" in sys.orig_argv:
    import torch
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
runpy.run_module("megatron_balance.megatron.pretrain_gpt", run_name="__main__")
"""


def test_where_measuring_fails_estimates_serve_unless_it_was_asked_for(checkpoint, tmp_path):
    script = tmp_path / "pretrain.py"
    script.write_text(OUT_OF_MEMORY)
    load = ["--load", str(checkpoint(UNTIED)), "--finetune", "--no-load-optim", "--no-load-rng"]
    cache = tmp_path / "cache"
    environment = {"MEGATRON_BALANCE_CACHE": str(cache)}
    run = trained(launch(tmp_path / "default", [*PP2, *load], 2, script=str(script), environment=environment))
    reason = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."
    assert (cache / "measuring-failed.log").read_text().rstrip().endswith(reason)
    (line,) = [line for line in run.output.splitlines() if "stands on estimates" in line]
    assert line.startswith("megatron-balance: the costs could not be measured") and reason in line
    assert "costs       analytic" in run.output and len(run.losses) == 20
    profiled = [*PP2, "--balanced-pipeline-costs", "profile"]
    asked = dry_run(tmp_path / "asked", profiled, script=str(script), environment=environment)
    assert asked.status == 2 and asked.output.count("megatron-balance: error:") == 1 and reason in asked.output


def test_a_costs_file_is_used_or_refused(kept, tmp_path):
    (file,) = kept[0].iterdir()
    used = dry_run(tmp_path / "used", [*PP2, "--balanced-pipeline-costs", str(file)])
    assert used.status == 0 and "costs       measured (CPU" in used.output
    values = json.loads(file.read_text())
    values["head"]["forward_s"] = float("nan")
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(values))
    refused = dry_run(tmp_path / "refused", [*PP2, "--balanced-pipeline-costs", str(broken)])
    assert refused.status == 2 and refused.output.count("megatron-balance: error:") == 1
    assert f"the costs file {broken} is not whole JSON" in refused.output and "Traceback" not in refused.output
    other = dry_run(tmp_path / "other", [*PP2, "--hidden-size", "64", "--balanced-pipeline-costs", str(file)])
    assert other.status == 2 and "hidden_size is 64 here, 32 there" in other.output
