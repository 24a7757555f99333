"""`megatron-balance doctor`: what this environment offers to our hooks."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import sys
import warnings
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.table import Table

from megatron_balance.errors import BalanceError
from megatron_balance.megatron.measuring.software import version
from megatron_balance.megatron.registry import Hook

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "flash-attn", "numba", "numpy")


def examine(checkout: str | None) -> int:
    """Print the tables of software and hooks; the exit status, 1 where a hook's target is missing.

    Args:
        checkout: folder of a Megatron-LM checkout to examine instead of the installed megatron-core.

    Raises:
        BalanceError: there is no Megatron to examine.
    """
    if checkout is not None:
        if not (Path(checkout) / "megatron" / "core").is_dir():
            raise BalanceError(f"{checkout} is no Megatron-LM checkout: it has no megatron/core")
        sys.path.insert(0, str(Path(checkout).resolve()))
    warnings.simplefilter("ignore")
    megatron = _megatron()
    console = Console(width=None if sys.stdout.isatty() else 160)  # a log keeps paths in one piece
    console.print(_software(megatron))
    hooks = _hooks()
    problems = [_problem(hook) for hook in hooks]
    console.print(_table(hooks, problems))
    for problem in filter(None, problems):
        console.print(problem, style="red", soft_wrap=True)
    return 1 if any(problems) else 0


def _megatron() -> ModuleType:
    try:
        return importlib.import_module("megatron.core")
    except ImportError as error:
        raise BalanceError(
            f"there is no Megatron to examine ({error}): install megatron-core, or give a checkout with --megatron-path"
        ) from error


def _hooks() -> tuple[Hook, ...]:
    from megatron_balance import cpu
    from megatron_balance.megatron import balanced_pipeline, entry_points, stored_layout
    from megatron_balance.megatron.measuring.measurement import Measurement
    from megatron_balance.megatron.packed import attention, context, hooks, log, options, prediction, shapes
    from megatron_balance.megatron.recorder.hooks import needed

    ours = (*entry_points.HOOKS, balanced_pipeline.PRINT_ARGS, stored_layout.SAVE)
    packing = (hooks.ROWS, attention.attention_hook(options.TORCH), context.LOCAL_ATTENTION, log.LOG, log.COUNT)
    predicting = (prediction.ROLL, *([prediction.WEIGHTS] if prediction.rescales() else []))
    return (
        *ours,
        *packing,
        shapes.NO_MESSAGES,
        *predicting,
        *needed(None),
        *Measurement(Path("costs.json")).hooks(),
        *cpu.HOOKS,
    )


def _problem(hook: Hook) -> str | None:
    try:
        hook.find()
    except BalanceError as error:
        return str(error)
    return None


def _software(megatron: ModuleType) -> Table:
    import torch

    table = Table(title="Software", title_justify="left", show_header=False)
    table.add_row("Python", f"{platform.python_version()} ({sys.executable})")
    for package in _PACKAGES:
        table.add_row(package, version(package))
    table.add_row("Megatron in use", f"{megatron.__version__} ({Path(megatron.__file__).parent})")
    helpers = importlib.util.find_spec("megatron.core.datasets.helpers_cpp")
    table.add_row("dataset helpers", "compiled" if helpers else "not compiled yet")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    table.add_row(
        "GPUs", f"{gpus} x {torch.cuda.get_device_name(0)}" if gpus else "none: training uses the CPU runtime"
    )
    return table


def _table(hooks: tuple[Hook, ...], problems: list[str | None]) -> Table:
    table = Table(title="Hooks", title_justify="left")
    for column in ("function of Megatron", "what ours does", "for", "found"):
        table.add_column(column, overflow="fold")
    for hook, problem in zip(hooks, problems, strict=True):
        table.add_row(hook.path, hook.purpose, hook.flag, "[red]no[/]" if problem else "yes")
    return table
