"""Resuming: the layout is kept beside every checkpoint, and a resume keeps it unless it is asked and able to change it.

A checkpoint's own arguments, which Megatron stores in it, tell the layout for certain. The JSON beside it is for people and
other tools, and the sign by which a run without our flag knows a balanced checkpoint.
"""

from __future__ import annotations

import argparse
import inspect
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.files import write_atomically
from megatron_balance.megatron.agreement import decide_on_rank_0
from megatron_balance.megatron.arguments import FLAG, Options
from megatron_balance.megatron.registry import Hook
from megatron_balance.pipeline.stored import FILE_NAME, StoredLayout, layout_of_arguments
from megatron_balance.reporting import global_rank, say

REPLAN = f"{FLAG}-replan"
_LAYOUT_FLAG = "--pipeline-model-parallel-layout"
_VIRTUAL_FLAGS = "--num-virtual-stages-per-pipeline-rank and --num-layers-per-virtual-pipeline-stage"


@dataclass(frozen=True)
class Checkpoint:
    """What a job is about to load.

    Attributes:
        folder: where it lies.
        layout: what it was saved with; None where that cannot be told.
        with_optimizer: whether optimizer state is loaded.
        tied_by: why it cannot be given another layout; None where it can.
        remedy: what would make that possible.
    """

    folder: str
    layout: StoredLayout | None
    with_optimizer: bool
    tied_by: str | None = None
    remedy: str = ""


@dataclass(frozen=True)
class Job:
    """What a job wants.

    Attributes:
        pipeline_size, virtual_size: its pipeline ranks, and stages on each.
        num_layers, mtp_num_layers: its transformer layers and multi-token-prediction layers.
        plan_file: where its plan is kept, None for nowhere.
        planned: layout of the plan in there, None where there is none yet.
        replan: whether the layout is to be planned afresh.
    """

    pipeline_size: int
    virtual_size: int
    num_layers: int
    mtp_num_layers: int = 0
    plan_file: str | None = None
    planned: str | None = None
    replan: bool = False


# --- what a resume does -----------------------------------------------------------------------------------------------


def layout_to_keep(args: Any, options: Options) -> str | None:
    """The layout of the checkpoint that ``args`` resume from, where it stays; None where the job is planned.

    Rank 0 decides and says what and why.

    Raises:
        BalanceError: the checkpoint cannot be resumed with what was asked for.
    """
    if not _loads(args):
        return None
    if getattr(args, "non_persistent_ckpt_type", None) == "local" and (options.replan or options.plan_file is None):
        raise BalanceError(
            f"{FLAG} cannot see the layout of local checkpoints (--non-persistent-ckpt-type local):"
            f" keep the plan with {FLAG}-plan FILE, and do not change it with {REPLAN}"
        )

    def decide() -> str:
        checkpoint = find_checkpoint(args)
        if checkpoint is None:
            return ""
        return str(kept(checkpoint, _job(args, options)) or "")

    return decide_on_rank_0("stored layout", decide) or None


def kept(checkpoint: Checkpoint, job: Job) -> StoredLayout | None:
    """The stored layout, where it stays; None where the job is planned.

    Raises:
        BalanceError: neither is possible.
    """
    stored, name = checkpoint.layout, f"the checkpoint {checkpoint.folder}"
    if not checkpoint.with_optimizer and checkpoint.tied_by is None:
        say(f"megatron-balance: only weights are loaded from {name}: planning afresh")
        return None
    if stored is None and checkpoint.tied_by is None and job.replan:
        return None
    if stored is None:
        raise BalanceError(
            f"{name} does not tell which pipeline layout it was saved with: give --no-load-optim to load only its weights,"
            f" or leave {FLAG} out and give {_LAYOUT_FLAG} yourself"
        )
    _check_model(stored, job, name)
    fits = (stored.pipeline_size, stored.virtual_size) == (job.pipeline_size, job.virtual_size)
    if job.replan or not fits:
        _check_untied(checkpoint, stored, job)
        reason = REPLAN if job.replan else f"it was saved on {stored.shape}"
        say(f"megatron-balance: not keeping the layout of {name}, {stored}: {reason}")
        return None
    if job.planned is not None and job.planned != str(stored):
        change = f"give {REPLAN} to change to the plan's"
        if checkpoint.tied_by is not None:
            change = f"{checkpoint.tied_by}, so that {REPLAN} cannot change it"
        raise BalanceError(
            f"the plan file {job.plan_file} has another layout, {job.planned}, than {name}, {stored}: {change}; or leave"
            f" {FLAG}-plan out"
        )
    say(
        f"megatron-balance: keeping the layout of {name}: {stored}"
        + ("" if checkpoint.tied_by else f"; {REPLAN} would plan afresh")
    )
    return stored


