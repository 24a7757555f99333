"""The checkpoint that a job is about to load: where it lies, its layout, and what ties it to that layout."""

from __future__ import annotations

import argparse
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.pipeline.stored import FILE_NAME, StoredLayout, layout_of_arguments
from megatron_balance.reporting import say


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


def find_checkpoint(args: Any) -> Checkpoint | None:
    """The checkpoint that ``args`` load, as far as its layout matters; None where training starts afresh.

    Works before any process group exists: with the functions by which Megatron reads a checkpoint's arguments. Where one exists
    these take part in it, so that all ranks must call.

    Raises:
        BalanceError: there is a checkpoint, but it cannot be read.
    """
    try:
        return _find(args)
    except BalanceError:
        raise
    except (Exception, SystemExit) as error:
        # Megatron exits where it cannot read, which on one rank would leave the others.
        where, reason = args.load or args.pretrained_checkpoint, f"{type(error).__name__}: {error}"
        raise BalanceError(
            f"the checkpoint in {where} cannot be read ({reason}): name an iteration that is there with --ckpt-step, or another"
            " checkpoint with --load"
        ) from error


def text_beside(args: Any) -> str | None:
    """The text of our file beside the checkpoint that ``args`` load; None where there is none."""
    try:
        if (found := _folder(args)) is None:
            return None
        beside = Path(found[1]) / FILE_NAME
        return (beside if beside.is_file() else ahead_of(beside)).read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return None


def ahead_of(beside: Path) -> Path:
    """Where our file lies until its checkpoint is complete: a job may be killed before it is put beside it."""
    return beside.parent.with_name(f"{beside.stem}-{beside.parent.name}{beside.suffix}")


def _find(args: Any) -> Checkpoint | None:
    if (found := _folder(args)) is None:
        return None
    load_dir, folder, release = found
    state, kind = _common_state(args, load_dir)
    arguments = vars(state["args"]) if state.get("args") is not None else {}
    with_optimizer = not (
        release
        or args.finetune
        or args.no_load_optim
        or getattr(args, "freeze_all_layers", False)  # Megatron then finetunes
        or load_dir != args.load  # --pretrained-checkpoint is finetuned
        or arguments.get("no_save_optim")
    )
    tied_by, remedy = _ties(args, arguments, state, kind, with_optimizer)
    return Checkpoint(folder, _stored_layout(folder, arguments), with_optimizer, tied_by, remedy)


def loads(args: Any) -> bool:
    """Whether a checkpoint is to be loaded, if there is one."""
    wanted = args.load is not None or getattr(args, "pretrained_checkpoint", None) is not None
    return wanted and not getattr(args, "moe_use_upcycling", False)


def is_remote(folder: str | None) -> bool:
    """Whether a folder of checkpoints is none of a file system (``msc://...``): our file cannot be beside them."""
    return folder is not None and "://" in str(folder)


def _folder(args: Any) -> tuple[str, str, bool] | None:
    """(value of the load flag, folder of its checkpoint, whether that is a release), chosen as Megatron does."""
    from megatron.training import checkpointing

    load_dir = args.load
    if not checkpointing.checkpoint_exists(load_dir) and getattr(args, "pretrained_checkpoint", None) is not None:
        load_dir = args.pretrained_checkpoint
    if load_dir is None:
        return None
    iteration, release = _latest(load_dir)
    if getattr(args, "ckpt_step", None):
        iteration = args.ckpt_step
    where = load_dir
    if getattr(args, "non_persistent_ckpt_type", None) == "global":
        folder = non_persistent_folder(args, load_dir)
        if (other := _latest(folder)[0]) != -1 and other >= iteration:
            where, iteration, release = folder, other, False
    if iteration == -1:
        return None
    return load_dir, checkpointing.get_checkpoint_name(where, iteration, release, return_base_dir=True), release


