"""The four entry points of Megatron that we always wrap, and `enable`, which wraps them.

Without a flag of ours each passes straight through to stock code. They are the same functions in every version,
whichever of them calls the others.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from megatron_balance import cpu
from megatron_balance.errors import BalanceError
from megatron_balance.megatron.arguments import FLAG, Options, add_arguments, given_in
from megatron_balance.megatron.packed.options import FLAG as PACKING
from megatron_balance.megatron.packed.options import PackingOptions
from megatron_balance.megatron.recorder.options import FLAG as TRACE
from megatron_balance.megatron.recorder.options import TraceOptions, refuse_conflicts
from megatron_balance.megatron.registry import Hook, registry
from megatron_balance.reporting import global_rank, say, stops_on_error

Function = Callable[..., Any]


def _with_our_arguments(add_megatron_arguments: Function) -> Function:
    def add(parser: Any, *args: Any, **kwargs: Any) -> Any:
        parser = add_arguments(add_megatron_arguments(parser, *args, **kwargs))
        if {"-h", "--help"} & set(sys.argv[1:]):
            _mend_help(parser)
        return parser

    return add


def _mend_help(parser: Any) -> None:
    """Some of Megatron's help texts hold a bare % (0.18, 0.19), on which argparse fails before it shows any."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        try:
            formatter._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = action.help.replace("%", "%%")


def _plans_before(validate_args: Function) -> Function:
    def validate(args: Any, *rest: Any, **kwargs: Any) -> Any:
        _before_validation(args)
        return validate_args(args, *rest, **kwargs)

    return validate


def _plans_after(set_global_variables: Function) -> Function:
    def set_variables(args: Any, *rest: Any, **kwargs: Any) -> Any:
        result = set_global_variables(args, *rest, **kwargs)
        _after_globals(args)
        return result

    return set_variables


def _packs(pretrain: Function) -> Function:
    def run(*args: Any, **kwargs: Any) -> Any:
        if PACKING not in sys.argv:
            return pretrain(*args, **kwargs)
        from megatron_balance.megatron.packed import hooks

        return stops_on_error(hooks.packs(pretrain))(*args, **kwargs)

    return run


# `balanced_pipeline` and `packed.hooks` are imported only where they are asked for: a run without our flags loads no planner.


@stops_on_error
def _before_validation(args: Any) -> None:
    options = Options.from_args(args)
    if cpu.is_installed() and not (options and options.plans_for_elsewhere):
        cpu.adapt_arguments(args)
    if trace := TraceOptions.from_args(args):
        refuse_conflicts(args, trace)
    if PackingOptions.from_args(args):
        from megatron_balance.megatron.packed import hooks

        hooks.before_validation(args)
    if options:
        from megatron_balance.megatron import balanced_pipeline

        balanced_pipeline.before_validation(args, options)


@stops_on_error
def _after_globals(args: Any) -> None:
    if options := Options.from_args(args):
        from megatron_balance.megatron import balanced_pipeline

        balanced_pipeline.after_globals(args, options)
    elif (getattr(args, "load", None) or getattr(args, "pretrained_checkpoint", None)) is not None:
        from megatron_balance.megatron import stored_layout

        stored_layout.check_without_flag(args)
    if packing := PackingOptions.from_args(args):
        from megatron_balance.megatron.packed import hooks

        hooks.after_globals(args, packing)
    else:
        _warn_of_a_packed_checkpoint(args)
    if trace := TraceOptions.from_args(args):
        from megatron_balance.megatron.recorder import start

        start.after_globals(args, trace)


def _warn_of_a_packed_checkpoint(args: Any) -> None:
    """Stock Megatron goes on in its own order of samples."""
    if global_rank() != 0 or (getattr(args, "load", None) or getattr(args, "pretrained_checkpoint", None)) is None:
        return
    from megatron_balance.megatron.found_checkpoint import text_beside

    if '"packing"' in (text_beside(args) or "") and not getattr(args, "finetune", False):
        say(
            f"megatron-balance: warning: the checkpoint was trained with {PACKING}: without it documents are learned again, others"
            " never"
        )


HOOKS = (
    Hook("megatron.training.arguments", "add_megatron_arguments", FLAG, "adds our flags", _with_our_arguments),
    Hook("megatron.training.arguments", "validate_args", FLAG, "checks our flags, number of stages", _plans_before),
    Hook("megatron.training.global_vars", "set_global_variables", FLAG, "plans, sets the layout", _plans_after),
    Hook("megatron.training.training", "pretrain", PACKING, "trains on packed documents", _packs),
)


@stops_on_error
def enable() -> None:
    """Wrap the entry points of the Megatron that `import megatron` finds. Call before a training script imports it.

    A target that is missing matters only when the command line has a flag of ours.
    """
    wanted = given_in(sys.argv[1:])
    if wanted and any(argument.split("=")[0] == "--yaml-cfg" for argument in sys.argv[1:]):
        raise BalanceError(
            f"{_flag_given()} cannot be used with --yaml-cfg: Megatron then drops every command-line argument, ours too."
            " Give the settings as arguments."
        )
    if wanted:
        _check_megatron()
    for hook in HOOKS:
        try:
            registry.apply(hook)
        except BalanceError:
            if wanted:
                raise


def _flag_given() -> str:
    """The one of our flags that an error is about."""
    given = (flag for flag in (FLAG, PACKING, TRACE) if any(word.split("=")[0] == flag for word in sys.argv))
    return next(given, FLAG)


def _check_megatron() -> None:
    """Refuse a Megatron that has no layouts.

    Raises:
        BalanceError: Megatron is older than 0.13, or a fork without them.
    """
    name = "megatron.core.transformer.pipeline_parallel_layer_layout"
    if importlib.util.find_spec(name) is None:
        from megatron.core.package_info import __version__ as version

        raise BalanceError(
            f"{_flag_given()} needs a Megatron with --pipeline-model-parallel-layout (megatron-core 0.13 or newer):"
            f" {name} is missing in the installed {version}"
        )