def _check_model(stored: StoredLayout, job: Job, name: str) -> None:
    for what, own, flag, wanted in (
        ("layers", sum(stored.layout.layers), "--num-layers", job.num_layers),
        ("multi-token-prediction layers", sum(stored.layout.mtp), "--mtp-num-layers", job.mtp_num_layers),
    ):
        if own != wanted:
            raise BalanceError(f"{name} has {own} {what}, but {flag} is {wanted}: give {flag} {own}, or load another")


def _check_untied(checkpoint: Checkpoint, stored: StoredLayout, job: Job) -> None:
    if checkpoint.tied_by is None:
        return
    wanted = (
        REPLAN
        if job.replan
        else f"a pipeline of {job.pipeline_size} rank(s) with {job.virtual_size} stage(s) each, not {stored.shape},"
    )
    keep = f"leave {REPLAN} out to keep it" if job.replan else "use the stored sizes"
    raise BalanceError(
        f"{wanted} would change the layout of the checkpoint {checkpoint.folder}, {stored}, but {checkpoint.tied_by}:"
        f" {keep}, or {checkpoint.remedy}"
    )


def _job(args: Any, options: Options) -> Job:
    from megatron_balance.pipeline.plan import find_plan

    plan = None if options.plan_file is None else find_plan(options.plan_file)
    return Job(
        pipeline_size=args.pipeline_model_parallel_size,
        virtual_size=args.virtual_pipeline_model_parallel_size or 1,
        num_layers=args.num_layers,
        mtp_num_layers=args.mtp_num_layers or 0,
        plan_file=options.plan_file,
        planned=None if plan is None else plan.layout,
        replan=options.replan,
    )


def check_without_flag(args: Any) -> None:
    """Refuse, on rank 0, to load a balanced checkpoint into another layout where that would spoil it.

    For runs without our flag: they look for our file beside the checkpoint, and read more only where there is one.

    Raises:
        BalanceError: the optimizer state, or the checkpoint's format, is tied to its layout, and the job has another.
    """
    own = layout_of_arguments(vars(args)) if global_rank() == 0 and _loads(args) else None
    if own is None or (folder := _folder(args)) is None or not (Path(folder[1]) / FILE_NAME).is_file():
        return
    try:
        checkpoint = find_checkpoint(args)
    except BalanceError:  # Megatron meets the same, and says it its way
        return
    if checkpoint is None or (stored := checkpoint.layout) is None or stored == own:
        return
    if checkpoint.tied_by is not None:
        raise BalanceError(
            f"this job has the pipeline layout {own}, but the checkpoint {checkpoint.folder} was saved with {stored} on"
            f" {stored.shape}, and {checkpoint.tied_by}: on these, give {FLAG} to keep the stored layout, or"
            f" {_LAYOUT_FLAG} '{stored}' without {_VIRTUAL_FLAGS}; or {checkpoint.remedy}"
        )
    if checkpoint.with_optimizer:
        say(
            f"megatron-balance: the checkpoint {checkpoint.folder} was saved with the layout {stored}; this job has {own}"
        )


# --- what a job loads -------------------------------------------------------------------------------------------------


