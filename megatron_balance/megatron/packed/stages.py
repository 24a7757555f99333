"""Which stages of a pipeline read tokens."""

from __future__ import annotations

from typing import Any

from megatron.core import mpu


def reads_tokens(args: Any, vp_stage: int | None) -> bool:
    """Whether a stage embeds tokens or computes a loss, so that it needs more of a batch than its bounds."""
    if args.pipeline_model_parallel_size == 1:
        return True
    chunks, ranks = args.virtual_pipeline_model_parallel_size or 1, args.pipeline_model_parallel_size
    stage = (vp_stage or 0) * ranks + mpu.get_pipeline_model_parallel_rank()
    return stage in (0, chunks * ranks - 1)
