"""`megatron-balance doctor`: what this environment offers to our hooks."""

from __future__ import annotations

import difflib
import functools
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

_WITHOUT = {  # what is left to do without a hook, by what needs it, if it is no flag
    "measuring costs": "give --balanced-pipeline-costs analytic, or a costs file",
    "the CPU runtime": "train on GPUs, which need none of it",
}
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
    for problem in dict.fromkeys(filter(None, problems)):
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
    from megatron_balance.megatron.packed import attention, context, experts, hooks, log, options, prediction, shapes
    from megatron_balance.megatron.recorder.hooks import needed

    ours = (*entry_points.HOOKS, balanced_pipeline.PRINT_ARGS, stored_layout.SAVE)
    packing = (hooks.ROWS, attention.attention_hook(options.TORCH), context.LOCAL_ATTENTION, log.LOG, log.COUNT)
    predicting = (prediction.ROLL, *([prediction.WEIGHTS] if prediction.rescales() else []))
    routing = [experts.TOKENS] if experts.multiplies_counts() else []
    return (
        *ours,
        *packing,
        *routing,
        shapes.NO_MESSAGES,
        *predicting,
        *needed(None),
        *Measurement(Path("costs.json")).hooks(),
        *cpu.HOOKS,
    )


def _problem(hook: Hook) -> str | None:
    """What is missing, what needs it and what to do; None where the function is there."""
    try:
        hook.find()
    except BalanceError as error:
        cause = error.__cause__
        return _not_imported(hook.module, cause) if isinstance(cause, ImportError) else _not_there(hook)
    return None


def _not_imported(module: str, error: ImportError) -> str:
    """The same text for all functions of a module."""
    missing = error.name if isinstance(error, ModuleNotFoundError) and error.name else "megatron"
    if missing == "megatron.training":
        remedy = "megatron-core carries it from 0.18 on, or give a checkout with --megatron-path"
    elif missing.split(".")[0] == "megatron":
        remedy = "this Megatron does not fit together: mend that first"
    else:
        remedy = f"install {missing} into this environment"
    return f"{module} cannot be imported ({error}), so nothing in it was found: {remedy}."


def _not_there(hook: Hook) -> str:
    from megatron_balance.megatron.entry_points import HOOKS

    *path, name = hook.attribute.split(".")
    module = sys.modules[hook.module]
    owner = functools.reduce(lambda found, part: getattr(found, part, None), path, module)
    names = [each for each, value in vars(owner).items() if callable(value)] if owner is not None else []
    similar = difflib.get_close_matches(name, names, n=3)
    found = f" (there is {' and '.join(similar)})" if similar else ""
    needs, without = f"{hook.flag} needs", _WITHOUT.get(hook.flag, f"train without {hook.flag}")
    if hook in HOOKS:
        needs, without = "every flag of ours needs", "train without our flags, which is stock training"
    # All names of a function are replaced in the modules, but a method only under the name that is looked for.
    rename = "" if path else f"if this fork only gave it another name, add `{name} = OTHER_NAME` behind it there; else "
    remedy = rename + without
    return (
        f"{hook.path} is not in {module.__file__}{found}; {needs} it ({hook.purpose}). {remedy[0].upper()}{remedy[1:]}."
    )


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
