"""What cannot be done is refused with its numbers and the remedy, before any process group forms."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ALONE, TINY, TORCHRUN, dry_run, launch

from megatron_balance.errors import BalanceError
from megatron_balance.megatron.arguments import Options

pytestmark = pytest.mark.training

MODEL = [*TINY, "--num-layers", "8"]
PP2 = [*MODEL, "--pipeline-model-parallel-size", "2", "--balanced-pipeline"]


def prepared(monkeypatch, arguments: list[str], **changes):
    """Megatron's own parse of ``arguments``, after our hook that runs before its validation."""
    from megatron.training.arguments import parse_args

    from megatron_balance.megatron.arguments import add_arguments
    from megatron_balance.megatron.balanced_pipeline import PRINT_ARGS, before_validation
    from megatron_balance.megatron.registry import registry

    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *arguments])
    args = parse_args(extra_args_provider=add_arguments)
    for name, value in changes.items():
        setattr(args, name, value)
    try:
        before_validation(args, Options.from_args(args))
    finally:
        registry.undo(PRINT_ARGS)
    return args


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--num-layers 2 --pipeline-model-parallel-size 8",
            "2 layers, embedding and head are 4 elements; 8 stages.*4 empty",
        ),
        ("--pipeline-model-parallel-layout Etttt|ttttL", r"leave out --pipeline-model-parallel-layout Etttt\|ttttL"),
        ("--decoder-first-pipeline-num-layers 3", "leave out --decoder-first-pipeline-num-layers 3"),
        ("--decoder-last-pipeline-num-layers 3", "leave out --decoder-last-pipeline-num-layers 3"),
        ("--account-for-embedding-in-pipeline-split", "leave out --account-for-embedding-in-pipeline-split"),
        ("--account-for-loss-in-pipeline-split", "leave out --account-for-loss-in-pipeline-split"),
        ("--balanced-pipeline-head-weight=-1", "--balanced-pipeline-head-weight -1: .*not negative"),
        ("--balanced-pipeline-head-weight nan", "head-weight nan"),
        ("--balanced-pipeline-head-weight inf,1", "head-weight inf,1"),
        ("--balanced-pipeline-head-weight 1e16", "at most 1e.06"),
        ("--balanced-pipeline-plan=", "plan needs the name of a file"),
        ("--balanced-pipeline-costs=", "costs needs the name of a file"),
        (
            "--balanced-pipeline-costs profile --balanced-pipeline-device H100",
            "device H100 is for estimates.*leave one",
        ),
        ("--balanced-pipeline-dry-run=3", r"dry-run 3: .* multiple of 1 \* 2 \* 1 = 2"),
        ("--num-layers=-4", "--num-layers -4: give 1 or more"),
        ("--balanced-pipeline-embedding-weight 1,2,3", "embedding-weight 1,2,3"),
        ("--balanced-pipeline-embedding-weight much", "embedding-weight much"),
        ("--balanced-pipeline-dry-run=-3", "dry-run -3"),
        ("--balanced-pipeline-device H300", "device H300: choose one of A100, .*generic"),
        (
            "--num-virtual-stages-per-pipeline-rank 2 --heterogeneous-layers-config-path blocks.json",
            "cannot build layers that each have a configuration of their own in 2 virtual stages",
        ),
        ("--experimental-attention-variant dsa", "experimental or linear attention"),
        ("--balanced-pipeline-mtp-placement first", "mtp-placement first: must be any or last"),
        ("--balanced-pipeline-memory-gb 0", "memory-gb 0.0: give the gigabytes"),
        (
            "--balanced-pipeline-memory-gb 5 --balanced-pipeline-memory-like uniform",
            "both limit the memory: leave one out",
        ),
        ("--num-virtual-stages-per-pipeline-rank 0", "--num-virtual-stages-per-pipeline-rank 0: give 1 or more"),
        ("--num-layers-per-virtual-pipeline-stage=-2", "--num-layers-per-virtual-pipeline-stage -2: give 1 or more"),
        (
            "--use-megatron-fsdp",
            "--use-megatron-fsdp with --pipeline-model-parallel-size 2: .*--use-distributed-optimizer",
        ),
        ("--use-torch-fsdp2", "--use-torch-fsdp2 with --pipeline-model-parallel-size 2"),
        ("--pipeline-model-parallel-size 0", "--pipeline-model-parallel-size 0: give 1 or more"),
        ("--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 2", "leave one out"),
    ],
)
def test_refused_before_validation(monkeypatch, flags, message):
    with pytest.raises(BalanceError, match=message):
        prepared(monkeypatch, [*PP2, *flags.split()])


