"""A resume keeps its checkpoint's layout, changes it only where nothing is lost, and then trains on as if never stopped."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from launch import ALONE, TINY, launch, trained

from megatron_balance.errors import BalanceError
from megatron_balance.megatron.arguments import Options
from megatron_balance.megatron.found_checkpoint import Checkpoint
from megatron_balance.megatron.stored_layout import Job, kept
from megatron_balance.pipeline.layout import Layout
from megatron_balance.pipeline.stored import FILE_NAME, StoredLayout, layout_of_arguments

UNIFORM = StoredLayout(Layout.of([4, 4]), 2, 1)
BALANCED = StoredLayout(Layout.of([5, 3]), 2, 1)

# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [UNIFORM, StoredLayout(Layout((1, 0, 3, 0), (0, 0, 1, 0)), 2, 2)], ids=str)
def test_file_is_read_as_it_was_written(stored):
    assert StoredLayout.from_json(stored.to_json(), "file") == stored


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "megatron-balance plan"}, "is not a stored layout"),
        ({"format_version": 2}, "has format_version 2, not 1"),
        ({"layout": "Ettttt|ttt"}, "layout is|has 0 L"),
        ({"layers": [3, 5]}, r"layers is \[3, 5\], not \[5, 3\]"),
        ({"layers": None}, "layers is None"),
        ({"pipeline_size": 3}, r"number of stages is 2, not 3 \* 1"),
        ({"virtual_size": "1"}, "virtual_size is '1', not a whole number"),
        ({"more": 1}, "holds the unknown more"),
        ({"created_by": 3}, "created_by is 3"),
    ],
)
def test_damaged_file_is_named_with_its_key(changes, message):
    values = {**json.loads(BALANCED.to_json()), **changes}
    with pytest.raises(BalanceError, match=f"the/file .*({message})"):
        StoredLayout.from_json(json.dumps(values), "the/file")


def test_cut_file_is_refused():
    for end in range(len(BALANCED.to_json()) - 2):
        with pytest.raises(BalanceError, match="the/file is not whole JSON"):
            StoredLayout.from_json(BALANCED.to_json()[:end], "the/file")


# --- the layout of arguments ------------------------------------------------------------------------------------------


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("ranks", "virtual_size", "flags"),
    [
        (2, None, {}),
        (4, 2, {}),
        (4, None, {"first": 1, "last": 3}),
        (4, 2, {"first": 2}),
        (2, None, {"last": 5}),
        (3, 2, {"embedding": True, "loss": True}),
        (17, None, {"loss": True}),
    ],
)
def test_layers_are_those_that_megatron_builds(ranks, virtual_size, flags):
    import torch
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

    num_layers = 16 if "first" not in flags or "last" in flags else 14
    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=virtual_size,
        pipeline_dtype=torch.float32,
        num_layers_in_first_pipeline_stage=flags.get("first"),
        num_layers_in_last_pipeline_stage=flags.get("last"),
        account_for_embedding_in_pipeline_split=flags.get("embedding", False),
        account_for_loss_in_pipeline_split=flags.get("loss", False),
    )
    built = [
        get_num_layers_to_build(config, chunk if virtual_size else None, rank)
        for chunk in range(virtual_size or 1)
        for rank in range(ranks)
    ]
    arguments = {
        "num_layers": num_layers,
        "pipeline_model_parallel_size": ranks,
        "virtual_pipeline_model_parallel_size": virtual_size,
        "decoder_first_pipeline_num_layers": flags.get("first"),
        "decoder_last_pipeline_num_layers": flags.get("last"),
        "account_for_embedding_in_pipeline_split": flags.get("embedding", False),
        "account_for_loss_in_pipeline_split": flags.get("loss", False),
    }
    assert list(layout_of_arguments(arguments).layout.layers) == built and sum(built) == num_layers


def test_layout_string_counts_and_unknown_models_tell_nothing():
    arguments = {"num_layers": 8, "pipeline_model_parallel_size": 2}
    assert layout_of_arguments(arguments) == UNIFORM
    assert layout_of_arguments({**arguments, "pipeline_model_parallel_layout": "Et*5|t*3L"}) == BALANCED
    assert layout_of_arguments({**arguments, "hybrid_layer_pattern": "M*M*M|M*M"}) == BALANCED
    with_depths = {"hybrid_layer_pattern": "M*M*M|M*M/*-/*-", "mtp_num_layers": 2}
    assert str(layout_of_arguments({**arguments, **with_depths})) == "Ettttt|tttmmL"
    assert layout_of_arguments({**arguments, "hybrid_layer_pattern": "M*M*M*M*"}) == UNIFORM
    for change in (
        {"num_layers": 7},
        {"pipeline_model_parallel_layout": "Et|tL"},
        {"hybrid_layer_pattern": "M*M*|M*M*|M"},
        {"num_layers": None},
    ):
        assert layout_of_arguments({**arguments, **change}) is None


# --- what a resume does -----------------------------------------------------------------------------------------------

JOB = Job(pipeline_size=2, virtual_size=1, num_layers=8)
PLAIN = Checkpoint("save/iter_0000005", UNIFORM, with_optimizer=True)
TIED = replace(PLAIN, tied_by="its optimizer is tied to it", remedy="save it otherwise")
WEIGHTS = replace(PLAIN, with_optimizer=False)
REPLAN = replace(JOB, replan=True)
VIRTUAL = replace(JOB, virtual_size=2)
PLANNED = replace(JOB, plan_file="plan.json", planned=str(BALANCED))


@pytest.mark.parametrize(
    ("checkpoint", "job", "layout", "said"),
    [
        (
            PLAIN,
            JOB,
            UNIFORM,
            "keeping the layout of the checkpoint save/iter_0000005: Etttt.*-replan would plan afresh",
        ),
        (TIED, JOB, UNIFORM, r"keeping the layout of the checkpoint save/iter_0000005: Etttt\|ttttL\n"),
        (PLAIN, REPLAN, None, r"not keeping .*Etttt\|ttttL: --balanced-pipeline-replan"),
        (PLAIN, VIRTUAL, None, r"not keeping .*Etttt\|ttttL: it was saved on 2 pipeline rank\(s\) of 1 stage"),
        (PLAIN, replace(JOB, pipeline_size=4), None, "not keeping .*it was saved on 2 pipeline"),
        (WEIGHTS, JOB, None, "only weights are loaded from .*planning afresh"),
        (replace(WEIGHTS, layout=None), JOB, None, "only weights"),
        (replace(WEIGHTS, tied_by="its format is tied"), JOB, UNIFORM, "keeping"),
        (PLAIN, replace(PLANNED, planned=str(UNIFORM)), UNIFORM, "keeping"),
        (PLAIN, replace(PLANNED, replan=True), None, "not keeping"),
        (replace(PLAIN, layout=None), REPLAN, None, ""),
    ],
)
def test_layout_is_kept_or_planned(capsys, checkpoint, job, layout, said):
    assert kept(checkpoint, job) == layout
    assert re.search(said, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("checkpoint", "job", "message"),
    [
        (
            TIED,
            REPLAN,
            r"-replan would change .*Etttt\|ttttL, but its optimizer is tied to it: leave .*, or save it otherwise",
        ),
        (
            TIED,
            VIRTUAL,
            r"2 rank\(s\) with 2 stage\(s\) each, not 2 pipeline rank\(s\) of 1 stage.*use the stored sizes",
        ),
        (replace(WEIGHTS, tied_by="its format is tied"), REPLAN, "its format is tied"),
        (
            PLAIN,
            PLANNED,
            r"plan.json has another layout, Ettttt\|tttL, than .*Etttt\|ttttL: give --balanced-pipeline-replan",
        ),
        (
            TIED,
            PLANNED,
            "plan.json has another layout.*tied to it, so that --balanced-pipeline-replan cannot change it",
        ),
        (PLAIN, replace(JOB, num_layers=12), "has 8 layers, but --num-layers is 12"),
        (PLAIN, replace(JOB, mtp_num_layers=1), "has 0 multi-token.* --mtp-num-layers is 1"),
        (replace(PLAIN, layout=None), JOB, "does not tell which pipeline layout.*--no-load-optim"),
    ],
)
def test_what_would_lose_something_is_refused(checkpoint, job, message):
    with pytest.raises(BalanceError, match=message):
        kept(checkpoint, job)


# --- real checkpoints -------------------------------------------------------------------------------------------------

# Without clipping, because the norm of the gradients is summed stage by stage: another split rounds it otherwise.
MODEL = [*TINY, *"--num-layers 8 --untie-embeddings-and-output-weights --clip-grad 0".split()]
PP2 = "--pipeline-model-parallel-size 2"
WEIGHED = (
    "--balanced-pipeline --balanced-pipeline-costs analytic --balanced-pipeline-head-weight 3,2"
    " --balanced-pipeline-embedding-weight 0.1,0.4"
)
DISTRIBUTED = "--use-distributed-optimizer"
VPP2 = "--num-virtual-stages-per-pipeline-rank 2"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of 20 steps by name, each trained once; they save every 5 steps into `folder(name)`."""
    root = tmp_path_factory.mktemp("resume")
    flags = {
        "uniform": f"{PP2}",
        "replanned": f"{PP2} {WEIGHED} --balanced-pipeline-replan --load {root}/uniform --ckpt-step 5",
        "distributed": f"{PP2} {DISTRIBUTED}",
        "kept": f"{PP2} {WEIGHED} {DISTRIBUTED} --dist-ckpt-optim-fully-reshardable --load {root}/distributed --ckpt-step 5",
    }

    def folder(name: str) -> Path:
        return root / name

    @cache
    def run(name: str):
        arguments = [*MODEL, *flags[name].split(), "--save", str(folder(name)), "--save-interval", "5"]
        return trained(launch(root / f"{name}-run", arguments, 2))

    run.folder = folder
    return run


