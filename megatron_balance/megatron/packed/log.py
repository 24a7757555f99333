"""What training logs of packing: beside Megatron's own line, and to its writers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megatron_balance.megatron.packed.options import FLAG
from megatron_balance.megatron.registry import Hook


def _with_packing(training_log: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(training_log)

    def log(*args: Any, **kwargs: Any) -> Any:
        result = training_log(*args, **kwargs)
        _log(signature.bind(*args, **kwargs).arguments["iteration"])
        return result

    return log


def _log(iteration: int) -> None:
    """Log the global batch that was just trained on, where and when Megatron logs its step."""
    from megatron.core.datasets.utils import Split
    from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer
    from megatron.training.utils import is_last_rank, print_rank_last

    from megatron_balance.megatron.packed.data import planner_of

    args = get_args()
    if not is_last_rank() or iteration % args.log_interval:
        return
    window = planner_of(Split.train).window(args.consumed_train_samples - 1)
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


LOG = Hook("megatron.training.training", "training_log", FLAG, "logs fill and predicted imbalance", _with_packing)