HYBRID = [*TINY, "--balanced-pipeline", *"--pipeline-model-parallel-size 2 --spec a.module a_stack".split()]


@pytest.mark.parametrize(
    ("pattern", "virtual", "provisional"),
    [("M*-M*-E", 1, "M*-|M*-E"), ("M*-M*-E/*-", 1, "M*-|M*-E/*-"), ("M*-M*-E", 2, "M|*-|M*|-E")],
)
def test_hybrid_models_get_borders_in_their_pattern(monkeypatch, pattern, virtual, provisional):
    flags = ["--hybrid-layer-pattern", pattern, "--num-virtual-stages-per-pipeline-rank", str(virtual)]
    args = prepared(monkeypatch, [*HYBRID, *flags])
    assert args.hybrid_layer_pattern == provisional and args.pipeline_model_parallel_layout is None
    assert args.num_virtual_stages_per_pipeline_rank is None  # Megatron refuses it beside a pattern


def test_borders_given_by_hand_are_refused(monkeypatch):
    with pytest.raises(BalanceError, match=r"leave the \| out of --hybrid-layer-pattern M\*\|M\*"):
        prepared(monkeypatch, [*HYBRID, "--hybrid-layer-pattern", "M*|M*"])


def test_legacy_models_are_refused(monkeypatch):
    with pytest.raises(BalanceError, match="leave out --use-legacy-models"):
        prepared(monkeypatch, PP2, use_legacy_models=True)  # newer parsers no longer have the flag


def test_a_teacher_beside_the_model_is_refused(monkeypatch):
    with pytest.raises(BalanceError, match="--export-kd-teacher-load by the same layout: leave one"):
        prepared(monkeypatch, PP2, export_kd_teacher_load="teacher")  # ModelOpt's own flag


def test_option_without_its_flag_is_refused(monkeypatch):
    with pytest.raises(BalanceError, match="--balanced-pipeline-plan does nothing without --balanced-pipeline"):
        prepared(monkeypatch, [*MODEL, "--balanced-pipeline-plan", "plan.json"])


def test_one_stage_trains_as_stock(monkeypatch, capsys):
    args = prepared(monkeypatch, [*MODEL, "--balanced-pipeline"])
    assert args.pipeline_model_parallel_layout is None
    assert "nothing to do" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        prepared(monkeypatch, [*MODEL, "--balanced-pipeline", "--balanced-pipeline-dry-run", "8"])
    assert ended.value.code == 0


@pytest.mark.parametrize(
    ("flags", "stages"),
    [
        ("", 2),
        ("--num-virtual-stages-per-pipeline-rank 3", 6),
        ("--num-layers-per-virtual-pipeline-stage 2", 4),  # 8 / (2 * 2)
        ("--num-layers-per-virtual-pipeline-stage 3", 2),  # 8 / (2 * 3), rounded
        ("--num-layers-per-virtual-pipeline-stage 9", 2),  # at least 1
    ],
)
def test_provisional_layout_has_the_final_number_of_stages(monkeypatch, flags, stages):
    args = prepared(monkeypatch, [*PP2, *flags.split()])
    assert args.pipeline_model_parallel_layout.count("|") + 1 == stages
    assert args.pipeline_model_parallel_layout.count("t") == 8


def test_rank_0_says_it_once_and_exits_with_2(tmp_path):
    run = launch(tmp_path, [*PP2, "--account-for-loss-in-pipeline-split"], 2, by=TORCHRUN)
    assert run.status != 0 and not run.ranks
    assert run.output.count("megatron-balance: error:") == 1
    assert "Traceback" not in run.output.split("torch/distributed/elastic")[0]
    root_cause = run.output.split("Root Cause")[1]
    assert "rank      : 0" in root_cause and "exitcode  : 2" in root_cause


def test_yaml_configuration_is_refused(tmp_path):
    run = launch(tmp_path, [*PP2, "--yaml-cfg", "model.yaml"], by=ALONE)
    assert run.status == 2 and "cannot be used with --yaml-cfg" in run.output


def test_device_flag_in_the_wrong_place_is_refused(tmp_path):
    run = launch(tmp_path, [*PP2, "--device", "cpu"], by=ALONE)
    assert run.status == 2 and "put it before all others" in run.output


def test_help_shows_our_group(tmp_path):
    run = launch(tmp_path, ["--help"], by=ALONE)
    assert run.status == 0, run.output[-2000:]
    assert "usage: torchrun" in run.output and "megatron-balance:" in run.output
    assert "--balanced-pipeline-head-weight W|FWD,BWD" in run.output


