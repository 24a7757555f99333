"""What training logs of packing: beside Megatron's own line, and to its writers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from megatron_balance.megatron.packed.chosen_shapes import shapes_of
from megatron_balance.megatron.packed.options import FLAG
from megatron_balance.megatron.packed.planner import Window
from megatron_balance.megatron.registry import Hook
from megatron_balance.packing.cost import VARIABLE


def _with_packing(training_log: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(training_log)

    def log(*args: Any, **kwargs: Any) -> Any:
        result = training_log(*args, **kwargs)
        _log(signature.bind(*args, **kwargs).arguments["iteration"])
        return result

    return log


def _log(iteration: int) -> None:
    """Log the global batch that was just trained on, where and when Megatron logs its step."""
    from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer
    from megatron.training.utils import is_last_rank, print_rank_last

    if not is_last_rank() or iteration % get_args().log_interval:
        return
    window = _last_window()
    placement = window.placement
    values = {
        "fill": window.batch.fill,
        "real tokens": int(window.batch.pieces.tokens.sum()),
        "predicted step over ideal": placement.step_s / placement.ideal_s,
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


def _last_window() -> Window:
    """The global batch that was just trained on."""
    from megatron.core.datasets.utils import Split
    from megatron.training import get_args

    from megatron_balance.megatron.packed.data import planner_of

    return planner_of(Split.train).window(get_args().consumed_train_samples - 1)


def _of_documents(num_floating_point_operations: Callable[..., float]) -> Callable[..., float]:
    """Operations of a batch whose attention is within documents: their lengths are known from the plan, without asking other ranks.

    For whole sequences Megatron counts ``batch_size * (a * s + b * s**2)``, in all versions; b follows from its count at 2 s.
    """

    def count(args: Any, batch_size: int, *rest: Any, **kwargs: Any) -> float:
        whole = num_floating_point_operations(args, batch_size)
        twice = copy.copy(args)
        twice.seq_length = 2 * args.seq_length
        attention = (num_floating_point_operations(twice, batch_size) - 2 * whole) / 2
        tokens = _last_window().batch.pieces.tokens.astype(float)
        padding = 0.0
        if getattr(args, "varlen_packing", False) and shapes_of(args) == VARIABLE:  # not computed
            padding = (whole - attention) * (1 - float(tokens.sum()) / (batch_size * args.seq_length))
        return whole - padding - attention * (1 - float(tokens @ tokens) / (batch_size * args.seq_length**2))

    return count


_TRAINING = "megatron.training.training"
LOG = Hook(_TRAINING, "training_log", FLAG, "logs fill and predicted imbalance", _with_packing)
COUNT = Hook(_TRAINING, "num_floating_point_operations", FLAG, "counts attention within documents", _of_documents)
