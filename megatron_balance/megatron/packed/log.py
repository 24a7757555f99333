"""What training logs of packing: beside Megatron's own line, and to its writers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from megatron_balance.megatron.packed.chosen_shapes import shapes_of
from megatron_balance.megatron.packed.options import FLAG
from megatron_balance.megatron.packed.totals import told
from megatron_balance.megatron.registry import Hook
from megatron_balance.packing.cost import VARIABLE


@dataclass
class _Interval:
    """What was trained on since Megatron last began to measure the time of a step.

    Attributes:
        operations: of each of its global batches.
        is_logged: whether Megatron is writing its line, for which it divides operations by that time.
    """

    operations: list[float] = field(default_factory=list)
    is_logged: bool = False


_interval = _Interval()  # a training loop has one


def begin_interval() -> None:
    """Forget what was counted: a new training loop measures afresh."""
    _interval.operations.clear()


def _with_packing(training_log: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(training_log)

    def log(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        call = signature.bind(*args, **kwargs).arguments
        _interval.is_logged = True
        try:
            result = training_log(*args, **kwargs)
        finally:
            _interval.is_logged = False
        if call["iteration"] % get_args().log_interval == 0:
            if not call.get("is_first_iteration", False):  # whose time Megatron 0.16 and newer leaves in
                begin_interval()
            _log(call["iteration"])
        return result

    return log


def _log(iteration: int) -> None:
    """Log the global batch that was just trained on, where and when Megatron logs its step."""
    from megatron.training import get_tensorboard_writer, get_wandb_writer
    from megatron.training.utils import is_last_rank, print_rank_last

    if not is_last_rank():
        return
    batch = told.batch
    values = {
        "fill": batch.fill,
        "real tokens": batch.tokens,
        "predicted step over ideal": batch.step_s / batch.ideal_s,
    }
    print_rank_last(
        f" packing of iteration {iteration:8d} | fill: {values['fill']:.2%} | real tokens: {values['real tokens']:12d} |"
        f" predicted step over ideal: {values['predicted step over ideal']:.4f} |"
    )
    for name, value in values.items():
        if (writer := get_tensorboard_writer()) is not None:
            writer.add_scalar(f"packing/{name}", value, iteration)
        if (wandb := get_wandb_writer()) is not None:
            wandb.log({f"packing/{name}": value}, iteration)


def _of_documents(num_floating_point_operations: Callable[..., float]) -> Callable[..., float]:
    """Operations of a batch whose attention is within documents: its items tell their lengths, without asking other ranks.

    Megatron's line divides the last batch's by the mean time of all since the line before: of these it gets the mean, too.

    For whole sequences Megatron counts ``batch_size * (a * s + b * s**2)``, in all versions; b follows from its count at 2 s.
    """

    def count(args: Any, batch_size: int, *rest: Any, **kwargs: Any) -> float:
        if _interval.is_logged and _interval.operations:
            return fmean(_interval.operations)
        whole = num_floating_point_operations(args, batch_size)
        twice = copy.copy(args)
        twice.seq_length = 2 * args.seq_length
        attention = (num_floating_point_operations(twice, batch_size) - 2 * whole) / 2
        batch, padding = told.batch, 0.0
        if getattr(args, "varlen_packing", False) and shapes_of(args) == VARIABLE:  # not computed
            padding = (whole - attention) * (1 - batch.tokens / (batch_size * args.seq_length))
        operations = whole - padding - attention * (1 - batch.squares / (batch_size * args.seq_length**2))
        _interval.operations.append(operations)
        return operations

    return count


_TRAINING = "megatron.training.training"
LOG = Hook(_TRAINING, "training_log", FLAG, "logs fill and predicted imbalance", _with_packing)
COUNT = Hook(_TRAINING, "num_floating_point_operations", FLAG, "counts attention within documents", _of_documents)