def test_missing_script_is_refused(tmp_path):
    run = launch(tmp_path, PP2, script="nowhere/pretrain_gpt.py", by=ALONE)
    assert run.status == 2 and "no training script nowhere/pretrain_gpt.py" in run.output


def test_dry_run_plans_and_exits(tmp_path):
    plan_file = tmp_path / "plan.json"
    thirty = [*TINY, *"--num-layers 30 --pipeline-model-parallel-size 4 --balanced-pipeline".split()]
    run = dry_run(tmp_path, [*thirty, "--balanced-pipeline-plan", str(plan_file)], 8)
    assert run.status == 0 and not run.ranks, run.output
    plan = json.loads(plan_file.read_text())
    assert sum(stage["layers"] for stage in plan["stages"]) == 30 and len(plan["stages"]) == 4
    assert "initializing torch distributed" not in run.output

    again = dry_run(tmp_path, [*thirty, "--balanced-pipeline-plan", str(plan_file)], 8)
    assert again.status == 0 and f"read from {plan_file}" in again.output

    for flags, message in (
        (["--hidden-size", "64"], "hidden_size is 64, planned for 32"),
        (["--balanced-pipeline-head-weight", "9"], "head_weight is '9,9', planned for None"),
        (["--global-batch-size", "16"], "num_microbatches"),
        (["--balanced-pipeline-device", "H100"], "stands on other costs, analytic"),
    ):
        other = dry_run(tmp_path, [*thirty, "--balanced-pipeline-plan", str(plan_file), *flags], 8)
        assert other.status == 2 and str(plan_file) in other.output and message in other.output

    no_file = dry_run(tmp_path, [*thirty, "--balanced-pipeline-plan", "/dev/full"], 8)
    assert no_file.status == 2 and "/dev/full cannot be read (it is not a regular file)" in no_file.output

    plan_file.write_text(plan_file.read_text()[:-20])
    broken = dry_run(tmp_path, [*thirty, "--balanced-pipeline-plan", str(plan_file)], 8)
    assert broken.status == 2 and str(plan_file) in broken.output and "Traceback" not in broken.output


def test_dry_run_for_a_gpu_plans_the_model_that_the_gpu_trains(tmp_path):
    """What the CPU runtime replaces (attention, gradient accumulation) must not enter a plan for another device."""
    plan_file = tmp_path / "plan.json"
    stock = [part for part in PP2 if part not in ("--transformer-impl", "local")]
    run = dry_run(tmp_path, [*stock, "--balanced-pipeline-device", "H100", "--balanced-pipeline-plan", str(plan_file)])
    assert run.status == 0, run.output
    plan = json.loads(plan_file.read_text())
    assert plan["costs_source"] == "analytic (H100)"
    assert plan["fingerprinted"]["fused_kernels"] and plan["fingerprinted"]["gradient_accumulation_fusion"]


@pytest.fixture(scope="module")
def renamed_tree(tmp_path_factory) -> Path:
    """A copy of the installed Megatron in which `validate_args` has another name."""
    import megatron.core

    source, tree = Path(megatron.core.__file__).parents[1], tmp_path_factory.mktemp("renamed")
    shutil.copytree(source, tree / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (tree / "megatron" / "training").rglob("*.py"):
        text = path.read_text()
        if "validate_args" in text:
            path.write_text(text.replace("validate_args", "validate_arguments"))
    return tree


def test_renamed_target_is_named_when_its_flag_is_given(renamed_tree, tmp_path):
    run = launch(tmp_path, PP2, by=ALONE, environment={"PYTHONPATH": str(renamed_tree)})
    assert run.status == 2 and "needs megatron.training.arguments.validate_args" in run.output
    assert f"{renamed_tree}/megatron/training/arguments.py has no function validate_args" in run.output.replace(
        "\n", ""
    )


def test_doctor_lists_the_hooks(renamed_tree):
    command = [sys.executable, "-m", "megatron_balance.cli", "doctor"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    renamed = subprocess.run([*command, "--megatron-path", str(renamed_tree)], capture_output=True, text=True)
    assert renamed.returncode == 1 and "megatron.training.arguments.validate_args is not in" in renamed.stdout
    assert "there is validate_arguments" in renamed.stdout and "every flag of ours needs it" in renamed.stdout
    assert "`validate_args = OTHER_NAME`" in renamed.stdout
    nowhere = subprocess.run([*command, "--megatron-path", "nowhere"], capture_output=True, text=True)
    assert nowhere.returncode == 2 and "nowhere is no Megatron-LM checkout" in nowhere.stderr
