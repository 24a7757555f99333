"""Resuming: the layout is kept beside every checkpoint, and a resume keeps it unless it is asked and able to change it.

A checkpoint's own arguments, which Megatron stores in it, tell the layout for certain. The JSON beside it is for people and
other tools, and the sign by which a run without our flag knows a balanced checkpoint.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_balance.errors import BalanceError
from megatron_balance.files import write_atomically
from megatron_balance.megatron.agreement import decide_on_rank_0
from megatron_balance.megatron.arguments import FLAG, Options
from megatron_balance.megatron.found_checkpoint import (
    Checkpoint,
    ahead_of,
    find_checkpoint,
    is_remote,
    loads,
    non_persistent_folder,
    text_beside,
)
from megatron_balance.megatron.registry import Hook
from megatron_balance.megatron.split_arguments import split_flag
from megatron_balance.pipeline.stored import FILE_NAME, StoredLayout, layout_of_arguments
from megatron_balance.reporting import global_rank, say

REPLAN = f"{FLAG}-replan"
_LAYOUT_FLAG = "--pipeline-model-parallel-layout"
_VIRTUAL_FLAGS = "--num-virtual-stages-per-pipeline-rank and --num-layers-per-virtual-pipeline-stage"


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
    hidden = None
    if is_remote(args.load) and not (args.finetune or args.no_load_optim):
        hidden = "checkpoints that are in no file system (://)"
    elif getattr(args, "non_persistent_ckpt_type", None) == "local":
        hidden = "local checkpoints (--non-persistent-ckpt-type local)"
    if loads(args) and hidden and (options.replan or options.plan_file is None):
        raise BalanceError(
            f"{FLAG} cannot see the layout of {hidden}: keep the plan with {FLAG}-plan FILE, and do not change it with {REPLAN}"
        )

    # In a process group Megatron's readers of checkpoints need all ranks.
    found = [find_checkpoint(args)] if loads(args) and dist.is_initialized() else None

    def decide() -> str:
        checkpoint = found[0] if found else find_checkpoint(args) if loads(args) else None
        return "" if checkpoint is None else str(kept(checkpoint, _job(args, options)) or "")

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
        weights = "give --no-load-optim to load only its weights, or " if checkpoint.with_optimizer else ""
        raise BalanceError(
            f"{name} does not tell which pipeline layout it was saved with: {weights}leave {FLAG} out and give {_LAYOUT_FLAG}"
            " yourself"
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
    if global_rank() != 0 or not loads(args) or dist.is_initialized():  # a collective on one rank would never end
        return
    own, beside = layout_of_arguments(vars(args)), text_beside(args)
    if own is None or beside in (None, own.to_json()):
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
            f" {split_flag(args, stored.layout)} without {_VIRTUAL_FLAGS}; or {checkpoint.remedy}"
        )
    if checkpoint.with_optimizer:
        say(
            f"megatron-balance: the checkpoint {checkpoint.folder} was saved with the layout {stored}; this job has {own}"
        )


# --- saving -----------------------------------------------------------------------------------------------------------

_said: set[str] = set()
# Gives where the documents of the next step begin; empty where they are not packed.
cursor_to_store: list[Callable[[], dict[str, Any]]] = []


def _keeps_layout(save_checkpoint: Any) -> Any:
    signature = inspect.signature(save_checkpoint)

    def save(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs).arguments
        if global_rank() == 0:
            _or_warn(_write_ahead, call)
        result = save_checkpoint(*args, **kwargs)
        if global_rank() == 0:
            _or_warn(_put_beside, call)
        return result

    return save


def _or_warn(step: Callable[[dict[str, Any]], None], call: dict[str, Any]) -> None:
    try:
        step(call)
    except Exception as error:  # no reason to end a training
        what, lost = "layout", ""
        if cursor_to_store:
            what, lost = "layout and place in the data", ", which cannot be resumed with --varlen-packing without it"
        _say_once(
            f"megatron-balance: warning: the {what} could not be kept beside the checkpoint ({FILE_NAME}){lost}: {error}"
        )


def _write_ahead(call: dict[str, Any]) -> None:
    """Write the layout before the checkpoint is complete, so that none which a killed job leaves lacks it."""
    from megatron.training import get_args

    args = get_args()
    stored, path = layout_of_arguments(vars(args)), _file(args, call)
    if path is None or (stored is None and not cursor_to_store):
        return
    if stored is None:
        raise BalanceError("the arguments do not tell the split over pipeline ranks")
    if cursor_to_store:
        stored = replace(stored, packing=cursor_to_store[0]())
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(ahead_of(path), stored.to_json())
    _say_once(
        f"megatron-balance: the layout is kept beside each checkpoint ({FILE_NAME}); a resume without {FLAG} needs"
        f" {split_flag(args, stored.layout)}, and neither of {_VIRTUAL_FLAGS}"
    )


def _put_beside(call: dict[str, Any]) -> None:
    """Move the layout to the checkpoint that was just saved, or is just being saved in the background."""
    from megatron.training import get_args

    path = _file(get_args(), call)
    if path is not None and ahead_of(path).is_file():
        ahead_of(path).replace(path)


def _file(args: Any, call: dict[str, Any]) -> Path | None:
    """Our file beside the checkpoint that a call of `save_checkpoint` saves; None for checkpoints without a common folder."""
    from megatron.training import checkpointing

    folder = args.save
    if call.get("non_persistent_ckpt"):
        if args.non_persistent_ckpt_type != "global":  # local ones lie on each machine
            return None
        folder = non_persistent_folder(args, folder)
    if folder is None or is_remote(folder) or "iteration" not in call:
        return None
    release = call.get("release", False)
    return Path(checkpointing.get_checkpoint_name(folder, call["iteration"], release, return_base_dir=True)) / FILE_NAME


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        say(text)


SAVE = Hook("megatron.training.checkpointing", "save_checkpoint", FLAG, "keeps the layout beside it", _keeps_layout)
