"""What `--varlen-packing` puts in Megatron's way: checks, its own data sets and forward step, and what is logged."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from megatron_balance import cpu
from megatron_balance.errors import BalanceError
from megatron_balance.megatron import stored_layout
from megatron_balance.megatron.arguments import topology_of
from megatron_balance.megatron.packed.attention import attention_hook
from megatron_balance.megatron.packed.backends import FLAG as ATTENTION
from megatron_balance.megatron.packed.backends import Choice, Here, Job, chosen
from megatron_balance.megatron.packed.chosen_shapes import check_more, more_of, row_multiple, shapes_of
from megatron_balance.megatron.packed.experts import TOKENS, multiplies_counts
from megatron_balance.megatron.packed.options import FLAG, TE, PackingOptions, refuse_conflicts, trains_on_conversations
from megatron_balance.megatron.packed.prediction import ROLL, WEIGHTS, rescales
from megatron_balance.megatron.packed.versions import refuse_missing
from megatron_balance.megatron.registry import Hook, registry
from megatron_balance.packing.cost import VARIABLE
from megatron_balance.packing.sizes import check_seq_length
from megatron_balance.reporting import say

Function = Callable[..., Any]


def before_validation(args: Any) -> None:
    """Refuse what packing cannot go with, on the arguments as they were given.

    Raises:
        BalanceError: says why.
    """
    refuse_conflicts(args)
    shapes_of(args)
    refuse_missing(args)
    if getattr(args, "balanced_pipeline_dry_run", None) is None:  # which may be on another machine than the job
        _attention_of(args)
    # Megatron would average losses by micro-batch in evaluation, which depends on the grouping.
    args.varlen_packing_conversations, args.sft = trains_on_conversations(args), False
    args.create_attention_mask_in_dataloader = False  # a mask of seq_length^2 that nothing would read


def after_globals(args: Any, options: PackingOptions) -> None:
    """Choose the attention, and have checkpoints keep the place in the data."""
    attention = _attention_of(args)
    if attention.note:
        say(f"megatron-balance: {ATTENTION} {options.attention} takes {attention.kind}: {attention.note}")
    if attention.kind != TE:
        registry.apply(attention_hook(attention.kind))
        if args.context_parallel_size > 1:
            from megatron_balance.megatron.packed.context import LOCAL_ATTENTION

            registry.apply(LOCAL_ATTENTION)
    check_seq_length(args.seq_length, topology_of(args, 1), args.sequence_parallel)
    if args.mtp_num_layers:
        registry.apply(ROLL)
        if rescales():
            registry.apply(WEIGHTS)
    if args.num_experts and multiplies_counts():
        registry.apply(TOKENS)
    registry.apply(ROWS)
    if shapes_of(args) == VARIABLE:
        from megatron_balance.megatron.packed.shapes import NO_MESSAGES, schedules_hook

        check_more(args)
        registry.apply(schedules_hook(row_multiple(args, _on_gpu()), _more))
        registry.apply(NO_MESSAGES)
    registry.apply(stored_layout.SAVE)
    from megatron_balance.megatron.packed.data import bin_cost

    bin_cost()


def _attention_of(args: Any) -> Choice:
    here = Here.found(torch.cuda.get_device_capability() if _on_gpu() else None, args.transformer_impl)
    return chosen(PackingOptions.from_args(args).attention, Job.of(args), here)


def _on_gpu() -> bool:
    return torch.cuda.is_available() and not cpu.is_installed()


def _more(num_microbatches: int) -> int:
    from megatron.training import get_args  # those of now: a restart in place parses anew

    return more_of(num_microbatches, get_args())


def packs(pretrain: Function) -> Function:
    """`pretrain` with our data sets and forward step in place of the script's.

    Raises:
        BalanceError: this Megatron's `pretrain` takes them under other names, or the script has no `loss_func`.
    """
    signature = inspect.signature(pretrain)

    @functools.wraps(pretrain)
    def run(*args: Any, **kwargs: Any) -> Any:
        from megatron_balance.megatron.packed.data import datasets
        from megatron_balance.megatron.packed.step import forward_step_with

        call = signature.bind(*args, **kwargs)
        for name in ("train_valid_test_dataset_provider", "forward_step_func"):
            if name not in call.arguments:
                raise BalanceError(f"{FLAG} needs pretrain's argument {name}, which this Megatron does not have")
        loss_func = _loss_func(call.arguments["forward_step_func"])
        call.arguments["train_valid_test_dataset_provider"] = datasets
        call.arguments["forward_step_func"] = forward_step_with(loss_func)
        return pretrain(*call.args, **call.kwargs)

    return run


def _loss_func(forward_step: Function) -> Function:
    """The `loss_func` of the script that `forward_step` is in."""
    function = inspect.unwrap(forward_step)
    while isinstance(function, functools.partial):
        function = function.func
    loss_func = getattr(function, "__globals__", {}).get("loss_func")
    if loss_func is None:
        raise BalanceError(
            f"{FLAG} keeps the training script's own loss, but the file of its forward step has no function loss_func: name it so"
        )
    return loss_func


def _in_one_row(get_forward_backward_func: Function) -> Function:
    """Schedules whose transfers have the shape of a packed micro-batch: its sequences in one row."""

    def get(*args: Any, **kwargs: Any) -> Function:
        run = get_forward_backward_func(*args, **kwargs)

        @functools.wraps(run)
        def run_in_rows(*args: Any, **kwargs: Any) -> Any:
            kwargs["seq_length"] *= kwargs["micro_batch_size"]
            kwargs["micro_batch_size"] = 1
            return run(*args, **kwargs)

        return run_in_rows

    return get


ROWS = Hook(
    "megatron.core.pipeline_parallel.schedules",
    "get_forward_backward_func",
    FLAG,
    "sends a micro-batch of several bins as one row",
    _in_one_row,
)