def _latest(folder: str) -> tuple[int, bool]:
    """The iteration that Megatron's tracker file names, -1 for none, and whether it is a release."""
    from megatron.training import checkpointing

    # Read here: Megatron's own reader exits on a damaged file, and asks the other ranks where there is a process group.
    tracker = Path(checkpointing.get_checkpoint_tracker_filename(folder)) if folder is not None else None
    if tracker is None or not tracker.is_file():
        return -1, False
    text = tracker.read_text().strip()
    if text == "release":
        return 0, True
    if not text.isdecimal():
        raise ValueError(f"{tracker} names no iteration but {text!r}")
    return int(text), False


def non_persistent_folder(args: Any, folder: str) -> str:
    """Where non-persistent global checkpoints of a job with checkpoints in ``folder`` lie."""
    from megatron.training import checkpointing

    name = getattr(checkpointing, "_NON_PERSISTENT_CKPT_SUBDIR", "non_persistent")
    return args.non_persistent_global_ckpt_dir or os.path.join(folder, name)


def _common_state(args: Any, load_dir: str) -> tuple[dict[str, Any], str]:
    """What Megatron stores once for all ranks, its arguments among it, and the name of the kind of checkpoint."""
    from megatron.training import checkpointing

    changes = {"exit_on_missing_checkpoint": False}
    if getattr(args, "non_persistent_ckpt_type", None) == "local":
        changes["non_persistent_ckpt_type"] = None  # those can be read only later
    quiet = argparse.Namespace(**{**vars(args), **changes})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that there is no process group yet
        state, _, _, kind = checkpointing._load_base_checkpoint(load_dir, quiet, rank0=True)
    return state or {}, getattr(kind, "name", "GLOBAL")


def _stored_layout(folder: str, arguments: dict[str, Any]) -> StoredLayout | None:
    """The layout by the checkpoint's own arguments, else by the file beside it."""
    layout, path = layout_of_arguments(arguments), Path(folder) / FILE_NAME
    if not path.is_file():
        return layout
    try:
        beside = StoredLayout.from_json(path.read_text(encoding="utf-8", errors="replace"), str(path))
    except (BalanceError, OSError) as error:
        own = "the checkpoint's own arguments tell its layout" if layout else "its own arguments do not tell its layout"
        say(f"megatron-balance: warning: {error}; {own}")
        return layout
    if layout is not None and layout != beside:
        say(f"megatron-balance: warning: {path} is of another checkpoint ({beside}); this one has {layout}")
    return layout or beside


_WEIGHTS_ONLY = "load without the optimizer's state (--no-load-optim)"


def _ties(
    args: Any, arguments: dict[str, Any], state: dict[str, Any], kind: str, with_optimizer: bool
) -> tuple[str | None, str]:
    """What ties the checkpoint to its layout, None for nothing, and what would loosen it."""
    if kind == "LEGACY":
        return (
            "--ckpt-format torch numbers the layers within each stage, so that others would be loaded unnoticed",
            "load it with the stored layout once, with --auto-detect-ckpt-format, and save it with --ckpt-format torch_dist",
        )
    if kind != "GLOBAL":
        return f"its format ({kind}) is not known to allow that", "load a checkpoint in --ckpt-format torch_dist"
    if not with_optimizer:
        return None, ""
    # Up to 0.17 the layer-wise optimizer has no argument of its own, but a name like dist_muon.
    if arguments.get("use_layer_wise_distributed_optimizer") or "dist" in str(arguments.get("optimizer")):
        return "its layer-wise optimizer's state is tied to it", _WEIGHTS_ONLY
    if (sharding := _optimizer_sharding(arguments, state)) is None:
        return None, ""
    newer = hasattr(args, "dist_ckpt_optim_fully_reshardable")
    flag = "--dist-ckpt-optim-fully-reshardable" if newer else "--ckpt-fully-parallel-save"
    return (
        f"its distributed optimizer's state ({sharding}) is tied to it",
        f"resume with the stored layout and {flag}, save, and change the layout from there; or {_WEIGHTS_ONLY}",
    )


def _optimizer_sharding(arguments: dict[str, Any], state: dict[str, Any]) -> str | None:
    """The name of the format in which the optimizer's state is stored; None where it fits every layout."""
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

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
