"""A balanced split changes no loss, and what Megatron builds is what was planned. Real training, on the CPU."""

from __future__ import annotations

import json

import pytest
from launch import TINY, launch, trained

pytestmark = pytest.mark.training

TOLERANCE = 2e-6  # relative, as fp32 sums in another order allow
UNTIED = "--num-layers 8 --untie-embeddings-and-output-weights"
TIED = "--num-layers 8"
BALANCED = (
    "--balanced-pipeline --balanced-pipeline-costs analytic --balanced-pipeline-head-weight 3,2"
    " --balanced-pipeline-embedding-weight 0.1,0.4"
)


def largest_difference(losses: list[float], reference: list[float]) -> float:
    assert len(losses) == len(reference) == 20
    return max(abs(loss - right) / right for loss, right in zip(losses, reference, strict=True))


def built(run) -> list[list[int]]:
    """Numbers of layers of each stage in the order of the data, checked to be the same on all replicas."""
    stages: dict[tuple[int, int], list[int]] = {}
    for rank in run.ranks.values():
        for number, chunk in enumerate(rank["chunks"]):
            assert stages.setdefault((number, rank["pipeline_rank"]), chunk["layers"]) == chunk["layers"]
    return [stages[place] for place in sorted(stages)]


@pytest.mark.parametrize(
    ("model", "parallel", "processes"),
    [
        (UNTIED, "--pipeline-model-parallel-size 2", 2),
        (UNTIED, "--pipeline-model-parallel-size 4", 4),
        (UNTIED, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", 2),
        (UNTIED, "--pipeline-model-parallel-size 2", 4),  # DP2
        (UNTIED, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2", 4),
        (TIED, "--pipeline-model-parallel-size 2", 2),
        ("--num-layers 7 --untie-embeddings-and-output-weights", "--pipeline-model-parallel-size 2", 2),
        ("--num-layers 30 --untie-embeddings-and-output-weights", "--pipeline-model-parallel-size 4", 4),
    ],
    ids=["PP2", "PP4", "PP2-VPP2", "DP2-PP2", "TP2-PP2", "tied", "7-layers", "30-layers-PP4"],
)
def test_losses_equal_those_of_one_stage(from_checkpoint, model, parallel, processes):
    run = from_checkpoint(model, f"{parallel} {BALANCED}", processes)
    assert largest_difference(run.losses, from_checkpoint(model).losses) <= TOLERANCE
    stages = built(run)
    numbers = [number for stage in stages for number in stage]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(stages[-1]) < len(stages[0])  # the head weighs layers


def test_losses_equal_those_of_the_uniform_split(from_checkpoint):
    parallel = "--pipeline-model-parallel-size 2"
    uniform, balanced = from_checkpoint(UNTIED, parallel, 2), from_checkpoint(UNTIED, f"{parallel} {BALANCED}", 2)
    assert built(uniform) == [[1, 2, 3, 4], [5, 6, 7, 8]] != built(balanced)
    assert largest_difference(balanced.losses, uniform.losses) <= TOLERANCE


@pytest.mark.parametrize("virtual", ["", " --num-virtual-stages-per-pipeline-rank 2"], ids=["PP2", "PP2-VPP2"])
def test_built_stages_equal_the_plan(from_checkpoint, tmp_path, virtual):
    plan_file = tmp_path / "plan.json"
    parallel = f"--pipeline-model-parallel-size 2{virtual} {BALANCED} --balanced-pipeline-plan {plan_file}"
    run = from_checkpoint(UNTIED, parallel, 2)
    plan = json.loads(plan_file.read_text())
    assert [len(layers) for layers in built(run)] == [stage["layers"] for stage in plan["stages"]]
    assert {rank["layout"] for rank in run.ranks.values()} == {plan["layout"]}
    assert f"pipeline_model_parallel_layout .................. {plan['layout']}" in run.output
    hidden, ffn, vocabulary, positions = 32, 128, 128, 32
    layer = 4 * hidden * hidden + 4 * hidden + 2 * hidden * ffn + hidden + ffn + 4 * hidden
    for rank in run.ranks.values():
        for chunk in rank["chunks"]:
            expected = layer * len(chunk["layers"])
            expected += (vocabulary + positions) * hidden if chunk["embedding"] else 0
            expected += vocabulary * hidden + 2 * hidden if chunk["head"] else 0
            assert chunk["parameters"] == expected


def test_a_killed_run_leaves_nothing_half_written_and_the_next_one_reuses_its_plan(
    checkpoint, from_checkpoint, tmp_path
):
    plan_file = tmp_path / "plans" / "plan.json"
    plan_file.parent.mkdir()
    load = ["--load", str(checkpoint(UNTIED)), "--finetune", "--no-load-optim", "--no-load-rng"]
    split = ["--pipeline-model-parallel-size", "2", *BALANCED.split(), "--balanced-pipeline-plan", str(plan_file)]
    arguments = [*TINY, *UNTIED.split(), *load, *split]
    killed = launch(tmp_path / "killed", [*arguments, "--train-iters", "5000"], 2, kill_when="iteration        3/")
    assert killed.status < 0
    assert [path.name for path in plan_file.parent.iterdir()] == ["plan.json"]
    run = trained(launch(tmp_path / "again", arguments, 2))
    assert f"plan read from {plan_file}" in run.output
    assert largest_difference(run.losses, from_checkpoint(UNTIED).losses) <= TOLERANCE


def test_bf16_trains_balanced(tmp_path):
    parallel = "--num-layers 4 --bf16 --pipeline-model-parallel-size 2 --train-iters 3"
    run = trained(launch(tmp_path, [*TINY, *parallel.split(), *BALANCED.split()], 2))
    assert len(run.losses) == 3 and all(4 < loss < 6 for loss in run.losses)


def test_checkout_script_trains_balanced(megatron_lm, checkpoint, tmp_path):
    script = str(megatron_lm / "pretrain_gpt.py")
    load = ["--load", str(checkpoint(UNTIED)), "--finetune", "--no-load-optim", "--no-load-rng"]
    model = [*TINY, *UNTIED.split(), *load]
    alone = trained(launch(tmp_path / "alone", model, script=script))
    parallel = ["--pipeline-model-parallel-size", "2", *BALANCED.split()]
    split = trained(launch(tmp_path / "split", [*model, *parallel], 2, script=script))
    assert largest_difference(split.losses, alone.losses) <= TOLERANCE
    assert len(built(split)[0]) > len(built(split)[1])
