"""Which stages of a pipeline read tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

from megatron.core import mpu
from megatron.core.transformer.enums import LayerType
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args


def reads_tokens(args: Any, vp_stage: int | None) -> bool:
    """Whether a stage embeds tokens, predicts further ones or computes a loss, so that it needs more of a batch than its bounds.

    Without ``vp_stage``, which Megatron 0.14 does not tell where data sets are built: whether any stage of this rank does.
    """
    chunks, ranks = args.virtual_pipeline_model_parallel_size or 1, args.pipeline_model_parallel_size
    rank = mpu.get_pipeline_model_parallel_rank()
    own = range(chunks) if vp_stage is None else (vp_stage,)
    return any(chunk * ranks + rank in (0, chunks * ranks - 1) for chunk in own) or predicts(vp_stage)


@cache
def predicts(vp_stage: int | None) -> bool:
    """Whether a layout puts multi-token prediction on a stage of this rank; without a layout it is on the last."""
    if not get_args().mtp_num_layers or get_args().pipeline_model_parallel_layout is None:
        return False
    stages = core_transformer_config_from_args(get_args()).pipeline_model_parallel_layout.layout[
        mpu.get_pipeline_model_parallel_rank()
    ]
    return any(LayerType.mtp in stage for stage in (stages if vp_stage is None else [stages[vp_stage]]))