def find_checkpoint(args: Any) -> Checkpoint | None:
    """The checkpoint that ``args`` load, as far as its layout matters; None where training starts afresh.

    Works before any process group exists: with the functions by which Megatron reads a checkpoint's arguments.

    Raises:
        BalanceError: there is a checkpoint, but it cannot be read.
    """
    if (found := _folder(args)) is None:
        return None
    load_dir, folder, release = found
    state, kind = _common_state(args, load_dir, folder)
    arguments = vars(state["args"]) if state.get("args") is not None else {}
    with_optimizer = not (
        release
        or args.finetune
        or args.no_load_optim
        or load_dir != args.load  # --pretrained-checkpoint is finetuned
        or arguments.get("no_save_optim")
    )
    tied_by, remedy = _ties(args, arguments, state, kind, with_optimizer)
    return Checkpoint(folder, _stored_layout(folder, arguments), with_optimizer, tied_by, remedy)


def _loads(args: Any) -> bool:
    wanted = args.load is not None or getattr(args, "pretrained_checkpoint", None) is not None
    return wanted and not getattr(args, "moe_use_upcycling", False)


def _folder(args: Any) -> tuple[str, str, bool] | None:
    """(value of the load flag, folder of its checkpoint, whether that is a release), chosen as Megatron does."""
    from megatron.training import checkpointing as megatron

    load_dir = args.load
    if not megatron.checkpoint_exists(load_dir) and getattr(args, "pretrained_checkpoint", None) is not None:
        load_dir = args.pretrained_checkpoint
    if load_dir is None:
        return None
    iteration, release = _latest(load_dir)
    if getattr(args, "ckpt_step", None):
        iteration = args.ckpt_step
    where = load_dir
    if getattr(args, "non_persistent_ckpt_type", None) == "global":
        folder = args.non_persistent_global_ckpt_dir or os.path.join(load_dir, _non_persistent_name())
        if (other := _latest(folder)[0]) != -1 and other >= iteration:
            where, iteration, release = folder, other, False
    if iteration == -1:
        return None
    return load_dir, megatron.get_checkpoint_name(where, iteration, release, return_base_dir=True), release


def _latest(folder: str) -> tuple[int, bool]:
    from megatron.training import checkpointing as megatron

    if not megatron.checkpoint_exists(folder):
        return -1, False
    return megatron.read_metadata(megatron.get_checkpoint_tracker_filename(folder))


def _non_persistent_name() -> str:
    from megatron.training import checkpointing as megatron

    return getattr(megatron, "_NON_PERSISTENT_CKPT_SUBDIR", "non_persistent")


def _common_state(args: Any, load_dir: str, folder: str) -> tuple[dict[str, Any], str]:
    """What Megatron stores once for all ranks, its arguments among it, and the name of the kind of checkpoint."""
    from megatron.training import checkpointing as megatron

    changes = {"exit_on_missing_checkpoint": False}
    if getattr(args, "non_persistent_ckpt_type", None) == "local":
        changes["non_persistent_ckpt_type"] = None  # those can be read only later
    quiet = argparse.Namespace(**{**vars(args), **changes})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, that there is no process group yet
            state, _, _, kind = megatron._load_base_checkpoint(load_dir, quiet, rank0=True)
    except Exception as error:
        raise BalanceError(f"the checkpoint {folder} cannot be read ({type(error).__name__}: {error})") from error
    return state or {}, getattr(kind, "name", "GLOBAL")


def _stored_layout(folder: str, arguments: dict[str, Any]) -> StoredLayout | None:
    """The layout by the checkpoint's own arguments, else by the file beside it."""
    layout, path = layout_of_arguments(arguments), Path(folder) / FILE_NAME
    if not path.is_file():
        return layout
    try:
        beside = StoredLayout.from_json(path.read_text(encoding="utf-8", errors="replace"), str(path))
    except (BalanceError, OSError) as error:
        if layout is None:
            raise BalanceError(f"the checkpoint's own arguments do not tell its layout, and {error}") from error
        say(f"megatron-balance: warning: {error}")
        return layout
    if layout is not None and layout != beside:
        say(f"megatron-balance: warning: {path} is of another checkpoint ({beside}); this one has {layout}")
    return layout or beside