def resumed(tmp_path, folder: Path, flags: str, processes: int = 2):
    """The run that goes on after the tenth step of the one that saved into ``folder``."""
    return trained(launch(tmp_path, [*MODEL, "--load", str(folder), "--ckpt-step", "10", *flags.split()], processes))


@pytest.fixture(scope="module")
def replanned(runs):
    """The uniform run changed to a balanced split after five steps; what stands in the way of one file is not to matter."""
    runs("uniform")
    (runs.folder("replanned") / "iter_0000020" / FILE_NAME).mkdir(parents=True)
    return runs("replanned")


@pytest.mark.training
def test_replanned_resume_trains_on_as_if_never_stopped(runs, replanned):
    layout = replanned.ranks[0]["layout"]
    assert replanned.losses == runs("uniform").losses[5:] and layout == "Ettttt|tttL"
    assert not list(runs.folder("uniform").glob(f"*/{FILE_NAME}"))  # our flag was not given
    for iteration in (10, 15):
        path = runs.folder("replanned") / f"iter_{iteration:07d}" / FILE_NAME
        assert str(StoredLayout.from_json(path.read_text(), "it")) == layout
    assert replanned.output.count(f"needs --pipeline-model-parallel-layout '{layout}', and neither of") == 1
    assert replanned.output.count("layout could not be kept beside the checkpoint") == 1


