"""How many micro-batches the steps of a job have, where its global batch grows."""

from __future__ import annotations

from typing import Any


def counts_of(args: Any) -> tuple[int, ...]:
    """Numbers of micro-batches that steps have, smallest first, from Megatron's validated arguments.

    Several with ``--rampup-batch-size``, which Megatron ignores from 0.18 on, or ``--step-batch-size-schedule``, beside which it
    takes ``--global-batch-size`` for a single micro-batch.
    """
    share = args.micro_batch_size * args.data_parallel_size
    return tuple(sorted({size // share for size in _batch_sizes(args)}))


def most(args: Any) -> int:
    """Micro-batches of the steps with the largest global batch, which most of a training has."""
    return counts_of(args)[-1]


def _batch_sizes(args: Any) -> set[int]:
    from megatron.core import num_microbatches_calculator

    calculator = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    if (schedule := getattr(calculator, "schedule", None)) is not None:
        return {size for _, size in schedule}
    if (growth := getattr(calculator, "batch_size_increment", None)) is not None:
        return {*range(calculator.start_global_batch_size, args.global_batch_size, growth), args.global_batch_size}
    return {args.global_batch_size}