def _ties(
    args: Any, arguments: dict[str, Any], state: dict[str, Any], kind: str, with_optimizer: bool
) -> tuple[str | None, str]:
    """What ties the checkpoint to its layout, None for nothing, and what would loosen it."""
    if kind != "GLOBAL":
        return _FORMAT_TIES.get(kind, f"its format ({kind}) is not known to allow that"), (
            "load it with the stored layout once, with --auto-detect-ckpt-format, and save it with --ckpt-format torch_dist"
        )
    if not with_optimizer:
        return None, ""
    flag = (
        "--dist-ckpt-optim-fully-reshardable"
        if hasattr(args, "dist_ckpt_optim_fully_reshardable")
        else "--ckpt-fully-parallel-save"
    )
    sharding = _optimizer_sharding(arguments, state)
    if sharding is None:
        return None, ""
    return (
        f"its distributed optimizer's state ({sharding}) is tied to it",
        f"resume with the stored layout and {flag}, save, and change the layout from there; or load without the optimizer's"
        " state (--no-load-optim)",
    )


_FORMAT_TIES = {
    "LEGACY": "--ckpt-format torch numbers the layers within each stage, so that others would be loaded unnoticed",
}


def _optimizer_sharding(arguments: dict[str, Any], state: dict[str, Any]) -> str | None:
    """The name of the format in which the optimizer's state is stored; None where it fits every layout."""
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if arguments.get("use_layer_wise_distributed_optimizer"):
        return "layer-wise"
    read = getattr(dist_checkpointing, "load_content_metadata", None)
    sharding = ((read(preloaded_state_dict=state) if read else None) or {}).get("distrib_optim_sharding_type")
    if sharding is None:
        if not arguments.get("use_distributed_optimizer"):
            return None
        # before megatron-core 0.13, which first stored its name
        sharding = (
            "fully_sharded_model_space" if arguments.get("ckpt_fully_parallel_save") else "dp_zero_gather_scatter"
        )
    anywhere = getattr(DistributedOptimizer, "checkpoint_fully_reshardable_formats", {"fully_sharded_model_space"})
    return None if sharding in anywhere else sharding


# --- saving -----------------------------------------------------------------------------------------------------------

_said: set[str] = set()


def _keeps_layout(save_checkpoint: Any) -> Any:
    signature = inspect.signature(save_checkpoint)

    def save(*args: Any, **kwargs: Any) -> Any:
        result = save_checkpoint(*args, **kwargs)
        if global_rank() == 0:
            _keep(signature.bind(*args, **kwargs).arguments)
        return result

    return save


def _keep(call: dict[str, Any]) -> None:
    """Write the layout beside the checkpoint that was just saved, or is just being saved in the background.

    A failure is no reason to end a training: the checkpoint's own arguments tell the same.
    """
    from megatron.training import checkpointing as megatron
    from megatron.training import get_args

    args = get_args()
    stored, folder = layout_of_arguments(vars(args)), args.save
    if call.get("non_persistent_ckpt"):
        if args.non_persistent_ckpt_type != "global":  # local ones lie on each machine
            return
        folder = args.non_persistent_global_ckpt_dir or os.path.join(folder, _non_persistent_name())
    if stored is None or folder is None or "iteration" not in call:
        return
    name = megatron.get_checkpoint_name(folder, call["iteration"], call.get("release", False), return_base_dir=True)
    path = Path(name) / FILE_NAME
    try:
        write_atomically(path, stored.to_json())
    except OSError as error:
        _say_once(
            "failed",
            f"megatron-balance: warning: {path} cannot be written ({error.strerror or error}); the checkpoint's own arguments"
            " tell the layout, too",
        )
        return
    _say_once(
        "kept",
        f"megatron-balance: the layout is kept beside each checkpoint ({FILE_NAME}); a resume without {FLAG} needs"
        f" {_LAYOUT_FLAG} '{stored}', and neither of {_VIRTUAL_FLAGS}",
    )


def _say_once(what: str, text: str) -> None:
    if what not in _said:
        _said.add(what)
        say(text)


SAVE = Hook("megatron.training.checkpointing", "save_checkpoint", FLAG, "keeps the layout beside it", _keeps_layout)