@pytest.mark.training
@pytest.mark.parametrize(
    ("flags", "processes"),
    [(PP2, 2), (f"{PP2} {WEIGHED} {VPP2}", 2), ("", 1)],
    ids=["uniform", "VPP2", "PP1"],
)
def test_balanced_checkpoint_is_resumed_in_any_layout(runs, replanned, tmp_path, flags, processes):
    run = resumed(tmp_path, runs.folder("replanned"), flags, processes)
    assert run.losses == runs("uniform").losses[10:]
    if flags == PP2:  # the launcher knows, though our flag is dropped
        assert "was saved with the layout Ettttt|tttL; this job has Etttt|ttttL" in run.output


@pytest.mark.training
def test_distributed_optimizer_keeps_its_layout_and_changes_it_once_it_can(runs, tmp_path):
    reference, kept_run = runs("distributed"), runs("kept")
    assert "keeping the layout of the checkpoint" in kept_run.output and "Pipeline plan" not in kept_run.output
    assert kept_run.losses == reference.losses[5:] and kept_run.ranks[0]["layout"] == "Etttt|ttttL"
    run = resumed(tmp_path, runs.folder("kept"), f"{PP2} {WEIGHED} {DISTRIBUTED} --balanced-pipeline-replan")
    assert run.losses == reference.losses[10:] and run.ranks[0]["layout"] == "Ettttt|tttL"


@pytest.mark.training
def test_dry_run_shows_what_a_resume_would_do(runs, tmp_path):
    runs("distributed")
    load = [
        "--load",
        str(runs.folder("distributed")),
        *f"{PP2} {WEIGHED} {DISTRIBUTED} --balanced-pipeline-dry-run".split(),
    ]
    run = launch(tmp_path / "kept", [*MODEL, *load], by=ALONE)
    assert run.status == 0 and "iter_0000020: Etttt|ttttL" in run.output and "Pipeline plan" not in run.output
    run = launch(tmp_path / "refused", [*MODEL, *load, "--balanced-pipeline-replan"], by=ALONE)
    assert run.status == 2 and "(dp_reshardable) is tied to it: leave --balanced-pipeline-replan out" in run.output
    assert "--dist-ckpt-optim-fully-reshardable" in run.output and "Traceback" not in run.output


def parsed(monkeypatch, folder: Path, flags: str = ""):
    """Megatron's own parse of a job that loads from ``folder``."""
    from megatron.training.arguments import parse_args

    from megatron_balance.megatron.arguments import add_arguments

    arguments = [*MODEL, *PP2.split(), "--load", str(folder), *flags.split()]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *arguments])
    return parse_args(extra_args_provider=add_arguments)


