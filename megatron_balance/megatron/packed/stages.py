"""Which stages of a pipeline read tokens."""

from __future__ import annotations

from typing import Any

from megatron.core import mpu


def reads_tokens(args: Any, vp_stage: int | None) -> bool:
    """Whether a stage embeds tokens or computes a loss, so that it needs more of a batch than its bounds.

    Without ``vp_stage``, which Megatron 0.14 does not tell where data sets are built: whether any stage of this rank does.
    """
    chunks, ranks = args.virtual_pipeline_model_parallel_size or 1, args.pipeline_model_parallel_size
    rank = mpu.get_pipeline_model_parallel_rank()
    own = range(chunks) if vp_stage is None else (vp_stage,)
    return any(chunk * ranks + rank in (0, chunks * ranks - 1) for chunk in own)