@pytest.mark.training
def test_what_is_loaded_is_found_as_megatron_finds_it(runs, monkeypatch, tmp_path):
    from megatron_balance.megatron.found_checkpoint import find_checkpoint
    from megatron_balance.megatron.stored_layout import layout_to_keep

    runs("distributed"), runs("kept")
    tied, free = runs.folder("distributed"), runs.folder("kept")

    def found(folder, flags=""):
        return find_checkpoint(parsed(monkeypatch, folder, flags))

    assert found(tied).layout == UNIFORM and found(tied).with_optimizer and "dp_reshardable" in found(tied).tied_by
    assert found(tied).folder == str(tied / "iter_0000020")
    assert found(tied, "--ckpt-step 15").folder == str(tied / "iter_0000015")
    for flags in ("--finetune", "--no-load-optim"):
        assert not found(tied, flags).with_optimizer and found(tied, flags).tied_by is None
    assert found(free).tied_by is None and found(free).with_optimizer
    assert found(tmp_path) is found(tmp_path / "none") is None
    with pytest.raises(BalanceError, match=r"cannot be read \(FileNotFoundError.*iter_0000007"):
        found(tied, "--ckpt-step 7")
    (tmp_path / "damaged").mkdir()
    for text in ("abc", "", "-5"):
        (tmp_path / "damaged" / "latest_checkpointed_iteration.txt").write_text(text)
        with pytest.raises(BalanceError, match=f"damaged cannot be read.*names no iteration but '{text}'"):
            found(tmp_path / "damaged")
    pretrained = found(tmp_path, f"--pretrained-checkpoint {tied}")
    assert pretrained.folder == str(tied / "iter_0000020") and not pretrained.with_optimizer
    # A non-persistent checkpoint is loaded where it is newer.
    shutil.copytree(tied, tmp_path / "persistent")
    (tmp_path / "persistent" / "latest_checkpointed_iteration.txt").write_text("10")
    flags = f"--non-persistent-ckpt-type global --non-persistent-global-ckpt-dir {tied}"
    assert found(tmp_path / "persistent", flags).folder == str(tied / "iter_0000020")
    args = parsed(monkeypatch, tied, f"{WEIGHED} --non-persistent-ckpt-type local")
    with pytest.raises(BalanceError, match=r"cannot see the layout of local checkpoints.*-plan FILE"):
        layout_to_keep(args, Options.from_args(args))
    args.non_persistent_ckpt_type, args.load = None, "msc://profile/run"
    with pytest.raises(
        BalanceError, match=r"cannot see the layout of checkpoints that are in no file system.*-plan FILE"
    ):
        layout_to_keep(args, Options.from_args(args))


@pytest.mark.training
def test_file_that_is_damaged_or_of_another_checkpoint_is_not_believed(runs, monkeypatch, tmp_path, capsys):
    from megatron_balance.megatron.found_checkpoint import find_checkpoint

    runs("distributed")
    shutil.copytree(runs.folder("distributed"), tmp_path / "save")
    path = tmp_path / "save" / "iter_0000020" / FILE_NAME
    for text, said in (
        (BALANCED.to_json()[:50], "is not whole JSON"),
        (BALANCED.to_json(), "is of another checkpoint"),
    ):
        path.write_text(text)
        assert find_checkpoint(parsed(monkeypatch, tmp_path / "save")).layout == UNIFORM
        assert said in capsys.readouterr().out


@pytest.mark.training
def test_dropped_flag_is_noticed_where_megatron_would_not(runs, monkeypatch, tmp_path, capsys):
    from megatron_balance.megatron.stored_layout import check_without_flag

    runs("distributed")
    shutil.copytree(runs.folder("distributed"), tmp_path / "save")
    other = "--pipeline-model-parallel-layout Ettttt|tttL"
    check_without_flag(parsed(monkeypatch, tmp_path / "save", other))  # nothing of ours is there
    (tmp_path / "save" / "iter_0000020" / FILE_NAME).write_text(UNIFORM.to_json())
    check_without_flag(parsed(monkeypatch, tmp_path / "save"))
    check_without_flag(parsed(monkeypatch, tmp_path / "save", f"{other} --finetune"))
    check_without_flag(parsed(monkeypatch, tmp_path / "save", "--pipeline-model-parallel-size 1 --no-load-optim"))
    assert capsys.readouterr().out == ""
    with pytest.raises(
        BalanceError,
        match=r"on these, give --balanced-pipeline to keep .* --pipeline-model-parallel-layout 'Etttt\|ttttL'",
    ):
        check_without_flag(parsed(monkeypatch, tmp_path / "save", other))


@pytest.mark.training
def test_format_torch_is_tied_even_for_weights(monkeypatch, tmp_path):
    from megatron_balance.megatron.found_checkpoint import find_checkpoint

    save = f"--ckpt-format torch --save {tmp_path}/save --save-interval 1 --train-iters 1"
    trained(launch(tmp_path / "run", [*MODEL, *save.split()]))
    checkpoint = find_checkpoint(
        parsed(monkeypatch, tmp_path / "save", "--ckpt-format torch --finetune --no-load-optim")
    )
    assert not checkpoint.with_optimizer and "--ckpt-format torch numbers the layers" in checkpoint.tied_by
    assert str(checkpoint.layout) == "EttttttttL"
